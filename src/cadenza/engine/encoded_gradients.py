"""The mean of DDP's buckets of gradients, in a codec's bytes, with what encoding has lost so far.

Every parameter starts at a multiple of the codec's block, and residuals belong to parameters by name. So what becomes
of a gradient does not depend on the bucket it is in: DDP makes its buckets anew after the first backward pass, and a
resumed run starts with the first ones again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cadenza.codecs import Codec
from cadenza.common.identity import identity
from cadenza.common.messages import unit_of
from cadenza.engine.exchange import Residual, exchange_mean
from cadenza.engine.header import HEADER_BYTES, Header
from cadenza.engine.opening import abandoning, open_round
from cadenza.errors import CheckpointError
from cadenza.transports import Transport

__all__ = ["EncodedGradients", "GradientBucket"]


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that lie in a row in `values`: those of the parameters in `sizes`, each of so many values."""

    sizes: Mapping[str, int]
    values: torch.Tensor

    @property
    def lines(self) -> list[str]:
        """What must be the same on all ranks, line by line."""
        dtype = str(self.values.dtype).removeprefix("torch.")
        return [f"gradient of {name}: {size} values of {dtype}" for name, size in self.sizes.items()]


class _Run:
    """A bucket's gradients in fp32 in one flat run, each from a multiple of a block on; and what was lost of them."""

    def __init__(self, sizes: Mapping[str, int], block: int) -> None:
        self.sizes = dict(sizes)
        self.residual: Residual | None = None
        self._block = block
        self.numel = sum(self._padded(size) for size in sizes.values())

    def _padded(self, size: int) -> int:
        return -(-size // self._block) * self._block

    def parts(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each gradient's part of a flat run, and the zeros after it."""
        whole = flat.split([self._padded(size) for size in self.sizes.values()])
        for part, size in zip(whole, self.sizes.values(), strict=True):
            yield part[:size], part[size:]

    def pack(self, values: torch.Tensor, flat: torch.Tensor) -> None:
        parts, gaps = zip(*self.parts(flat), strict=True)
        torch._foreach_copy_(list(parts), list(values.split(list(self.sizes.values()))))
        torch._foreach_zero_(list(gaps))

    def unpack(self, flat: torch.Tensor, values: torch.Tensor) -> None:
        if values.dtype == torch.float16:  # all gradients were finite, so their mean is
            flat.clamp_(-torch.finfo(torch.float16).max, torch.finfo(torch.float16).max)
        parts = [part for part, _ in self.parts(flat)]
        torch._foreach_copy_(list(values.split(list(self.sizes.values()))), parts)

    def by_parameter(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: part for name, (part, _) in zip(self.sizes, self.parts(flat), strict=True)}


class EncodedGradients:
    """Averages buckets, one after the other, and keeps what encoding loses where the codec has error feedback.

    Attributes:
        codec: How gradients are written.
        bytes_sent: What was handed to the transport so far.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.bytes_sent = 0
        self._block = unit_of(codec)
        self._runs: dict[tuple[str, ...], _Run] = {}
        self._loose: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # of runs that no bucket has any more
        self._place: tuple[int, int] | None = None  # of whom the residuals are: how many ranks, and which of them
        self._scratch = torch.empty(0)

    @torch.no_grad()
    def average(self, bucket: GradientBucket, transport: Transport, step: int) -> None:
        """Replace the gradients by their mean over all members, the same bits on each; by NaN if one is not finite."""
        if len(transport.members) == 1:
            return
        run = self._runs.get(tuple(bucket.sizes)) or _Run(bucket.sizes, self._block)
        flat = self._memory(run.numel, bucket.values.device)
        run.pack(bucket.values, flat)
        former = [one for one in self._runs.values() if one is not run and one.sizes.keys() & run.sizes.keys()]
        lines = [*identity(self.codec, "codec"), *bucket.lines, *(f"residuals of {list(one.sizes)}" for one in former)]
        digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()
        header = Header(step, digest, able=True, faulty=not _is_finite(flat))
        with abandoning(transport):
            transport.next_round()
            headers = open_round(
                transport,
                header,
                problem=self._problem(bucket, transport),
                describe=lambda: lines,
                by_averager=True,
            )
            self.bytes_sent += (len(headers) - 1) * HEADER_BYTES
            self._fit(run, former, flat, transport)
            if any(one.faulty for one in headers):
                bucket.values.fill_(math.nan)  # as DDP would, so that a GradScaler sees it on every rank
                return
            weights = [1 / len(headers)] * len(headers)
            done = exchange_mean(flat, transport, self.codec, weights=weights, residual=run.residual)
            self.bytes_sent += done.bytes_sent
        run.unpack(flat, bucket.values)

    def _memory(self, numel: int, device: torch.device) -> torch.Tensor:
        if self._scratch.numel() < numel or self._scratch.device != device:
            self._scratch = torch.empty(numel, dtype=torch.float32, device=device)
        return self._scratch[:numel]

    def _problem(self, bucket: GradientBucket, transport: Transport) -> str | None:
        """Say why what was restored cannot be used, if so."""
        members = len(transport.members)
        if self._place is not None and self._place[0] == members and self._place[1] != transport.position:
            return (
                f"the restored state is that of rank {self._place[1]} of {members}. Every rank has residuals of its "
                "own: save the state on every rank, and restore each rank's, or restore none."
            )
        known = {name: size for run in self._runs.values() for name, size in run.sizes.items()}
        for name, size in bucket.sizes.items():
            if known.get(name, size) != size:
                return f"{name} has {size} values, and the residual in the restored state {known[name]}."
        return None

    def _fit(self, run: _Run, former: Sequence[_Run], flat: torch.Tensor, transport: Transport) -> None:
        """Give a run that is new its residuals, out of the former runs of its parameters; all members call this."""
        if self.codec.feedback is None:
            return
        self._belong_to(transport)
        for one in former:
            self._dissolve(self._runs.pop(tuple(one.sizes)), transport, flat.device)
        if run.residual is None:
            run.residual = Residual.zeros(flat, transport, self.codec)
            shares = torch.zeros_like(flat)
            both = zip(run.sizes, run.parts(run.residual.own), run.parts(shares), strict=True)
            for name, (own, _), (share, _) in both:
                if name in self._loose:
                    kept_own, kept_share = self._loose.pop(name)
                    own.copy_(kept_own)
                    share.copy_(kept_share)
            run.residual.take_share(shares, transport, self.codec)
        self._runs[tuple(run.sizes)] = run

    def _belong_to(self, transport: Transport) -> None:
        """Make residuals that were restored those of this rank; of another number of ranks, only its own fit."""
        place = len(transport.members), transport.position
        if self._place is not None and self._place[0] != place[0]:
            for run in self._runs.values():
                assert run.residual is not None
                own = run.residual.own
                run.residual = Residual(own, Residual.zeros(own, transport, self.codec).share)
        self._place = place

    def _dissolve(self, run: _Run, transport: Transport, device: torch.device) -> None:
        """Keep a run's residuals by parameter, on every member what any of them has lost of the mean."""
        residual = run.residual
        assert residual is not None
        residual = Residual(residual.own.to(device), residual.share.to(device))
        shares = run.by_parameter(residual.gather_shares(transport, self.codec))
        for name, own in run.by_parameter(residual.own).items():
            self._loose[name] = own, shares[name]

    # ---- saving ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the residuals, and of whom they are."""
        kept = [(run, run.residual) for run in self._runs.values() if run.residual is not None]
        runs = [{"sizes": run.sizes, "own": lost.own.clone(), "share": lost.share.clone()} for run, lost in kept]
        return {"codec": identity(self.codec, "codec"), "place": self._place, "residuals": runs}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on with the residuals of a saved run."""
        mine = identity(self.codec, "codec")
        if saved["codec"] != mine:
            told = next((pair for pair in zip(saved["codec"], mine, strict=False) if pair[0] != pair[1]), ("", ""))
            raise CheckpointError(
                f"The saved residuals are those of another codec ({told[0]}; here {told[1]}). Use the codec that the "
                "run was saved with, or begin without its state."
            )
        self._runs, self._loose = {}, {}
        self._place = None if saved["place"] is None else (saved["place"][0], saved["place"][1])
        for told in saved["residuals"]:
            run = _Run(told["sizes"], self._block)
            run.residual = Residual(told["own"].clone(), told["share"].clone())
            self._runs[tuple(run.sizes)] = run


def _is_finite(values: torch.Tensor) -> bool:
    # A sum takes a tenth of the time, but may overflow.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
