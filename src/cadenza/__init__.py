"""Cadenza trains one PyTorch model on many workers that talk seldom.

Today it holds the drop-in for torch's model averaging: `cadenza.model_averaging`, `cadenza.ddp_comm_hooks` and
`cadenza.optim` take the place of torch's modules of the same names.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
