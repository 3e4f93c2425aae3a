"""`cadenza bench`: what synchronising a model costs on this cluster, beside torch's averager and a raw all-reduce."""

from cadenza.cli.bench.command import bench

__all__ = ["bench"]
