"""A run's model for use elsewhere: a file that plain PyTorch reads, or a folder that transformers reads."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch

from cadenza.checkpoint import load_model
from cadenza.errors import UsageError
from cadenza.training.runs import Run
from cadenza.training.task import check_task, load_build

__all__ = ["export_model"]

_FILE = ".safetensors"


def export_model(
    run: Run, target: Path, *, step: int | None = None, worker: int | None = None, best: bool = False
) -> Path:
    """Write a run's model, and return where: a safetensors file, or a folder in the layout of Hugging Face.

    Args:
        run: The run.
        target: A file whose name ends in `.safetensors`, or else a folder, for which the task is built and its model's
            own `save_pretrained` is called.
        step: The checkpoint to take; without one the final model, or the newest checkpoint if a worker is asked for.
        worker: Whose model; without one the mean of all.
        best: Whether to take the model that `checkpoint.keep_best` has kept.
    """
    if best and (step is not None or worker is not None):
        raise UsageError("--best is the average of the best step: --step and --worker do not go with it.")
    if target.exists() and (not target.is_dir() or target.suffix == _FILE or any(target.iterdir())):
        raise UsageError(f"{target} is there already: give another name, or take it away first.")
    if best:
        tensors = _best_model(run)
    else:
        tensors = _final_model(run) if step is None and worker is None else _from_checkpoint(run, step, worker)
    if target.suffix == _FILE:
        _write_file(target, tensors)
    else:
        _write_folder(run, target, tensors)
    return target


def _steps(run: Run) -> list[int]:
    folders = run.checkpoints.glob("step-*") if run.checkpoints.is_dir() else ()
    return sorted(int(folder.name.removeprefix("step-")) for folder in folders)


def _from_checkpoint(run: Run, step: int | None, worker: int | None) -> dict[str, torch.Tensor]:
    steps = _steps(run)
    if not steps:
        raise UsageError(
            f"{run.folder} has no checkpoints; only the final model can be had, without --step and --worker."
        )
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UsageError(f"{run.folder} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}.")
    return load_model(run.checkpoint(step), worker=worker)


def _final_model(run: Run) -> dict[str, torch.Tensor]:
    if not run.model_file.is_file():
        steps = _steps(run)
        mend = f"Give one of its checkpoints: --step {steps[-1]}" if steps else "It has no checkpoint either"
        raise UsageError(f"{run.folder} has not finished, so it has no final model. {mend}.")
    return _read(run.model_file)


def _best_model(run: Run) -> dict[str, torch.Tensor]:
    if not run.best_model.is_file():
        raise UsageError(
            f"{run.folder} has kept no best model: train with --set checkpoint.keep_best=loss, or another metric of "
            "the task's evaluate()."
        )
    return _read(run.best_model)


def _read(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a model; tied ones, of which the file holds one name, under all their names."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        also = file.metadata() or {}
    return tensors | {name: tensors[kept].clone() for name, kept in also.items() if kept in tensors}


def _write_file(target: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{socket.gethostname()}-{os.getpid()}.partial")
    save_file({name: value.contiguous() for name, value in tensors.items()}, str(partial), metadata={"format": "pt"})
    os.replace(partial, target)


def _write_folder(run: Run, target: Path, tensors: dict[str, torch.Tensor]) -> None:
    config = run.config()
    model: Any = check_task(load_build(config.task)(config), source=config.task).model
    if not callable(getattr(model, "save_pretrained", None)):
        raise UsageError(
            f"{target} would be a folder for transformers, but the model of {config.task} is a "
            f"{type(model).__name__}, which has no save_pretrained(). Give a file instead: {target}{_FILE}."
        )
    model.load_state_dict(tensors)
    model.save_pretrained(str(target))
