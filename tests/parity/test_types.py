"""Ours are torch's types too: programs that ask `isinstance`, subclass, or mix both sides' names keep working."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from support.compare import same_bits
from support.ranks import RankPool
from support.sides import OURS, TORCH, Side

CLASSES = [
    "ModelAverager",
    "PeriodicModelAverager",
    "HierarchicalModelAverager",
    "PostLocalSGDState",
    "PostLocalSGDOptimizer",
]
SIDES = [TORCH, OURS]


@pytest.mark.parametrize("name", CLASSES)
def test_our_classes_derive_from_torchs(name: str) -> None:
    assert issubclass(getattr(OURS, name), getattr(TORCH, name))


def inherited_behaviour(name: str) -> set[str]:
    """The methods that a class of ours has from torch's class of the same name."""
    ours, theirs = getattr(OURS, name), getattr(TORCH, name)
    return {
        method
        for method, function in vars(theirs).items()
        if (inspect.isfunction(function) or isinstance(function, property))
        and inspect.getattr_static(ours, method) is function
    }


@pytest.mark.parametrize("name", CLASSES)
def test_deriving_brings_none_of_torchs_behaviour_in(name: str) -> None:
    assert inherited_behaviour(name) == set()


def objects_are_torchs() -> list[bool]:
    layer = nn.Linear(2, 1)
    averager = OURS.PeriodicModelAverager(period=2)
    nested = OURS.HierarchicalModelAverager({2: dist.get_world_size()})
    optimizer = OURS.PostLocalSGDOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), averager)
    _, copied = copy.deepcopy((layer, optimizer))
    return [
        isinstance(averager, TORCH.PeriodicModelAverager),
        isinstance(nested, TORCH.HierarchicalModelAverager),
        isinstance(nested, TORCH.ModelAverager) and not isinstance(nested, TORCH.PeriodicModelAverager),
        isinstance(optimizer, TORCH.PostLocalSGDOptimizer),
        isinstance(copied, TORCH.PostLocalSGDOptimizer) and copied.averager.step == averager.step,
        isinstance(pickle.loads(pickle.dumps(averager)), TORCH.PeriodicModelAverager),
    ]


def test_objects_and_their_copies_are_of_torchs_types(ranks: RankPool) -> None:
    assert ranks.run(1, objects_are_torchs) == [[True] * 6]


def test_a_state_is_of_torchs_type_and_a_copy_keeps_its_fields() -> None:
    state = OURS.PostLocalSGDState(None, None, 7, post_local_gradient_allreduce=False)
    state.iter = 3
    for one in (state, copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert isinstance(one, TORCH.PostLocalSGDState)
        assert [getattr(one, name) for name in TORCH.PostLocalSGDState.__slots__] == [None, None, 7, False, 3]
        assert not hasattr(one, "__dict__")


def imported_after(code: str) -> tuple[str, str]:
    script = f"{code}\nimport sys\nprint('torch.distributed.optim' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import cadenza",
        "from cadenza.optim import muon_and_adamw",
        "import cadenza.model_averaging.averagers, cadenza.model_averaging.hierarchical_model_averager",
        "import cadenza.ddp_comm_hooks.post_localSGD_hook",
    ],
)
def test_torchs_heavy_package_of_optimizers_is_imported_by_the_wrapper_alone(code: str) -> None:
    assert imported_after(code) == ("False", "")


def test_importing_the_wrapper_does_not_warn() -> None:
    assert imported_after("from cadenza.optim import PostLocalSGDOptimizer") == ("True", "")


# ---- names of both sides in one program ---------------------------------------------------------------------------


def train_mixed(of: tuple[Side, ...]) -> list[torch.Tensor]:
    """Train with an averager, an optimizer, a state and a hook, each of a side of its own."""
    averager_of, optimizer_of, state_of, hook_of = of
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    state = state_of.PostLocalSGDState(None, None, start_localSGD_iter=3, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, hook_of.post_localSGD_hook)
    optimizer = optimizer_of.PostLocalSGDOptimizer(
        optim=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        averager=averager_of.PeriodicModelAverager(period=2, warmup_steps=3),
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=generator)).square().mean().backward()
        optimizer.step()
    assert [state.iter, optimizer.averager.step] == [3, 8]
    return [p.detach().clone() for p in model.parameters()]


def train_all_mixtures() -> list[tuple[Side, ...]]:
    """The mixtures that do not end where torch's four names end."""
    expected = train_mixed((TORCH,) * 4)
    return [
        mixture
        for mixture in itertools.product(SIDES, repeat=4)
        if not all(same_bits(a, b) for a, b in zip(train_mixed(mixture), expected, strict=True))
    ]


def test_any_mixture_of_torchs_names_and_ours_trains_alike(ranks: RankPool) -> None:
    assert ranks.run(2, train_all_mixtures) == [[], []]


# ---- what programs do with them -----------------------------------------------------------------------------------


class Trainer:
    """What Lightning's DDPStrategy does with a hook's state and a `model_averaging_period`, in its order."""

    def __init__(self, state: Any, hook: Any, period: int) -> None:
        self._state, self._hook, self._period = state, hook, period
        self.averager: Any = None

    def set_up(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> DistributedDataParallel:
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state=self._state, hook=self._hook)
        if isinstance(self._state, TORCH.PostLocalSGDState):
            assert not isinstance(optimizer, TORCH.PostLocalSGDOptimizer)
            self.averager = TORCH.PeriodicModelAverager(self._period, warmup_steps=self._state.start_localSGD_iter)
        return ddp

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.averager is not None:
            params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.averager.average_parameters(iter(params))


def train_as_lightning_does() -> list[float]:
    state = OURS.PostLocalSGDState(None, None, start_localSGD_iter=2, post_local_gradient_allreduce=False)
    trainer = Trainer(state, OURS.post_localSGD_hook, period=1)
    layer = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    ddp = trainer.set_up(layer, optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        ddp(torch.tensor([[1.0 + dist.get_rank()]])).sum().backward()
        optimizer.step()
        trainer.after_step(optimizer)
    return [trainer.averager is not None, layer.weight.item()]


@pytest.mark.filterwarnings("ignore:When period is 1")
def test_a_trainer_that_asks_for_torchs_state_averages_with_ours(ranks: RankPool) -> None:
    first, second = ranks.run(2, train_as_lightning_does)
    assert first[0] is True
    assert first == second


def is_the_wrapper_found() -> bool:
    """A trainer of graph networks averages at the end of an epoch if its optimizer is torch's wrapper."""
    optimizer = OURS.PostLocalSGDOptimizer(
        torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), OURS.PeriodicModelAverager(period=4)
    )
    return isinstance(optimizer, TORCH.PostLocalSGDOptimizer) and isinstance(optimizer.averager, TORCH.ModelAverager)


def test_a_trainer_that_asks_for_torchs_wrapper_finds_ours(ranks: RankPool) -> None:
    assert ranks.run(1, is_the_wrapper_found) == [True]


class Telling(OURS.PeriodicModelAverager):  # type: ignore[misc]
    """Tells whether the last call averaged, by the fields of torch's averager; takes an argument of its own first."""

    def __init__(self, owner: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.owner = owner
        self.averaged: list[int] = []

    def average_parameters(self, params: Any) -> None:
        due = self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0
        if due:
            self.averaged.append(self.step)
        assert super().average_parameters(params) is None


class WithAverager(OURS.PostLocalSGDOptimizer):  # type: ignore[misc]
    """Saves more of its averager than the step."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "averager": {"owner": self.averager.owner}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.averager.owner = state_dict.pop("averager")["owner"]
        super().load_state_dict(state_dict)


def train_with_subclasses() -> list[Any]:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, float(dist.get_rank()))
    optimizer = WithAverager(torch.optim.SGD(layer.parameters(), lr=0.0), Telling("me", period=3, warmup_steps=2))
    for _ in range(9):
        layer(torch.ones(1)).backward()
        optimizer.step()
    other = WithAverager(torch.optim.SGD(layer.parameters(), lr=0.0), Telling("you", 3, 2))
    other.load_state_dict(optimizer.state_dict())
    return [optimizer.averager.averaged, layer.weight.item(), other.averager.owner, other.averager.step]


def test_subclasses_that_read_the_averagers_fields_and_call_super_work(ranks: RankPool) -> None:
    assert ranks.run(2, train_with_subclasses) == [[[2, 5, 8], 0.5, "me", 9]] * 2
