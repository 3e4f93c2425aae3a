"""Ways to say that two models, or the ranks' copies of one, hold the same values."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# One averaging rounds each sum at most once more or less than another order of summation does.
FP32_RTOL, FP32_ATOL = 1e-6, 1e-7


def values_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the values, with the memory layout of the originals."""
    return [p.detach().clone(memory_format=torch.preserve_format) for p in parameters]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal values of equal dtype and shape; unlike torch.equal also where both are NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)


def ulps_of_bf16(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many bf16 numbers lie between the two, at the worst place."""

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.detach().contiguous().view(torch.int16).to(torch.int32)
        return torch.where(bits < 0, -32768 - bits, bits)

    return int((ordered(a) - ordered(b)).abs().max()) if a.numel() else 0


def assert_parity(name: str, theirs: torch.Tensor, ours: torch.Tensor, *, exact: bool) -> None:
    """Our value of a parameter is torch's: to the bit, or within the rounding of one averaging."""
    __tracebackhide__ = True
    assert ours.dtype == theirs.dtype, f"{name}: {ours.dtype} is not {theirs.dtype}"
    assert ours.shape == theirs.shape, f"{name}: {ours.shape} is not {theirs.shape}"
    if exact:
        difference = (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0
        assert same_bits(theirs, ours), f"{name}: not the same bits, off by {difference}"
    elif ours.dtype == torch.bfloat16:
        assert ulps_of_bf16(theirs, ours) <= 1, f"{name}: {ulps_of_bf16(theirs, ours)} ulps of bf16 apart"
    else:
        torch.testing.assert_close(
            ours.detach(), theirs.detach(), rtol=FP32_RTOL, atol=FP32_ATOL, msg=lambda m: f"{name}: {m}"
        )


def assert_models_agree(theirs: nn.Module, ours: nn.Module, where: str, *, exact: bool) -> None:
    """Every parameter and buffer of the two models agrees."""
    for (name, a), (_, b) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert_parity(f"{where}, parameter {name}", a, b, exact=exact)
    for (name, a), (_, b) in zip(theirs.named_buffers(), ours.named_buffers(), strict=True):
        assert_parity(f"{where}, buffer {name}", a, b, exact=exact)


def assert_same_on_ranks(
    where: str, parameters: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Every parameter is the same bits on all ranks of the group."""
    digests = [hashlib.sha256(_bytes(p)).hexdigest() for p in parameters]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, digests, group=group)
    for position, row in enumerate(zip(*everyone, strict=True)):
        assert len(set(row)) == 1, f"{where}, parameter {position} differs between ranks"


def warned(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[str, str, str]]:
    """The category, text and file of every warning that the call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **kwargs)
    return [(w.category.__name__, str(w.message), w.filename) for w in caught]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
