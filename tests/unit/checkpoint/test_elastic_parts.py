"""Checkpoints of elastic workers: parts that are missing, damaged, or were never written to the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import cadenza
from cadenza.checkpoint import files
from cadenza.checkpoint.folders import collect_part, load_optimizers, restore
from cadenza.checkpoint.selection import Selection, select_any_part
from cadenza.errors import CheckpointError
from cadenza.participants.store import serve


class Killed(BaseException):
    """What stands for SIGKILL: nothing is cleaned up after it."""


class Worker:
    """A worker that trains alone, and saves."""

    def __init__(self, port: int, worker: int = 0) -> None:
        self.worker = worker
        torch.manual_seed(1)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.sync = cadenza.attach(
            self.model,
            self.optimizer,
            cadenza.diloco(period=2, faults=cadenza.shrink(quorum=0.0, first_s=0.3, grace_s=0.3)),
            membership=cadenza.join(f"127.0.0.1:{port}", worker=worker, workers=worker + 1, lease_s=0.3),
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(3, 4)).square().mean().backward()
            self.optimizer.step()
            self.sync.step()

    def save(self, folder: Path) -> None:
        part = collect_part(self.model, [self.optimizer], self.sync, {"place": self.sync.clock})
        part.write(folder, shared=True, overwrite=True)

    def find(self, folder: Path) -> Selection:
        return select_any_part(folder, self.sync.replica.place())

    def load(self, folder: Path) -> dict[str, object] | None:
        return restore(self.find(folder), self.model, [self.optimizer], self.sync)

    def values(self) -> list[torch.Tensor]:
        momentum = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *momentum)]


@pytest.fixture
def worker() -> Iterator[Worker]:
    store = serve(host="127.0.0.1")
    worker = Worker(store.port)
    yield worker
    worker.sync.close()


@contextmanager
def killed_at(call: int) -> Iterator[list[str]]:
    """Let the n-th of the calls by which a checkpoint is written, and all after it, not come to pass."""
    made: list[str] = []

    def dying(name: str, function):  # type: ignore[no-untyped-def]
        def call_or_die(*args, **options):  # type: ignore[no-untyped-def]
            made.append(name)
            if len(made) > call:
                raise Killed
            return function(*args, **options)

        return call_or_die

    with (
        mock.patch.object(os, "replace", dying("replace", os.replace)),
        mock.patch.object(os, "fsync", dying("fsync", os.fsync)),
        mock.patch.object(files, "_hash", dying("hash", files._hash)),
        mock.patch.object(Path, "write_text", dying("write", Path.write_text)),
    ):
        yield made


def test_whenever_a_worker_dies_while_it_saves_the_earlier_checkpoint_is_there(worker: Worker, tmp_path: Path) -> None:
    worker.train(3)
    worker.save(tmp_path / "step-3")
    then = worker.values()
    worker.train(2)
    call = 0
    while True:
        folder = tmp_path / f"step-5-{call}"
        with killed_at(call) as made:
            try:
                worker.save(folder)
            except Killed:
                pass
            else:
                break
        if made.count("replace") < 4 or made[-1] == "replace":  # later, all files have their names
            with pytest.raises(CheckpointError):
                worker.find(folder)
        call += 1
    assert made.count("replace") == 4  # a part and its manifest, what is shared and its manifest
    assert len(made) == call == 16
    assert worker.load(tmp_path / "step-3") == {"place": 3}
    assert worker.sync.clock == 3
    assert all(torch.equal(a, b) for a, b in zip(worker.values(), then, strict=True))


def test_a_worker_without_a_part_goes_on_from_anothers_and_from_the_anchor(worker: Worker, tmp_path: Path) -> None:
    worker.train(3)
    with worker.sync.averaged():
        agreed = [p.detach().clone() for p in worker.model.parameters()]
    worker.save(tmp_path)
    store = serve(host="127.0.0.1")
    other = Worker(store.port, worker=5)
    try:
        assert other.find(tmp_path).worker == 0
        assert other.load(tmp_path) == {"place": 3}
        assert other.sync.clock == 3
        assert all(torch.equal(p, a) for p, a in zip(other.model.parameters(), agreed, strict=True))
        other.train(1)
    finally:
        other.sync.close()


def test_a_part_that_was_saved_beside_another_round_is_not_taken(worker: Worker, tmp_path: Path) -> None:
    worker.train(3)
    worker.save(tmp_path / "one")
    worker.train(2)
    worker.save(tmp_path / "other")
    for name in ("shared.json", "shared.safetensors"):
        os.replace(tmp_path / "other" / name, tmp_path / "one" / name)
    with pytest.raises(CheckpointError, match="no worker's part that belongs"):
        worker.find(tmp_path / "one")


def test_a_damaged_part_is_not_taken(worker: Worker, tmp_path: Path) -> None:
    worker.train(3)
    worker.save(tmp_path)
    path = tmp_path / "worker-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError):
        worker.find(tmp_path)


def test_a_worker_that_has_joined_takes_up_its_own_optimizer(worker: Worker, tmp_path: Path) -> None:
    worker.train(3)
    worker.save(tmp_path)
    momentum = worker.values()[2:]
    worker.train(4)
    parameters = worker.values()[:2]
    assert load_optimizers(tmp_path, 0, [worker.optimizer]) == {"place": 3}
    assert all(torch.equal(a, b) for a, b in zip(worker.values()[2:], momentum, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(worker.values()[:2], parameters, strict=True))
