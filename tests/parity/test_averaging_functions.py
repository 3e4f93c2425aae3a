"""average_parameters and its companions beside torch's, on every kind of tensor that torch's can average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.compare import assert_parity, assert_same_on_ranks, ulps_of_bf16, values_of
from support.ranks import RankPool, outcome
from support.sides import OURS, TORCH, Side


def tensors_of(kind: str) -> list[torch.Tensor]:
    """Tensors of one kind, different on every rank."""
    generator = torch.Generator().manual_seed(7 + dist.get_rank())

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    zoo: dict[str, Callable[[], list[torch.Tensor]]] = {
        "one": lambda: [random(3, 5)],
        "many_small": lambda: [random(1 + i % 4, 3) for i in range(300)],
        "scalars_and_empty": lambda: [random(), random(0), random(4, 0, 2), random(1), random()],
        "float64": lambda: [random(4, 4, dtype=torch.float64), random(3, dtype=torch.float64)],
        "float64_with_float32": lambda: [random(4, 4, dtype=torch.float64), random(33)],
        "larger_than_a_bucket": lambda: [random(3), random(1100, 2000), random(5)],
        "transposed": lambda: [random(6, 5).t(), random(2, 3, 4).permute(2, 0, 1)],
        "channels_last": lambda: [random(4, 3, 5, 5).to(memory_format=torch.channels_last)],
        "every_second_column": lambda: [random(7, 10)[:, ::2], random(9)[::3]],
        "part_of_a_larger_one": lambda: [random(20)[4:9], random(6, 6)[1:3, 2:5]],
    }
    return zoo[kind]()


KINDS = [
    "one",
    "many_small",
    "scalars_and_empty",
    "float64",
    "float64_with_float32",
    "larger_than_a_bucket",
    "transposed",
    "channels_last",
    "every_second_column",
    "part_of_a_larger_one",
]


def average_kinds(kinds: list[str], as_parameters: bool) -> None:
    exact = dist.get_world_size() <= 2
    for kind in kinds:
        given = [tensors_of(kind), tensors_of(kind)]
        theirs, ours = [[nn.Parameter(t) for t in ts] if as_parameters else ts for ts in given]
        contributions = [gather(t) for t in ours]
        TORCH.average_parameters(iter(theirs), None)
        OURS.average_parameters(iter(ours), None)
        for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            promoted = kind == "float64_with_float32" and b.dtype == torch.float32  # torch sums it in float64
            if exact and not promoted:
                assert_parity(f"{kind} {i}", a, b, exact=True)
            assert_is_mean(f"torch, {kind} {i}", a, contributions[i])
            assert_is_mean(f"ours, {kind} {i}", b, contributions[i])
        assert_same_on_ranks(kind, ours)


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's values, in float64."""
    mine = tensor.detach().double().contiguous()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone)


def assert_is_mean(name: str, value: torch.Tensor, contributions: torch.Tensor) -> None:
    """The mean, up to the rounding of one addition a rank and one division, in whatever order."""
    rounding = torch.finfo(value.dtype).eps / 2 * len(contributions) * contributions.abs().mean(0)
    error = (value.detach().double() - contributions.mean(0)).abs()
    assert (error <= rounding).all(), f"{name}: off by {(error - rounding).max()} more than rounding allows"


@pytest.mark.parametrize(
    ("world", "as_parameters"),
    [(1, True), (2, True), (3, True), (4, True), (1, False), (3, False)],
    ids=lambda value: value if type(value) is int else "parameters" if value else "tensors",
)
def test_values_of_every_kind_of_tensor_agree(
    ranks: RankPool, transport: dict[str, str], world: int, as_parameters: bool
) -> None:
    kinds = KINDS if as_parameters else [kind for kind in KINDS if kind != "larger_than_a_bucket"]
    ranks.run(world, average_kinds, kinds, as_parameters, env=transport)


def average_16_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3 + dist.get_rank())
    values = torch.randn(5000, generator=generator).to(dtype)
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    exact = torch.stack(gathered).double().mean(0)
    theirs, ours = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    TORCH.average_parameters([theirs], None)
    OURS.average_parameters([ours], None)
    # Torch sums 16-bit values in 16 bits; in fp32 the mean is the nearest 16-bit number to the exact one, or its
    # neighbour where fp32 itself stands on the border between two.
    assert (ours.double() - exact).abs().sum() <= (theirs.double() - exact).abs().sum()
    nearest = exact.to(dtype)
    if dtype == torch.bfloat16:
        assert ulps_of_bf16(ours, nearest) <= 1
    assert (ours.detach() != nearest).sum() <= 5
    assert_same_on_ranks(str(dtype), [ours])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [2, 4])
def test_16_bit_means_are_never_worse_than_torchs(
    ranks: RankPool, transport: dict[str, str], world: int, dtype: torch.dtype
) -> None:
    ranks.run(world, average_16_bit, dtype, env=transport)


def average_extremes(side: Side, dtype: torch.dtype) -> torch.Tensor:
    largest, first = torch.finfo(dtype).max, dist.get_rank() == 0
    values = [largest, -largest if first else largest, 1.0 if first else float("inf"), 1.0 if first else float("nan")]
    parameter = nn.Parameter(torch.tensor(values, dtype=torch.float64).to(dtype))
    side.average_parameters([parameter], None)
    return parameter.detach()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_largest_numbers_do_not_overflow_and_infinities_spread_as_in_torch(
    ranks: RankPool, transport: dict[str, str], world: int, dtype: torch.dtype
) -> None:
    """Torch divides before it sums, so the mean of the largest numbers is finite."""
    largest = torch.finfo(dtype).max
    exact = torch.tensor([largest, largest * ((world - 2) / world), float("inf"), float("nan")], dtype=torch.float64)
    for side in (TORCH, OURS):
        for mean in ranks.run(world, average_extremes, side, dtype, env=transport):
            torch.testing.assert_close(mean.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0.0, equal_nan=True)


def average_nearly_the_largest(side: Side, dtype: torch.dtype) -> bool:
    values = torch.full((5,), torch.finfo(dtype).max * 0.99, dtype=dtype)
    parameter = nn.Parameter(values.clone())
    side.average_parameters([parameter], None)
    return bool(torch.allclose(parameter, values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_numbers_do_not_overflow_where_the_number_of_ranks_is_no_power_of_two(
    ranks: RankPool, transport: dict[str, str], dtype: torch.dtype
) -> None:
    assert ranks.run(3, average_nearly_the_largest, TORCH, dtype) == [True] * 3
    assert ranks.run(3, average_nearly_the_largest, OURS, dtype, env=transport) == [True] * 3


def give_as(side: Side, form: str) -> list[float]:
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(dist.get_rank())
    parameters = list(layer.parameters())
    forms: dict[str, Any] = {
        "iterator": iter(parameters),
        "generator": (p for p in parameters),
        "list": parameters,
        "tuple": tuple(parameters),
        "module.parameters()": layer.parameters(),
        "the same one twice": [*parameters, parameters[0]],
        "dict values": dict(layer.named_parameters()).values(),
    }
    side.average_parameters(forms[form], dist.group.WORLD)
    return [value for p in parameters for value in p.flatten().tolist()]


FORMS = [
    "iterator",
    "generator",
    "list",
    "tuple",
    "module.parameters()",
    "the same one twice",
    "dict values",
]


@pytest.mark.parametrize("form", FORMS)
def test_parameters_may_come_in_any_iterable(ranks: RankPool, form: str) -> None:
    assert ranks.run(2, give_as, OURS, form) == ranks.run(2, give_as, TORCH, form) == [[0.5, 0.5, 0.5]] * 2


def outside_the_group(side: Side) -> tuple[float, Any]:
    group = dist.new_group([0, 2])
    parameter = nn.Parameter(torch.tensor([float(dist.get_rank())]))
    parameter.grad = torch.ones(1)
    returned = side.average_parameters([parameter], group)
    side.average_parameters_or_parameter_groups([{"params": [parameter]}], group)
    return parameter.item(), returned


def test_ranks_outside_the_group_are_left_alone(ranks: RankPool) -> None:
    theirs = ranks.run(3, outside_the_group, TORCH)
    assert ranks.run(3, outside_the_group, OURS) == theirs == [(1.0, None), (1.0, None), (1.0, None)]
    assert ranks.run(4, outside_the_group, OURS)[3] == (3.0, None)


class Mode:
    """Which parameters have a gradient, and in which form they are given."""

    FORMS = ("parameters", "groups", "iterator of groups", "groups and parameters mixed", "nothing")


def chosen_positions(side: Side, form: str) -> list[int]:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    parameters = list(layers.parameters())
    parameters[0].grad = torch.zeros(2, 2)
    parameters[3].grad = torch.ones(1)
    groups: list[Any] = [{"params": parameters[2:], "lr": 1.0}, {"params": parameters[:2]}]
    forms: dict[str, Any] = {
        "parameters": layers.parameters(),
        "groups": groups,
        "iterator of groups": iter(groups),
        "groups and parameters mixed": [parameters[0], groups[0]],
        "nothing": [],
    }
    chosen = side.get_params_to_average(forms[form])
    assert type(chosen) is list
    return [next(i for i, p in enumerate(parameters) if p is c) for c in chosen]


@pytest.mark.parametrize("form", Mode.FORMS)
def test_the_parameters_to_average_are_chosen_alike(form: str) -> None:
    assert chosen_positions(OURS, form) == chosen_positions(TORCH, form)


@pytest.mark.parametrize("bad", ["parameter", 3, None, torch.zeros(2), ["p"], ("params", [])])
def test_other_types_are_refused_in_torchs_words(bad: Any) -> None:
    theirs, ours = outcome(TORCH.get_params_to_average, [bad]), outcome(OURS.get_params_to_average, [bad])
    assert theirs[:2] == ("error", "NotImplementedError")
    assert ours == theirs


def average_with_and_without_gradients(side: Side) -> tuple[list[float], list[float]]:
    def pair() -> list[nn.Parameter]:
        parameters = [nn.Parameter(torch.tensor([float(dist.get_rank())])) for _ in range(2)]
        parameters[0].grad = torch.ones(1)
        return parameters

    all_of_them, with_gradient = pair(), pair()
    side.average_parameters(iter(all_of_them), None)
    side.average_parameters_or_parameter_groups(with_gradient, None)
    return [p.item() for p in all_of_them], [p.item() for p in with_gradient]


def test_one_function_takes_all_and_the_other_those_with_gradients(ranks: RankPool) -> None:
    theirs = ranks.run(2, average_with_and_without_gradients, TORCH)
    assert ranks.run(2, average_with_and_without_gradients, OURS) == theirs
    assert theirs[1] == ([0.5, 0.5], [0.5, 1.0])


def gradients_after(side: Side) -> bool:
    layer = nn.Linear(3, 3)
    layer(torch.ones(2, 3)).sum().backward()
    before = values_of(p.grad for p in layer.parameters() if p.grad is not None)
    side.average_parameters_or_parameter_groups(layer.parameters(), None)
    after = [p.grad for p in layer.parameters() if p.grad is not None]
    trains = all(p.requires_grad and p.is_leaf for p in layer.parameters())
    layer(torch.ones(2, 3)).sum().backward()
    doubled = all(torch.equal(2 * b, a) for b, a in zip(before, after, strict=True))
    return trains and doubled


def test_gradients_stay_and_training_goes_on(ranks: RankPool) -> None:
    assert ranks.run(2, gradients_after, OURS) == ranks.run(2, gradients_after, TORCH) == [True, True]
