"""The names that `import cadenza` gives, each from where it is defined; loaded when one of them is first used."""

from cadenza import codecs, observers, outer, weighting
from cadenza.engine.attach import attach
from cadenza.engine.synchronizer import Synchronizer
from cadenza.faults import raise_error, shrink, skip_round
from cadenza.fragments import by_bytes, by_layers, whole
from cadenza.outer import nesterov
from cadenza.participants.membership import Membership, join
from cadenza.presets import (
    demo,
    des_loc,
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
    "demo",
    "des_loc",
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
