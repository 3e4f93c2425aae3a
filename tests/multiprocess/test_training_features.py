"""What tasks of people have: metrics, logged values, accumulated gradients, GradScaler, the best model, callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cadenza.cli.app import main
from cadenza.cli.report.page import write_report
from cadenza.errors import UsageError
from cadenza.training import Config, runs
from cadenza.training.loop import run_worker
from support import full_task
from support.ranks import RankPool

STRATEGY = {"name": "diloco", "period": 4, "outer_lr": 0.7}


def make(folder: Path, *, strategy: dict[str, Any] | None = None, **options: Any) -> runs.Run:
    config = {
        "task": full_task.NAME,
        "steps": 12,
        "strategy": strategy or STRATEGY,
        "options": options,
        "evaluate": {"every": 3},
        "checkpoint": {"every": 6, "keep_best": "accuracy"},
        "log": {"tensorboard": False},
    }
    return runs.create(folder, Config.model_validate(config))


def model_of(run: runs.Run) -> torch.Tensor:
    return load_file(run.model_file)["weight"]


def test_two_workers_tell_everything_that_a_task_measures(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path / "run")
    assert ranks.run(2, run_worker, run.folder) == ["finished"] * 2
    metrics = runs.read_metrics(run.folder)

    found = metrics.of("evaluation")
    assert [line["step"] for line in found] == [3, 6, 9, 12]
    assert [line["metrics"]["accuracy"] for line in found] == pytest.approx([line["loss"] / 2 for line in found])
    assert run.summary()["metrics"] == {"loss": found[-1]["loss"], **found[-1]["metrics"]}

    assert [line["values"]["number"] for line in metrics.of("step", 1)] == list(range(1, 13))
    assert [line["values"]["step"] for line in metrics.of("values", 1)] == [2, 4, 6, 8, 10, 12]

    best = max(found, key=lambda line: line["metrics"]["accuracy"])
    assert run.best() == {"step": best["step"], "metric": "accuracy", "value": best["metrics"]["accuracy"]}
    kept = load_file(run.best_model)
    again = (torch.ones(8) @ kept["weight"].T + kept["bias"]).square().mean() / 2
    assert float(again) == pytest.approx(best["metrics"]["accuracy"])
    assert not list(run.folder.glob("best-candidate*"))

    main_exits(["export", str(run.folder), str(tmp_path / "best.safetensors"), "--best"])
    assert torch.equal(load_file(tmp_path / "best.safetensors")["weight"], kept["weight"])
    capsys.readouterr()

    page = write_report([run.folder], tmp_path / "report.html").read_text()
    assert all(title in page for title in ("Held-out accuracy", ">largest<", ">norm<", "held-out accuracy, highest"))


def main_exits(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code


@pytest.mark.parametrize("name", ["ddp", "diloco"])
def test_accumulated_batches_are_as_good_as_large_ones(ranks: RankPool, tmp_path: Path, name: str) -> None:
    strategy = {"name": "ddp"} if name == "ddp" else STRATEGY
    large = make(tmp_path / "large", strategy=strategy, batch=8)
    small = make(tmp_path / "small", strategy=strategy, batch=2, accumulate=4)
    for run in (large, small):
        assert ranks.run(2, run_worker, run.folder) == ["finished"] * 2
    assert torch.allclose(model_of(large), model_of(small), rtol=1e-5)
    both = [runs.read_metrics(run.folder).of("step", 0) for run in (large, small)]
    assert [[line["samples"] for line in lines] for lines in both] == [list(range(8, 97, 8))] * 2
    assert [line["loss"] for line in both[0]] == pytest.approx([line["loss"] for line in both[1]])


def test_a_resumed_run_goes_on_after_the_batches_that_were_accumulated(tmp_path: Path) -> None:
    whole, halved = make(tmp_path / "whole", accumulate=3), make(tmp_path / "halved", accumulate=3)
    for run in (whole, halved):
        run_worker(run.folder)
    (halved.checkpoint(12) / "shared.json").unlink()
    run_worker(halved.folder)
    assert runs.read_metrics(halved.folder).start()["step"] == 6
    assert torch.equal(model_of(whole), model_of(halved))


def test_a_scaler_changes_nothing_but_leaves_out_what_overflows(tmp_path: Path) -> None:
    plain, scaled = make(tmp_path / "plain"), make(tmp_path / "scaled", scale=1024.0)
    for run in (plain, scaled):
        run_worker(run.folder)
    assert torch.allclose(model_of(plain), model_of(scaled), rtol=1e-5)
    skipped = make(tmp_path / "skipped", scale=2.0**40, overflow_at=1, clip=1e9)
    run_worker(skipped.folder)
    assert torch.isfinite(model_of(skipped)).all()
    rates = [line["lr"] for line in runs.read_metrics(skipped.folder).of("step")]
    assert rates == [0.1] * 4 + [0.05] * 4 + [0.025] * 4  # the clock ticks, whether or not a step was left out


def test_a_scaler_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole, halved = make(tmp_path / "whole", scale=4.0), make(tmp_path / "halved", scale=4.0)
    for run in (whole, halved):
        run_worker(run.folder)
    (halved.checkpoint(12) / "shared.json").unlink()
    run_worker(halved.folder)
    assert torch.equal(model_of(whole), model_of(halved))
    for run in (whole, halved):
        scales = [line["values"]["scale"] for line in runs.read_metrics(run.folder).of("step")]
        assert scales == [4.0] * 3 + [8.0] * 3 + [16.0] * 3 + [32.0] * 3


def test_callbacks_are_told_of_everything(tmp_path: Path) -> None:
    full_task.heard.clear()
    run_worker(make(tmp_path / "run").folder)
    told = [(kind, step) for kind, step, _ in full_task.heard]
    assert told[:4] == [("start", 0), ("step", 1), ("step", 2), ("step", 3)]
    assert [step for kind, step in told if kind == "evaluation"] == [3, 6, 9, 12]
    assert [step for kind, step in told if kind == "checkpoint"] == [6, 12]
    assert told[-1] == ("end", 12)
    figures = {kind: set(figures) for kind, _, figures in full_task.heard}
    assert figures["step"] == {"loss", "lr", "samples", "largest", "number", "scale"}
    assert figures["evaluation"] == {"loss", "accuracy"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"logged": "text"}, "a dict of numbers to log"),
        ({"logged": "list"}, "a dict of numbers to log"),
        ({"evaluated": "no loss"}, 'one of them named "loss"'),
        ({"evaluated": "loss alone"}, 'keep_best = "accuracy": .* measures no such metric, but loss'),
    ],
)
def test_what_a_task_gets_wrong_is_said(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_worker(make(tmp_path / "run", **options).folder)


def test_training_from_scratch_forgets_the_best_model(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    run.best_note.write_text('{"step": 9, "metric": "accuracy", "value": 1e9}')
    run.candidate(9).touch()  # of a process that was killed
    run_worker(run.folder)
    assert run.best()["value"] < 1e9
    assert not run.candidate(9).exists()
