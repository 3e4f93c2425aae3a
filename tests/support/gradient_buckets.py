"""What DDP averages by itself, counted."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the classes themselves.
import torch
import torch.distributed as dist

from cadenza.engine.ddp import average_bucket


class GradientBuckets:
    """A communication hook that averages as DDP does, and counts the bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def hook(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.bytes += bucket.buffer().nbytes
        return average_bucket(bucket, dist.group.WORLD)
