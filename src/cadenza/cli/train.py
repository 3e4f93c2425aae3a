"""`cadenza train`: from flags and a file to a run that has finished."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cadenza.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from cadenza.training.config import Config
    from cadenza.training.runs import Run

__all__ = ["train"]

RUN, STRATEGY, TRAINING = "The run", "The strategy", "The training"
NODES, RACE = "Many machines, in torchrun's words", "Comparing"


def _option(help: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


def _complete_strategy(incomplete: str) -> list[str]:
    from cadenza.training.strategies import STRATEGIES

    return [name for name in STRATEGIES if name.startswith(incomplete)]


def _complete_codec(incomplete: str) -> list[str]:
    from cadenza.training.strategies import CODECS

    return [name for name in CODECS if name.startswith(incomplete)]


def _complete_policy(incomplete: str) -> list[str]:
    return [name for name in ("raise_error", "skip_round", "shrink") if name.startswith(incomplete)]


def train(
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="TASK",
            help="Your own training: package.module:build, a function that returns a Task.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[Path | None, _option("A TOML file; flags override it.", RUN, "--config", metavar="FILE")] = None,
    print_config: Annotated[bool, _option("Print the whole configuration as TOML, and end.", RUN, "--print-config")] = (
        False
    ),
    run: Annotated[
        Path | None, _option("The run's folder; runs/TIME-STRATEGY if not given.", RUN, "--run", metavar="FOLDER")
    ] = None,
    resume: Annotated[
        Path | None, _option("Go on with a run, from its newest whole checkpoint.", RUN, metavar="RUN")
    ] = None,
    plain: Annotated[bool, _option("Plain lines, also on a terminal.", RUN, "--plain")] = False,
    no_report: Annotated[bool, _option("Draw no report at the end.", RUN, "--no-report")] = False,
    strategy: Annotated[
        str | None,
        _option(
            "ddp, local_sgd, post_local_sgd, hierarchical, slowmo, diloco (the default), streaming_diloco or "
            "sparse_loco.",
            STRATEGY,
            autocompletion=_complete_strategy,
        ),
    ] = None,
    period: Annotated[int | None, _option("Steps from one round to the next.", STRATEGY)] = None,
    codec: Annotated[
        str | None,
        _option(
            "How differences are written: fp32, bf16, fp16, int8, e3m0 or topk; +feedback behind it sends later what "
            "was lost.",
            STRATEGY,
            autocompletion=_complete_codec,
        ),
    ] = None,
    outer_lr: Annotated[float | None, _option("Learning rate of the outer step.", STRATEGY)] = None,
    delay: Annotated[int | None, _option("Steps for which a round may be on its way.", STRATEGY)] = None,
    faults: Annotated[
        str | None,
        _option(
            "What is done when a worker dies: raise_error (the default), skip_round or shrink, which go on.",
            STRATEGY,
            metavar="POLICY",
            autocompletion=_complete_policy,
        ),
    ] = None,
    warmup_steps: Annotated[int | None, _option("Steps with averaged gradients, at first.", STRATEGY)] = None,
    steps: Annotated[int | None, _option("Optimizer steps of each worker.", TRAINING)] = None,
    workers: Annotated[int | None, _option("Workers on this node (torchrun: --nproc-per-node).", TRAINING)] = None,
    seed: Annotated[int | None, _option("What random numbers begin with.", TRAINING)] = None,
    settings: Annotated[
        list[str] | None,
        _option(
            "Any key of the configuration, such as options.width=64; may be repeated.",
            TRAINING,
            "--set",
            metavar="KEY=VALUE",
        ),
    ] = None,
    nnodes: Annotated[str | None, _option("Nodes, or a range such as 2:4.", NODES, metavar="N")] = None,
    node_rank: Annotated[int | None, _option("This node's number, for a static rendezvous.", NODES)] = None,
    rdzv_backend: Annotated[str | None, _option("How nodes find each other: c10d, static, ….", NODES)] = None,
    rdzv_endpoint: Annotated[
        str | None, _option("Where they do, the same on all nodes.", NODES, metavar="HOST:PORT")
    ] = None,
    rdzv_id: Annotated[str | None, _option("The job's name, the same on all nodes.", NODES)] = None,
    max_restarts: Annotated[
        int | None, _option("How often workers are started anew, from the last checkpoint, if one fails.", NODES)
    ] = None,
    compare: Annotated[
        str | None, _option("Train by several strategies, one after the other.", RACE, metavar="NAME,NAME,…")
    ] = None,
    link: Annotated[
        str | None,
        _option("Put each worker behind an emulated link, such as 100mbit; needs root.", RACE, metavar="RATE"),
    ] = None,
) -> None:
    """Train a model on many workers that talk seldom, and draw a report.

    Without a TASK: a small GPT on the sources of Python's standard library, two to three minutes on two cores. Ctrl-C
    stops all workers and saves. A run is a folder: configuration, metrics, logs, checkpoints, model, report.
    """
    flags = {
        "task": task,
        "steps": steps,
        "seed": seed,
        "strategy.name": strategy,
        "strategy.period": period,
        "strategy.codec": codec,
        "strategy.outer_lr": outer_lr,
        "strategy.delay": delay,
        "strategy.warmup_steps": warmup_steps,
        "faults.policy": faults,
        "launch.workers": workers,
        "launch.nnodes": nnodes,
        "launch.node_rank": node_rank,
        "launch.rdzv_backend": rdzv_backend,
        "launch.rdzv_endpoint": rdzv_endpoint,
        "launch.rdzv_id": rdzv_id,
        "launch.max_restarts": max_restarts,
    }
    overrides = {key: value for key, value in flags.items() if value is not None} | parse_settings(settings or [])
    _refuse_together(resume=resume, config=config, run=run, compare=compare)
    from rich.console import Console

    from cadenza.training.config import read_config

    console = Console(highlight=False)
    if resume is not None:
        _go_on(resume, overrides, console, plain=plain, link=link, report=not no_report, show=print_config)
        return
    chosen = read_config(config, overrides)
    if print_config:
        print(chosen.to_toml(), end="")
    elif compare is not None:
        from cadenza.cli.comparing import race

        folder = run or _default_folder("compare")
        race(folder, chosen, compare.split(","), console, plain=plain, link=link, report=not no_report)
    else:
        _begin(run, chosen, console, plain=plain, link=link, report=not no_report)


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return the values of ``--set key=value``, in TOML's writing; a word needs no quotes.

    >>> parse_settings(["strategy.period=8", "options.sizes=[1, 2]", "strategy.name=diloco"])
    {'strategy.period': 8, 'options.sizes': [1, 2], 'strategy.name': 'diloco'}
    """
    found = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise UsageError(f'--set "{setting}": KEY=VALUE is required, such as --set strategy.period=8.')
        try:
            found[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            if not re.fullmatch(r"[\w.:+/-]+", text):
                raise UsageError(f"--set {setting}: the value is not TOML; texts are written 'like this'.") from None
            found[key.strip()] = text
    return found


def _refuse_together(**given: Any) -> None:
    both = [f"--{name}" for name, value in given.items() if value is not None]
    if len(both) > 1 and both[0] == "--resume":
        raise UsageError(f"--resume goes on with a run as its folder says, so {both[1]} cannot be given with it.")


def _default_folder(name: str) -> Path:
    return Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}"


def _begin(
    folder: Path | None, config: Config, console: Console, *, plain: bool, link: str | None, report: bool
) -> None:
    """Make a new run, and train it."""
    from cadenza.cli.rendezvous import arrange, store_place
    from cadenza.cli.running import emulated, make_run
    from cadenza.training.runs import read_metrics

    if folder is None:
        if config.launch.nnodes != "1":
            raise UsageError(
                "Several nodes need one folder that all of them can write to, for the checkpoints: give all of them "
                "the same --run FOLDER."
            )
        folder = _default_folder(config.strategy.name)
    if link is None:  # what is wrong with the endpoint is said before there is a folder
        store_place(config) if config.faults.tolerant else arrange(config.launch, name=folder.name)
    with nullcontext() if link is None else emulated(link, config) as network:
        run = make_run(folder, config)
        try:
            _train(run, config, console, plain=plain, network=network, report=report)
        except UsageError:
            if config.launch.nnodes == "1" and not read_metrics(run.folder).of("start"):
                shutil.rmtree(run.folder)  # so that the next attempt can have the same name
            raise


def _go_on(
    folder: Path,
    overrides: dict[str, Any],
    console: Console,
    *,
    plain: bool,
    link: str | None,
    report: bool,
    show: bool,
) -> None:
    """Go on with a run, as its folder says and the flags change it."""
    from cadenza.cli.running import emulated, same_run
    from cadenza.training.runs import open_run

    run = open_run(folder)
    before = run.config()
    config = before.with_(**overrides) if overrides else before
    if show:
        print(config.to_toml(), end="")
        return
    summary = run.summary() or {}
    if summary.get("status") == "finished" and summary["steps"] >= config.steps:
        raise UsageError(
            f"{folder} has finished its {summary['steps']} steps; --steps {2 * summary['steps']} would go on with it."
        )
    with nullcontext() if link is None else emulated(link, config) as network:
        if not same_run(config, before):
            run.write_config(config)
        try:
            _train(run, config, console, plain=plain, network=network, report=report)
        except UsageError:
            run.write_config(before)  # what the workers refused shall not stand in the way of the next attempt
            raise


def _train(run: Run, config: Config, console: Console, *, plain: bool, network: Any, report: bool) -> None:
    from cadenza.cli.failures import TrainingFailedError
    from cadenza.cli.running import carry_out
    from cadenza.cli.watching import InterruptedRunError

    try:
        leads = carry_out(run, config, console, plain=plain, network=network)
    except InterruptedRunError as interruption:
        told = _left(run) if interruption.left else _saved(run, interruption.saved)
        console.print(told, soft_wrap=True)
        raise typer.Exit(128 + interruption.number) from None
    except TrainingFailedError as error:
        if _last_saved(run) is None:
            raise
        raise TrainingFailedError(
            f"{error}\n\nThe last checkpoint is of step {_last_saved(run)}. {_resume(run)}"
        ) from None
    if leads:
        finish([run.folder], run.report_file, console, report=report)


def finish(folders: Sequence[Path], target: Path, console: Console, *, report: bool) -> None:
    """Tell what came of the runs, and draw it."""
    from cadenza.cli.report import write_report
    from cadenza.cli.results import results

    console.print(results(folders))
    if report:
        console.print(f"Report: {write_report(folders, target)}", soft_wrap=True)


def _saved(run: Run, saved: bool) -> str:
    """Say what was saved, and how to go on."""
    step = _last_saved(run)
    if step is None:
        return f"Interrupted before anything was saved. {_resume(run)}"
    if saved:
        return f"Interrupted after step {step}, and saved. {_resume(run)}"
    return f"The workers were ended before they could save; the last checkpoint is of step {step}. {_resume(run)}"


def _left(run: Run) -> str:
    return f"The workers of this node have left; others go on. Come back with:  {_command(run)}"


def _last_saved(run: Run) -> int | None:
    found = [int(path.name.rpartition("-")[2]) for path in run.checkpoints.glob("step-*")]
    return max(found, default=None)


def _resume(run: Run) -> str:
    where = "" if run.config().launch.nnodes == "1" else ", on all nodes,"
    return f"Go on{where} with:  {_command(run)}"


def _command(run: Run) -> str:
    return f"cadenza train --resume {shlex.quote(str(run.folder))}"
