"""Checkpoints of one worker: what is written, what comes back, what is refused."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cadenza
from cadenza import checkpoint
from cadenza.checkpoint.files import Manifest, read_manifest, write_state
from cadenza.checkpoint.loop import collect_loop
from cadenza.errors import CheckpointError


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Job:
    """A model that trains alone."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 2)
        )
        self.model.to(memory_format=torch.channels_last)
        self.optimizer = kind(self.model.parameters(), **{"lr": 0.1, **options})
        self.sync = cadenza.attach(self.model, self.optimizer, cadenza.diloco(period=2))

    def go(self, steps: int) -> Job:
        for _ in range(steps):
            images = torch.randn(3, 2, 4, 4).to(memory_format=torch.channels_last)
            self.model(images).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.sync.step()
        return self

    def save(self, folder: Path, **options: Any) -> Path:
        checkpoint.save(folder, model=self.model, optimizer=self.optimizer, sync=self.sync, **options)
        return folder

    def load(self, folder: Path, **options: Any) -> dict[str, Any] | None:
        return checkpoint.load(folder, model=self.model, optimizer=self.optimizer, sync=self.sync, **options)

    def values(self) -> list[torch.Tensor]:
        kept = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        return [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers(), *kept)]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Rprop, torch.optim.NAdam])
def test_dropout_and_optimizers_go_on_as_if_nothing_had_been(tmp_path: Path, kind: Any) -> None:
    job = Job(kind).go(3)
    job.save(tmp_path)
    expected = job.go(4).values()
    other = Job(kind)
    assert other.load(tmp_path) is None
    assert equal(other.go(4).values(), expected)


def test_the_state_of_the_optimizer_keeps_its_strides(tmp_path: Path) -> None:
    job = Job().go(1)
    job.save(tmp_path)
    other = Job()
    other.load(tmp_path)
    for p, q in zip(job.model.parameters(), other.model.parameters(), strict=True):
        assert job.optimizer.state[p]["exp_avg"].stride() == other.optimizer.state[q]["exp_avg"].stride()
        assert p.stride() == q.stride()


def test_options_of_an_optimizer_come_back_to_the_bit_and_in_their_types(tmp_path: Path) -> None:
    job = Job(lr=torch.tensor(1 / 3), betas=(1 / 7, math.nextafter(0.9, 1)), eps=5e-324)
    job.optimizer.param_groups[0] |= {"floor": -math.inf, "names": ["a"], "nested": {1: {"x": None}, "1": True}}
    groups = {**job.optimizer.param_groups[0]}
    job.save(tmp_path)
    other = Job()
    other.load(tmp_path)
    for key, value in groups.items():
        if key != "params":
            assert other.optimizer.param_groups[0][key] == value
            assert type(other.optimizer.param_groups[0][key]) is type(value)


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    job = Job()
    torch.rand(3), random.gauss(0, 1), np.random.rand(2), np.random.standard_normal()

    def draw() -> list[Any]:
        return [torch.rand(2).tolist(), random.random(), random.gauss(0, 1), float(np.random.standard_normal())]

    job.save(tmp_path)
    expected = draw()
    assert draw() != expected
    job.load(tmp_path)
    assert draw() == expected


def test_several_optimizers_are_kept_apart(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    both = [torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(model[1].parameters())]
    sync = cadenza.attach(model, both, cadenza.local_sgd(4))
    model(torch.ones(2)).sum().backward()
    for optimizer in both:
        optimizer.step()
    checkpoint.save(tmp_path, model=model, optimizer=both, sync=sync)
    kept = both[0].state[model[0].weight]["momentum_buffer"].clone()
    both[0].state.clear()
    checkpoint.load(tmp_path, model=model, optimizer=both, sync=sync)
    assert torch.equal(both[0].state[model[0].weight]["momentum_buffer"], kept)
    with pytest.raises(CheckpointError, match=r"groups of \[\[2\], \[2\]\] parameters, those here of \[\[2\]\]"):
        checkpoint.load(tmp_path, model=model, optimizer=both[0], sync=sync)


def test_tied_weights_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = cadenza.attach(model, optimizer, cadenza.local_sgd(4))
    state = collect_loop("worker/0", model, [optimizer], None)
    assert [key for key in state if key.endswith("weight")] == ["worker/0/model/0.weight"]
    checkpoint.save(tmp_path, model=model, optimizer=optimizer, sync=sync)
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    checkpoint.load(tmp_path, model=model, optimizer=optimizer, sync=sync)
    assert torch.equal(model[1].weight, before)
    assert model[1].weight is model[0].weight


def test_what_the_user_adds_comes_back(tmp_path: Path) -> None:
    extra = {"epoch": 3, "loss": 1 / 3, "nothing": None, "sampler": {7: (1, 2), "seed": [torch.arange(3), math.inf]}}
    job = Job()
    found = job.load(job.save(tmp_path, extra=extra))
    assert repr(found) == repr(extra)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("CosineAnnealingLR", {"T_max": 9}), ("MultiStepLR", {"milestones": [2, 4]}), ("ReduceLROnPlateau", {})],
)
def test_a_learning_rate_schedule_goes_on(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    def step() -> float:
        job.go(1)
        schedule.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
        return job.optimizer.param_groups[0]["lr"]

    job = Job()
    schedule = getattr(torch.optim.lr_scheduler, kind)(job.optimizer, **options)
    step()
    job.save(tmp_path, extra={"schedule": schedule.state_dict()})
    expected = [step() for _ in range(4)]
    job = Job()
    schedule = getattr(torch.optim.lr_scheduler, kind)(job.optimizer, **options)
    extra = job.load(tmp_path)
    assert extra is not None
    schedule.load_state_dict(extra["schedule"])
    assert [step() for _ in range(4)] == expected


def test_what_only_pickle_could_hold_is_refused_with_its_place(tmp_path: Path) -> None:
    job = Job()
    job.optimizer.param_groups[0]["hook"] = len
    with pytest.raises(CheckpointError, match="optimizer/0/param_groups/0/hook is a builtin_function_or_method"):
        job.save(tmp_path / "new")
    with pytest.raises(CheckpointError, match="extra/a is a set"):
        Job().save(tmp_path / "new", extra={"a": {1, 2}})
    assert not (tmp_path / "new").exists()
    with pytest.raises(CheckpointError, match=r"safetensors does not hold torch.complex128"):
        Job().save(tmp_path / "new", extra={"a": torch.ones(2, dtype=torch.complex128)})


def test_a_compiled_model_and_its_original_read_each_other_s_checkpoints(tmp_path: Path) -> None:
    job = Job().go(1)
    compiled = torch.compile(job.model, backend="eager")
    checkpoint.save(tmp_path, model=compiled, optimizer=job.optimizer, sync=job.sync)  # type: ignore[arg-type]
    other = Job()
    other.load(tmp_path)
    assert equal(job.values(), other.values())


# ---- damage ----------------------------------------------------------------------------------------------------------


def other_width(job: Job) -> None:
    job.model[4] = nn.Linear(16, 3)


def other_name(job: Job) -> None:
    job.model.add_module("head", job.model._modules.pop("4"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_width, "another model: 4.weight: (2, 16) float32 in the state, 4.weight: (3, 16) float32 here"),
        (other_name, "4.weight: (2, 16) float32 in the state, head.weight"),
        (lambda job: job.model[1].register_buffer("more", torch.ones(1)), "1.more is nothing in it, and (1,) float32"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_before_anything_is_changed(
    tmp_path: Path, change: Callable[[Job], None], words: str
) -> None:
    Job().go(3).save(tmp_path)
    job = Job()
    change(job)
    before = job.values()
    with pytest.raises(CheckpointError) as error:
        job.load(tmp_path)
    assert words in str(error.value)
    assert equal(before, job.values())
    assert job.sync.clock == 0


def test_a_bit_that_flips_anywhere_is_found(tmp_path: Path) -> None:
    job = Job().go(3)
    job.save(tmp_path)
    before = job.values()
    rng = random.Random(7)
    for path in sorted(tmp_path.iterdir()):
        data = path.read_bytes()
        for _ in range(20):
            place = rng.randrange(len(data) * 8)
            damaged = bytearray(data)
            damaged[place // 8] ^= 1 << (place % 8)
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=path.name):
                job.load(tmp_path)
        path.write_bytes(data)
    assert equal(before, job.values())
    job.load(tmp_path)


class Bomb:
    """Pickled code."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("write", [pickle.dump, lambda value, file: torch.save({"x": value}, file)])
def test_a_planted_pickle_is_not_opened(tmp_path: Path, write: Callable[..., None]) -> None:
    job = Job()
    path = job.save(tmp_path) / "worker-00000.safetensors"
    with path.open("wb") as file:
        write(Bomb(tmp_path / "run"), file)
    with pytest.raises(CheckpointError, match=r"worker-00000.safetensors is damaged"):
        job.load(tmp_path)
    old = read_manifest(path)
    data = path.read_bytes()
    _forge(path, old, data)
    with pytest.raises(CheckpointError, match=r"worker-00000.safetensors is no safetensors file"):
        job.load(tmp_path)
    assert not (tmp_path / "run").exists()


def _forge(path: Path, old: Manifest, data: bytes) -> None:
    """Write a manifest that agrees with the file, as someone with bad intentions would."""
    new = Manifest(old.format, len(data), hashlib.blake2b(data).hexdigest(), old.step, old.fingerprint, old.workers)
    path.with_suffix(".json").write_text(new.to_json())


def test_a_safetensors_file_of_something_else_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    job = Job()
    path = job.save(tmp_path) / "worker-00000.safetensors"
    old = read_manifest(path)
    save_file({"x": torch.ones(2)}, path)
    _forge(path, old, path.read_bytes())
    with pytest.raises(CheckpointError, match="no safetensors file that Cadenza wrote"):
        job.load(tmp_path)
    write_state(path, {"worker/0/meta": "[]"}, lambda size, blake2b: Manifest(1, size, blake2b, 0, old.fingerprint))
    with pytest.raises(CheckpointError, match="worker/0/meta is not what was saved"):
        job.load(tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"shared.safetensors is missing"):
        Job().load(tmp_path)
    with pytest.raises(CheckpointError, match=r"shared.safetensors is missing"):
        Job().load(tmp_path / "nowhere")


@pytest.mark.parametrize("number", [2, 4])
def test_another_format_is_refused(tmp_path: Path, number: int) -> None:
    job = Job()
    state = job.sync.state_dict()
    meta = json.loads(str(state["shared/meta"])) | {"format": number, "version": "9.0"}
    with pytest.raises(CheckpointError, match=rf"format {number}, written by Cadenza 9.0; this is Cadenza"):
        job.sync.load_state_dict({**state, "shared/meta": json.dumps(meta)})


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    job = Job()
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None
    for name in ("c", "b", "a"):
        job.go(1).save(tmp_path / name)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").write_text("not a checkpoint")
    (tmp_path / "notes.txt").write_text("nor is this")
    assert checkpoint.latest(tmp_path) == tmp_path / "a"
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "worker-00000.safetensors.partial").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"d is not a whole checkpoint and is left out. .*shared.safetensors is mis"):
        assert checkpoint.latest(tmp_path) == tmp_path / "a"
    shutil.rmtree(tmp_path / "d")
    (tmp_path / "a" / "shared.safetensors").write_bytes(b"?")
    with pytest.warns(UserWarning, match=r"a is not a whole checkpoint and is left out. .*a/shared.safetensors is dam"):
        assert checkpoint.latest(tmp_path) == tmp_path / "b"


def test_a_whole_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    job = Job().go(1)
    job.save(tmp_path)
    job.save(tmp_path)  # the same once more
    job.go(1)
    with pytest.raises(CheckpointError, match=r"holds a whole checkpoint of step 1.* a folder of its own"):
        job.save(tmp_path)
    (tmp_path / "shared.json").unlink()
    job.save(tmp_path)  # what was left of one that was not finished may go
    other = Job()
    other.load(tmp_path)
    assert other.sync.clock == 2


def test_nothing_but_the_checkpoint_is_left_in_the_folder(tmp_path: Path) -> None:
    names = sorted(path.name for path in Job().save(tmp_path).iterdir())
    assert names == ["shared.json", "shared.safetensors", "worker-00000.json", "worker-00000.safetensors"]


def test_files_are_on_the_disk_before_they_get_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    flush, replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        log.append(f"flush {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        flush(descriptor)

    def rename(source: Path, target: Path) -> None:
        log.append(f"rename {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    Job().save(tmp_path)
    names = ["worker-00000.safetensors", "worker-00000.json", "shared.safetensors", "shared.json"]
    steps = [(f"flush {name}.partial", f"rename {name}", f"flush {tmp_path.name}") for name in names]
    assert log == [step for three in steps for step in three]


def test_without_safetensors_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'cadenza\[checkpoint\]'"):
        Job().save(tmp_path)


def test_a_finished_run_can_still_be_saved(tmp_path: Path) -> None:
    job = Job().go(3)
    job.sync.finish()
    job.save(tmp_path)
    other = Job()
    other.load(tmp_path)
    assert other.sync.clock == 3
    with pytest.raises(cadenza.errors.CadenzaError, match="finished"):
        job.load(tmp_path)


# ---- the synchronizer's own state ------------------------------------------------------------------------------------


def test_a_state_dict_is_flat_and_holds_tensors_and_json_only() -> None:
    state = Job().go(3).sync.state_dict()
    assert {type(value) for value in state.values()} == {str, torch.Tensor}
    assert {key.split("/")[0] for key in state} == {"shared", "worker"}
    assert {key for key, value in state.items() if isinstance(value, str)} == {"shared/meta", "worker/0/meta"}
    assert "shared/level/0/fragment/0/anchor/4.weight" in state
    assert "shared/level/0/fragment/0/outer/momentum/4.weight" in state


def test_a_state_dict_holds_copies() -> None:
    job = Job().go(3)
    state = job.sync.state_dict()
    before = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    job.go(4)
    assert all(torch.equal(value, state[key]) for key, value in before.items())  # type: ignore[arg-type]


@given(st.floats(allow_nan=False))
def test_numbers_come_back_from_the_meta_to_the_bit(samples: float) -> None:
    job = _quick_job()
    job.sync.replica.state.counts.samples = samples
    state = job.sync.state_dict()
    job.sync.replica.state.counts.samples = 0.0
    job.sync.load_state_dict(state)
    assert job.sync.replica.state.counts.samples.hex() == samples.hex()


def _quick_job(made: list[Job] = []) -> Job:  # noqa: B006
    if not made or not dist.is_initialized():
        made[:] = [Job()]
    return made[0]


def test_a_worker_alone_is_worker_0_with_the_whole_model() -> None:
    place = Job().sync.replica.place()
    assert (place.workers, place.position, place.shard, place.shards) == ((0,), 0, 0, 1)
