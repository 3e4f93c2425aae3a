"""Real loggers on a real run with late rounds: W&B offline, MLflow on SQLite, TensorBoard's files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cadenza
from cadenza import RoundReport, observers
from cadenza.training import Config, runs
from cadenza.training.loop import run_worker
from support.ranks import RankPool

STEPS, PERIOD, DELAY = 15, 4, 2
LANDED = [6, 10, 14, 15]  # the last round is held when the training ends


def drift_of(reports: list[RoundReport]) -> str:
    """The name of the curve of the drift."""
    return next(name for name in reports[0].figures(prefix="cadenza") if name.endswith("/drift"))


def train(observers: list[Any], each_step: Any = None) -> None:
    """Train with rounds that land two steps after their launch."""
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = cadenza.diloco(period=PERIOD, delay=DELAY, measure_drift=True)
    with cadenza.attach(model, optimizer, strategy, observers=observers) as sync:
        for step in range(1, STEPS + 1):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sync.step()
            if each_step is not None:
                each_step(step)


def logged_to_wandb(folder: str) -> tuple[str, str, list[tuple[int, float | None]]]:
    os.environ.update(WANDB_MODE="offline", WANDB_DIR=folder, WANDB_SILENT="true", WANDB_ERROR_REPORTING="false")
    reports: list[RoundReport] = []
    if dist.get_rank() != 0:
        train([])
        return "", "", []
    import wandb

    run = wandb.init(project="cadenza", settings=wandb.Settings(x_disable_stats=True, console="off"))
    train([reports.append, observers.wandb(run)], lambda step: run.log({"loss": 1 / step}, step=step))
    run.finish()
    [path] = Path(folder).glob("wandb/offline-run-*/run-*.wandb")
    return str(path), drift_of(reports), [(report.landed_at, report.drift) for report in reports]


def history(path: Path) -> Iterator[dict[str, Any]]:
    """What was logged, row by row, from W&B's file: a header, then records in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (1 << 15) - at % (1 << 15) < 7:
            at += (1 << 15) - at % (1 << 15)
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record.FromString(parts)
            parts = b""
            if record.HasField("history"):
                items = record.history.item
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.mark.timeout(300)
def test_wandb_has_every_late_round_at_its_landing_step_beside_the_losses(ranks: RankPool, tmp_path: Path) -> None:
    (path, curve, told), _ = ranks.run(2, logged_to_wandb, str(tmp_path), timeout_s=200, discard=True)
    rows = list(history(Path(path)))
    assert [row["_step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1)), "none was dropped"
    found = [(row["_step"], row[curve]) for row in rows if curve in row]
    assert found == told
    assert [step for step, _ in found] == LANDED
    assert all(row["cadenza/step"] == row["_step"] for row in rows if curve in row)


def logged_to_mlflow_and_tensorboard(folder: str) -> tuple[list[Any], list[Any], list[Any]]:
    reports: list[RoundReport] = []
    if dist.get_rank() != 0:
        train([])
        return [], [], []
    import mlflow
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.create_experiment("cadenza", artifact_location=f"{folder}/artifacts")
    mlflow.set_experiment("cadenza")
    board = observers.tensorboard(f"{folder}/board")
    with mlflow.start_run() as run:
        train([reports.append, observers.mlflow(), board])
    board.close()
    rows = mlflow.MlflowClient().get_metric_history(run.info.run_id, drift_of(reports))
    events = EventAccumulator(f"{folder}/board")
    events.Reload()
    told = [(report.landed_at, report.drift) for report in reports]
    scalars = events.Scalars(drift_of(reports))
    return told, [(row.step, row.value) for row in rows], [(event.step, event.value) for event in scalars]


@pytest.mark.timeout(300)
def test_mlflow_and_tensorboard_have_every_late_round_at_its_landing_step(ranks: RankPool, tmp_path: Path) -> None:
    (told, in_mlflow, on_board), _ = ranks.run(
        2, logged_to_mlflow_and_tensorboard, str(tmp_path), timeout_s=200, group_timeout_s=150, discard=True
    )
    assert [step for step, _ in told] == LANDED
    assert in_mlflow == told
    assert on_board == [(step, pytest.approx(drift)) for step, drift in told]


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # of what MLflow is made of
def test_a_run_of_the_command_line_goes_on_in_the_same_curves(ranks: RankPool, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "MLFLOW_TRACKING_URI": uri}
    config = {
        "task": "support.tiny_task:build",
        "steps": 20,
        "strategy": {"name": "local_sgd", "period": 5, "codec": "fp32"},
        "evaluate": {"every": 10},
        "checkpoint": {"every": 10},
        "log": {"tensorboard": True, "wandb": True, "mlflow": True},
    }
    run = runs.create(tmp_path / "run", Config.model_validate(config))
    for _ in range(2):
        ended = ranks.run(2, run_worker, run.folder, timeout_s=140, group_timeout_s=120, env=env, discard=True)
        assert ended == ["finished"] * 2
        (run.checkpoint(20) / "shared.json").unlink()  # the second run goes on from step 10
    texts = [line["text"] for line in runs.read_metrics(run.folder).of("event")]
    assert all("set aside" in text for text in texts), "no logger was missed"
    paths = sorted(tmp_path.glob("run/wandb/offline-run-*/run-*.wandb"))
    assert len(paths) == 2
    assert len({path.name for path in paths}) == 1, "one id"
    first, again = ([row["cadenza/step"] for row in history(path) if "held_out" in row] for path in paths)
    assert (first, again) == ([10, 20], [20])
    run_id = (tmp_path / "run" / "mlflow_run_id").read_text()
    held_out = MlflowClient(uri).get_metric_history(run_id, "held_out")
    assert MlflowClient(uri).get_run(run_id).data.params["strategy.period"] == "5"
    assert [row.step for row in held_out] == [10, 20, 20]
