"""THEN: what becomes of the mean difference once all have met.

Every worker starts a period from the same anchor. A round gives the mean of what the workers moved, delta = anchor −
mean, and an outer update makes of the two the anchor from which all go on. It runs in place, element by element, on
flat tensors, so it is the same for shards as for the whole.

**The same bits on unlike machines.** Every worker makes the new anchor by itself, and all must come to the same bits,
whatever their processors. +, −, ×, ÷ and √ of torch round alike everywhere. What multiplies and adds at once
(`add_(x, alpha=a)`, `lerp_`, `addcmul_`) rounds once where the processor has such an instruction and twice
where it has none: so the updates here write products down before they add them. Sums over elements depend on the number
of threads: an update that needs a norm asks for `clip`, which one member measures for all. The optimizers of torch fuse
where they can. Where that tells machines apart, the next round makes the anchors one again: docs/decisions/0010.

>>> import torch
>>> anchor, moved = torch.tensor([1.0]), torch.tensor([0.5])
>>> outer = nesterov(lr=0.7, momentum=0.9)
>>> state = outer.init(anchor)
>>> outer.update(anchor, moved, state, rounds=0)
>>> anchor  # 1 − 0.7 · (0.5 + 0.9 · 0.5)
tensor([0.3350])

**State and slices.** `init` gives tensors with as many elements as the anchor, and 0-dim ones. An update may be made in
slices, each with an `inner_lr` of its own: pass the slice of the anchor, of delta and of each state tensor that has the
anchor's size, the 0-dim tensors as they are, and the same `rounds` for all slices of one round. Together they give what
one update of the whole would.
"""

from __future__ import annotations

from cadenza.outer.base import Outer, State
from cadenza.outer.eager import Eager, eager
from cadenza.outer.factors import Factor
from cadenza.outer.mean import Mean, mean
from cadenza.outer.noloco import NoLoCo, noloco
from cadenza.outer.sgd import Sgd, nesterov, sgd
from cadenza.outer.sign import Sign, sign
from cadenza.outer.slowmo import SlowMo, slowmo
from cadenza.outer.suited import Defaults, Suited, suited, suited_nesterov
from cadenza.outer.torch_optimizer import TorchOptimizer, optimizer

__all__ = [
    "Defaults",
    "Eager",
    "Factor",
    "Mean",
    "NoLoCo",
    "Outer",
    "Sgd",
    "Sign",
    "SlowMo",
    "State",
    "Suited",
    "TorchOptimizer",
    "eager",
    "mean",
    "nesterov",
    "noloco",
    "optimizer",
    "sgd",
    "sign",
    "slowmo",
    "suited",
    "suited_nesterov",
]
