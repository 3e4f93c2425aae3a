"""Where the parts of a selftest run: each device of this machine, and each way between its workers."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["Setup", "accelerator", "setups_here"]

SHARED_MEMORY = "shared memory"


@dataclass(frozen=True)
class Setup:
    """A device and a way between workers.

    Attributes:
        device: The kind of device: "cpu", "cuda", "xpu".
        way: "shared memory", or the backend of the process group.
        workers: How many take part.
        missing: Why there is no such thing here; empty if there is.
    """

    device: str
    way: str
    workers: int
    missing: str = ""

    @property
    def name(self) -> str:
        return f"{self.device} · {self.way}"

    @property
    def backend(self) -> str:
        """The backend of the process group: headers always travel through the host."""
        if self.way in (SHARED_MEMORY, "gloo"):
            return "gloo"
        return f"cpu:gloo,{self.device}:{self.way}"

    def device_of(self, rank: int) -> torch.device:
        """Return the device of a worker; several share one if there are fewer."""
        if self.device == "cpu":
            return torch.device("cpu")
        return torch.device(self.device, rank % torch.accelerator.device_count())


def accelerator() -> str | None:
    """Return the kind of accelerator that torch can use here."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else found.type


def setups_here(workers: int) -> list[Setup]:
    """Return all that there could be, with a reason for what is missing.

    >>> [setup.name for setup in setups_here(4) if not setup.missing][-1 if accelerator() is None else 1]
    'cpu · gloo'
    """
    no_memfd = "" if hasattr(os, "memfd_create") else "no shared memory on this system"
    found = [Setup("cpu", SHARED_MEMORY, workers, no_memfd), Setup("cpu", "gloo", workers)]
    kind = accelerator()
    if kind is None:
        return [*found, Setup("cuda", "nccl", workers, "no GPU"), Setup("cuda", "gloo", workers, "no GPU")]
    backend = dist.get_default_backend_for_device(kind)
    devices = torch.accelerator.device_count()
    lack = ""
    if devices < 2:
        lack = f"{backend} needs a device for each of two workers, and there is one"
    elif not dist.is_backend_available(backend):
        lack = f"this torch has no {backend}"
    return [*found, Setup(kind, backend, min(workers, devices), lack), Setup(kind, "gloo", workers)]
