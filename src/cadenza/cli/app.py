"""The program `cadenza`: its commands, and what becomes of errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as missing:
    sys.exit(f"The command line needs {missing.name}; install Cadenza with its extra: pip install 'cadenza[cli]'.")

from rich.console import Console

from cadenza.cli.bench import bench
from cadenza.cli.doctor import doctor
from cadenza.cli.export import export
from cadenza.cli.failures import exit_code, explain
from cadenza.cli.plan import plan
from cadenza.cli.recipes import recipes
from cadenza.cli.report.command import report
from cadenza.cli.selftest import selftest
from cadenza.cli.train import train
from cadenza.errors import CadenzaError
from cadenza.version import __version__

__all__ = ["app", "main"]

STORY = """
**cadenza train** trains a small GPT on 4 local workers that meet every 16 steps, and draws a report.

**cadenza train mypkg.task:build** trains your own model: build(config) returns a Task.

**cadenza train --print-config > run.toml**, edit it, **cadenza train --config run.toml**; flags override the file.

**cadenza train --nnodes 2 --rdzv-endpoint HOST:29400 --run SHARED/FOLDER** on each of two machines: one training.

**cadenza train --faults shrink** trains on when workers die, and starts them again.

**cadenza train --compare ddp,local_sgd,diloco --link 100mbit** races strategies over a slow link.

**cadenza plan --parameters 1.3B --step-s 0.8 --workers 8 --bandwidth 200mbit** says which period and codec to take.

Ctrl-C saves; **cadenza train --resume RUN** goes on. **cadenza report RUN…** draws what is in the run's folder.

**cadenza recipes list** names configurations that come with Cadenza; **cadenza recipes copy NAME** writes one here.

**cadenza export RUN model.safetensors** writes the trained model, for plain PyTorch or transformers.

**cadenza selftest** tries on this machine whether all of it works, on each device; its JSON goes into a bug report.

Exit codes: 0 done, 1 the training failed, 2 bad input, 130 interrupted. `--debug` shows where an error comes from.
"""

app = typer.Typer(
    name="cadenza",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (train, report, plan, export, doctor, bench, selftest):
    app.command()(command)
app.add_typer(recipes)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"cadenza {__version__}")
        raise typer.Exit


@app.callback(epilog=STORY)
def cadenza(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; anywhere in the line.")] = False,
) -> None:
    """Train one model on many workers that talk seldom."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors that were foreseen are printed as a paragraph, and end in an exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        app([word for word in given if word != "--debug"], prog_name="cadenza")
    except (CadenzaError, OSError) as error:
        if debug:
            raise
        explain(error, Console(stderr=True))
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
