"""Which outer step suits a period: a law through the settings that were found to be best, each by tuning of its own.

What a period's difference is worth in the end is lr / (1 − momentum). The best value of that rises with the fourth root
of the period: 2.5 at 8 steps, 3.5 at 30, 5 at 100, and 7 at DiLoCo's own 500. The first three are of four
workers. One and two were best at 2.5 or 3.5 at period 30, and lost 0.7 % at most by the law's 3.5; for eight it rises
(docs/convergence.md).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from cadenza.common.checks import as_fraction, as_positive
from cadenza.outer.sgd import Sgd, nesterov

__all__ = ["Defaults", "Suited", "suited", "suited_nesterov"]

Defaults = Literal["measured", "paper"]

_WORTH, _AT, _POWER = 2.5, 8, 0.25
_LONG = 200  # periods beyond this one were not measured, and take what DiLoCo's authors took for 500
_LONGEST = 500
_USUAL = 30  # stands for a period that is not known beforehand: the middle of what was tuned
_MOMENTUM, _LONG_MOMENTUM = 0.8, 0.9
_MOST = 1.0  # with four workers a larger rate was nowhere the best
_FEW = 4


class Suited(NamedTuple):
    """Values for `cadenza.outer.nesterov`.

    >>> suited(30).lr
    0.7
    """

    lr: float
    momentum: float
    rises_beyond: int | None


def suited(period: int, *, momentum: float | None = None) -> Suited:
    """Return the outer step that suits a period, with AdamW inside; its rate suits the momentum, if one is given.

    Periods of 8, 30 and 100 were tuned. What is beyond 500 takes the outer step of 500.

    >>> [suited(period)[:2] for period in (8, 30, 100, 500, 5000)]
    [(0.5, 0.8), (0.7, 0.8), (0.94, 0.8), (0.7, 0.9), (0.7, 0.9)]
    >>> suited(30, momentum=0.9)
    Suited(lr=0.35, momentum=0.9, rises_beyond=4)
    """
    steps = as_positive("period", period)
    if momentum is None:
        momentum = _MOMENTUM if steps <= _LONG else _LONG_MOMENTUM
    left = 1 - as_fraction("momentum", momentum)
    lr = min(_MOST, float(f"{_WORTH * (min(steps, _LONGEST) / _AT) ** _POWER * left:.2g}"))
    return Suited(lr, momentum, _FEW if steps <= _LONG else None)


def suited_nesterov(
    cycle: tuple[int, int] | None,
    lr: float | None,
    momentum: float | None,
    defaults: Defaults,
    *,
    paper: tuple[float, float],
    clip: float | None = None,
) -> Sgd:
    """Return a preset's Nesterov step: what was not given suits the period, or is the paper's.

    `cycle` is that of the schedule; where it has none, since its period changes or is measured, it gets what suits 30.

    >>> suited_nesterov((30, 0), 0.5, None, "measured", paper=(0.7, 0.9)) == nesterov(0.5, momentum=0.8)
    True
    """
    if defaults not in ("measured", "paper"):
        raise ValueError(f'defaults is "measured" or "paper"; got {defaults!r}.')
    usual = Suited(*paper, rises_beyond=None)
    if defaults == "measured":
        usual = suited(_USUAL if cycle is None else cycle[0], momentum=momentum)
    return nesterov(
        usual.lr if lr is None else lr,
        momentum=usual.momentum if momentum is None else momentum,
        clip=clip,
        rises_beyond=usual.rises_beyond if lr is None else None,
    )
