"""The drop-in for torch's `PostLocalSGDOptimizer`; the other optimizers of `torch.distributed.optim` stay torch's."""

from cadenza.optim.post_localSGD_optimizer import PostLocalSGDOptimizer

__all__ = ["PostLocalSGDOptimizer"]
