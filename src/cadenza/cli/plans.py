"""What the programs that start workers are told, as JSON: the front writes it, without torch.

The elastic agent (`cadenza.cli.agent`) follows one of two plans, the supervisor (`cadenza.cli.supervisor`) a third.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["HostsPlan", "RendezvousPlan", "SupervisorPlan", "WorkerCommand"]


@dataclass(frozen=True)
class WorkerCommand:
    """A worker's number, the command that starts it, and its environment beside that of who starts it."""

    worker: int
    command: list[str]
    env: dict[str, str]


@dataclass(frozen=True)
class RendezvousPlan:
    """What torch's elastic agent is to launch on this node; the names are torchrun's."""

    command: list[str]
    logs: str
    workers: int
    min_nodes: int
    max_nodes: int
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_id: str
    rdzv_configs: dict[str, Any]
    local_addr: str | None
    max_restarts: int

    def arguments(self) -> list[str]:
        """Return the program's arguments."""
        return ["rendezvous", json.dumps(asdict(self))]


@dataclass(frozen=True)
class HostsPlan:
    """Workers that know where worker 0 is, one on each host of an emulated network."""

    commands: list[WorkerCommand]
    logs: str

    def arguments(self) -> list[str]:
        """Return the program's arguments."""
        return ["hosts", json.dumps(asdict(self))]


@dataclass(frozen=True)
class SupervisorPlan:
    """What a supervisor is to keep running.

    Attributes:
        commands: The workers of this node.
        metrics: The folder of the run's metrics.
        logs: The folder for what the workers print.
        job: What tells this job from others that use the store.
        host: The host of the store.
        port: Its port; 0 for a free one.
        store: The command that serves the store, without its port; empty if somebody else does.
        restarts: How often each worker is started again.
        eager: Whether the others are told at once when a worker died, or only when it will not come back.
    """

    commands: list[WorkerCommand]
    metrics: str
    logs: str
    job: str
    host: str
    port: int
    store: list[str]
    restarts: int
    eager: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SupervisorPlan:
        fields = json.loads(text)
        return cls(**{**fields, "commands": [WorkerCommand(**command) for command in fields["commands"]]})
