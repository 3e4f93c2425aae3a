"""Between rounds a step looks at no value: on a device every look would make training wait."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cadenza
import cadenza.testing
from cadenza import Strategy, codecs

LOOKS = ("item", "cpu", "tolist", "numpy", "nonzero", "is_nonzero", "equal", "data_ptr", "__array__")
LOOKS += ("__float__", "__int__", "__bool__", "__index__")
STEPS, PERIOD = 16, 6
STRATEGIES = {
    "local_sgd": cadenza.local_sgd(PERIOD),
    "late": cadenza.local_sgd(PERIOD, delay=2),
    "diloco": cadenza.diloco(PERIOD, codec=codecs.error_feedback(codecs.int8()), delay=2),
    "a period late": cadenza.diloco(PERIOD, delay=PERIOD),
    "streaming": cadenza.streaming_diloco(PERIOD, delay=1, layers=1),
    "offloaded": cadenza.diloco(PERIOD, offload=True, delay=2),
    "slowmo": cadenza.slowmo(PERIOD),
    "des_loc": cadenza.des_loc(PERIOD),
}


class Looks:
    """Counts how often this thread looks at the values of a tensor."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._counting: set[int] = set()
        self.seen: list[str] = []
        for name in LOOKS:
            patch.setattr(torch.Tensor, name, self._noting(name, getattr(torch.Tensor, name)))
        patch.setattr(torch.accelerator, "synchronize", self._noting("synchronize", lambda *_: None))

    def _noting(self, name: str, look: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **options: Any) -> Any:
            if threading.get_ident() in self._counting:
                self.seen.append(name)
            return look(*args, **options)

        return noting

    def during(self, step: Callable[[], None]) -> list[str]:
        """Return how the values of tensors were looked at in a call."""
        self._counting.add(threading.get_ident())
        try:
            step()
        finally:
            self._counting.discard(threading.get_ident())
        return self.seen


def train(worker: cadenza.testing.Worker, model: torch.nn.Module, strategy: Strategy, looks: Looks) -> int:
    """Return in how many steps nothing was launched and nothing landed."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    landed: list[cadenza.RoundReport] = []
    sync = cadenza.attach(model, optimizer, strategy, observers=[landed.append])
    quiet = 0
    for _ in range(STEPS):
        model(torch.randn(4, 5, generator=worker.generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        before = len(landed), sync.next_round
        assert sync.next_round is not None
        if sync.clock + 1 < sync.next_round and not sync.replica.state.pending:
            assert looks.during(sync.step) == []
            quiet += 1
            assert before == (len(landed), sync.next_round)
        else:
            sync.step()
    sync.finish()
    return quiet


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_step_between_rounds_looks_at_a_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
    with monkeypatch.context() as patch, cadenza.testing.workers(2) as pool:
        looks = Looks(patch)
        assert all(quiet >= 3 for quiet in pool.run(train, model, STRATEGIES[name], looks))


def test_a_look_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    assert looks.during(lambda: float(torch.ones(()))) == ["__float__"]  # type: ignore[arg-type,func-returns-value]
    assert looks.during(lambda: torch.ones(1).item())[-1] == "item"  # type: ignore[arg-type,return-value]
