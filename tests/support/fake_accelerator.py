"""An accelerator that is none: its tensors lie in host memory, and every misuse of streams on it is an error.

It is torch's PrivateUse1 device with a Python backend, so device checks, factories and threads are torch's own. Each
operation notes in which stream it reads and writes which memory. Who reads what another stream writes, or writes what
another stream reads or writes, must have waited for an event of it: vector clocks tell, whatever the threads' luck.
Memory may be freed only when the stream that it was made in comes after all who used it, or was told of them by
`record_stream`. Copies to pinned memory arrive when the host waits for them, and until then the memory has NaN. Once
it is installed the device stays for the life of the process, so tests use it in processes of their own.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from support.fake_streams import (
    Clock,
    Copy,
    Event,
    Misuse,
    Stream,
    come_after,
    copies,
    current_stream,
    here,
    host_waits,
    lock,
    no_host_waits,
    set_stream,
    settle,
)

__all__ = ["DEVICE", "DeviceTensor", "Misuse", "freed_too_early", "install", "no_host_waits", "on_device", "settle"]

NAME = "fake"
DEVICE = f"{NAME}:0"
HOST_READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim"}
COPIES = {"copy_", "_foreach_copy_", "_to_copy", "_copy_from"}
MAKES_MEMORY = {"empty_like", "new_empty", "new_empty_strided", "empty", "empty_strided"}
# Where an address only tells tensors apart; everywhere else it would be read from.
NAMES_MEMORY = {("packing", "_read"), ("bucket", "_span")}


_blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
_pinned: dict[int, torch.UntypedStorage] = {}  # kept, so that no other memory gets the address
_installed: list[torch.library.Library] = []
freed_too_early: list[str] = []


class Block:
    """Memory of the device, and who has used it."""

    def __init__(self) -> None:
        self.home = current_stream()
        self.written: tuple[int, int] | None = None
        self.used: Clock = {}
        self.kept: set[int] = set()

    def __del__(self) -> None:
        if lock is None:  # at the end of the process
            return  # type: ignore[unreachable]
        with lock:
            for stream, tick in self.used.items():
                if stream not in self.kept | {self.home.id} and tick > self.home.clock.get(stream, 0):
                    freed_too_early.append(f"memory of stream {self.home.id} was freed while stream {stream} used it")


class DeviceTensor(torch.Tensor):
    """A tensor of the device. Its values lie in `host`."""

    host: torch.Tensor
    block: Block

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(DEVICE),
        )
        made.host, made.block = host, _block_of(host)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        caller = sys._getframe(1)
        place = caller.f_globals["__name__"].rpartition(".")[2], caller.f_code.co_name
        if place not in NAMES_MEMORY:
            raise Misuse(f"A host pointer was taken from a tensor on the device, in {place}.")
        return self.host.data_ptr()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise Misuse("A numpy array was made of a tensor on the device.")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Stream) -> None:
        self.block.kept.add(stream.id)

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


def _block_of(host: torch.Tensor) -> Block:
    """Return the block that a tensor's values lie in."""
    place = host.untyped_storage().data_ptr()
    with lock:
        found = _blocks.get(place) if place else None
        if found is None:
            found = Block()
            if place:
                _blocks[place] = found
        return found


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    kind = _kind(func)
    near = [x for x in _tensors((*args, *kwargs.values())) if not isinstance(x, DeviceTensor)]
    if kind.name in COPIES and (near or "device" in kwargs):
        return _copy(kind.name, args, kwargs)
    if any(x.ndim for x in near):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got some on {NAME} and cpu.")
    if kind.touches:
        _enter(*_accesses(kind, args, kwargs))
    if kind.name in HOST_READS:
        host_waits(current_stream().clock, kind.name)
    told = {key: torch.device("cpu") if key == "device" else _host(value) for key, value in kwargs.items()}
    out = func(*map(_host, args), **told)
    if out is None or kind.in_place:
        return None if out is None else kwargs.get("out", args[0])
    made = _far(out)
    if kind.touches:
        _enter([], list(_tensors([made])))
    return made


class _Kind:
    """What is to be known of an operation: whether it reads and writes memory at all, and which arguments it writes."""

    def __init__(self, func: Any) -> None:
        self.name = func.overloadpacket.__name__
        aliases = [told.alias_info for told in func._schema.returns]
        view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        self.in_place = any(alias is not None and alias.is_write for alias in aliases)
        self.touches = not view and self.name not in MAKES_MEMORY
        given = func._schema.arguments
        self.writes = [(told.name, told.alias_info is not None and told.alias_info.is_write) for told in given]


_kind = cache(_Kind)


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _host(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [_host(item) for item in x]
    return x.host if isinstance(x, DeviceTensor) else x


def _far(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return type(x)(map(_far, x)) if type(x) in (list, tuple) else tuple(map(_far, x))
    return DeviceTensor(x) if isinstance(x, torch.Tensor) else x


def _accesses(kind: _Kind, args: Any, kwargs: Any) -> tuple[list[DeviceTensor], list[DeviceTensor]]:
    """Return which tensors an operation reads and writes."""
    reads: list[DeviceTensor] = []
    writes: list[DeviceTensor] = []
    for position, (name, writing) in enumerate(kind.writes):
        value = args[position] if position < len(args) else kwargs.get(name)
        (writes if writing else reads).extend(x for x in _tensors([value]) if isinstance(x, DeviceTensor))
    return reads, writes


def _enter(reads: list[DeviceTensor], writes: list[DeviceTensor]) -> None:
    """Do the next thing in the current stream; it must come after all whom it could disturb, or be disturbed by."""
    with lock:
        stream = current_stream()
        come_after(stream.clock, getattr(here, "known", {}))
        tick = stream.clock[stream.id] = stream.clock.get(stream.id, 0) + 1
        for tensor, writing in [*((x, False) for x in reads), *((x, True) for x in writes)]:
            block = tensor.block
            others = block.used if writing else dict([block.written] if block.written else [])
            for other, when in others.items():
                if other != stream.id and when > stream.clock.get(other, 0):
                    raise Misuse(
                        f"Stream {stream.id} {'writes' if writing else 'reads'} {tensor!r}, which stream {other} "
                        f"{'uses' if writing else 'writes'}, without an event between them."
                    )
        for tensor in (*reads, *writes):
            tensor.block.used[stream.id] = tick
        for tensor in writes:
            tensor.block.written = (stream.id, tick)


def _copy(name: str, args: Any, kwargs: Any) -> Any:
    """Copy between host and device."""
    later = bool(kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False))
    if name == "_foreach_copy_":
        for target, source in zip(args[0], args[1], strict=True):
            target.copy_(source, *args[2:])
        return None
    if name == "_to_copy":
        made = torch.empty_like(_host(args[0]), dtype=kwargs.get("dtype") or args[0].dtype)
        far = torch.device(kwargs.get("device") or args[0].device).type != "cpu"
        target = DeviceTensor(made) if far else made
        return target.copy_(args[0], non_blocking=False if not far else later)
    target, source = args[:2] if name == "copy_" else (args[1], args[0])
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        _enter([source], [target])
        target.host.copy_(source.host)
    elif isinstance(target, DeviceTensor):
        _from_host(target, source, later=later)
    else:
        _to_host(target, source, later=later)
    return target


def _from_host(target: DeviceTensor, source: torch.Tensor, *, later: bool) -> None:
    fresh = target.block.written is None
    _enter([], [target])
    with lock:
        _arrive_in_order(source)
        target.host.copy_(source)
        if later and _is_pinned(source):
            copies.append(Copy(source, source.clone(), current_stream(), arrives=False))
            return
    if source.ndim:
        host_waits(current_stream().clock, "a copy from pageable memory")
        if fresh:
            target.block.written = None  # it is there, whoever gets it after this


def _to_host(target: torch.Tensor, source: DeviceTensor, *, later: bool) -> None:
    _enter([source], [])
    if later and _is_pinned(target):
        with lock:
            _arrive_in_order(target)
            copies.append(Copy(target, source.host.to(target.dtype, copy=True), current_stream(), arrives=True))
            target.view(torch.uint8).fill_(255)  # NaN, in every precision
        return
    host_waits(current_stream().clock, "a copy to the host")
    target.copy_(source.host)


def _arrive_in_order(host: torch.Tensor) -> None:
    """Finish the copies of this memory that come before what the current stream does now."""
    for copy in [copy for copy in copies if _overlap(copy.host, host)]:
        if copy.tick > current_stream().clock.get(copy.stream, 0):
            raise Misuse("Pinned memory is used in a stream that did not wait for an earlier copy of it.")
        copies.remove(copy)
        copy.finish()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes


def _is_pinned(host: torch.Tensor) -> bool:
    return host.untyped_storage().data_ptr() in _pinned


def on_device(host: torch.Tensor) -> DeviceTensor:
    """Return a copy of a tensor on the device."""
    return DeviceTensor(host.detach().clone())


def install() -> None:
    """Make the device this process's accelerator; for good."""
    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    _installed.append(library)  # it ends with its owner

    def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> DeviceTensor:
        return DeviceTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> DeviceTensor:
        return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype))

    library.impl("empty.memory_format", empty)
    library.impl("empty_strided", empty_strided)
    library.impl("_copy_from", lambda source, target, later=False: _copy("copy_", (target, source, later), {}))
    plain_empty = torch.empty

    def empty_or_pinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = plain_empty(*size, **options)
        if pin_memory:
            storage = made.untyped_storage()
            _pinned[storage.data_ptr()] = storage
        return made

    torch.empty = empty_or_pinned  # type: ignore[assignment]
    torch.Stream, torch.Event = Stream, Event  # type: ignore[misc,assignment]
    torch.accelerator.current_stream = current_stream  # type: ignore[assignment]
    torch.accelerator.set_stream = set_stream  # type: ignore[assignment]
