"""What runs in each race: the methods, at which settings, on which links.

The loss after so many steps does not depend on the link, and the time of a step does not depend on how far training
has come. So every method trains once without a limit on the links (`training`), some steps of it are timed on every
link (`timing`), and the time to a loss is computed from both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lab.race.jobs import LARGE, MIDDLE, SMALL, Job, Size
from lab.race.rivals import METHODS

__all__ = [
    "ENTRIES",
    "FULL",
    "QUICK",
    "Entry",
    "Scale",
    "gradients",
    "headline",
    "sites",
    "syncs",
    "timing",
    "training",
]

FEW = 20
GRADIENT_STEPS = 24  # where a method recommends to begin with averaged gradients


@dataclass(frozen=True)
class Entry:
    """A contender: a method and its settings, at several periods.

    Attributes:
        label: Its name in tables.
        bits: What a value takes on the wire; with the number of workers that gives the bytes that must move.
        periods: The steps between two synchronisations that it is tried at.
        outers: The outer learning rates and momenta that it is tried at; none if it has no such thing.
        late: If its rounds land some steps after their launch, while training goes on: how many steps after the end of
            a period the last one lands.
        uneven: Whether the cost of a period depends on its length in other ways, so that each is timed.
    """

    label: str
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    bits: float = 32
    periods: tuple[int, ...] = (4, 8, 16, 64)
    outers: tuple[tuple[float, float], ...] = ()
    late: int | None = None
    uneven: bool = False

    @property
    def timed_period(self) -> int:
        return 1 if METHODS[self.method].sends_gradients else 16

    @property
    def each_period(self) -> bool:
        """Whether the time of one period does not tell that of another."""
        return self.uneven or self.late is not None

    def jobs(self) -> Iterator[Job]:
        """Yield the settings that it is tried at."""
        for period in self.periods:
            for extra in self.outer_settings():
                yield Job(self.method, period, {**self.settings, **extra})

    def outer_settings(self) -> list[dict[str, float]]:
        return [{"outer_lr": lr, "outer_momentum": momentum} for lr, momentum in self.outers] or [{}]


# The first is what short periods want (docs/convergence.md), the second what the paper and torchft recommend.
OUTERS = ((1.0, 0.8), (0.7, 0.9))
LATE = (8, 16, 64)  # a round must have landed before the next one starts
ENTRIES = {
    entry.label: entry
    for entry in [
        Entry("compute alone", "compute alone", bits=0, periods=()),
        Entry("DDP", "DDP", periods=(1,)),
        Entry("DDP, fp16 hook", "DDP, fp16 hook", bits=16, periods=(1,)),
        Entry(
            "DDP, PowerSGD hook", "DDP, PowerSGD hook", {"rank": 2, "gradient_steps": GRADIENT_STEPS}, 0, periods=(1,)
        ),
        Entry("torch PeriodicModelAverager", "torch PeriodicModelAverager"),
        Entry(
            "torch HierarchicalModelAverager",
            "torch HierarchicalModelAverager",
            {"inner_period": 4},
            periods=(16, 64),
            uneven=True,
        ),
        Entry("torch PostLocalSGDOptimizer", "torch PostLocalSGDOptimizer", {"gradient_steps": GRADIENT_STEPS}),
        Entry("Accelerate LocalSGD", "Accelerate LocalSGD"),
        Entry("torchft LocalSGD", "torchft LocalSGD"),
        Entry("torchft DiLoCo", "torchft DiLoCo", outers=OUTERS),
        Entry(
            "torchft Streaming DiLoCo",
            "torchft Streaming DiLoCo",
            {"fragments": 2, "delay": 3, "alpha": 0.5},
            periods=LATE,
            outers=OUTERS,
            late=0,  # it launches before the end of the period, and lands there
        ),
        Entry("fairscale SlowMo", "fairscale SlowMo", {"momentum": 0.2}),
        Entry("hivemind", "hivemind", periods=(16,), late=0),
        Entry("Cadenza DDP hook int8", "DDP, Cadenza hook", {"codec": "int8+feedback"}, 8, periods=(1,)),
        Entry("Cadenza DDP hook e3m0", "DDP, Cadenza hook", {"codec": "e3m0+feedback"}, 4, periods=(1,)),
        Entry("Cadenza local_sgd", "Cadenza local_sgd"),
        Entry("Cadenza local_sgd int8", "Cadenza local_sgd", {"codec": "int8"}, 8),
        Entry("Cadenza local_sgd int8, late", "Cadenza local_sgd", {"codec": "int8", "delay": 2}, 8, late=2),
        Entry("Cadenza diloco int8", "Cadenza diloco", {"codec": "int8"}, 8, outers=OUTERS),
        Entry(
            "Cadenza streaming_diloco",
            "Cadenza streaming_diloco",
            {"codec": "e3m0", "delay": 3, "layers": 2, "alpha": 0.5},
            4,
            periods=LATE,
            outers=OUTERS,
            late=3,
        ),
        Entry("Cadenza hierarchical", "Cadenza hierarchical", {"inner_period": 4}, periods=(16, 64), uneven=True),
        Entry(
            "Cadenza hierarchical int8",
            "Cadenza hierarchical",
            {"inner_period": 4, "codec": "int8"},
            8,
            periods=(16, 64),
            uneven=True,
        ),
    ]
}
# The same mean of the parameters after the same steps: the curves coincide, which one run of each at H = 16 shows.
SAME_CURVE = {
    "torch PeriodicModelAverager": "Cadenza local_sgd",
    "Accelerate LocalSGD": "Cadenza local_sgd",
    "torchft LocalSGD": "Cadenza local_sgd",
    "torch HierarchicalModelAverager": "Cadenza hierarchical",
}


@dataclass(frozen=True)
class Scale:
    """How much is run: everything, or just enough to see that it works."""

    size: Size
    steps: int  # of training
    evaluate_every: int
    windows: int
    timed: int  # steps that are timed, at least; of methods that send gradients, FEW
    links: tuple[str, ...]
    curve_links: tuple[str, ...]  # where stall is measured beside these
    lrs: tuple[float, ...]
    millions: tuple[float, ...]
    workers: tuple[int, ...]
    seeded: Size  # what is trained for several seeds
    seeded_steps: int


FULL = Scale(
    size=LARGE,
    steps=128,
    evaluate_every=16,
    windows=64,
    timed=32,
    links=("1gbit", "100mbit", "20mbit"),
    curve_links=("300mbit", "50mbit"),
    lrs=(1e-3, 5e-4),
    millions=(1, 10, 100),
    workers=(2, 4, 8),
    seeded=MIDDLE,
    seeded_steps=256,
)
QUICK = Scale(
    size=SMALL,
    steps=32,
    evaluate_every=8,
    windows=32,
    timed=8,
    links=("100mbit",),
    curve_links=("20mbit",),
    lrs=(1e-3,),
    millions=(0.1, 1),
    workers=(2, 4),
    seeded=SMALL,
    seeded_steps=32,
)


def trained(job: Job, scale: Scale) -> Job:
    """Return the job that trains from the start and is judged on the way."""
    return job.but(
        steps=scale.steps,
        warm=0,
        evaluate_every=scale.evaluate_every,
        windows=scale.windows,
        size=scale.size,
        lr_warmup=scale.steps // 10,
    )


def timed(entry: Entry, scale: Scale, period: int | None = None) -> Job:
    """Return the job whose steps are timed: whole periods, after the first rounds have landed.

    It stops between periods for blocks of compute alone, at moments at which no round is under way. Steps with averaged
    gradients at the beginning are not in it; they take what DDP's take.
    """
    period = period or entry.timed_period
    settings = {key: value for key, value in entry.settings.items() if key != "gradient_steps"}
    block = min(FEW, scale.timed) if period == 1 else period * -(-scale.timed // 2 // period)
    return Job(
        entry.method,
        period,
        {**settings, **entry.outer_settings()[0]},
        steps=block if period == 1 else block * -(-scale.timed // block),
        warm=3 if entry.late is None else period + entry.late,
        floor_every=block,
        size=scale.size,
    )


def entries(labels: Iterable[str] | None = None) -> list[Entry]:
    return [ENTRIES[label] for label in labels or ENTRIES]


def training(scale: Scale, labels: Iterable[str] | None = None) -> Iterator[tuple[Job, str]]:
    """Yield what trains: every entry at every period; inner and outer learning rates are swept at one of them."""
    for entry in entries(labels):
        for job in entry.jobs():
            at_first = job.period == entry.timed_period
            usual = entry.outer_settings()[0].items() <= job.settings.items()
            alone = entry.label not in SAME_CURVE
            if (at_first and usual) or (alone and (at_first or usual)):
                for lr in scale.lrs if at_first and usual and alone else scale.lrs[:1]:
                    yield trained(job, scale).but(lr=lr), "unlimited"


def timing(scale: Scale, labels: Iterable[str] | None = None) -> Iterator[tuple[Job, str]]:
    """Yield what is timed on every link; late and uneven ones at every period.

    On the fastest link, where short periods are best, all others are timed at their shortest too: a round that takes
    little is seen better where there are more of them.
    """
    for link in scale.links:
        for job in _timed_jobs(scale, labels):
            yield job, link
    for entry in entries(labels):
        if len(entry.periods) > 1 and not entry.each_period:
            yield timed(entry, scale, min(entry.periods)), scale.links[0]


def _timed_jobs(scale: Scale, labels: Iterable[str] | None) -> Iterator[Job]:
    for entry in entries(labels):
        yield timed(entry, scale)
        for period in entry.periods if entry.each_period else ():
            if period != entry.timed_period:
                yield timed(entry, scale, period)


UTILISATION = (
    "compute alone",
    "DDP",
    "DDP, PowerSGD hook",
    "torch PeriodicModelAverager",
    "torchft DiLoCo",
    "torchft Streaming DiLoCo",
    "Cadenza local_sgd int8, late",
    "Cadenza diloco int8",
    "Cadenza streaming_diloco",
)


def utilisation(scale: Scale, labels: Iterable[str] | None = None) -> Iterator[tuple[Job, str]]:
    """Yield what is timed on further links, at one period."""
    for link in scale.curve_links:
        for entry in entries(labels or UTILISATION):
            yield timed(entry, scale), link


SITES = (
    "compute alone",
    "DDP",
    "torch PeriodicModelAverager",
    "torch HierarchicalModelAverager",
    "torchft DiLoCo",
    "Cadenza local_sgd",
    "Cadenza local_sgd int8",
    "Cadenza hierarchical",
    "Cadenza hierarchical int8",
)


def sites(scale: Scale, labels: Iterable[str] | None = None) -> Iterator[tuple[Job, str]]:
    """Yield what runs on two sites of two hosts: 1 Gbit/s inside, slow between."""
    for link in site_links(scale):
        for job in _timed_jobs(scale, labels or SITES):
            yield job, link


def site_links(scale: Scale) -> list[str]:
    """Return the slow links between two sites that are fast inside."""
    return [f"sites 1gbit {between}" for between in scale.links if between != "1gbit"]


SYNCS = (
    "compute alone",
    "DDP",
    "DDP, fp16 hook",
    "torch PeriodicModelAverager",
    "Accelerate LocalSGD",
    "torchft LocalSGD",
    "torchft DiLoCo",
    "fairscale SlowMo",
    "Cadenza local_sgd",
    "Cadenza diloco fp32",
    "Cadenza diloco int8",
    "Cadenza diloco e3m0",
)
SYNC_ENTRIES = {
    **ENTRIES,
    "Cadenza diloco fp32": Entry("Cadenza diloco fp32", "Cadenza diloco", {"codec": "fp32"}),
    "Cadenza diloco e3m0": Entry("Cadenza diloco e3m0", "Cadenza diloco", {"codec": "e3m0"}, 4),
}
SYNC_LINK = "1gbit"


def syncs(scale: Scale, labels: Iterable[str] | None = None) -> Iterator[tuple[Job, str]]:
    """Yield synchronisations of growing models, and of growing numbers of workers."""
    for label in labels or SYNCS:
        for millions in scale.millions:
            yield one_sync(label, millions), SYNC_LINK
        for workers in scale.workers:
            if workers != 4:
                yield one_sync(label, middle(scale)), sync_link(workers)


def middle(scale: Scale) -> float:
    """Return the size at which the workers grow."""
    return sorted(scale.millions)[len(scale.millions) // 2]


def sync_link(workers: int) -> str:
    """Return the link of so many workers."""
    return SYNC_LINK if workers == 4 else f"{SYNC_LINK} x{workers}"


def one_sync(label: str, millions: float) -> Job:
    entry = SYNC_ENTRIES[label]
    settings = {key: value for key, value in entry.settings.items() if key in ("codec",)}
    return Job(entry.method, 1, settings, steps=5 if millions <= 10 else 3, warm=1, millions=millions)


HEADLINE = (
    "compute alone",
    "DDP",
    "torch PeriodicModelAverager",
    "Accelerate LocalSGD",
    "torchft DiLoCo",
    "Cadenza diloco int8",
    "Cadenza streaming_diloco",
)


HEADLINE_LINK = "100mbit"


def headline(scale: Scale, labels: Iterable[str] | None = None) -> Iterator[tuple[Job, str]]:
    """Yield the short race: a few methods at H = 16 on one link, and how far each comes in as many steps."""
    for entry in entries(labels or HEADLINE):
        yield timed(entry, scale), HEADLINE_LINK
    for entry in entries(labels or HEADLINE):
        if entry.periods and entry.label not in SAME_CURVE:
            job = next(job for job in entry.jobs() if job.period == entry.timed_period)
            yield trained(job, scale).but(steps=scale.steps // 2, lr=scale.lrs[0]), "unlimited"


SEEDS = (1, 2, 3)
OUTER = {"outer_lr": OUTERS[0][0], "outer_momentum": OUTERS[0][1]}
LOSSES = {
    "DDP": Job("DDP"),
    "local_sgd": Job("Cadenza local_sgd", 16, {"codec": "fp32"}),
    "local_sgd int8": Job("Cadenza local_sgd", 16, {"codec": "int8"}),
    "local_sgd e3m0": Job("Cadenza local_sgd", 16, {"codec": "e3m0"}),
    "hierarchical": Job("Cadenza hierarchical", 16, {"inner_period": 4}),
    "slowmo": Job("Cadenza slowmo", 16),
    "sparse_loco": Job("Cadenza sparse_loco", 16),
    **{
        f"diloco {codec}": Job("Cadenza diloco", 16, {"codec": codec, **OUTER})
        for codec in ("fp32", "bf16", "int8", "int8+feedback", "e3m0", "e3m0+feedback")
    },
    **{
        f"streaming_diloco {codec}": Job(
            "Cadenza streaming_diloco", 16, {"codec": codec, "layers": 2, "delay": 3, **OUTER}
        )
        for codec in ("fp32", "e3m0")
    },
}


def losses(scale: Scale, labels: Iterable[str] | None = None) -> Iterator[tuple[Job, str]]:
    """Yield every strategy and codec at equal tokens, for several seeds."""
    for seed in SEEDS:
        for label in labels or LOSSES:
            yield seeded(LOSSES[label], scale, seed), "unlimited"


def seeded(job: Job, scale: Scale, seed: int) -> Job:
    """Return the job that trains from a seed on, and is judged at the end."""
    steps = scale.seeded_steps
    job = trained(job, scale).but(seed=seed, lr=scale.lrs[0], size=scale.seeded)
    return job.but(steps=steps, lr_warmup=steps // 10, evaluate_every=steps, windows=256)


GRADIENTS = (
    "compute alone",
    "DDP",
    "DDP, fp16 hook",
    "DDP, PowerSGD hook",
    "Cadenza DDP hook int8",
    "Cadenza DDP hook e3m0",
)
GRADIENT_LINKS = ("1gbit", "100mbit")


def gradients(scale: Scale, labels: Iterable[str] | None = None) -> Iterator[tuple[Job, str]]:
    """Yield what averages gradients in every step: timed on two links, trained on equal tokens for several seeds."""
    chosen = entries(labels or GRADIENTS)
    for link in GRADIENT_LINKS:
        for entry in chosen:
            yield timed(entry, scale), link
    for seed in SEEDS:
        for entry in chosen:
            for job in entry.jobs():
                yield seeded(job, scale, seed), "unlimited"


RACES = {
    "training": training,
    "timing": timing,
    "utilisation": utilisation,
    "sites": sites,
    "syncs": syncs,
    "losses": losses,
    "gradients": gradients,
    "headline": headline,
}
