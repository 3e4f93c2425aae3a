"""One run from its folder to its end: on this node, or over an emulated link."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console

from cadenza import emulation
from cadenza.cli.display import Display, LiveDisplay, PlainDisplay
from cadenza.cli.following import Follower
from cadenza.cli.launching import Workers, log_folder
from cadenza.cli.programs import program_for
from cadenza.cli.rendezvous import node_range
from cadenza.cli.watching import watch
from cadenza.common.wording import count_workers
from cadenza.emulation import Network
from cadenza.errors import UsageError
from cadenza.training.config import Config, LaunchSettings
from cadenza.training.ownership import owning
from cadenza.training.runs import Run, create, open_run
from cadenza.training.task import load_build

__all__ = ["carry_out", "emulated", "import_task", "make_run", "owned", "same_run", "title_of"]

_MEETING = ("nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "max_restarts")
_OTHERS_S = 10.0  # for another node to finish making the folder that all share


def import_task(config: Config, console: Console, *, plain: bool) -> None:
    """Import the task, so that what is wrong with it is told before there is a folder or a worker."""
    live = console.is_terminal and not plain
    with console.status(f"importing {config.task}") if live else nullcontext():
        load_build(config.task)


def make_run(folder: Path, config: Config) -> Run:
    """Make the folder of a run; with several nodes, the one that comes first makes it for all that share it."""
    try:
        return create(folder, _without(config, ["node_rank"]))
    except UsageError:
        if node_range(config.launch.nnodes)[1] == 1:
            raise
        return _joined(folder, config)


def same_run(config: Config, other: Config, *, but: Sequence[str] = _MEETING) -> bool:
    """Say whether two configurations differ at most in some settings of the launch: how the nodes of a start meet."""
    return _without(config, but).to_toml() == _without(other, but).to_toml()


def _without(config: Config, names: Sequence[str]) -> Config:
    """Return a configuration in which these settings of the launch have their defaults."""
    kept = {name: value for name, value in config.launch.model_dump().items() if name not in names}
    return config.model_copy(update={"launch": LaunchSettings(**kept)})


def _joined(folder: Path, config: Config) -> Run:
    """Return the run that another node has just made."""
    deadline = time.monotonic() + _OTHERS_S
    while not Run(folder).config_file.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    run = open_run(folder)
    if any(run.metrics.glob("*.jsonl")):
        raise UsageError(
            f"{folder} holds a run that has begun already: go on with it by --resume {folder} on all nodes, or give "
            "all of them another --run."
        )
    if not same_run(run.config(), config, but=[*_MEETING, "workers", "threads"]):
        raise UsageError(
            f"{folder} was made by another node with another configuration: give all nodes the same flags and file."
        )
    return run


@contextmanager
def emulated(rate: str, config: Config) -> Iterator[Network]:
    """Make a network with a host for each worker, or say why there can be none."""
    if config.launch.nnodes != "1":
        raise UsageError("--link puts every worker on a host of an emulated network; it goes with one node only.")
    if (reason := emulation.available()) is not None:
        raise UsageError(f"--link {rate}: {reason}")
    try:
        network = Network(config.launch.workers, rate=rate)
    except ValueError as error:
        raise UsageError(f"--link {rate}: {error}") from None
    with network:
        yield network


@contextmanager
def owned(run: Run, config: Config, console: Console) -> Iterator[int | None]:
    """Own a run inside the block; its value is the lock's file, for those who write into the run's folder."""
    launch = config.launch
    job = "" if launch.nnodes == "1" else f"{launch.rdzv_id or run.folder.name} at {launch.rdzv_endpoint}"
    with owning(run.folder, job=job) as lock:
        if lock.before is not None:
            console.print(f"The run's last owner has ended without a word: {lock.before}.", soft_wrap=True)
        yield lock.file


def carry_out(
    run: Run,
    config: Config,
    console: Console,
    *,
    plain: bool,
    network: Network | None = None,
    lock: int | None = None,
) -> bool:
    """Start the workers of a run, show how far they are, and return when they have finished.

    Returns:
        Whether this node is the one that tells what came of it.

    Raises:
        What `watch` raises.
    """
    logs = log_folder(run.folder)
    follower = Follower(run.metrics, from_now=True)
    sent = [] if network is None else [host.bytes_sent() for host in network.hosts]
    workers = Workers(program_for(run.folder, config, logs, network), logs.parent, network, lock)
    title = title_of(run, config, network)
    live = console.is_terminal and not plain and workers.leads
    display: Display = LiveDisplay(console, title) if live else PlainDisplay(console, title)
    with display:
        watch(workers, follower, display, folder=run.folder, logs=logs)
    if network is not None:
        left = [host.bytes_sent() - before for host, before in zip(network.hosts, sent, strict=True)]
        run.write_environment({**run.environment(), "link": {"rate": network.rate, "interface_bytes": left}})
    return workers.leads


def title_of(run: Run, config: Config, network: Network | None = None) -> str:
    """Return what is trained, in a line."""
    strategy, launch = config.strategy, config.launch
    parts = [" ".join(["cadenza train", strategy.name, strategy.codec]).strip()]
    nodes = "" if launch.nnodes == "1" else f" on each of {launch.nnodes} nodes"
    parts.append(f"{count_workers(launch.workers)}{nodes}")
    if config.faults.tolerant:
        parts.append(config.faults.policy)
    if network is not None:
        parts.append(f"{network.rate} links")
    return " · ".join([*parts, str(run.folder)])
