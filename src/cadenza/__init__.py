"""Cadenza trains one PyTorch model on many workers that talk seldom.

A *strategy* is seven choices; a *synchronizer*, made by `attach`, runs it; every round is *launched*, then *landed*.
The drop-in for torch's model averaging is in `cadenza.model_averaging`, `cadenza.ddp_comm_hooks` and `cadenza.optim`.
"""

from cadenza import codecs, observers, outer, weighting
from cadenza.engine.attach import attach
from cadenza.engine.synchronizer import Synchronizer
from cadenza.faults import raise_error, shrink, skip_round
from cadenza.fragments import by_bytes, by_layers, whole
from cadenza.outer import nesterov
from cadenza.participants.membership import Membership, join
from cadenza.presets import (
    diloco,
    eager_diloco,
    edit,
    hierarchical,
    local_sgd,
    muloco,
    noloco,
    post_local_sgd,
    slowmo,
    snoo,
    sparse_loco,
    streaming_diloco,
)
from cadenza.reports import RoundReport
from cadenza.schedules import adaptive, changing, every
from cadenza.strategy import LevelPlan, Strategy
from cadenza.topology import Topology
from cadenza.version import __version__

__all__ = [
    "LevelPlan",
    "Membership",
    "RoundReport",
    "Strategy",
    "Synchronizer",
    "Topology",
    "__version__",
    "adaptive",
    "attach",
    "by_bytes",
    "by_layers",
    "changing",
    "codecs",
    "diloco",
    "eager_diloco",
    "edit",
    "every",
    "hierarchical",
    "join",
    "local_sgd",
    "muloco",
    "nesterov",
    "noloco",
    "observers",
    "outer",
    "post_local_sgd",
    "raise_error",
    "shrink",
    "skip_round",
    "slowmo",
    "snoo",
    "sparse_loco",
    "streaming_diloco",
    "weighting",
    "whole",
]
