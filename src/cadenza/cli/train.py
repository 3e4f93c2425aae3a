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
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from cadenza.cli import train_options as options
from cadenza.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from cadenza.training.config import Config
    from cadenza.training.runs import Run

__all__ = ["train"]


class _Insists(NamedTuple):
    """What one who resumes insists on: another task, a beginning at step 0."""

    other_task: bool
    from_scratch: bool


def train(
    task: options.Task = None,
    config: options.ConfigFile = None,
    print_config: options.PrintConfig = False,
    run: options.RunFolder = None,
    resume: options.Resume = None,
    force: options.Force = False,
    from_scratch: options.FromScratch = False,
    plain: options.Plain = False,
    log: options.Log = None,
    no_report: options.NoReport = False,
    strategy: options.StrategyName = None,
    period: options.Period = None,
    levels: options.Levels = None,
    codec: options.Codec = None,
    outer_lr: options.OuterLr = None,
    delay: options.Delay = None,
    faults: options.Faults = None,
    accept_rollback: options.AcceptRollback = None,
    warmup_steps: options.WarmupSteps = None,
    steps: options.Steps = None,
    workers: options.Workers = None,
    seed: options.Seed = None,
    settings: options.Settings = None,
    nnodes: options.Nodes = None,
    node_rank: options.NodeRank = None,
    rdzv_backend: options.RdzvBackend = None,
    rdzv_endpoint: options.RdzvEndpoint = None,
    rdzv_id: options.RdzvId = None,
    max_restarts: options.MaxRestarts = None,
    compare: options.Compare = None,
    link: options.Link = None,
) -> None:
    """Train a model on many workers that talk seldom, and draw a report.

    Without a TASK: a small GPT on the sources of Python's standard library, two to three minutes on two cores. Ctrl-C
    stops all workers and saves. A run is a folder: configuration, metrics, logs, checkpoints, model, report.
    """
    overrides = options.overrides_of(locals()) | parse_settings(settings or [])
    _refuse_together(resume=resume, config=config, run=run, compare=compare)
    from rich.console import Console

    from cadenza.training.config import read_config

    console = Console(highlight=False)
    if resume is not None:
        insists = _Insists(force, from_scratch)
        _go_on(resume, overrides, insists, console, plain=plain, link=link, report=not no_report, show=print_config)
        return
    if force or from_scratch:
        raise UsageError(f"--{'force' if force else 'from-scratch'} belongs to --resume RUN.")
    if compare is not None and not print_config:
        from cadenza.cli.comparing import contestants, race

        entered = contestants(config, overrides, compare.split(","))
        race(run or _default_folder("compare"), entered, console, plain=plain, link=link, report=not no_report)
        return
    chosen = read_config(config, overrides)
    if print_config:
        _print(chosen)
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
        except (ValueError, RecursionError):
            if not re.fullmatch(r"[\w.:+/-]+", text):
                raise UsageError(f"--set {setting}: the value is not TOML; texts are written 'like this'.") from None
            found[key.strip()] = text
    return found


def _print(config: Config) -> None:
    from cadenza.training.config_text import commented

    print(commented(config), end="")


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
    from cadenza.cli.running import emulated, import_task, make_run, owned
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
    import_task(config, console, plain=plain)
    with nullcontext() if link is None else emulated(link, config) as network:
        run = make_run(folder, config)
        try:
            with owned(run, config, console) as lock:
                _train(run, config, console, plain=plain, network=network, report=report, lock=lock)
        except UsageError:
            if config.launch.nnodes == "1" and not read_metrics(run.folder).of("start"):
                shutil.rmtree(run.folder)  # so that the next attempt can have the same name
            raise


def _go_on(
    folder: Path,
    overrides: dict[str, Any],
    insists: _Insists,
    console: Console,
    *,
    plain: bool,
    link: str | None,
    report: bool,
    show: bool,
) -> None:
    """Go on with a run, as its folder says and the flags change it."""
    from cadenza.cli.running import emulated, import_task, owned, same_run
    from cadenza.training.runs import open_run
    from cadenza.training.saved import checkpoint_folders, set_aside

    run = open_run(folder)
    before = run.config()
    config = before.with_(**overrides) if overrides else before
    if show:
        _print(config)
        return
    if config.task != before.task and not insists.other_task:
        raise UsageError(
            f"{folder} trains the task {before.task}, and not {config.task}: its checkpoints belong to another model. "
            "--force goes on with the other task all the same."
        )
    if insists.from_scratch and config.launch.nnodes != "1":
        raise UsageError("--from-scratch is for one node: of several, one could set aside what another has just saved.")
    summary = run.summary() or {}
    if not insists.from_scratch and summary.get("status") == "finished" and summary["steps"] >= config.steps:
        raise UsageError(
            f"{folder} has finished its {summary['steps']} steps; --steps {2 * summary['steps']} would go on with it."
        )
    link_or_none = nullcontext() if link is None else emulated(link, config)
    with owned(run, config, console) as lock, link_or_none as network:
        import_task(config, console, plain=plain)
        if not same_run(config, before):
            run.write_config(config)
        for checkpoint in checkpoint_folders(run) if insists.from_scratch else []:
            set_aside(checkpoint)
        try:
            _train(run, config, console, plain=plain, network=network, report=report, lock=lock)
        except UsageError:
            run.write_config(before)  # what the workers refused shall not stand in the way of the next attempt
            raise


def _train(
    run: Run, config: Config, console: Console, *, plain: bool, network: Any, report: bool, lock: int | None
) -> None:
    from cadenza.cli.failures import TrainingFailedError
    from cadenza.cli.running import carry_out
    from cadenza.cli.watching import InterruptedRunError

    try:
        leads = carry_out(run, config, console, plain=plain, network=network, lock=lock)
    except InterruptedRunError as interruption:
        text = _left(run) if interruption.left else _saved(run, interruption.saved)
        console.print(text, soft_wrap=True)
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
    """Show what came of the runs, and draw it; without room for the drawing they have ended well even so."""
    from cadenza.cli.report.page import write_report
    from cadenza.cli.results import results

    console.print(results(folders))
    if not report:
        return
    try:
        told = f"Report: {write_report(folders, target)}"
    except OSError as error:
        told = f"There is no report: {error.filename}: {error.strerror}. Draw it with cadenza report."
    console.print(told, soft_wrap=True)


def _saved(run: Run, saved: bool) -> str:
    """Say what was saved, and how to go on."""
    step = _last_saved(run)
    if step is None:
        return f"Interrupted before anything was saved. {_resume(run)}"
    if saved and step == (run.summary() or {}).get("steps", step):
        return f"Interrupted after step {step}, and saved. {_resume(run)}"
    return f"The workers ended before their last step was saved; the last checkpoint is of step {step}. {_resume(run)}"


def _left(run: Run) -> str:
    return f"The workers of this node have left; others go on. Come back with:  {_command(run)}"


def _last_saved(run: Run) -> int | None:
    from cadenza.training.saved import last_whole_step

    return last_whole_step(run, tolerant=run.config().faults.tolerant)


def _resume(run: Run) -> str:
    where = "" if run.config().launch.nnodes == "1" else ", on all nodes,"
    return f"Go on{where} with:  {_command(run)}"


def _command(run: Run) -> str:
    return f"cadenza train --resume {shlex.quote(str(run.folder))}"
