"""The drop-in for torch's `PostLocalSGDOptimizer`, and the pair of torch's optimizers with which MuLoCo trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cadenza.optim.muon import muon_and_adamw

if TYPE_CHECKING:
    from cadenza.optim.post_localSGD_optimizer import PostLocalSGDOptimizer

__all__ = ["PostLocalSGDOptimizer", "muon_and_adamw"]


# Only when asked for: it derives from torch's, and torch.distributed.optim takes most of a second to import.
def __getattr__(name: str) -> Any:
    if name == "PostLocalSGDOptimizer":
        from cadenza.optim.post_localSGD_optimizer import PostLocalSGDOptimizer

        return PostLocalSGDOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
