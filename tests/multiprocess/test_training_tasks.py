"""The tasks that ship: the default one and the examples train, and resume to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cadenza.errors import UsageError
from cadenza.training import Config, runs
from cadenza.training.loop import run_worker
from cadenza.training.task import load_build
from support.ranks import RankPool

GPT = {
    "layers": 1,
    "width": 32,
    "heads": 2,
    "context": 32,
    "batch": 4,
    "lr_warmup": 4,
    "held_out_windows": 16,
    "lr": 1e-3,
}
TASKS: dict[str, dict[str, Any]] = {
    "cadenza.training.standard_library_gpt:build": GPT,
    "examples.tasks.digits_convnet:build": {"channels": 4},
    "examples.tasks.hugging_face:build": {"layers": 1, "width": 32, "context": 32},
}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_learns_and_resumes(ranks: RankPool, tmp_path: Path, task: str) -> None:
    if "hugging_face" in task:
        pytest.importorskip("transformers")

    def make(name: str, steps: int) -> runs.Run:
        config = {
            "task": task,
            "steps": steps,
            "options": TASKS[task],
            "strategy": {"name": "diloco", "period": 6, "outer_lr": 0.4, "codec": "int8"},
            "evaluate": {"every": 20},
            "checkpoint": {"every": 20},
            "log": {"tensorboard": False},
        }
        return runs.create(tmp_path / name, Config.model_validate(config))

    whole, halved = make("whole", 40), make("halved", 40)
    for run in (whole, halved):
        assert ranks.run(2, run_worker, run.folder) == ["finished"] * 2
    losses = [line["loss"] for line in runs.read_metrics(whole.folder).of("evaluation")]
    assert len(losses) == 2
    assert losses[-1] < losses[0]
    (halved.checkpoint(40) / "shared.json").unlink()  # so it goes on from the one before
    assert ranks.run(2, run_worker, halved.folder) == ["finished"] * 2
    assert runs.read_metrics(halved.folder).start()["step"] == 20
    assert whole.model_file.read_bytes() == halved.model_file.read_bytes()
    assert whole.summary()["held_out"] == halved.summary()["held_out"]


def test_the_hugging_face_example_says_what_is_missing() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        with pytest.raises(UsageError, match="pip install transformers"):
            load_build("examples.tasks.hugging_face:build")
    else:
        assert callable(load_build("examples.tasks.hugging_face:build"))
