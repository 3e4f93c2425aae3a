"""What a run of elastic workers keeps when one of them dies, or the store is away."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cadenza.errors import CheckpointError
from cadenza.participants.store import serve
from cadenza.training import Config, checkpoints, runs
from cadenza.training.checkpoints import Checkpoints
from cadenza.training.loop import run_worker
from cadenza.training.metrics import MetricsWriter
from cadenza.training.recording import Recorder
from cadenza.training.stepping import Stepper
from support import tiny_task


def test_checkpoints_go_on_while_the_store_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [serve(host="127.0.0.1")]
    for name, value in {"CADENZA_STORE": f"127.0.0.1:{stores[0].port}", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    take = Stepper.take

    def lose_the_store(stepper: Stepper, step: int) -> None:
        if step == 5:
            stores.clear()
        elif step == 7:
            time.sleep(0.5)  # for the heart-beat to notice
        take(stepper, step)

    monkeypatch.setattr(Stepper, "take", lose_the_store)
    settings: dict[str, Any] = {
        "task": tiny_task.NAME,
        "steps": 12,
        "strategy": {"name": "diloco", "period": 2},
        "checkpoint": {"every": 2},
        "evaluate": {"every": 0},
        "log": {"tensorboard": False},
        "faults": {"policy": "shrink", "grace_s": 0.5, "first_s": 10.0, "lease_s": 0.5},
    }
    run = runs.create(tmp_path / "run", Config.model_validate(settings))
    assert run_worker(run.folder) == "finished"
    metrics = runs.read_metrics(run.folder)
    assert [line["step"] for line in metrics.of("round")] == [2, 4]
    assert {line["reason"].partition(":")[0] for line in metrics.of("failed")}
    saved = [line["step"] for line in metrics.of("checkpoint")]
    assert {2, 4, 8, 10, 12} <= set(saved), "that of step 6 comes while the loss is being noticed"
    assert all((folder / "shared.json").exists() for folder in run.checkpoints.glob("step-*"))


class Board:
    """A logger that remembers its points."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self.closed = False

    def observe_round(self, report: Any) -> None:
        """Rounds have no part in this."""

    def draw(self, step: int, figures: Mapping[str, float]) -> None:
        self.points.append((step, figures["loss"]))

    def close(self) -> None:
        self.closed = True


def test_who_draws_the_curves_after_another_draws_what_that_one_could_not(tmp_path: Path) -> None:
    board, opened = Board(), list[int]()

    def open_boards(after: int) -> list[Any]:
        opened.append(after)
        return [board]

    with MetricsWriter(tmp_path / "worker-00001.jsonl") as writer:
        recorder = Recorder(writer)
        for step in range(1, 36):
            recorder.step(step, loss=float(step), samples=1, lr=0.1, next_sync=None)
        recorder.draw_with(open_boards, 35)
        assert (opened, board.points) == ([9], [(10, 10.0), (20, 20.0), (30, 30.0)])
        recorder.stop_drawing()
        recorder.step(40, loss=4.0, samples=1, lr=0.1, next_sync=None)
    assert (board.closed, len(board.points)) == (True, 3)


@pytest.mark.parametrize(
    ("whose", "saved", "step", "momentum"),
    [
        ("own", {1: 4, 2: 6}, 4, 1.0),
        ("own", {2: 6}, 0, 2.0),
        ("peer", {1: 4, 2: 6}, 4, 2.0),
        ("nobody", {1: 4, 2: 6}, 4, None),
        ("own", {1: 20}, 0, None),  # of a step that the others have not come to
    ],
)
def test_a_worker_that_comes_back_takes_up_the_optimizer_state_it_was_told_to(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whose: Any,
    saved: dict[int, int],
    step: int,
    momentum: float | None,
) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    run = runs.create(tmp_path / "run", Config())
    for worker, at in saved.items():
        folder = run.checkpoint(at)
        folder.mkdir(parents=True)
        (folder / f"worker-{worker:05}.json").touch()

    def read_manifest(path: Path) -> Any:
        if not path.with_suffix(".json").exists():
            raise CheckpointError("not there")
        return SimpleNamespace(step=int(path.parent.name.rpartition("-")[2]))

    def load_optimizers(folder: Path, worker: int, optimizers: Any) -> dict[str, int]:
        optimizer.state[parameter] = {"momentum_buffer": torch.tensor(float(worker))}
        return {"worker": worker}

    monkeypatch.setattr(checkpoints, "read_manifest", read_manifest)
    monkeypatch.setattr(checkpoints, "load_optimizers", load_optimizers)
    places: list[Any] = []
    job: Any = SimpleNamespace(
        worker=1,
        sync=SimpleNamespace(clock=10, replica=SimpleNamespace(place=lambda: None)),
        task=SimpleNamespace(optimizers=[optimizer]),
        set_place=places.append,
    )
    crew: Any = None
    assert Checkpoints(run, job, crew).take_up(whose) == step
    assert places == ([{"worker": 1}] if step else []), "its place in the data is its own"
    found = optimizer.state.get(parameter, {}).get("momentum_buffer")
    assert found is None if momentum is None else float(found) == momentum
