"""`period="auto"` and `codec="auto"` on workers: decided alike, reported with the reason, resumed to the bit."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

import cadenza
from cadenza import RoundReport, Strategy, Synchronizer
from cadenza.engine.pacing import Pace
from cadenza.testing import Worker, workers

MODEL = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what each round is told of the one before, in place of a clock; how many were told is saved with the rest."""

    def set_stalls(*stalls: float) -> None:
        def measured(self: Pace, level: int, fragment: int) -> tuple[float, float]:
            if not self.on:
                return 0.0, 0.0
            told = int(self._stalls.get("told", 0))
            self._stalls["told"] = told + 1
            return 0.1, stalls[min(told, len(stalls) - 1)]

        monkeypatch.setattr(Pace, "measured", measured)
        monkeypatch.setattr(Pace, "note_stall", lambda self, *_: None)

    return set_stalls


class Loop:
    def __init__(self, worker: Worker, strategy: Strategy) -> None:
        self.model = copy.deepcopy(MODEL)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.reports: list[RoundReport] = []
        self.worker, self.seed = worker, 1000 * worker.rank
        self.sync: Synchronizer = cadenza.attach(self.model, self.optimizer, strategy, observers=[self.reports.append])

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            generator = torch.Generator().manual_seed(self.seed + step)
            self.model(torch.randn(4, 6, generator=generator)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.sync.step()

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def train(worker: Worker, strategy: Strategy, steps: int) -> tuple[list[RoundReport], list[torch.Tensor]]:
    loop = Loop(worker, strategy)
    loop.steps(1, steps)
    found = loop.values()
    loop.sync.close()
    return loop.reports, found


def train_in_two(worker: Worker, strategy: Strategy, middle: int, steps: int) -> list[torch.Tensor]:
    first = Loop(worker, strategy)
    first.steps(1, middle)
    saved, model = first.sync.state_dict(), copy.deepcopy(first.model.state_dict())
    first.sync.close()
    second = Loop(worker, strategy)
    second.model.load_state_dict(model)
    second.sync.load_state_dict(saved)
    second.steps(middle + 1, steps)
    found = second.values()
    second.sync.close()
    return found


STRATEGIES = {
    "diloco": lambda: cadenza.diloco("auto", outer_lr=0.5),
    "both": lambda: cadenza.diloco("auto", codec="auto", outer_lr=0.5),
    "late": lambda: cadenza.local_sgd("auto", codec="auto", delay=2),
    "mean": lambda: cadenza.local_sgd("auto"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_workers_decide_alike_and_a_resumed_run_is_the_same_to_the_bit(
    name: str, link: Callable[..., None]
) -> None:
    link(0.0, 5.0, 0.05, 0.05, 0.05, 20.0)
    with workers(3) as pool:
        whole = pool.run(train, STRATEGIES[name](), 90)
        for middle in (13, 40, 61):
            again = pool.run(train_in_two, STRATEGIES[name](), middle, 90)
            for (_, values), others in zip(whole, again, strict=True):
                assert all(torch.equal(one, other) for one, other in zip(values, others, strict=True))
    decisions = [[(r.step, r.decision) for r in reports if r.decision] for reports, _ in whole]
    assert decisions[0] == decisions[1] == decisions[2]
    assert len(decisions[0]) >= 2, decisions[0]
    assert all("→" in text and " ms" in text for _, text in decisions[0])
    steps = [report.step for report in whole[0][0]]
    assert len({after - before for before, after in pairwise(steps)}) > 1


def test_the_codec_follows_the_link_where_the_period_is_given(link: Callable[..., None]) -> None:
    link(0.0, 0.005, 0.005, 0.2, 0.2, 0.2, 0.001, 0.001)
    with workers(2) as pool:
        reports, _ = pool.run(train, cadenza.diloco(8, codec="auto"), 80)[0]
    codecs = [report.codec for report in reports]
    assert codecs[:3] == ["bf16"] * 3
    assert "e3m0" in codecs
    assert codecs[-1] == "bf16"


def test_the_period_follows_real_times() -> None:
    """Steps of some milliseconds, and rounds among threads: whatever is decided, it is decided by all and in bounds."""

    def slowly(worker: Worker) -> list[tuple[int, str]]:
        loop = Loop(worker, cadenza.diloco(cadenza.schedules.auto(initial=2, maximum=5)))
        for step in range(1, 21):
            time.sleep(0.005)
            loop.steps(step, step)
        loop.sync.close()
        return [(report.step, report.decision) for report in loop.reports]

    with workers(2) as pool:
        one, other = pool.run(slowly)
    assert one == other
    assert all(1 <= after - before <= 5 for (before, _), (after, _) in pairwise(one))


@pytest.mark.parametrize(
    "build",
    [
        lambda: cadenza.noloco("auto"),
        lambda: cadenza.noloco(50, codec="auto"),
        lambda: Strategy(levels=(cadenza.LevelPlan("auto", groups=2), cadenza.LevelPlan(64))),  # type: ignore[arg-type]
        lambda: cadenza.local_sgd("auto", balanced=True),
        lambda: cadenza.codecs.error_feedback(cadenza.codecs.auto()),
        lambda: cadenza.codecs.auto([cadenza.codecs.topk()]),
    ],
)
def test_what_could_not_be_decided_alike_is_refused(build: Any) -> None:
    with pytest.raises(ValueError, match=r"follow|times|balanced|choice|lost"):
        build()
