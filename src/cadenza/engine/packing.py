"""WHAT is averaged: the tensors that travel together, cut into buckets, packed and unpacked in place.

A `Fragment` is an ordered list of tensors. It knows whether each of them can be averaged, has a `digest` that is
equal on two ranks exactly if what they would send has the same meaning, and cuts itself into buckets: runs of one
dtype on one device that fit a given capacity. Nothing here communicates, and only this file knows DTensor.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import cast
from zlib import crc32

import torch

from cadenza.common.norms import norm_squared
from cadenza.engine.alignment import aligned_starts
from cadenza.engine.bucket import Bucket, cut, cut_alone, overlapping
from cadenza.errors import UnsupportedTensorError

__all__ = ["Fragment", "local_part", "packed_shape", "wire_dtype"]

# 8-bit floats have no arithmetic of their own; complex numbers travel as pairs of reals.
_WIRE_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
    torch.complex128: torch.float64,
    torch.complex64: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}


def wire_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which values of `dtype` are packed, or None if they cannot be averaged.

    >>> wire_dtype(torch.complex64), wire_dtype(torch.int64)
    (torch.float32, None)
    """
    return _WIRE_DTYPES.get(dtype)


class Fragment:
    """Tensors that are averaged together, by position.

    `taking` says which of them take part; the others still count as positions, so that ranks which disagree on them
    are found out. `label` names a position in messages. `names` are part of what ranks compare, so that different
    tensors of one shape are found out, too. `problem` says that the tensors could not even be collected.

    >>> fragment = Fragment([torch.ones(2, 3), torch.zeros(4)], taking=[True, False])
    >>> fragment.describe()
    ['parameter 0: (2, 3) float32 on cpu, takes part', 'parameter 1: (4,) float32 on cpu, has no gradient']
    >>> fragment.given, fragment.taken, fragment.numel
    (2, 1, 6)
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        taking: Sequence[bool] | None = None,
        label: Callable[[int], str] = "parameter {}".format,
        names: Sequence[str] | None = None,
        problem: str | None = None,
    ) -> None:
        self._given = tensors
        self._names = names
        self._taking = [True] * len(tensors) if taking is None else list(taking)
        self._label = label
        self._problem = problem
        self._members: list[tuple[torch.dtype, torch.device, torch.Tensor]] = []
        self._positions: list[int] = []
        self._views: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        self._cut: dict[tuple[object, ...], list[Bucket]] = {}
        self.digest = self._read()

    @property
    def given(self) -> int:
        """Return the number of positions."""
        return len(self._given)

    @property
    def taken(self) -> int:
        """Return how many of the given tensors take part."""
        return sum(self._taking)

    @property
    def numel(self) -> int:
        """Return the number of values that take part, a complex number counting as two."""
        return sum(view.numel() for _, _, view in self._members)

    @property
    def problem(self) -> str | None:
        """Say why this fragment cannot be averaged, or None if it can."""
        return self._problem

    def describe(self) -> list[str]:
        """Return a line a position: what two ranks compare when their digests differ."""
        return [
            f"{self._label(i)}: {_facts(tensor)}, {'takes part' if taken else 'has no gradient'}"
            for i, (tensor, taken) in enumerate(zip(self._given, self._taking, strict=True))
        ]

    def refuse_mesh_overlap(self, ranks: Sequence[int], this_rank: int) -> None:
        """Refuse to average shards of one copy with each other: `ranks` may hold copies, never other shards."""
        for i, (tensor, taken) in enumerate(zip(self._given, self._taking, strict=True)):
            if not taken or not _is_dtensor(tensor):
                continue
            others = _shard_ranks(tensor) - {this_rank}
            if shared := sorted(others.intersection(ranks)):
                self._problem = self._problem or (
                    f"{self._label(i)} is a DTensor whose shards live on ranks {shared} of the averaging group; "
                    "averaging would mix different shards. Average over the replicate dimension of the mesh: "
                    "process_group=mesh.get_group('replicate')."
                )

    def norm2(self) -> float:
        """Return the sum of all squares: infinite or not a number exactly if one of the values is, or is huge."""
        return norm_squared(*(view for _, _, view in self._members))

    def first_not_finite(self) -> str | None:
        """Name the first position that holds a value which is not finite."""
        for i, (tensor, taken) in enumerate(zip(self._given, self._taking, strict=True)):
            if taken and not bool(torch.isfinite(local_part(tensor)).all()):
                return self._label(i)
        return None

    def strips(
        self, home: torch.device | None = None, *, align: int = 1
    ) -> tuple[list[Bucket], dict[int, tuple[int, slice]]]:
        """Return one bucket for each device and precision, of any size, in fp32 or better.

        On a `home` device, memory to pack into is there, and tensors of all devices share buckets. Tensors start at
        multiples of `align` values; where that would make a bucket much longer, small neighbours share a place. The
        second value says where the values of each position that takes part lie: in which bucket, and which slice of it.
        """
        kinds: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
        for position, (dtype, device, view) in zip(self._positions, self._members, strict=True):
            kinds.setdefault((home or device, _widened(dtype)), []).append((position, view))
        buckets, places = [Bucket(*kind) for kind in kinds], dict.fromkeys(self._positions, (0, slice(0)))
        for number, members in enumerate(kinds.values()):
            starts = aligned_starts(tuple(view.numel() for _, view in members), align)
            for (position, view), start in zip(members, starts, strict=True):
                buckets[number].add(view, at=start)
                places[position] = (number, slice(start, start + view.numel()))
        return buckets, places

    def buckets(
        self,
        capacity: Callable[[torch.device, torch.dtype], int],
        *,
        widen: bool = False,
        in_place: Callable[[torch.device, torch.dtype], tuple[int, int] | None] | None = None,
    ) -> list[Bucket]:
        """Cut the fragment into buckets of at most `capacity(device, dtype)` values each; `widen` makes them fp32.

        Tensors of at least as many values as `in_place(device, dtype)` says are buckets of their own.
        """
        cuts: list[tuple[torch.device, torch.dtype, torch.dtype, int, tuple[int, int] | None]] = []
        for device, dtype in self._views:
            wire = _widened(dtype) if widen else cast(torch.dtype, wire_dtype(dtype))
            extent = in_place(device, dtype) if in_place is not None and wire == dtype else None
            cuts.append((device, dtype, wire, capacity(device, wire), extent))
        if tuple(cuts) not in self._cut:  # the same in every round of a transport
            self._cut = {tuple(cuts): [bucket for cut in cuts for bucket in self._buckets_of(*cut)]}
        return self._cut[tuple(cuts)]

    def _buckets_of(
        self, device: torch.device, dtype: torch.dtype, wire: torch.dtype, capacity: int, extent: tuple[int, int] | None
    ) -> Iterator[Bucket]:
        views = self._views[device, dtype]
        if extent is None:
            yield from cut(views, device, wire, capacity)
            return
        fewest, most = extent
        yield from cut([view for view in views if view.numel() < fewest], device, wire, capacity)
        if large := [view for view in views if view.numel() >= fewest]:
            shared = overlapping([view for _, _, view in self._members])
            yield from cut_alone(large, device, wire, most, shared)

    def _read(self) -> bytes:
        """Check every tensor, collect those that take part, and return the digest of all of them."""
        codes: list[int] = [crc32(name.encode()) for name in self._names or ()]
        seen: dict[tuple[int, ...], int] = {}
        for i, (tensor, taken) in enumerate(zip(self._given, self._taking, strict=True)):
            dtype = _code(tensor.dtype)
            shape = tensor.shape
            codes += (taken, dtype, len(shape), *shape)
            if not taken:
                continue
            try:
                view, order = _view(tensor)
            except UnsupportedTensorError as error:
                self._problem = self._problem or f"{self._label(i)} {error}"
                continue
            numel = view.numel()
            # Parameters that are the same memory are one contribution: averaged once, tied afterwards.
            first = seen.setdefault((view.data_ptr(), dtype, *view.shape, *view.stride()), i) if numel else i
            device = view.device
            codes += (_code(device), numel, first, *order)
            if first == i and numel:
                self._members.append((view.dtype, device, view))
                self._views.setdefault((device, view.dtype), []).append(view)
                self._positions.append(i)
        return hashlib.blake2b(array("q", codes).tobytes(), digest_size=16).digest()


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _view(tensor: torch.Tensor) -> tuple[torch.Tensor, Sequence[int]]:
    """Return a view of the tensor's own memory to pack from, and the order of dimensions in which it is packed.

    Dense tensors are packed as they lie in memory (channels_last and transposed ones too), flat; others in logical
    order. The order names only dimensions longer than 1, and is empty for the logical one, so that equal orders mean
    equal positions.
    """
    local = local_part(tensor)
    if wire_dtype(local.dtype) is None or local.layout != torch.strided or local.is_meta or _is_lazy(local):
        raise UnsupportedTensorError(_objection(local))
    if local.is_complex():
        local = torch.view_as_real(local)
    if local.is_contiguous():
        return local if local.ndim == 1 else local.view(-1), ()
    strides, shape = local.stride(), local.shape
    order = sorted(range(local.ndim), key=lambda dim: -strides[dim])
    turned = local.permute(order)
    if turned.is_contiguous():
        long = [dim for dim in order if shape[dim] > 1]
        return turned.reshape(-1), () if long == sorted(long) else long
    if any(stride == 0 and size > 1 for stride, size in zip(strides, shape, strict=True)):
        raise UnsupportedTensorError(
            "is expanded: several of its elements are one place in memory. Use .clone() to give each its own."
        )
    return local, ()


def packed_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape in which this rank's values of a tensor lie when they are packed.

    >>> packed_shape(torch.zeros(3, 2).T)
    (3, 2)
    """
    local = local_part(tensor)
    local = torch.view_as_real(local) if local.is_complex() else local
    strides = local.stride()
    turned = local.permute(sorted(range(local.ndim), key=lambda dim: -strides[dim]))
    return tuple(local.shape if local.is_contiguous() or not turned.is_contiguous() else turned.shape)


def _objection(local: torch.Tensor) -> str:
    """Say what keeps a tensor from being averaged, and what to do about it."""
    if local.layout != torch.strided:
        return f"has layout {local.layout}; only dense (strided) tensors can be averaged."
    if local.is_meta:
        return "is on the meta device and has no values; materialise it first."
    if _is_lazy(local):
        return "is a conjugate or negated view; use .resolve_conj().resolve_neg() to give it memory of its own."
    return (
        f"has dtype {_name(local.dtype)}, which has no mean; only floating-point and complex tensors do. Leave it out: "
        "(t for t in tensors if t.is_floating_point())."
    )


def _is_lazy(local: torch.Tensor) -> bool:
    """Whether the memory holds other values than the tensor, which changes sign while it is read."""
    return local.is_conj() or local.is_neg()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor that this rank holds, sharing memory with the parameter."""
    if _is_dtensor(tensor):
        return cast(torch.Tensor, tensor.to_local()).detach()  # type: ignore[attr-defined]
    return tensor.detach()


def _is_dtensor(tensor: torch.Tensor) -> bool:
    # By its attributes, so that nobody imports torch.distributed.tensor who does not use it.
    return type(tensor) is not torch.nn.Parameter and hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def _shard_ranks(tensor: torch.Tensor) -> set[int]:
    """Return the global ranks that hold pieces of the same copy of a DTensor."""
    return set(tensor.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]


def _facts(tensor: torch.Tensor) -> str:
    facts = f"{tuple(tensor.shape)} {_name(tensor.dtype)} on {tensor.device.type}"
    if tensor.layout == torch.strided and not tensor.is_contiguous():
        facts += f" with strides {tuple(tensor.stride())}"
    return facts


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_codes: dict[object, int] = {}


def _code(thing: object) -> int:
    """Return a number for a dtype or a device's type that is the same in every process."""
    code = _codes.get(thing)
    if code is None:
        name = thing.type if isinstance(thing, torch.device) else thing
        code = _codes[thing] = crc32(str(name).encode())
    return code
