"""Parameters on a device, their flat copies in host memory: copies in pieces, while training goes on.

Values are packed on the device, in the stream of the training loop, and copied to pinned memory in a side stream; on
the way back they are copied there and unpacked in the stream of the training loop. There are two buffers on the device,
so that one is packed or unpacked while the other is copied. The host waits for nothing here but in `wait`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cadenza.common.streams import Moment, SideStreams, has_streams, keep_for_stream
from cadenza.engine.bucket import Bucket

__all__ = ["HostCopies"]

_BUFFER_BYTES = 32 << 20  # large enough for a bus at its full speed


class _Buffer:
    """Memory on a device, and the moment from which on it may be written to again."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.memory = torch.empty(_BUFFER_BYTES // dtype.itemsize, dtype=dtype, device=device)
        self.free = Moment([])


class HostCopies:
    """Copies between parameters on devices and flat values in host memory; only the training loop's thread asks for it.

    Args:
        streams: Where the copies are made.
    """

    def __init__(self, streams: SideStreams) -> None:
        self._streams = streams
        self._rings: dict[tuple[torch.device, torch.dtype, int], list[_Buffer]] = {}
        self._last: dict[torch.device, Moment] = {}

    def to_host(self, strip: Bucket, memory: torch.Tensor) -> None:
        """Enqueue copies of a strip's values into host memory, which has them after `wait`."""
        for start, chunk in strip.chunks(_BUFFER_BYTES // strip.dtype.itemsize):
            place = memory[start : start + chunk.numel]
            if not has_streams(chunk.device):
                chunk.pack(place)
                continue
            buffer = self._next(chunk)
            buffer.free.wait()
            chunk.pack(buffer.memory)
            packed = Moment([chunk.device])
            with self._streams.use([chunk.device]):
                packed.wait()
                place.copy_(buffer.memory[: chunk.numel], non_blocking=True)
                buffer.free = self._last[chunk.device] = Moment([chunk.device])

    def to_device(
        self, strip: Bucket, *flats: torch.Tensor
    ) -> Iterator[tuple[list[torch.Tensor], list[list[torch.Tensor]]]]:
        """Yield some of a strip's pieces with their parts of flat values in host memory, brought to their device."""
        for start, chunk in strip.chunks(_BUFFER_BYTES // strip.dtype.itemsize):
            parts = [flat[start : start + chunk.numel] for flat in flats]
            if not has_streams(chunk.device):
                yield chunk.pieces, [chunk.places_in(part) for part in parts]
                continue
            buffers = [self._next(chunk, number) for number in range(len(flats))]
            with self._streams.use([chunk.device]):
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.free.wait()
                    buffer.memory[: chunk.numel].copy_(part, non_blocking=True)
                copied = self._last[chunk.device] = Moment([chunk.device])
            copied.wait()
            yield chunk.pieces, [chunk.places_in(buffer.memory) for buffer in buffers]
            used = Moment([chunk.device])
            for buffer in buffers:
                buffer.free = used

    def wait(self) -> None:
        """Wait on the host until what was copied to its memory is there, and what is copied from it may be changed."""
        for moment in list(self._last.values()):
            moment.wait_on_host()

    def _next(self, chunk: Bucket, number: int = 0) -> _Buffer:
        """Return one of two buffers for the values with a number, in turn."""
        kind = (chunk.device, chunk.dtype, number)
        if kind not in self._rings:
            self._rings[kind] = [_Buffer(*kind[:2]) for _ in range(2)]
            with self._streams.use([chunk.device]):
                keep_for_stream(buffer.memory for buffer in self._rings[kind])
        ring = self._rings[kind]
        ring.reverse()
        return ring[0]
