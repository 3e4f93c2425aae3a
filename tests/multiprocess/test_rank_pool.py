"""The pool of rank processes itself: a suite that stands on it must be able to trust it."""

import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.ranks import RankFailure, RankPool, outcome


def rank_and_sum(base: float) -> tuple[int, float, str]:
    total = torch.tensor(base + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.environ["RANK"]


def fail_on(failing: int) -> int:
    if dist.get_rank() == failing:
        raise KeyError("the missing piece")
    dist.barrier()
    return dist.get_rank()


def die_on(dying: int) -> tuple[int, int]:
    dist.barrier()
    if dist.get_rank() == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank(), os.getpid()


def hang_on(hanging: int) -> None:
    while dist.get_rank() == hanging:
        time.sleep(0.01)


def soil_everything() -> list[torch.Tensor]:
    os.environ["RANK_POOL_SOILED"] = "1"
    os.environ["WORLD_SIZE"] = "77"
    warnings.simplefilter("error")
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger("soiled").setLevel(logging.DEBUG)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    group = dist.new_group([0])
    cycle = [group]
    cycle.append(cycle)  # only the collector can free it
    return [torch.ones(3)]


def describe_process() -> dict[str, object]:
    warnings.warn("not an error here", stacklevel=1)
    return {
        "soiled": os.environ.get("RANK_POOL_SOILED"),
        "world": os.environ["WORLD_SIZE"],
        "handlers": len(logging.getLogger().handlers),
        "level": logging.getLogger("soiled").level,
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "groups": dist.get_pg_count(),
        "threads": torch.get_num_threads(),
        "random": torch.rand(1).item(),
    }


def odd_tensors() -> dict[str, torch.Tensor]:
    strided = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    return {"half": torch.arange(3, dtype=torch.bfloat16) + dist.get_rank(), "strided": strided}


def initialise_by_environment() -> tuple[bool, float]:
    was_initialised = dist.is_initialized()
    dist.init_process_group("gloo")
    return was_initialised, rank_and_sum(0)[1]


def raise_value_error(text: str) -> None:
    raise ValueError(text)


def unpicklable() -> object:
    return lambda: None


def test_results_come_in_rank_order(ranks: RankPool) -> None:
    assert ranks.run(4, rank_and_sum, 1.0) == [(r, 10.0, str(r)) for r in range(4)]


def test_ranks_are_reused_between_calls_of_any_size(ranks: RankPool) -> None:
    ranks.run(4, rank_and_sum, 0.0)
    before = ranks.pids
    assert ranks.run(2, rank_and_sum, 0.5)[1] == (1, 2.0, "1")
    assert ranks.run(4, rank_and_sum, 0.0)[3] == (3, 6.0, "3")
    assert ranks.pids == before


def test_an_exception_is_shown_with_its_rank_and_traceback(ranks: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, fail_on, 1)
    assert caught.value.failures[1].type_name == "KeyError"
    assert "rank 1: KeyError" in str(caught.value)
    assert "the missing piece" in str(caught.value)
    assert "in fail_on" in str(caught.value)
    assert "in fail_on" in caught.value.failures[0].text  # where the other one was left waiting
    assert ranks.run(2, rank_and_sum, 0.0)[0][1] == 1.0


def test_a_rank_that_was_to_die_gives_none_and_is_replaced(ranks: RankPool) -> None:
    results = ranks.run(3, die_on, 1, expect_dead={1})
    assert results[1] is None
    assert [results[0][0], results[2][0]] == [0, 2]
    assert ranks.run(3, rank_and_sum, 0.0)[2] == (2, 3.0, "2")


def test_an_unexpected_death_is_a_failure(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 0: died with exit code -9"):
        ranks.run(2, die_on, 0)


def test_an_expected_death_that_does_not_happen_is_a_failure(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="it was expected to die"):
        ranks.run(2, rank_and_sum, 0.0, expect_dead={1})


def test_a_hung_rank_is_killed_and_its_stack_shown(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 1: still running") as caught:
        ranks.run(2, hang_on, 1, timeout_s=1)
    assert "in hang_on" in str(caught.value)
    assert set(caught.value.failures) == {1}
    assert ranks.run(2, rank_and_sum, 0.0)[1] == (1, 1.0, "1")


def test_nothing_leaks_from_one_call_into_the_next(ranks: RankPool) -> None:
    before = ranks.run(2, describe_process)
    ranks.run(2, soil_everything)
    assert ranks.run(2, describe_process) == before


def test_tensors_arrive_with_their_strides_and_dtypes_in_memory_of_their_own(ranks: RankPool) -> None:
    for rank, tensors in enumerate(ranks.run(2, odd_tensors)):
        assert tensors["half"].dtype == torch.bfloat16
        assert tensors["half"].tolist() == [rank, rank + 1, rank + 2]
        assert tensors["strided"].is_contiguous(memory_format=torch.channels_last)
        assert not tensors["strided"].is_shared()


def test_without_init_the_function_can_initialise_the_group_itself(ranks: RankPool) -> None:
    assert ranks.run(2, initialise_by_environment, init=False) == [(False, 1.0), (False, 1.0)]


def test_outcomes_are_values_or_errors(ranks: RankPool) -> None:
    assert ranks.run(1, outcome, raise_value_error, "no") == [("error", "ValueError", "no")]
    assert ranks.run(1, outcome, abs, -3) == [("ok", 3)]


def test_a_result_that_cannot_be_sent_is_a_failure(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="unpicklable"):
        ranks.run(1, unpicklable)


# As a script, this file is a session of its own: it must leave nothing running, however it ends.
SCRIPT = """
import os, signal, sys, threading
sys.path[:0] = [{support!r}, {here!r}]
from support.ranks import RankPool
from test_rank_pool import hang_on, rank_and_sum
pool = RankPool()
pool.run(2, rank_and_sum, 0.0)
print(*pool.pids, flush=True)
ending = {ending!r}
if ending == "interrupt":
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    pool.run(2, hang_on, 0)
elif ending == "kill":
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    pool.run(2, hang_on, 0)
"""


def processes_of_session(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(after_name[3]) == session and after_name[0] != "Z":
                members.append(int(entry.name))
    return members


def start_session(ending: str, directory: Path) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    script = directory / f"{ending}.py"
    body = SCRIPT.format(support=str(here.parent), here=str(here), ending=ending)
    script.write_text("if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in body.splitlines()))
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def left_of_session(session: subprocess.Popen[str], within_s: float) -> list[int]:
    deadline = time.monotonic() + within_s
    while (left := processes_of_session(session.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_no_process_is_left_when_a_session_ends_or_is_interrupted_or_killed(tmp_path: Path) -> None:
    sessions = {ending: start_session(ending, tmp_path) for ending in ("normal", "interrupt", "kill")}
    for ending, session in sessions.items():
        ranks, errors = session.communicate(timeout=100)
        assert len(ranks.split()) == 2, errors
        assert (session.returncode == 0) == (ending == "normal"), errors
    left = {ending: left_of_session(session, within_s=15) for ending, session in sessions.items()}
    assert left == {"normal": [], "interrupt": [], "kill": []}
