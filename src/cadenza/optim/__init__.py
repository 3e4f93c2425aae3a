"""The drop-in for torch's `PostLocalSGDOptimizer`, and the pair of torch's optimizers with which MuLoCo trains."""

from cadenza.optim.muon import muon_and_adamw
from cadenza.optim.post_localSGD_optimizer import PostLocalSGDOptimizer

__all__ = ["PostLocalSGDOptimizer", "muon_and_adamw"]
