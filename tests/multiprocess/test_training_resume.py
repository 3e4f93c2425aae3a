"""A run that was stopped, or killed at any moment, ends with the bits of the one that never stopped."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from cadenza.errors import CadenzaError
from cadenza.training import Config, runs
from cadenza.training.job import Job
from cadenza.training.loop import run_worker
from cadenza.training.saved import set_aside
from support import tiny_task
from support.ranks import RankPool, outcome

STEPS = 24

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "local_sgd": {"name": "local_sgd", "period": 4, "buffers": True},
    "post_local_sgd": {"name": "post_local_sgd", "period": 4, "warmup_steps": 12, "weight": "samples"},
    "slowmo": {"name": "slowmo", "period": 4},
    "diloco late": {"name": "diloco", "period": 5, "delay": 4, "codec": "int8+feedback"},
    "streaming_diloco": {"name": "streaming_diloco", "period": 6, "layers": 1, "delay": 3},
    "sparse_loco": {"name": "sparse_loco", "period": 4, "density": 0.1},
}


def make(folder: Path, strategy: dict[str, Any], **changes: Any) -> runs.Run:
    settings = {
        "task": tiny_task.NAME,
        "steps": STEPS,
        "strategy": strategy,
        "evaluate": {"every": 0},
        "checkpoint": {"every": 0},
        "log": {"tensorboard": False},
    }
    return runs.create(folder, Config.model_validate({**settings, **changes}))


def final_state(run: runs.Run) -> dict[str, torch.Tensor]:
    """Everything that all workers hold at the end: models, optimizers, anchors, random numbers, losses."""
    found = {f"model/{name}": tensor for name, tensor in load_file(run.model_file).items()}
    for path in sorted(run.checkpoint(run.config().steps).glob("*.safetensors")):
        found |= {f"{path.stem}/{name}": tensor for name, tensor in load_file(path).items()}
    return found


def assert_same(one: runs.Run, other: runs.Run) -> None:
    then, now = final_state(one), final_state(other)
    assert then.keys() == now.keys()
    assert [name for name in then if not torch.equal(then[name], now[name])] == []


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_interrupted_run_ends_as_one_that_was_not(ranks: RankPool, tmp_path: Path, name: str) -> None:
    whole = make(tmp_path / "whole", STRATEGIES[name])
    assert ranks.run(2, run_worker, whole.folder) == ["finished"] * 2
    stopped = make(tmp_path / "stopped", STRATEGIES[name], options={"at": 7, "worker": 1, "event": "signal"})
    assert ranks.run(2, run_worker, stopped.folder) == ["interrupted"] * 2
    stopped.write_config(stopped.config().with_(options={}))
    assert ranks.run(2, run_worker, stopped.folder) == ["finished"] * 2
    assert_same(whole, stopped)
    metrics = runs.read_metrics(stopped.folder)
    for worker in (0, 1):
        assert [line["step"] for line in metrics.of("step", worker)] == list(range(1, STEPS + 1))
        assert [line["resumed"] for line in metrics.of("start", worker)] == [False, True]
        if name == "ddp":
            gradients = metrics.start(worker)["gradient_bytes"]
            assert metrics.of("step", worker)[-1]["bytes_sent"] == STEPS * gradients > 0
        rounds = [(line["step"], line["fragment"]) for line in metrics.of("round", worker)]
        assert rounds == [
            (line["step"], line["fragment"]) for line in runs.read_metrics(whole.folder).of("round", worker)
        ]


@pytest.mark.parametrize("strategy", ["diloco late", "ddp"])
def test_evaluations_and_checkpoints_do_not_disturb_a_run(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    alone = make(tmp_path / "alone", STRATEGIES[strategy])
    watched = make(
        tmp_path / "watched",
        STRATEGIES[strategy],
        evaluate={"every": 1},
        checkpoint={"every": 3, "keep": 2},
        options={"draws_in_evaluation": 5},
        log={"tensorboard": True},
    )
    for run in (alone, watched):
        assert ranks.run(2, run_worker, run.folder) == ["finished"] * 2
    assert_same(alone, watched)
    evaluations = runs.read_metrics(watched.folder).of("evaluation")
    assert [line["step"] for line in evaluations] == list(range(1, STEPS + 1))
    assert evaluations[-1]["loss"] == alone.summary()["held_out"]
    assert sorted(path.name for path in watched.checkpoints.iterdir()) == ["step-00000021", "step-00000024"]
    assert list(watched.tensorboard.iterdir())


@pytest.mark.parametrize("data", ["list", "stateful"])
def test_the_place_in_the_data_is_found_again(ranks: RankPool, tmp_path: Path, data: str) -> None:
    """Also when it comes after a shuffle, as in the other tests of this page."""
    whole = make(tmp_path / "whole", STRATEGIES["local_sgd"], options={"data": data})
    ranks.run(2, run_worker, whole.folder)
    stopped = make(tmp_path / "stopped", STRATEGIES["local_sgd"], options={"data": data, "at": 10, "event": "signal"})
    ranks.run(2, run_worker, stopped.folder)
    stopped.write_config(stopped.config().with_(options={"data": data}))
    ranks.run(2, run_worker, stopped.folder)
    assert_same(whole, stopped)


def test_ddp_of_three_workers_adds_up_in_the_same_order_after_a_resume(ranks: RankPool, tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", {"name": "ddp"}, options={"width": 256})
    ranks.run(3, run_worker, whole.folder)
    stopped = make(tmp_path / "stopped", {"name": "ddp"}, options={"width": 256, "at": 7, "event": "signal"})
    ranks.run(3, run_worker, stopped.folder)
    stopped.write_config(stopped.config().with_(options={"width": 256}))
    ranks.run(3, run_worker, stopped.folder)
    assert_same(whole, stopped)


def test_a_finished_run_goes_on_for_more_steps(ranks: RankPool, tmp_path: Path) -> None:
    """The last averaging is not part of the way: a run of 12 steps that goes on to 24 is one of 24."""
    longer = make(tmp_path / "longer", STRATEGIES["diloco late"], options={"constant_lr": True})
    ranks.run(2, run_worker, longer.folder)
    first = make(tmp_path / "first", STRATEGIES["diloco late"], steps=12, options={"constant_lr": True})
    ranks.run(2, run_worker, first.folder)
    first.write_config(first.config().with_(steps=STEPS))
    assert ranks.run(2, run_worker, first.folder) == ["finished"] * 2
    assert_same(longer, first)


def test_another_number_of_workers_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    run = make(tmp_path / "run", STRATEGIES["diloco late"], steps=12)
    ranks.run(2, run_worker, run.folder)
    run.write_config(run.config().with_(steps=STEPS))
    assert ranks.run(3, run_worker, run.folder) == ["finished"] * 3
    assert run.summary()["workers"] == 3


def test_a_damaged_checkpoint_is_set_aside_and_said_to_be(ranks: RankPool, tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", STRATEGIES["diloco late"], checkpoint={"every": 8})
    ranks.run(2, run_worker, whole.folder)
    damaged = make(tmp_path / "damaged", STRATEGIES["diloco late"], checkpoint={"every": 8})
    ranks.run(2, run_worker, damaged.folder)
    flip_a_bit(damaged.checkpoint(24) / "worker-00001.safetensors")
    (damaged.checkpoint(16) / "shared.json").unlink()
    assert ranks.run(2, run_worker, damaged.folder) == ["finished"] * 2
    assert_same(whole, damaged)
    metrics = runs.read_metrics(damaged.folder)
    told = [line["text"] for line in metrics.of("event") if line["level"] == "warning"]
    assert len(told) == 2
    assert "step-00000024" in told[0]
    assert "step-00000016" in told[1]
    assert [line["step"] for line in metrics.of("start", 0)] == [0, 8]
    aside = damaged.checkpoints / "set-aside"
    assert sorted(path.name for path in aside.iterdir()) == ["step-00000016", "step-00000024"]


def test_a_run_of_which_every_checkpoint_is_damaged_does_not_begin_again_unasked(
    ranks: RankPool, tmp_path: Path
) -> None:
    run = make(tmp_path / "run", STRATEGIES["diloco late"], steps=12)
    ranks.run(2, run_worker, run.folder)
    run.write_config(run.config().with_(steps=STEPS))
    flip_a_bit(run.checkpoint(12) / "worker-00001.safetensors")
    told = ranks.run(2, refused, run.folder)
    assert told[0] == told[1]
    assert "nothing to go on from" in told[0]
    assert "--from-scratch" in told[0]
    assert run.checkpoint(12).is_dir()
    set_aside(run.checkpoint(12))  # as --from-scratch does
    assert ranks.run(2, run_worker, run.folder) == ["finished"] * 2
    assert runs.read_metrics(run.folder).start(0)["step"] == 0


def refused(folder: Path) -> str:
    with pytest.raises(CadenzaError) as raised:
        run_worker(folder)
    return str(raised.value)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# ---- kill -9 of everything, at any moment ----------------------------------------------------------------------------


def train_until_killed(folder: Path, word: Path, moment: int, after_s: float | None) -> None:
    """Train; at the moment-th time that a rank touches the run's files, or after a while, all ranks are killed.

    Each kills itself when the file `word` appears: a number of another process might be another's by then.
    """
    left = moment

    def count(event: str, arguments: Any) -> None:
        nonlocal left
        if event in TOUCHES and str(folder) in str(arguments[0]):
            left -= 1
            if left == 0:
                word.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def die_with_the_others() -> None:
        deadline = time.monotonic() + after_s if after_s is not None else math.inf
        while time.monotonic() < deadline and not word.exists():
            time.sleep(0.002)
        word.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if after_s is None:
        sys.addaudithook(count)  # it is gone when the process is
    threading.Thread(target=die_with_the_others, daemon=True).start()
    outcome(run_worker, folder)  # which may come to its end, or fail when another was killed a moment before
    word.touch()
    time.sleep(60)


def train_until_saved(folder: Path) -> None:
    """Train; a rank is killed in the moment at which its part of the first checkpoint is there."""
    save = Job.save

    def die(self: Job, *arguments: Any, **options: Any) -> int:
        save(self, *arguments, **options)
        dist.barrier()  # so both parts are
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    Job.save = die  # type: ignore[method-assign] - it is gone when the process is
    run_worker(folder)


def test_the_lines_of_the_steps_before_a_checkpoint_are_written_before_it(ranks: RankPool, tmp_path: Path) -> None:
    """A run that goes on from the checkpoint does not take these steps again, so nobody would tell of them."""
    run = make(tmp_path / "run", STRATEGIES["diloco late"], checkpoint={"every": 3})
    ranks.run(2, train_until_saved, run.folder, expect_dead={0, 1})
    assert ranks.run(2, run_worker, run.folder) == ["finished"] * 2
    for worker in (0, 1):
        lines = runs.read_metrics(run.folder).of("step", worker)
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))


TOUCHES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.listdir", "os.scandir"}


@pytest.mark.timeout(240)
def test_killing_everything_at_any_moment_loses_nothing_but_steps(ranks: RankPool, tmp_path: Path) -> None:
    often = {"every": 3, "keep": 2}
    whole = make(tmp_path / "whole", STRATEGIES["diloco late"], checkpoint=often)
    ranks.run(2, run_worker, whole.folder)
    killed = make(tmp_path / "killed", STRATEGIES["diloco late"], checkpoint=often)
    moments = random.Random(4)
    for kill in range(10):
        after_s = moments.uniform(0, 0.6) if kill % 2 else None
        moment = moments.randrange(1, 100)
        word = tmp_path / f"die-{kill}"
        ranks.run(2, train_until_killed, killed.folder, word, moment, after_s, expect_dead={0, 1})
    assert ranks.run(2, run_worker, killed.folder) == ["finished"] * 2
    assert_same(whole, killed)
    for worker in (0, 1):
        lines = runs.read_metrics(killed.folder).of("step", worker)
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert len(runs.read_metrics(killed.folder).of("start", 0)) > 1
