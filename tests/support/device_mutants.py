"""What the fake accelerator must find: the engine with one mistake in it, each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from cadenza.codecs import kernels, native
from cadenza.common.streams import Moment
from cadenza.engine import host_copies, layout, pending, round_runner
from cadenza.engine.synchronizer import Synchronizer
from cadenza.transports import loopback

__all__ = ["MUTANTS"]


class Nothing(Moment):
    """A moment for which nobody waits."""

    def wait(self) -> None:
        """Do not."""

    def wait_on_host(self) -> None:
        """Do not."""


def nothing(*_: Any) -> None:
    """Do nothing."""


def in_every_step(look: Callable[[torch.Tensor], object]) -> Any:
    """Let every step do something with a parameter before anything else."""

    def check(self: Synchronizer) -> None:
        look(next(iter(self.replica.view.parameters().values())).detach())

    return mock.patch.object(Synchronizer, "_check_values", check)


def wait_for_outcome_only(self: pending.PendingRound) -> None:
    self.outcome.exception()


# By name: the case in which the mistake is made, what makes it, and what must be said of it.
MUTANTS: dict[str, tuple[str, Any, str]] = {
    "no event at the launch": (
        "diloco late",
        mock.patch.object(round_runner, "Moment", Nothing),
        "without an event between them",
    ),
    "no event at the landing": (
        "diloco late",
        mock.patch.object(pending.PendingRound, "wait", wait_for_outcome_only),
        "without an event between them",
    ),
    "memory is used again without an event": (
        "streaming_diloco",
        mock.patch.object(layout, "Moment", Nothing),
        "without an event between them",
    ),
    "no event between workers": (
        "diloco late",
        mock.patch.object(loopback, "Moment", Nothing),
        "without an event between them",
    ),
    "memory is not kept at the landing": (
        "eager_diloco",
        mock.patch.object(pending, "keep_for_stream", nothing),
        "was freed while stream",
    ),
    "item() in every step": (
        "diloco",
        in_every_step(lambda tensor: tensor.sum().item()),
        "The host waits for the device",
    ),
    "cpu() in every step": ("diloco", in_every_step(torch.Tensor.cpu), "The host waits for the device"),
    "tolist() in every step": (
        "diloco late",
        in_every_step(lambda tensor: tensor.tolist()),
        "The host waits for the device",
    ),
    "a synchronisation in every step": (
        "diloco late",
        in_every_step(lambda _: torch.accelerator.current_stream().synchronize()),
        "The host waits for the device",
    ),
    "numpy() in every step": ("diloco", in_every_step(lambda tensor: tensor.numpy()), "A numpy array was made"),
    "machine code on the device": (
        "diloco late",
        mock.patch.object(kernels, "_load", return_value=native.kernels()),
        "A host pointer was taken",
    ),
    "packed memory is used before it is there": (
        "diloco offloaded late",
        mock.patch.object(layout.Layout, "settle", nothing),
        "is not finite",
    ),
    "a buffer is packed before it was copied": (
        "streaming offloaded",
        mock.patch.object(host_copies, "Moment", Nothing),
        "without an event between them",
    ),
}
