"""The field's algorithms by name: short compositions of the seven choices; defaults are their papers' or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypedDict, Unpack

from cadenza.codecs import Codec, dct, e3m0, error_feedback, topk
from cadenza.common.checks import as_steps
from cadenza.fragments import Fragmentation, by_layers
from cadenza.outer import Defaults, Outer, eager, mean, nesterov, sgd, sign, suited_nesterov
from cadenza.outer import noloco as noloco_update
from cadenza.outer import slowmo as slowmo_update
from cadenza.schedules import Schedule, every, moments
from cadenza.strategy import (
    Buffers,
    CommonOptions,
    Groups,
    LevelPlan,
    Strategy,
    StrategyOptions,
    Weight,
    as_codec,
    as_schedule,
)
from cadenza.topology import random_pairs
from cadenza.weighting import edit_norms

__all__ = [
    "demo",
    "des_loc",
    "diloco",
    "eager_diloco",
    "edit",
    "hierarchical",
    "local_sgd",
    "muloco",
    "noloco",
    "post_local_sgd",
    "slowmo",
    "snoo",
    "sparse_loco",
    "streaming_diloco",
]


# The period of a level that is there only to say who starts together, averages gradients and ends together.
_NEVER = every(2**62)


# A preset that has an argument of the same name takes the other options only.
class _EagerOptions(CommonOptions, total=False):
    fragments: Fragmentation
    warmup_steps: int


class _PostLocalSgdOptions(CommonOptions, total=False):
    fragments: Fragmentation
    delay: int
    alpha: float


class _SlowMoOptions(CommonOptions, total=False):
    fragments: Fragmentation
    warmup_steps: int
    delay: int
    keep_progress: bool


class _SnooOptions(CommonOptions, total=False):
    fragments: Fragmentation
    warmup_steps: int


class _StreamingOptions(CommonOptions, total=False):
    warmup_steps: int


class _DesLocOptions(TypedDict, total=False):  # without those that optimizer state of its own periods rules out
    fragments: Fragmentation
    warmup_steps: int
    buffers: Buffers
    weight: Weight
    offload: bool
    measure_drift: bool


def local_sgd(
    period: int | Schedule | Literal["auto"] = 16,
    *,
    codec: Codec | Literal["auto"] | None = None,
    **options: Unpack[StrategyOptions],
) -> Strategy:
    """Average the parameters every `period` steps.

    >>> local_sgd(period=8).levels[0].schedule
    Every(period=8, offset=0)
    """
    return Strategy(levels=(LevelPlan(as_schedule(period), codec=as_codec(codec)),), **options)


def post_local_sgd(
    period: int | Schedule | Literal["auto"] = 16,
    *,
    warmup_steps: int,
    codec: Codec | Literal["auto"] | None = None,
    **options: Unpack[_PostLocalSgdOptions],
) -> Strategy:
    """Average gradients for `warmup_steps`, then parameters every `period` steps (arXiv 1808.07217).

    >>> post_local_sgd(period=8, warmup_steps=100).warmup_steps
    100
    """
    return local_sgd(period, codec=codec, warmup_steps=warmup_steps, **options)


def hierarchical(
    levels: Mapping[int, Groups], *, codec: Codec | Literal["auto"] | None = None, **options: Unpack[StrategyOptions]
) -> Strategy:
    """Average small groups often and large ones seldom: {period: groups} from the innermost (arXiv 2010.12998).

    Groups are a number of ranks, "host", "all", or tuples of ranks. Only the largest level that is due averages. The
    codec is the largest level's, which has the slowest links.

    >>> [level.groups for level in hierarchical({4: "host", 32: "all"}).levels]
    ['host', 'all']
    """
    plans = [LevelPlan(every(period), groups=groups) for period, groups in levels.items()]
    if plans and codec is not None:
        plans[-1] = replace(plans[-1], codec=as_codec(codec))
    return Strategy(levels=tuple(plans), **options)


def slowmo(
    period: int | Schedule | Literal["auto"] = 12,
    *,
    alpha: float = 1.0,
    beta: float = 0.6,
    codec: Codec | Literal["auto"] | None = None,
    **options: Unpack[_SlowMoOptions],
) -> Strategy:
    """Add slow momentum to local SGD, in units of the inner learning rate (arXiv 1910.00643).

    >>> slowmo(beta=0.4).levels[0].outer.needs_inner_lr
    True
    """
    plan = LevelPlan(as_schedule(period), codec=as_codec(codec), outer=slowmo_update(alpha=alpha, beta=beta))
    return Strategy(levels=(plan,), **options)


def snoo(
    period: int | Schedule | Literal["auto"] = 30,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.8,
    **options: Unpack[_SnooOptions],
) -> Strategy:
    """Take an outer Nesterov step every `period` steps of data-parallel training (Step-K Nesterov, arXiv 2510.15830).

    Gradients are averaged in every step, by DDP or by `sync.average_gradients()`, so all workers are one replica, and
    the outer step needs no communication. It is for better models, not for less traffic.

    >>> strategy = snoo(period=10, outer_momentum=0.9)
    >>> strategy.average_gradients, [level.groups for level in strategy.levels]
    (True, [1, 'all'])
    """
    options.setdefault("average_gradients", True)
    outer = nesterov(lr=outer_lr, momentum=outer_momentum)
    return Strategy(levels=(LevelPlan(as_schedule(period), groups=1, outer=outer), LevelPlan(_NEVER)), **options)


def diloco(
    period: int | Schedule | Literal["auto"] = 500,
    *,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    defaults: Defaults = "measured",
    codec: Codec | Literal["auto"] | None = None,
    clip: float | None = None,
    **options: Unpack[StrategyOptions],
) -> Strategy:
    """Take many local steps, then an outer Nesterov step on the mean difference (arXiv 2311.08105).

    The outer learning rate and momentum are those that were found to suit the period and the number of workers
    (`cadenza.outer.suited`; tuned at periods of 8, 30 and 100 on small models), and from a period of 500 on the paper's
    own; ``defaults="paper"`` takes 0.7 and 0.9 at any, and what is given wins. A period that changes, or is measured
    ("auto"), gets what suits 30.

    >>> [diloco(period, outer_momentum=momentum).levels[0].outer.lr for period, momentum in ((30, 0.8), (30, 0.9))]
    [0.7, 0.35]
    >>> diloco(30, defaults="paper").levels[0].outer.momentum
    0.9
    """
    plan = LevelPlan(as_schedule(period), codec=as_codec(codec))
    outer = suited_nesterov(plan.schedule.cycle, outer_lr, outer_momentum, defaults, paper=(0.7, 0.9), clip=clip)
    return Strategy(levels=(replace(plan, outer=outer),), **options)


def eager_diloco(
    period: int = 30,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    codec: Codec | Literal["auto"] | None = None,
    **options: Unpack[_EagerOptions],
) -> Strategy:
    """Let DiLoCo's rounds take a period: own differences count at once, others' a period later (arXiv 2502.12996).

    The naive way, in which all differences count one period late, is `diloco(period, delay=period)`; it wants a smaller
    outer learning rate. `fragments=by_layers(3)` makes it the paper's streaming variant.

    >>> strategy = eager_diloco(period=16)
    >>> strategy.delay, strategy.restarts(0)
    (16, True)
    """
    steps = as_steps("period", period)
    outer = eager(lr=outer_lr, momentum=outer_momentum)
    return Strategy(levels=(LevelPlan(every(steps), codec=as_codec(codec), outer=outer),), delay=steps, **options)


def edit(
    period: int | Schedule | Literal["auto"] = 128,
    *,
    outer_lr: float = 0.8,
    outer_momentum: float = 0.85,
    clip: float | None = 10.0,
    codec: Codec | Literal["auto"] | None = None,
    **options: Unpack[StrategyOptions],
) -> Strategy:
    """Weigh workers by how far they have moved, layer by layer, without anomalies (EDiT, arXiv 2412.07210).

    It is DiLoCo with `weight=edit_norms()`, `fragments=by_layers(1)` and clipping, any of which can be replaced. Layers
    take turns, so a period has at least as many steps as the model has layers.

    >>> edit(period=64, weight=edit_norms(threshold=4.0)).weight.threshold
    4.0
    """
    options.setdefault("weight", edit_norms())
    options.setdefault("fragments", by_layers(1))
    return diloco(period, outer_lr=outer_lr, outer_momentum=outer_momentum, clip=clip, codec=codec, **options)


def muloco(
    period: int | Schedule | Literal["auto"] = 30,
    *,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    defaults: Defaults = "measured",
    codec: Codec | Literal["auto"] | None = None,
    clip: float | None = None,
    **options: Unpack[StrategyOptions],
) -> Strategy:
    """Take DiLoCo's outer step over workers that train with Muon (arXiv 2505.23725).

    The inner optimizers are `cadenza.optim.muon_and_adamw(model)`. The outer step suits the period as that of `diloco`
    does (tuned at a period of 30 with four workers); ``defaults="paper"`` takes the authors' for one worker, 0.7 and
    0.6. With several they tuned larger ones: 0.9 and 0.8 for 2 and 8, 1.0 and 0.9 for 16.

    >>> muloco().levels[0].outer.momentum, muloco(defaults="paper").levels[0].outer.momentum
    (0.8, 0.6)
    """
    plan = LevelPlan(as_schedule(period), codec=as_codec(codec))
    outer = suited_nesterov(plan.schedule.cycle, outer_lr, outer_momentum, defaults, paper=(0.7, 0.6), clip=clip)
    return Strategy(levels=(replace(plan, outer=outer),), **options)


def noloco(
    period: int | Schedule | Literal["auto"] = 50,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    pull: float | None = None,
    seed: int = 0,
    codec: Codec | Literal["auto"] | None = None,
    **options: Unpack[StrategyOptions],
) -> Strategy:
    """Meet in random pairs and never all at once, each worker with an anchor of its own (arXiv 2506.10911).

    `pull` says how much of the distance to the pair's mean anchor is made up for; `outer_lr` without one. `finish()`
    gives all workers the mean of their parameters.

    >>> noloco(period=100, seed=3).levels[0].groups
    RandomPairs(seed=3)
    """
    outer = noloco_update(lr=outer_lr, momentum=outer_momentum, pull=pull)
    plan = LevelPlan(as_schedule(period), groups=random_pairs(seed), codec=as_codec(codec), outer=outer)
    return Strategy(levels=(plan,), **options)


def streaming_diloco(
    period: int | Schedule | Literal["auto"] = 100,
    *,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    defaults: Defaults = "measured",
    layers: int = 3,
    delay: int = 5,
    alpha: float | None = None,
    keep_progress: bool | None = None,
    codec: Codec | Literal["auto"] | None = None,
    **options: Unpack[_StreamingOptions],
) -> Strategy:
    """Send a few layers at a time, in 4 bits, while training goes on (arXiv 2501.18512).

    The mean comes back in 4 bits too; ``codec=e3m0(back=int8())`` loses half as much of it for 1.4 times the bytes, and
    trained no better where it was measured (docs/decisions/0004-codecs.md). The outer step suits the period as that of
    `diloco` does (tuned at 30, one layer at a time, two steps late), and a landing keeps what was learned since the
    launch; ``defaults="paper"`` takes 0.4 and 0.9, and keeps half of the local value (`alpha`) instead.

    >>> strategy, published = streaming_diloco(30, delay=3), streaming_diloco(30, delay=3, defaults="paper")
    >>> [(each.levels[0].outer.lr, each.alpha, each.keep_progress) for each in (strategy, published)]
    [(0.7, 0.0, True), (0.4, 0.5, False)]
    """
    if alpha is None and keep_progress is None:
        alpha, keep_progress = (0.5, False) if defaults == "paper" else (0.0, True)
    plan = LevelPlan(as_schedule(period), codec=as_codec(codec, e3m0()))
    outer = suited_nesterov(plan.schedule.cycle, outer_lr, outer_momentum, defaults, paper=(0.4, 0.9))
    levels = (replace(plan, outer=outer),)
    return Strategy(
        levels=levels,
        fragments=by_layers(layers),
        delay=delay,
        alpha=0.0 if alpha is None else alpha,
        keep_progress=bool(keep_progress),
        **options,
    )


def sparse_loco(
    period: int | Schedule | Literal["auto"] = 30,
    *,
    outer_lr: float = 1.0,
    density: float = 0.02,
    decay: float = 0.95,
    mean_of: Literal["all", "senders"] = "senders",
    **options: Unpack[StrategyOptions],
) -> Strategy:
    """Send only the largest changes, in 2 bits, and keep what was not sent for later (arXiv 2508.15706).

    A value's mean is over the workers that have sent it, as in the authors' code; ``mean_of="all"`` is the paper's
    formula, in which the others count as 0.

    >>> sparse_loco(density=0.01).levels[0].codec.sparse
    True
    """
    codec = error_feedback(topk(density=density, mean_of=mean_of), decay=decay)
    return Strategy(levels=(LevelPlan(as_schedule(period), codec=codec, outer=sgd(lr=outer_lr)),), **options)


def demo(
    period: int | Schedule | Literal["auto"] = 1,
    *,
    lr: float = 4e-4,
    k: int = 32,
    chunk: int = 64,
    decay: float = 0.999,
    weight_decay: float = 0.0,
    **options: Unpack[StrategyOptions],
) -> Strategy:
    """Keep the momentum on each worker, send its largest frequencies, step by their sign (arXiv 2411.19870).

    The inner optimizer is ``torch.optim.SGD(parameters, lr=1.0)`` without momentum, on fp32 parameters: its step is
    only how the gradient gets here. A scheduler of it goes from 0 to 1, and is one of both the step, `lr` times the
    inner learning rate, and the gradient's share in the momentum. `period` is 1 in the paper.

    >>> demo(lr=1e-3).levels[0].codec.name
    'error_feedback(dct(32))'
    """
    codec = error_feedback(dct(k, chunk=chunk), decay=decay)
    plan = LevelPlan(as_schedule(period), codec=codec, outer=sign(lr, weight_decay=weight_decay))
    return Strategy(levels=(plan,), **options)


def des_loc(
    period: int | Schedule | Literal["auto"] = 32,
    *,
    momentum_period: int | None = None,
    variance_period: int | None = None,
    codec: Codec | Literal["auto"] | None = None,
    outer: Outer | None = None,
    **options: Unpack[_DesLocOptions],
) -> Strategy:
    """Average parameters often, Adam's first moment less often and its second one seldom (arXiv 2505.22549).

    The paper's periods of the moments are 3 and 6 times that of the parameters, which are their defaults. For another
    optimizer, name what it keeps: ``local_sgd(32, optimizer_state=cadenza.schedules.moments(momentum_buffer=96))``.

    >>> des_loc(period=16).optimizer_state.due(96)
    ('exp_avg', 'exp_avg_sq')
    """
    plan = LevelPlan(as_schedule(period), codec=as_codec(codec), outer=outer or mean())
    first = 3 * plan.schedule.shortest_gap if momentum_period is None else as_steps("momentum_period", momentum_period)
    second = 6 * plan.schedule.shortest_gap if variance_period is None else as_steps("variance_period", variance_period)
    state = moments(exp_avg=first, exp_avg_sq=second)
    return Strategy(levels=(plan,), optimizer_state=state, **options)
