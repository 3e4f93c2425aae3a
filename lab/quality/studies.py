"""What is measured, in the order in which it is worth knowing.

A `Study` tunes one method on its own; a `Variant` changes one thing about the tuned setting of a study and is compared
with it seed by seed. Both give the runs that are still missing; the queue asks them in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lab.quality.records import Records
from lab.quality.search import Axis, Found, search
from lab.quality.training import Setting

__all__ = ["QUEUE", "SEEDS", "TUNING_SEED", "Study", "Variant", "find", "missing"]

TUNING_SEED = 1
SEEDS = (11, 12, 13)  # of the final runs; tuning has never seen them

LR = Axis((5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2))
BATCH = Axis((1, 2, 4, 8, 16, 32), closed_below=True)
OUTER_LR = Axis((0.2, 0.3, 0.5, 0.7, 1.0, 1.4, 2.0))
MOMENTUM = Axis((0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95), closed_below=True)
BETA = Axis((0.0, 0.2, 0.4, 0.6, 0.8, 0.9), closed_below=True)
OWN = ("lr", "batch")  # axes of a Setting; all others are keys of its strategy


@dataclass(frozen=True)
class Study:
    """One method on one model with one number of workers, tuned on its own.

    Args:
        fixed: What is not tuned.
        axes: What is; `start` has a value for each, and for whatever of the strategy stays as it is.
        after: A study that must have ended; its best values are this one's start, where they share an axis.
        seeds: Of the final runs; none where only the setting is asked for.
    """

    name: str
    fixed: Setting
    axes: Mapping[str, Axis]
    start: Mapping[str, Any]
    after: str | None = None
    seeds: Sequence[int] = SEEDS

    def setting(self, point: Mapping[str, Any], seed: int = TUNING_SEED) -> Setting:
        own = {name: value for name, value in point.items() if name in OWN}
        outer = {name: value for name, value in point.items() if name not in OWN}
        return replace(self.fixed, strategy={**self.fixed.strategy, **outer}, seed=seed, **own)

    def found(self, records: Records) -> Found:
        """Return how far the tuning is."""
        start = dict(self.start)
        if self.after is not None:
            before = find(self.after)
            assert isinstance(before, Study)
            other = before.found(records)
            if other.wanted or other.best is None:
                return Found(None, [], [])
            start |= {name: other.best[name] for name in self.axes if name in other.best and name != "batch"}

        def loss(point: Mapping[str, Any]) -> float | None:
            run = records.get(self.setting(point))
            return None if run is None else run["validation"]

        return search(self.axes, start, loss)

    def tuned(self, records: Records) -> Setting | None:
        """Return the best setting, once its neighbours are known to be worse and it lies inside the grid."""
        found = self.found(records)
        return self.setting(found.best) if found.best is not None and not found.wanted and not found.edges else None

    def wanted(self, records: Records) -> list[Setting]:
        """Return the runs to do next: those of the tuning, then those of the final seeds."""
        found = self.found(records)
        if found.wanted:
            return [self.setting(point) for point in found.wanted]
        tuned = self.tuned(records)
        return [] if tuned is None else _missing_seeds(tuned, self.seeds, records)


@dataclass(frozen=True)
class Variant:
    """The tuned setting of a study with some things changed.

    Args:
        of: The study.
        change: Fields of the Setting.
        strategy: Keys of its strategy.
        seeds: With which it is compared; the tuning seed alone is a first look, judged on the text for tuning.
    """

    name: str
    of: str
    change: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = SEEDS

    def tuned(self, records: Records) -> Setting | None:
        study = find(self.of)
        tuned = study.tuned(records)
        if tuned is None:
            return None
        strategy = {key: value for key, value in {**tuned.strategy, **self.strategy}.items() if value is not None}
        return replace(tuned, strategy=strategy, **self.change)

    def wanted(self, records: Records) -> list[Setting]:
        tuned = self.tuned(records)
        return [] if tuned is None else _missing_seeds(tuned, self.seeds, records)


def _missing_seeds(setting: Setting, seeds: Sequence[int], records: Records) -> list[Setting]:
    settings = [replace(setting, seed=seed) for seed in seeds]
    return [one for one in settings if records.get(one) is None]


def _ddp(
    size: str = "170k",
    inner: str = "adamw",
    *,
    lr: float = 8e-3,
    batch: int = 8,
    held: Sequence[str] = (),
    **more: Any,
) -> Study:
    fixed = Setting({"name": "ddp"}, workers=1, batch=batch, lr=lr, seed=TUNING_SEED, size=size, inner=inner, **more)
    name = "ddp" if inner == "adamw" else f"ddp {inner}"
    axes = {name: axis for name, axis in {"lr": LR, "batch": BATCH}.items() if name not in held}
    return Study(_named(name, size), fixed, axes, {"lr": lr, "batch": batch})


def _method(
    method: str,
    workers: int,
    period: int | None = 30,
    *,
    size: str = "170k",
    inner: str = "adamw",
    start: Mapping[str, Any],
    strategy: Mapping[str, Any] | None = None,
    after: str | None = None,
    held: Sequence[str] = (),
    called: str | None = None,
    **more: Any,
) -> Study:
    keys = {"name": method, **({} if period is None else {"period": period}), **(strategy or {})}
    known = {"lr": LR, "batch": BATCH, "outer_lr": OUTER_LR, "outer_momentum": MOMENTUM, "beta": BETA}
    axes = {name: axis for name, axis in known.items() if name in start and name not in held}
    first = {"batch": start["batch"], "lr": start["lr"]}
    fixed = Setting(keys, workers=workers, seed=TUNING_SEED, size=size, inner=inner, **first, **more)
    words = f"{called or method} {workers} workers" + ("" if period is None else f" period {period}")
    return Study(_named(words, size), fixed, axes, start, after)


def _named(name: str, size: str) -> str:
    return name if size == "170k" else f"{name} {size}"


def _default_task(
    method: str, *, start: Mapping[str, Any], batch: int | None = None, called: str = "default task", **strategy: Any
) -> Study:
    """Return a study of the default task of `cadenza train`, at half its tokens, for the recipes."""
    together = method == "ddp"
    fixed = Setting(
        {"name": method, **strategy},
        workers=1 if together else 4,
        batch=batch or (32 if together else 8),
        lr=start["lr"],
        seed=TUNING_SEED,
        tokens=1000 * 4 * 8 * 128,
        betas=(0.9, 0.95),
        warmup=0.064,
        floor=0.1,
        weight_decay=0.1,
        qk_norm=False,
        context=128,
    )
    known = {"lr": LR, "outer_lr": OUTER_LR, "outer_momentum": MOMENTUM}
    return Study(f"{called}, {method}", fixed, {k: a for k, a in known.items() if k in start}, start, seeds=())


_FOUR = "diloco 4 workers period 30"
_FOUR_SMALL = f"{_FOUR} 35k"
_STREAMING = "streaming_diloco 4 workers period 30 35k"
_HALF_KEPT = "streaming_diloco, half kept 4 workers period 30 35k"
_KEPT = {"layers": 1, "delay": 2, "keep_progress": True}
_HALF = {"layers": 1, "delay": 2, "alpha": 0.5}  # as its paper has it
_OUTER = {"lr": 8e-3, "outer_lr": 0.7, "outer_momentum": 0.8}
_PERIOD_30 = {"period": 30, "outer_lr": 0.7, "outer_momentum": 0.8}
_START = {**_OUTER, "batch": 2}
_SMALL_TOKENS = 9216 * 256  # of the smallest and of the largest model
_MULOCO = "muloco 4 workers period 30"


def _small(method: str, workers: int = 4, period: int | None = 30, **more: Any) -> Study:
    """Return a study of the smallest model, which pays for breadth; its batch is that of DiLoCo's four workers."""
    more.setdefault("start", {"lr": 8e-3})
    start = {"batch": 4 // min(workers, 4), **more.pop("start")}
    return _method(method, workers, period, size="35k", held=("batch",), start=start, tokens=_SMALL_TOKENS, **more)


def _larger(size: str, *, held: Sequence[str]) -> tuple[Study, Study]:
    """Return DDP and DiLoCo's four workers on a larger model, with few tokens for its size: 256 in a step for each."""
    start = {**_OUTER, "lr": 4e-3, "batch": 1}
    return (
        _ddp(size, tokens=_SMALL_TOKENS, lr=2e-3, batch=4, held=held),
        _method("diloco", 4, size=size, start=start, held=held, tokens=_SMALL_TOKENS),
    )


def _streaming() -> Iterator[Variant]:
    """Yield what tells apart where streaming loses: by its codec, its delay, its turns, what it keeps at a landing."""
    nothing: dict[str, Any] = {"alpha": 0.0}
    half = "streaming_diloco, half kept"
    for words, change in {
        "in fp32": {"codec": "fp32"},
        "4 bits with feedback": {"codec": "e3m0+feedback"},
        "nothing kept instead": nothing,
        "progress kept instead": {"alpha": None, "keep_progress": True},
        "no delay": {**nothing, "delay": 0},
        "one fragment, nothing kept": {**nothing, "layers": 99},
        "one fragment, no delay": {**nothing, "layers": 99, "delay": 0},
    }.items():
        yield Variant(f"{half}: {words} 35k", _HALF_KEPT, strategy=change, seeds=(TUNING_SEED,))
    yield Variant("streaming_diloco: in fp32 35k", _STREAMING, strategy={"codec": "fp32"})
    yield Variant("streaming_diloco: 4 bits with feedback 35k", _STREAMING, strategy={"codec": "e3m0+feedback"})
    yield Variant("streaming_diloco: no delay 35k", _STREAMING, strategy={**nothing, "delay": 0, "keep_progress": None})


def _late(of: str, size: str) -> tuple[Variant, ...]:
    """Return what rounds that land two steps late cost DiLoCo, whole and in turns, by what they keep of those steps."""
    return (
        Variant(f"two steps late, nothing kept{size}", of, strategy={"delay": 2}),
        Variant(f"two steps late, progress kept{size}", of, strategy={"delay": 2, "keep_progress": True}),
        Variant(f"as streaming, half kept{size}", of, strategy={"name": "streaming_diloco", **_HALF}),
        Variant(f"as streaming, progress kept{size}", of, strategy={"name": "streaming_diloco", **_KEPT}),
    )


def _candidates() -> dict[str, Variant]:
    """Return what might bring workers that meet seldom nearer to DDP, each alone, on the smallest model."""
    return {
        name: Variant(f"{name} 35k", _FOUR_SMALL, change, strategy)
        for name, change, strategy in (
            ("moments averaged", {}, {"optimizer_state": "average"}),
            ("gradients averaged in the first tenth", {}, {"warmup_steps": 900}),
            ("period from 8 to 60", {}, {"period": {"1": 8, "1024": 30, "6144": 60}}),
            ("outer rate rises over a fifth of the rounds", {}, {"outer_factors": {"0": 0.3, "20": 0.6, "61": 1.0}}),
            ("outer rate halved in the last fifth of the rounds", {}, {"outer_factors": {"245": 0.5}}),
            ("no weight decay", {"decay": 0.0}, {}),
            ("weight decay times 4", {"decay": 4.0}, {}),
            ("beta2 0.999", {"betas": (0.9, 0.999)}, {}),
            ("outer momentum restarted every quarter of the rounds", {}, {"restart_every": 77}),
            ("outer momentum without look-ahead", {}, {"look_ahead": False}),
            ("weight decay on the anchor instead", {"decay": 0.0}, {"anchor_decay": 1.0}),
            ("weight decay on the anchor instead, times 3.5", {"decay": 0.0}, {"anchor_decay": 3.5}),
            ("first moment zeroed at each round", {"moments_kept": (0.0, 1.0)}, {}),
            ("moments reset at each round", {"moments_kept": (0.0, 0.0)}, {}),
        )
    }


def _confirmed(name: str) -> Variant:
    """Return a candidate that helped on the smallest model, on the usual one."""
    return replace(_candidates()[name], name=name, of=_FOUR)


# The bars first, with the default task for its recipes, then the smallest model: other periods and numbers of workers,
# what might win points, the other methods. Then the same on the usual model.
QUEUE: tuple[Study | Variant, ...] = (
    _ddp(),
    _method("diloco", 4, start=_START),
    _method("diloco", 2, start={**_START, "batch": 4}, after=_FOUR),
    _method("diloco", 1, start={**_START, "batch": 8}, after=_FOUR),
    Variant("int8 with feedback", _FOUR, strategy={"codec": "int8+feedback"}),
    Variant("4 bits with feedback", _FOUR, strategy={"codec": "e3m0+feedback"}),
    _default_task("ddp", start={"lr": 1.6e-2}),
    _default_task("diloco", period=16, start={"lr": 8e-3, "outer_lr": 0.7, "outer_momentum": 0.6}),
    _ddp(inner="muon", lr=1.6e-2),
    _method("muloco", 4, inner="muon", start={**_START, "lr": 1.6e-2}),
    _confirmed("moments averaged"),
    _confirmed("outer rate halved in the last fifth of the rounds"),
    *_late(_FOUR, ""),
    Variant("muloco, 4 bits with feedback", _MULOCO, strategy={"codec": "e3m0+feedback"}),
    _ddp("35k", tokens=_SMALL_TOKENS, batch=4),
    _small("diloco", start=_OUTER),
    *(_small("diloco", 4, period, start=_OUTER, after=_FOUR_SMALL) for period in (100, 8)),
    _small("diloco", 8, start=_OUTER, after=_FOUR_SMALL),
    _small("streaming_diloco", start=_OUTER, strategy=_KEPT, after=_FOUR_SMALL),
    _small("streaming_diloco", start=_OUTER, strategy=_HALF, after=_FOUR_SMALL, called="streaming_diloco, half kept"),
    _ddp("35k", inner="muon", lr=3.2e-2, batch=4, tokens=_SMALL_TOKENS),
    _small("muloco", inner="muon", start={**_OUTER, "lr": 3.2e-2}),
    *_streaming(),
    *_late(_FOUR_SMALL, " 35k"),
    Variant("int8 with feedback 35k", _FOUR_SMALL, strategy={"codec": "int8+feedback"}),
    Variant("4 bits with feedback 35k", _FOUR_SMALL, strategy={"codec": "e3m0+feedback"}),
    _small("local_sgd"),
    *_candidates().values(),
    _small("slowmo", start={"lr": 8e-3, "beta": 0.6}),
    _small("sparse_loco", start={"lr": 8e-3, "outer_lr": 1.0}),
    _small("hierarchical", 4, None, strategy={"levels": {"8": 2, "30": "all"}}),
    _small("post_local_sgd", strategy={"warmup_steps": 1000}),
    _small("edit", start=_OUTER, after=_FOUR_SMALL),
    _small("des_loc"),
    *(_small("diloco", workers, start=_OUTER, after=_FOUR_SMALL) for workers in (2, 1)),
    Variant("ddp, beta2 0.999 35k", "ddp 35k", {"betas": (0.9, 0.999)}),
    Variant("ddp, weight decay times 4 35k", "ddp 35k", {"decay": 4.0}),
    _default_task("ddp", start={"lr": 4e-3}, batch=2, called="default task in small batches"),
    _default_task("diloco", start={"lr": 8e-3}, batch=1, called="default task in small batches", **_PERIOD_30),
    _default_task("local_sgd", period=16, start={"lr": 1.6e-2}),
    _method("diloco", 8, start={**_START, "batch": 1}, after=_FOUR),
    _method("diloco", 4, 8, start=_START, after=_FOUR),
    _method("diloco", 4, 100, start=_START, after=_FOUR),
    *_larger("3.3M", held=("batch", "outer_lr", "outer_momentum")),
    *_larger("830k", held=("batch",)),
)


def find(name: str) -> Study | Variant:
    """Return what is called so."""
    return next(entry for entry in QUEUE if entry.name == name)


def missing(records: Records) -> list[tuple[str, Setting]]:
    """Return the runs that can be done now, the most wanted first."""
    return [(entry.name, setting) for entry in QUEUE for setting in entry.wanted(records)]
