"""`cadenza export`: the final model, a checkpoint's mean and a worker's, in plain PyTorch and in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from cadenza import checkpoint
from cadenza.cli.app import main
from cadenza.training import Config, runs
from cadenza.training.loop import run_worker
from cadenza.training.task import load_build
from support.ranks import RankPool
from support.tiny_task import NAME


def trained(ranks: RankPool, folder: Path, task: str = NAME, **options: Any) -> runs.Run:
    """A run of two workers that meet every 4 steps, with checkpoints between rounds."""
    config = {
        "task": task,
        "steps": 8,
        "options": options,
        "strategy": {"name": "local_sgd", "period": 4, "codec": "fp32"},
        "evaluate": {"every": 8},
        "checkpoint": {"every": 3},
        "log": {"tensorboard": False},
    }
    run = runs.create(folder, Config.model_validate(config))
    assert ranks.run(2, run_worker, run.folder) == ["finished"] * 2
    return run


def exported(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    """The exit code of `cadenza export` and what it printed."""
    with pytest.raises(SystemExit) as ended:
        main(["export", *map(str, arguments)])
    told = capsys.readouterr()
    return int(ended.value.code or 0), " ".join((told.out + told.err).split())


def test_a_runs_models_load_in_plain_torch(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(ranks, tmp_path / "run")
    out = tmp_path / "out"
    wanted = {
        "final": [],
        "mean": ["--step", 3],
        "zero": ["--step", 3, "--worker", 0],
        "one": ["--step", 3, "--worker", 1],
    }
    for name, options in wanted.items():
        code, text = exported(capsys, run.folder, out / f"{name}.safetensors", *options)
        assert (code, text) == (0, str(out / f"{name}.safetensors"))
    found = {name: load_file(out / f"{name}.safetensors") for name in wanted}

    model = load_build(NAME)(run.config()).model
    for tensors in found.values():
        model.load_state_dict(tensors)  # all of them, by their own names
    with safe_open(out / "mean.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert all(torch.equal(value, load_file(run.model_file)[name]) for name, value in found["final"].items())
    weight, counted = "0.weight", "1.num_batches_tracked"
    assert not torch.equal(found["zero"][weight], found["one"][weight])
    mean = (found["zero"][weight].double() + found["one"][weight].double()) / 2
    assert torch.equal(found["mean"][weight], mean.float())
    assert found["mean"][counted] == found["one"][counted] == 3
    assert list(checkpoint.load_model(run.checkpoint(3))) == list(model.state_dict())


def test_bad_input_is_answered_in_a_sentence(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(ranks, tmp_path / "run")
    out = tmp_path / "model.safetensors"
    (tmp_path / "there.safetensors").write_text("")
    answers = {
        ("--step", 4): "has no checkpoint of step 4; it has 3, 6, 8.",
        ("--step", 3, "--worker", 7): "has no worker 7; it has 0, 1.",
    }
    for options, answer in answers.items():
        code, text = exported(capsys, run.folder, out, *options)
        assert code != 0
        assert answer in text
    assert "is there already" in exported(capsys, run.folder, tmp_path / "there.safetensors")[1]
    assert "There is no folder" in exported(capsys, tmp_path / "nothing", out)[1]
    assert "a Sequential, which has no save_pretrained(). Give a file" in exported(capsys, run.folder, out.stem)[1]
    run.model_file.unlink()
    assert (
        "has not finished, so it has no final model. Give one of its checkpoints: --step 8."
        in (exported(capsys, run.folder, out)[1])
    )
    damaged = run.checkpoint(6) / "worker-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    code, text = exported(capsys, run.folder, out, "--step", 6)
    assert code == 1
    assert "worker-00001.safetensors is damaged" in text
    assert not out.exists()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # transformers' own, about its future
def test_a_model_of_transformers_is_read_by_from_pretrained(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"layers": 1, "width": 32, "context": 32, "batch": 2}
    run = trained(ranks, tmp_path / "run", "examples.tasks.hugging_face:build", **small)
    for name, options in {"final": [], "mean": ["--step", 6]}.items():
        code, text = exported(capsys, run.folder, tmp_path / name, *options)
        assert code == 0, text
        assert exported(capsys, run.folder, tmp_path / f"{name}.safetensors", *options)[0] == 0
        wanted = load_file(tmp_path / f"{name}.safetensors")
        read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert wanted.keys() == read.state_dict().keys(), "tied weights under both their names"
        assert all(torch.equal(value, wanted[key]) for key, value in read.state_dict().items())
