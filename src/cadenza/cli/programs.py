"""Which program starts the workers of this node and looks after them, and what it is given.

Fixed workers have torch's elastic agent or, on an emulated network, an agent that knows all hosts; elastic ones have a
supervisor. Either way the workers are ``python -m cadenza.cli.worker FOLDER`` with torchrun's environment.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from cadenza.cli.parent_death import PARENT
from cadenza.cli.plans import HostsPlan, RendezvousPlan, SupervisorPlan, WorkerCommand
from cadenza.cli.rendezvous import StorePlace, arrange, node_range, store_place
from cadenza.emulation import Network
from cadenza.participants.join_arguments import accepts_rollback, job_name
from cadenza.participants.signing import shared_secret
from cadenza.training.config import Config, LaunchSettings
from cadenza.training.runs import Run

__all__ = ["WORKER_MODULE", "Program", "program_for"]

WORKER_MODULE = "cadenza.cli.worker"


@dataclass(frozen=True)
class Program:
    """A program that starts workers.

    Attributes:
        title: What to call it, in errors.
        log_name: What its log's name begins with.
        command: Its command.
        leads: Whether this node is the one that shows and draws what all have done.
        passes_interrupts: Whether workers are to know Ctrl-C from SIGTERM: one stops all nodes, one lets this leave.
        env: Its environment, beside the front's.
    """

    title: str
    log_name: str
    command: list[str]
    leads: bool
    passes_interrupts: bool = False
    env: dict[str, str] = field(default_factory=dict)


def program_for(folder: Path, config: Config, logs: Path, network: Network | None) -> Program:
    """Return the program for a run.

    Args:
        folder: The run's folder.
        config: Its configuration.
        logs: The folder for what the workers print.
        network: An emulated network, if its hosts are the workers.

    >>> program = program_for(Path("runs/first"), Config(), Path("runs/first/logs/launch-001"), None)
    >>> program.title, program.leads
    ('The elastic agent', True)
    """
    if config.faults.tolerant:
        return _supervisor(folder, config, logs, network)
    if network is not None:
        plan = HostsPlan(_commands_on(network, folder), str(logs))
        return _agent(plan.arguments(), config.launch, leads=True)
    return _elastic_agent(folder, config.launch, logs)


def _elastic_agent(folder: Path, launch: LaunchSettings, logs: Path) -> Program:
    least, most = node_range(launch.nnodes)
    rendezvous = arrange(launch, name=folder.resolve().name)
    plan = RendezvousPlan(
        command=_worker_command(folder),
        logs=str(logs),
        workers=launch.workers,
        min_nodes=least,
        max_nodes=most,
        rdzv_backend=rendezvous.backend,
        rdzv_endpoint=rendezvous.endpoint,
        rdzv_id=rendezvous.name,
        rdzv_configs=rendezvous.configs,
        local_addr=rendezvous.local_addr,
        max_restarts=launch.max_restarts,
    )
    env = _interface(rendezvous.interface)
    if launch.max_restarts or least != most:
        # Workers that are started anew must not find the addresses of those before them in the agent's store.
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return _agent(plan.arguments(), launch, leads=rendezvous.leads, env=env)


def _agent(arguments: list[str], launch: LaunchSettings, *, leads: bool, env: dict[str, str] | None = None) -> Program:
    command = [sys.executable, "-m", "cadenza.cli.agent", *arguments]
    return Program("The elastic agent", "agent", command, leads, env={**_environment(launch), **(env or {})})


def _supervisor(folder: Path, config: Config, logs: Path, network: Network | None) -> Program:
    for check in (shared_secret, accepts_rollback):
        check()  # what cannot be used is refused before anything is started
    place = store_place(config, network)
    plan = SupervisorPlan(
        commands=_commands_here(folder, config.launch, place) if network is None else _commands_on(network, folder),
        metrics=str(Run(folder).metrics),
        logs=str(logs),
        job=job_name(os.environ.get("CADENZA_JOB") or config.launch.rdzv_id or folder.resolve().name),
        host=place.host,
        port=place.port,
        store=[sys.executable, "-m", "cadenza.cli.store"] if place.serves else [],
        restarts=config.faults.restarts,
        eager=config.faults.policy == "shrink",
    )
    command = [sys.executable, "-m", "cadenza.cli.supervisor", plan.to_json()]
    several = config.launch.nnodes != "1"
    return Program("The supervisor", "supervisor", command, place.leads, several, _environment(config.launch))


def _commands_here(folder: Path, launch: LaunchSettings, place: StorePlace) -> list[WorkerCommand]:
    """Return the workers of this node."""
    env = {"WORLD_SIZE": str(place.workers), "LOCAL_WORLD_SIZE": str(launch.workers), **_interface(place.interface)}
    first = launch.node_rank * launch.workers
    return [
        WorkerCommand(first + local, _worker_command(folder), {**env, "LOCAL_RANK": str(local)})
        for local in range(launch.workers)
    ]


def _commands_on(network: Network, folder: Path) -> list[WorkerCommand]:
    """Return the workers of an emulated network, one on each host."""
    return [
        WorkerCommand(rank, host.command(_worker_command(folder)), network.environment(rank))
        for rank, host in enumerate(network.hosts)
    ]


def _worker_command(folder: Path) -> list[str]:
    return [sys.executable, "-m", WORKER_MODULE, str(folder)]


def _environment(launch: LaunchSettings) -> dict[str, str]:
    """Return what all workers, and who starts them, find in their environment."""
    return {
        PARENT: str(os.getpid()),
        "OMP_NUM_THREADS": str(launch.threads),
        "PYTHONUNBUFFERED": "1",  # what a worker printed before it was killed is in its log
        "PYTHONFAULTHANDLER": "1",
    }


def _interface(name: str | None) -> dict[str, str]:
    """Return what makes Gloo use an interface, unless the user has chosen one."""
    return {} if name is None or "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": name}
