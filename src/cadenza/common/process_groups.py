"""What Cadenza asks of torch's process groups, in one place: most of it has no public name in every torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from cadenza.common.later import dist, torch
from cadenza.errors import NotInitializedError

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "all_gather_single",
    "backend_beside",
    "backend_for",
    "comm_hooks_of",
    "control_device",
    "count_groups",
    "find_groups",
    "is_member",
    "make_gloo_group",
    "name_groups",
    "resolve",
    "set_timeout",
    "store_of",
    "timeout_of",
    "without_splitting",
]


def all_gather_single(*arguments: Any, **options: Any) -> Any:
    """Gather equal tensors into one, by the newest name of this collective; older torches know the other one."""
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return collective(*arguments, **options)


def resolve(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group, or the world for None; raise if there is none or it was destroyed."""
    if not dist.is_available() or not dist.is_initialized():
        raise NotInitializedError(
            "There is no process group: call torch.distributed.init_process_group() first, and do not use a group "
            "after destroy_process_group()."
        )
    if group is None:
        group = dist.group.WORLD
    try:
        dist.get_rank(group)
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        if isinstance(group, dist.ProcessGroup):
            raise NotInitializedError(
                "This process group was destroyed; build the averager anew on a group that exists."
            ) from error
        raise TypeError(
            f"A process group is required (from torch.distributed.new_group, or None for everyone); got {group!r}."
        ) from error
    assert group is not None
    return group


def is_member(group: dist.ProcessGroup) -> bool:
    """Tell whether this rank is in the group: `new_group` gives the others a placeholder."""
    return dist.get_rank(group) != -1


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the group's key-value store."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    default = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"cadenza/{group.group_name}", default)


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the group's time-out in seconds."""
    timeout: timedelta = group._get_backend(control_device(group)).options._timeout
    return timeout.total_seconds()


def control_device(group: dist.ProcessGroup) -> torch.device:
    """Return where small messages to the host travel: on the CPU, if the group has a backend for it."""
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.accelerator.current_stream().device


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return the name of the backend that carries a group's values on a device; None if it has none for it."""
    return _backends(group).get(device.type)


def backend_beside(group: dist.ProcessGroup, *, through_host: bool) -> str:
    """Return the backends that a group of Cadenza's own has, of ranks of a given group.

    They are the same ones, and Gloo on the CPU where there is none, so that small messages between hosts never wait for
    a device. With `through_host` there is only that.
    """
    if through_host:
        return "cpu:gloo"
    known = _backends(group)
    if "cpu" in known or not dist.is_gloo_available():
        return dist.get_backend(group)
    return ",".join(["cpu:gloo", *(f"{device}:{backend}" for device, backend in known.items())])


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend for each type of device."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, backend, *_ in pairs}


@contextmanager
def without_splitting() -> Iterator[None]:
    """Make groups, inside the block, whose communicators are new ones.

    Where the world was bound to a device (`init_process_group(device_id=…)`), torch splits communicators off that of
    the world: a collective of all ranks, where only some of them make the group.
    """
    world = resolve(None)
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        if bound is not None:
            world.bound_device_id = bound


def count_groups() -> int:
    """Return how many process groups this process has; torch makes it part of a new group's name.

    >>> count_groups()
    0
    """
    return len(dist.distributed_c10d._world.pg_names)


@dataclass(frozen=True)
class _Named:
    """Stands for a process group where the group itself cannot go."""

    name: str


def name_groups(value: Any) -> Any:
    """Replace a process group, or those in a mapping, by their names."""
    if isinstance(value, dist.ProcessGroup):
        return _Named(value.group_name)
    if isinstance(value, dict):
        return type(value)((key, name_groups(item)) for key, item in value.items())
    return value


def find_groups(value: Any) -> Any:
    """Replace names by the process groups of this process that bear them."""
    if isinstance(value, _Named):
        try:
            return dist.distributed_c10d._resolve_process_group(value.name)  # type: ignore[arg-type]
        except (LookupError, RuntimeError, ValueError) as error:
            raise NotInitializedError(
                f"There is no process group named {value.name!r} here: make the same groups, in the same order, as in "
                "the process that pickled this averager, and then unpickle it."
            ) from error
    if isinstance(value, dict):
        return type(value)((key, find_groups(item)) for key, item in value.items())
    return value


def make_gloo_group(store: dist.Store, position: int, members: int, timeout_s: float) -> dist.ProcessGroup:
    """Make a Gloo group on the CPU beside torch's registry; all members call this, and RuntimeErrors are Gloo's own."""
    gloo = dist.ProcessGroupGloo(store, position, members, timedelta(seconds=timeout_s))
    group = dist.ProcessGroup(store, position, members)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Let collectives of a Gloo group that are started from now on fail after so long."""
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=seconds))


def comm_hooks_of(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], Any]]:
    """Return the communication hooks that were registered with a DistributedDataParallel, with their states."""
    hooks: list[tuple[Callable[..., Any], Any]] = ddp._comm_hooks
    return hooks
