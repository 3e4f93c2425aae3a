"""Work in the streams of an accelerator: what comes after what, and memory that one stream hands to another.

A device does what is enqueued in one stream in order, and what is enqueued in two streams in any order, unless one
waits for an event of the other. Nothing here waits on the host but what says so. On a CPU all of this does nothing:
what is called is done when it returns. CUDA, ROCm, XPU and others are alike, through `torch.accelerator`.

>>> device = torch.device("cpu")
>>> packed = Moment([device])
>>> with SideStreams().use([device]):
...     packed.wait()
...     total = torch.ones(3).sum()
>>> total
tensor(3.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import ParamSpec, TypeVar

from cadenza.common.later import torch
from cadenza.errors import CadenzaError

__all__ = [
    "Moment",
    "SideStreams",
    "devices_of",
    "empty_on_host",
    "has_streams",
    "keep_for_stream",
    "made_once",
    "refuse_capture",
]

P = ParamSpec("P")
T = TypeVar("T")

_WITHOUT_STREAMS = ("cpu", "meta", "mps")  # mps has one queue, in which all is in order


def has_streams(device: torch.device) -> bool:
    """Say whether a device has streams, between which nothing is in order by itself.

    >>> has_streams(torch.device("cpu")), has_streams(torch.device("cuda", 0))
    (False, True)
    """
    return device.type not in _WITHOUT_STREAMS


def devices_of(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """Return the devices with streams that some tensors are on, each once.

    >>> devices_of([torch.zeros(1)])
    ()
    """
    return tuple(device for device in dict.fromkeys(tensor.device for tensor in tensors) if has_streams(device))


class Moment:
    """All that was enqueued so far in the current streams of some devices: others can wait for it.

    >>> Moment([torch.device("cpu")]).wait()
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events = [
            (device, torch.accelerator.current_stream(device).record_event())
            for device in devices
            if has_streams(device)
        ]

    def wait(self) -> None:
        """Let what this thread enqueues from now on, in the current streams of these devices, come after it."""
        for device, event in self._events:
            torch.accelerator.current_stream(device).wait_event(event)

    def wait_on_host(self) -> None:
        """Wait until the devices have done it; not for the training loop."""
        for _, event in self._events:
            event.synchronize()


class SideStreams:
    """One stream on each device, beside those in which training is done.

    >>> with SideStreams().use([torch.device("cpu")]):
    ...     pass
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    @contextmanager
    def use(self, devices: Iterable[torch.device]) -> Iterator[None]:
        """Let this thread enqueue in the side streams of some devices, inside the block."""
        used = list(filter(has_streams, devices))
        with _keeping_device(used):
            before = [torch.accelerator.current_stream(device) for device in used]
            try:
                for device in used:
                    if device not in self._streams:
                        self._streams[device] = torch.Stream(device)
                    torch.accelerator.set_stream(self._streams[device])
                yield
            finally:
                for stream in before:
                    torch.accelerator.set_stream(stream)


def _keeping_device(used: Sequence[torch.device]) -> AbstractContextManager[object]:
    """Give the thread its current device back after the block: to set a stream sets its device, too.

    Another process's device, which is current in a new thread, is left alone: torch looks whether this one uses it.
    """
    known = getattr(torch.accelerator, "device_index", None)  # not in older torches
    return known(used[0].index) if used and known else nullcontext()


def refuse_capture(what: str) -> None:
    """Raise if the current stream is captured into a CUDA graph: replays of the graph would not call `what` again.

    >>> refuse_capture("sync.step()")
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise CadenzaError(
            f"{what} was called while a CUDA graph is captured, and no replay would call it again. Capture the forward "
            f"pass, the backward pass and the optimizer's step, and call {what} after every replay()."
        )


def keep_for_stream(tensors: Iterable[torch.Tensor]) -> None:
    """Keep memory that was made in another stream from being given away before the current stream is done with it.

    >>> keep_for_stream([torch.zeros(2)])
    """
    for tensor in tensors:
        if has_streams(tensor.device):
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def made_once(make: Callable[P, T]) -> Callable[P, T]:
    """Let a function make a constant tensor once for the same arguments, however many threads ask for it at a time.

    `functools.cache` may make it twice and drop the first one, of which the stream of another thread still reads.

    >>> @made_once
    ... def zeros(size):
    ...     return torch.zeros(size)
    >>> zeros(2) is zeros(2)
    True
    """
    kept, lock = cache(make), threading.Lock()

    @wraps(make)
    def made(*args: P.args, **options: P.kwargs) -> T:
        with lock:
            return kept(*args, **options)  # type: ignore[arg-type]

    return made


def empty_on_host(numel: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """Return memory on the host; pinned, if there is an accelerator: it copies from and to it while the host goes on.

    >>> empty_on_host(3, torch.float16, pinned=True).shape
    torch.Size([3])
    """
    return torch.empty(numel, dtype=dtype, pin_memory=pinned and torch.accelerator.is_available())
