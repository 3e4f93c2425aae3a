"""Stop at any step, build everything anew, restore, go on: to the last bit the run that never stopped."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import cadenza
from cadenza import LevelPlan, Strategy, Synchronizer, checkpoint
from cadenza.codecs import e3m0, error_feedback, int8
from support.compare import same_bits
from support.models import CASES
from support.ranks import RankPool, outcome
from support.training import adam, momentum_sgd

STEPS = 12

FED_BACK = error_feedback(int8(block=16))


def strategies(ranks: int) -> dict[str, Strategy]:
    """One of each kind; rounds are in flight at some of the steps at which tests stop."""
    two_groups = ((0,), tuple(range(1, ranks)))
    inner = LevelPlan(2, groups=two_groups, codec=FED_BACK, outer=cadenza.nesterov(lr=0.5))
    outer = LevelPlan(4, codec=int8(block=16), outer=cadenza.nesterov(lr=0.7))
    return {
        "local_sgd": cadenza.local_sgd(period=4),
        "local_sgd_late": cadenza.local_sgd(period=4, delay=2),
        "local_sgd_changing": cadenza.local_sgd(period=cadenza.changing({1: 2, 5: 3})),
        "local_sgd_adaptive": cadenza.local_sgd(
            period=cadenza.adaptive(3, target_drift=0.02, minimum=2, maximum=6), delay=1
        ),
        "local_sgd_samples": cadenza.local_sgd(period=4, weight="samples", buffers=True, optimizer_state="average"),
        "post_local_sgd": cadenza.post_local_sgd(period=4, warmup_steps=5),
        "hierarchical": cadenza.hierarchical({2: two_groups, 6: "all"}),
        "hierarchical_int8": cadenza.hierarchical({2: two_groups, 6: "all"}, codec=int8()),
        "hierarchical_late": cadenza.hierarchical({3: two_groups, 6: "all"}, delay=2),
        "own_at_each_level": Strategy(levels=(inner, outer), delay=1),
        "slowmo": cadenza.slowmo(period=4),
        "slowmo_late": cadenza.slowmo(period=4, delay=2),
        "diloco": cadenza.diloco(period=4, codec=FED_BACK),
        "diloco_warm": cadenza.diloco(period=4, warmup_steps=3, codec=FED_BACK, clip=0.5),
        "diloco_late": cadenza.diloco(period=4, delay=2, codec=FED_BACK),
        "adam_outside": Strategy(
            levels=(LevelPlan(4, outer=cadenza.outer.optimizer(torch.optim.AdamW, lr=0.01)),), delay=1
        ),
        "streaming_diloco": cadenza.streaming_diloco(period=6, layers=1, delay=3, codec=error_feedback(e3m0())),
        "sparse_loco": cadenza.sparse_loco(period=4, density=0.1),
    }


NAMES = list(strategies(2))


class Run:
    """A model in training on this rank."""

    def __init__(
        self, name: str, case: str = "mlp", inner: Callable[..., torch.optim.Optimizer] = momentum_sgd
    ) -> None:
        self.rank, self.case = dist.get_rank(), CASES[case]
        self.model = self.case.model(self.rank)
        self.optimizer = inner(self.model)
        self.sync: Synchronizer = cadenza.attach(self.model, self.optimizer, strategies(dist.get_world_size())[name])

    def go(self, upto: int, *, after: Callable[[int], None] = lambda step: None) -> list[torch.Tensor]:
        """Train up to a step; the values after every step."""
        history = []
        while self.sync.clock < upto:
            self.optimizer.zero_grad()
            self.case.backward(self.model, self.rank, self.sync.clock + 1)
            self.sync.average_gradients()
            self.optimizer.step()
            self.sync.step(samples=1.0 + self.rank * self.sync.clock)
            history.append(self.values())
            after(self.sync.clock)
        return history

    def values(self) -> torch.Tensor:
        """Everything that training changes, side by side."""
        kept = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        tensors = [*self.model.parameters(), *self.model.buffers(), *kept]
        return torch.cat([t.detach().double().reshape(-1) for t in tensors])

    def end(self) -> torch.Tensor:
        self.sync.finish()
        return self.values()

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "sync": self.sync}


def in_memory(run: Run, folder: Path) -> Callable[[Run], object]:
    kept = deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    state = run.sync.state_dict()

    def restore(anew: Run) -> None:
        anew.model.load_state_dict(kept[0])
        anew.optimizer.load_state_dict(deepcopy(kept[1]))
        anew.sync.load_state_dict(state)

    return restore


def in_files(run: Run, folder: Path) -> Callable[[Run], object]:
    checkpoint.save(folder, **run.parts())
    return lambda anew: checkpoint.load(folder, **anew.parts())


def in_dcp(run: Run, folder: Path) -> Callable[[Run], object]:
    dcp.save(checkpoint.dcp_state(run.sync, run.model, run.optimizer), checkpoint_id=folder)

    def restore(anew: Run) -> None:
        state = checkpoint.dcp_template(folder, anew.sync)
        dcp.load(state, checkpoint_id=folder)
        checkpoint.load_dcp_state(state, anew.sync, anew.model, anew.optimizer)

    return restore


def resume(
    name: str,
    stops: list[int],
    keep: Callable[[Run, Path], Callable[[Run], object]],
    folder: Path,
    case: str = "mlp",
    inner: Callable[..., torch.optim.Optimizer] = momentum_sgd,
) -> list[str]:
    """What differs between a run, one that is saved on its way, and those that go on from what was saved."""
    straight = Run(name, case, inner)
    expected = [*straight.go(STEPS), straight.end()]
    saved: dict[int, Callable[[Run], object]] = {}
    landing: dict[int, list[int]] = {}

    def save(step: int) -> None:
        if step in stops:
            dist.barrier()
            saved[step] = keep(run, folder / str(step))
            landing[step] = [flight.land_at for flight in run.sync.replica.state.pending.values()]

    run = Run(name, case, inner)
    found = _differences("saving", [*run.go(STEPS, after=save), run.end()], expected)
    if run.sync.strategy.delay and not any(landing.values()):
        found.append("no round was in flight at any of the stops")
    for stop in stops:
        dist.barrier()  # all have saved
        anew = Run(name, case, inner)
        anew.go(1)  # whatever is there already is replaced
        saved[stop](anew)
        if [flight.land_at for flight in anew.sync.replica.state.pending.values()] != landing[stop]:
            found.append(f"resumed at {stop}: other rounds are in flight")
        found += _differences(f"resumed at {stop}", [*anew.go(STEPS), anew.end()], expected[stop:])
    return found


def _differences(where: str, found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[str]:
    assert len(found) == len(expected)
    for step, (a, b) in enumerate(zip(reversed(found), reversed(expected), strict=True)):
        if not same_bits(a, b):
            return [f"{where}: {int((a != b).sum())} of {a.numel()} values differ {step} steps before the end"]
    return []


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_go_on_from_their_state_dicts(ranks: RankPool, tmp_path: Path, name: str) -> None:
    assert ranks.run(2, resume, name, [3, 6, 8], in_memory, tmp_path) == [[]] * 2


@pytest.mark.parametrize("name", NAMES)
def test_three_ranks_go_on_from_their_state_dicts(ranks: RankPool, tmp_path: Path, name: str) -> None:
    case = "mlp" if name == "streaming_diloco" else "tied_transformer"
    assert ranks.run(3, resume, name, [5, 7, 12], in_memory, tmp_path, case) == [[]] * 3


@pytest.mark.parametrize(
    ("name", "case", "inner"),
    [
        ("post_local_sgd", "param_groups", adam),
        ("local_sgd_samples", "conv_channels_last", adam),
        ("local_sgd_late", "mixed_bf16", momentum_sgd),
        ("own_at_each_level", "mlp", momentum_sgd),
        ("slowmo", "conv_channels_last", momentum_sgd),
        ("diloco_late", "tied_transformer", adam),
        ("streaming_diloco", "mlp", adam),
        ("sparse_loco", "frozen", adam),
    ],
)
def test_a_run_goes_on_from_its_files(
    ranks: RankPool, tmp_path: Path, name: str, case: str, inner: Callable[..., torch.optim.Optimizer]
) -> None:
    assert ranks.run(3, resume, name, [3, 8], in_files, tmp_path, case, inner) == [[]] * 3


@pytest.mark.parametrize("name", ["hierarchical_late", "diloco_late", "sparse_loco"])
def test_a_run_goes_on_from_torch_s_own_checkpoint(ranks: RankPool, tmp_path: Path, name: str) -> None:
    stop = 7 if name == "hierarchical_late" else 5
    assert ranks.run(2, resume, name, [stop], in_dcp, tmp_path, "conv_channels_last", adam) == [[]] * 2


def without_the_state(name: str, stop: int) -> bool:
    """Whether a run ends the same if only model, optimizer and clock are restored."""
    straight = Run(name)
    straight.go(stop)
    kept = deepcopy((straight.model.state_dict(), straight.optimizer.state_dict()))
    anew = Run(name)
    anew.model.load_state_dict(kept[0])
    anew.optimizer.load_state_dict(kept[1])
    anew.sync.replica.state.clock = stop
    anew.sync.replica.rewrites.forgive()  # it would be refused
    return same_bits(straight.go(STEPS)[-1], anew.go(STEPS)[-1])


@pytest.mark.parametrize("name", ["local_sgd_late", "diloco", "own_at_each_level", "sparse_loco"])
def test_a_run_would_go_on_otherwise_without_its_state(ranks: RankPool, name: str) -> None:
    assert ranks.run(2, without_the_state, name, 5) == [False, False]


def there_and_back(name: str) -> list[str]:
    """Go back to an earlier step of the same run, and forward to a later one with a round in flight."""
    run = Run(name)
    run.go(2)
    back = in_memory(run, Path())
    expected = run.go(9)
    forth = in_memory(run, Path())
    back(run)
    found = _differences("again", run.go(9), expected)
    back(run)
    forth(run)
    return found + _differences("at the end", [run.end()], [_straight(name, 9).end()])


def _straight(name: str, upto: int) -> Run:
    run = Run(name)
    run.go(upto)
    return run


@pytest.mark.parametrize("name", ["diloco_warm", "diloco_late", "streaming_diloco"])
def test_a_run_can_go_back_in_time(ranks: RankPool, name: str) -> None:
    assert ranks.run(2, there_and_back, name) == [[], []]


# ---- another number of workers ---------------------------------------------------------------------------------------


def leave(name: str, upto: int, folder: Path) -> dict[str, Any]:
    run = Run(name)
    run.go(upto)
    checkpoint.save(folder / "files", **run.parts(), extra={"rank": run.rank})
    dcp.save(checkpoint.dcp_state(run.sync, run.model, run.optimizer), checkpoint_id=folder / "dcp")
    return {"state": run.sync.state_dict(), "model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}


def join(name: str, how: str, folder: Path, left: list[dict[str, Any]]) -> dict[str, Any]:
    run = Run(name)
    extra = None
    if how == "files":
        extra = checkpoint.load(folder / "files", **run.parts())
    elif how == "dcp":
        state = checkpoint.dcp_template(folder / "dcp", run.sync)
        dcp.load(state, checkpoint_id=folder / "dcp")
        checkpoint.load_dcp_state(state, run.sync, run.model, run.optimizer)
    else:
        entry = left[run.rank % len(left)]
        run.model.load_state_dict(entry["model"])
        run.optimizer.load_state_dict(deepcopy(entry["optimizer"]))
        run.sync.load_state_dict({key: value for each in left for key, value in each["state"].items()})
    state = run.sync.state_dict()
    model = deepcopy(run.model.state_dict())
    run.go(STEPS)
    return {"state": state, "model": model, "extra": extra, "clock": run.sync.clock, "end": run.end()}


@pytest.mark.parametrize(
    ("name", "how"),
    [("diloco", "memory"), ("diloco_late", "files"), ("diloco_late", "dcp"), ("own_at_each_level", "files")],
)
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_another_number_of_workers_goes_on(
    ranks: RankPool, tmp_path: Path, name: str, before: int, after: int, how: str
) -> None:
    left = ranks.run(before, leave, name, 5, tmp_path)
    joined = ranks.run(after, join, name, how, tmp_path, left)
    for rank, found in enumerate(joined):
        entry = left[rank % before]
        for key, value in entry["model"].items():
            assert same_bits(found["model"][key], value)
        common = [key for key in found["state"] if key.startswith("shared/level/")]
        assert any("/anchor/" in key for key in common)
        assert any("/outer/momentum/" in key for key in common)
        for key in common:
            assert same_bits(torch.as_tensor(found["state"][key]), torch.as_tensor(left[0]["state"][key])), key
        assert found["clock"] == STEPS
        assert same_bits(found["end"][:200], joined[0]["end"][:200])  # all parameters are level after finish()
        assert how != "files" or found["extra"] == {"rank": rank % before}


def lost(state: dict[str, Any], rank: int, kind: str) -> torch.Tensor:
    tensor = state[f"worker/{rank}/level/0/fragment/0/{kind}/0"]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def test_residuals_become_the_mean_of_the_old_ones(ranks: RankPool, tmp_path: Path) -> None:
    left = ranks.run(2, leave, "diloco_late", 5, tmp_path)  # the second round is in flight
    for rank, found in enumerate(ranks.run(3, join, "diloco_late", "files", tmp_path, left)):
        mean = (lost(left[0]["state"], 0, "residual") + lost(left[1]["state"], 1, "residual")) / 2
        assert mean.any()
        assert same_bits(lost(found["state"], rank, "residual"), mean)
        assert not lost(found["state"], rank, "share").any()


def draw(folder: Path, first: bool) -> float:
    run = Run("local_sgd")
    torch.manual_seed(run.rank)
    if first:
        checkpoint.save(folder, **run.parts())
    else:
        torch.manual_seed(100 + run.rank)
        checkpoint.load(folder, **run.parts())
    return torch.rand(()).item()


def test_of_workers_that_share_an_entry_one_goes_on_with_its_random_numbers(ranks: RankPool, tmp_path: Path) -> None:
    old = ranks.run(2, draw, tmp_path, True)
    new = ranks.run(3, draw, tmp_path, False)
    assert new[:2] == old
    assert new[2] not in old


# ---- what is refused -------------------------------------------------------------------------------------------------


def refused(change: Callable[[dict[str, Any]], dict[str, Any]], options: dict[str, Any]) -> tuple[Any, ...]:
    """What a state says to a run that it does not fit, and whether the run is as it was."""
    run = Run("diloco")
    run.go(6)
    state = change(run.sync.state_dict())
    anew = Run(**{"name": "diloco", **options})
    anew.go(3)
    before, values = anew.sync.state_dict(), anew.values()
    result = outcome(anew.sync.load_state_dict, state)
    after = anew.sync.state_dict()
    kept = before.keys() == after.keys() and same_bits(values, anew.values())
    for key, value in before.items():
        kept &= value == after[key] if isinstance(value, str) and key.startswith("shared") else True
        kept &= same_bits(value, after[key]) if isinstance(value, torch.Tensor) else True
    return (*result[1:], kept)


def as_it_is(state: dict[str, Any]) -> dict[str, Any]:
    return state


def nothing(state: dict[str, Any]) -> dict[str, Any]:
    return {}


def without_a_tensor(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not key.endswith("outer/momentum/2.bias")}


def without_worker(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key.startswith("shared")}


def of_another_step(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.replace('"clock": 6', '"clock": 5') if key == "shared/meta" else value
        for key, value in state.items()
    }


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (as_it_is, {"name": "slowmo"}, "another strategy: strategy.levels[0]."),
        (as_it_is, {"case": "unused_branch"}, "another model: 0.weight: (16, 6) float32 in the state, "),
        (without_a_tensor, {}, "outer/momentum/2.bias must hold 8 values of float32; the state has nothing there"),
        (without_worker, {}, "goes on from what worker {rank} saved, which is not in this state"),
        (of_another_step, {}, "worker/{rank} was saved at step 6 and shared at step 5"),
        (nothing, {}, "nothing that Cadenza saved"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(
    ranks: RankPool, change: Callable[..., dict[str, Any]], options: dict[str, Any], words: str
) -> None:
    for rank, (kind, message, kept) in enumerate(ranks.run(2, refused, change, options)):
        assert kind == "CheckpointError"
        assert words.format(rank=rank) in message
        assert kept


def saved(folder: Path, upto: int) -> None:
    run = Run("diloco")
    run.go(upto)
    checkpoint.save(folder, **run.parts())


def loaded(folders: list[Path]) -> list[tuple[Any, ...]]:
    """What checkpoints say to a new run, and whether the run is as it was."""
    run = Run("diloco")
    before, values = run.sync.state_dict(), run.values()
    results = []
    for folder in folders:
        result = outcome(checkpoint.load, folder, **run.parts())
        after = run.sync.state_dict()
        same = [same_bits(a, torch.as_tensor(after[k])) for k, a in before.items() if isinstance(a, torch.Tensor)]
        results.append((*result, run.sync.clock == 0 and same_bits(values, run.values()) and all(same)))
    return results


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_every_rank_finds_the_damaged_file_before_anything_is_changed(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, saved, tmp_path / "whole", 5)
    damaged: list[tuple[Path, str]] = []
    for file in ("worker-00001.safetensors", "shared.safetensors", "worker-00000.json"):
        for damage in (flip_a_bit, truncate, Path.unlink):
            folder = Path(shutil.copytree(tmp_path / "whole", tmp_path / f"worse {file} {damage.__name__}"))
            damage(folder / file)
            words = "is missing" if damage is Path.unlink else "is damaged"
            damaged.append((folder, f"{folder / file} {words}"))
    for results in ranks.run(2, loaded, [folder for folder, _ in damaged]):
        for (_, words), (_, kind, message, kept) in zip(damaged, results, strict=True):
            assert kind == "CheckpointError"
            assert words in message
            assert kept
    with pytest.warns(UserWarning, match="not a whole checkpoint") as warned:
        assert checkpoint.latest(tmp_path) == tmp_path / "whole"
    assert len(warned) == len(damaged)


def killed_at_a_rename(folder: Path, victim: int, number: int) -> None:
    """Save twice; at the given rename of the second time one rank is killed."""
    run = Run("diloco")
    run.go(4)
    checkpoint.save(folder / "first", **run.parts())
    run.go(8)
    renames = []

    def replace(*args: Any) -> None:
        renames.append(args)
        if len(renames) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        really(*args)

    really = os.replace
    if run.rank == victim:
        os.replace = replace
    try:
        checkpoint.save(folder / "second", **run.parts())
    finally:
        os.replace = really


@pytest.mark.parametrize(("victim", "number"), [(0, 1), (0, 3), (0, 4), (1, 2)])
def test_a_rank_killed_before_a_rename_leaves_the_previous_checkpoint(
    ranks: RankPool, tmp_path: Path, victim: int, number: int
) -> None:
    ranks.run(2, killed_at_a_rename, tmp_path, victim, number, expect_dead=[victim])
    with pytest.warns(UserWarning, match=r"second is not a whole checkpoint and is left out.* is missing"):
        assert checkpoint.latest(tmp_path) == tmp_path / "first"


def test_files_of_different_steps_are_no_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    for step in (4, 8):
        ranks.run(2, saved, tmp_path / str(step), step)
    for name in ("worker-00001.safetensors", "worker-00001.json"):
        (tmp_path / "4" / name).replace(tmp_path / "8" / name)
    for [(_, kind, message, kept)] in ranks.run(2, loaded, [tmp_path / "8"]):
        assert kind == "CheckpointError"
        assert "worker-00001.safetensors (step 4)" in message
        assert "not saved together" in message
        assert kept


# ---- wrappers, shards, and parameters that come and go ---------------------------------------------------------------


class Wrapped(Run):
    """A model in DistributedDataParallel."""

    def __init__(self, name: str, case: str = "mlp") -> None:
        self.rank, self.case = dist.get_rank(), CASES[case]
        self.model = DistributedDataParallel(self.case.model(self.rank))
        self.optimizer = momentum_sgd(self.model)
        self.sync = cadenza.attach(self.model, self.optimizer, strategies(dist.get_world_size())[name])


def resume_wrapped(folder: Path) -> list[Any]:
    straight = Wrapped("diloco_warm")
    expected: list[torch.Tensor] = []
    for stop in (2, 5):
        expected += straight.go(stop)
        checkpoint.save(folder / str(stop), **straight.parts())
        dist.barrier()
    expected += straight.go(STEPS)
    found: list[Any] = []
    for stop in (2, 5):
        anew = Wrapped("diloco_warm")
        checkpoint.load(folder / str(stop), **anew.parts())
        found.append((stop, anew.model.require_backward_grad_sync))  # type: ignore[union-attr]
        found += _differences(f"resumed at {stop}", anew.go(STEPS), expected[stop:])
    checkpoint.load(folder / "2", **anew.parts())  # back into the warm-up
    found.append(anew.model.require_backward_grad_sync)  # type: ignore[union-attr]
    found += _differences("back", anew.go(STEPS), expected[2:])
    plain = Run("diloco_warm")
    checkpoint.load(folder / "5", **plain.parts())
    return found + _differences("without DDP", plain.go(STEPS), expected[5:])


def test_ddp_averages_gradients_in_the_warm_up_only_also_after_a_restart(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, resume_wrapped, tmp_path) == [[(2, True), (5, False), True]] * 2


class Sharded(Run):
    """A model in shards, one copy on each row of ranks."""

    def __init__(self, shards: int = 2) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.rank, self.case = dist.get_rank(), CASES["mlp"]
        mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(0)
        model = self.case.build()
        for layer in (model[0], model[2], model[4]):  # type: ignore[index]
            fully_shard(layer, mesh=mesh["shard"])
        self.model = fully_shard(model, mesh=mesh["shard"])
        self.optimizer = adam(self.model)
        self.sync = cadenza.attach(
            self.model,
            self.optimizer,
            cadenza.diloco(period=4, delay=2, codec=FED_BACK),
            topology=cadenza.Topology.from_mesh(mesh, ["replicate"]),
        )

    def values(self) -> torch.Tensor:
        kept = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in (*self.model.parameters(), *kept)]
        return torch.cat([t.detach().double().reshape(-1) for t in local])


def resume_sharded(folder: Path) -> list[Any]:
    straight = Sharded()
    straight.go(5)
    restore = [keep(straight, folder / keep.__name__) for keep in (in_memory, in_files, in_dcp)]
    expected = straight.go(STEPS)
    dist.barrier()
    found: list[Any] = []
    for way in restore:
        anew = Sharded()
        way(anew)
        found += _differences("resumed", anew.go(STEPS), expected)
    found.append(outcome(checkpoint.load, folder / "in_files", **Run("diloco").parts())[1:])
    return found


def join_sharded(folder: Path) -> tuple[Any, ...]:
    run = Sharded()
    checkpoint.load(folder / "in_files", **run.parts())
    run.go(STEPS)
    run.sync.finish()
    dcp_result = outcome(checkpoint.dcp_template, folder / "in_dcp", run.sync)
    return run.sync.clock, dcp_result[1], run.values()[:50]


def test_a_sharded_model_goes_on_shard_by_shard(ranks: RankPool, tmp_path: Path) -> None:
    for [(kind, message)] in ranks.run(4, resume_sharded, tmp_path):
        assert kind == "CheckpointError"
        assert "in 2 shards; here it is in 1" in message
    clock, kind, _ = ranks.run(2, join_sharded, tmp_path)[0]  # one copy goes on where there were two
    assert (clock, kind) == (STEPS, "CheckpointError")


def unfreeze(run: Run) -> None:
    layer = run.model.get_submodule("0").requires_grad_(True)
    run.optimizer.add_param_group({"params": list(layer.parameters())})


def unfrozen_later(name: str, case: str) -> list[str]:
    """A layer that is unfrozen between two rounds joins at the next, whether or not the run was stopped."""
    straight = Run(name, case)
    straight.model.get_submodule("0").requires_grad_(False)
    straight.go(5)
    if case == "frozen":
        unfreeze(straight)
    else:
        straight.model.get_submodule("0").requires_grad_(True)
    straight.go(6)
    restore = in_memory(straight, Path())
    expected = straight.go(STEPS)
    anew = Run(name, case)
    if case == "frozen":
        unfreeze(anew)
    restore(anew)
    return _differences("resumed", anew.go(STEPS), expected)


@pytest.mark.parametrize("case", ["mlp", "frozen"])
@pytest.mark.parametrize("name", ["diloco", "local_sgd"])
def test_a_layer_that_was_unfrozen_since_the_last_round_joins_at_the_next(
    ranks: RankPool, name: str, case: str
) -> None:
    assert ranks.run(2, unfrozen_later, name, case) == [[], []]


def frozen_in_flight() -> list[str]:
    """A layer that is frozen while a round is in flight still lands, whether or not the run was stopped."""
    straight = Run("diloco_late")
    straight.go(4)
    straight.model.get_submodule("0").requires_grad_(False)
    straight.go(5)
    restore = in_memory(straight, Path())
    expected = straight.go(7)
    anew = Run("diloco_late")
    anew.model.get_submodule("0").requires_grad_(False)
    restore(anew)
    return _differences("resumed", anew.go(7), expected)


def test_a_layer_that_was_frozen_in_flight_lands(ranks: RankPool) -> None:
    assert ranks.run(2, frozen_in_flight) == [[], []]


def resume_balanced(folder: Path) -> tuple[Any, ...]:
    """Workers that take steps of different numbers save when they have met as often."""
    rank = dist.get_rank()

    def build() -> Run:
        run = Run("local_sgd")
        run.sync.close()
        run.sync = cadenza.attach(run.model, run.optimizer, cadenza.local_sgd(period=4, balanced=True))
        return run

    run = build()
    run.go(4)
    run.sync.replica.state.balance.quota = 3 + 2 * rank
    run.go(4 + run.sync.replica.state.balance.quota)
    checkpoint.save(folder, **run.parts())
    dist.barrier()
    anew = build()
    checkpoint.load(folder, **anew.parts())
    return (
        anew.sync.clock,
        anew.sync.replica.state.balance.periods,
        anew.sync.replica.state.balance.quota == run.sync.replica.state.balance.quota,
        _differences("resumed", [anew.values()], [run.values()]),
    )


def test_balanced_workers_go_on_each_from_its_own_step(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, resume_balanced, tmp_path) == [(7, 2, True, []), (9, 2, True, [])]
