"""`cadenza export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["export"]


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.", show_default=False)],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="A file that ends in .safetensors, or a folder, for a task whose model is one of transformers.",
            show_default=False,
        ),
    ],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Take the checkpoint of this step, not the final model.")
    ] = None,
    worker: Annotated[
        int | None, typer.Option(metavar="K", help="Take one worker's model, not the mean of all.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Take the best averaged model, which checkpoint.keep_best has kept.")
    ] = False,
) -> None:
    """Write a run's model for use elsewhere: in plain PyTorch, or by from_pretrained."""
    from cadenza.training.exporting import export_model
    from cadenza.training.runs import open_run

    print(export_model(open_run(run), out, step=step, worker=worker, best=best))
