"""Points 10 to 18 of the reference: what averaging does to the parameters."""

from __future__ import annotations

import io
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from cadenza.errors import CadenzaError, DisagreementError, NothingToAverageError, UnsupportedTensorError
from support.compare import assert_same_on_ranks, same_bits, values_of
from support.models import CASES
from support.ranks import RankPool, outcome
from support.sides import OURS, TORCH, Side

BOTH = pytest.mark.parametrize("side", [TORCH, OURS])
TRANSPORTS = pytest.mark.parametrize(
    "env",
    [{"CADENZA_SHARED_MEMORY": "1"}, {"CADENZA_SHARED_MEMORY": "0"}],
    ids=["shared_memory", "c10d"],
)


def with_gradient(tensor: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(tensor)
    parameter.grad = torch.zeros_like(parameter)
    return parameter


def filled(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter with a gradient, whose values are the rank's number."""
    return with_gradient(torch.full(shape, float(dist.get_rank()), dtype=dtype))


# 10


def average_all_given(side: Side) -> list[Any]:
    with_grad, without = filled(2), nn.Parameter(torch.full((2,), float(dist.get_rank())))
    side.average_parameters(iter([with_grad, without]), None)
    outsiders = dist.new_group([0, 1])
    untouched = filled(2)
    side.average_parameters(iter([untouched]), outsiders)
    return [with_grad.tolist(), without.tolist(), untouched.tolist()]


@BOTH
def test_point_10_none_is_the_world_outsiders_return_and_every_parameter_is_averaged(
    ranks: RankPool, side: Side
) -> None:
    results = ranks.run(3, average_all_given, side)
    pair, outsider = [0.5, 0.5], [2.0, 2.0]
    assert results == [[[1.0, 1.0], [1.0, 1.0], inside] for inside in (pair, pair, outsider)]


# 11


@BOTH
def test_point_11_parameters_without_gradients_are_dropped_from_either_input(side: Side) -> None:
    layer = nn.Linear(2, 3)
    layer.bias.grad = torch.zeros(3)
    optimizer = torch.optim.SGD(layer.parameters())
    assert [p is layer.bias for p in side.get_params_to_average(layer.parameters())] == [True]
    assert [p is layer.bias for p in side.get_params_to_average(optimizer.param_groups)] == [True]


@BOTH
def test_point_11_other_types_raise_not_implemented_in_torchs_words(side: Side) -> None:
    with pytest.raises(NotImplementedError, match=r"^Parameter input of type <class 'str'> is not supported$"):
        side.get_params_to_average(["weight"])


# 12


def average_after_zero_grad(side: Side) -> list[Any]:
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(2)).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = values_of(layer.parameters())
    averager = side.PeriodicModelAverager(4)
    told = [
        outcome(averager.average_parameters, layer.parameters()),
        outcome(side.average_parameters_or_parameter_groups, optimizer.param_groups, None),
        outcome(side.average_parameters, iter([]), None),
    ]
    assert all(map(same_bits, before, values_of(layer.parameters())))
    return told


def test_point_12_averaging_nothing_says_which_order_of_calls_is_expected(ranks: RankPool) -> None:
    for told in ranks.run(2, average_after_zero_grad, TORCH):
        assert all(t[0] == "error" and "zero_grad" not in t[2] for t in told)  # torch.cat's own words
    for told in ranks.run(2, average_after_zero_grad, OURS):
        assert [t[:2] for t in told] == [("error", "NothingToAverageError")] * 3
        for _, _, text in told[:2]:
            assert "zero_grad" in text
            assert "backward" in text
    assert issubclass(NothingToAverageError, CadenzaError)
    assert issubclass(NothingToAverageError, ValueError)


# 13: on torch each of these hangs, aborts the process, or silently mixes values up, so it is not run there.


def disagree(build: str) -> list[Any]:
    """Average what differs on the last rank; then average something sound on the same group."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    given = DISAGREEMENTS[build](odd)
    before = values_of(given)
    told = outcome(OURS.average_parameters_or_parameter_groups, given, None)
    untouched = all(map(same_bits, before, values_of(given)))
    sound = filled(3)
    OURS.average_parameters([sound], None)
    return [told, untouched, sound.tolist()]


def one_without_gradient(odd: bool) -> list[nn.Parameter]:
    parameters = [filled(2), filled(3), filled(4)]
    if odd:
        parameters[1].grad = None
    return parameters


def none_with_gradient(odd: bool) -> list[nn.Parameter]:
    parameters = [filled(2), filled(3)]
    for parameter in parameters:
        parameter.grad = None if odd else parameter.grad
    return parameters


DISAGREEMENTS: dict[str, Callable[[bool], list[nn.Parameter]]] = {
    "a gradient is None": one_without_gradient,
    "all gradients are None": none_with_gradient,
    "another gradient is None": lambda odd: [
        p if i != odd else nn.Parameter(p.detach()) for i, p in enumerate([filled(2), filled(2)])
    ],
    "one parameter more": lambda odd: [filled(2), filled(3), *([filled(1)] if odd else [])],
    "another shape": lambda odd: [filled(2), filled(*((3, 4) if odd else (4, 3)))],
    "another size": lambda odd: [filled(2), filled(7 if odd else 5)],
    "another dtype": lambda odd: [
        filled(2),
        filled(4, dtype=torch.float16 if odd else torch.bfloat16),
    ],
    "another order": lambda odd: [filled(2), filled(3)][:: -1 if odd else 1],
    "no parameters": lambda odd: [] if odd else [filled(2)],
}
POSITION = {
    "a gradient is None": 1,
    "all gradients are None": 0,
    "another gradient is None": 0,
    "one parameter more": 2,
    "another shape": 1,
    "another size": 1,
    "another dtype": 1,
    "another order": 0,
    "no parameters": 0,
}


@TRANSPORTS
@pytest.mark.parametrize("build", list(DISAGREEMENTS))
@pytest.mark.parametrize("world", [2, 4])
def test_point_13_ranks_that_disagree_get_one_error_that_names_parameter_and_ranks(
    ranks: RankPool, env: dict[str, str], build: str, world: int
) -> None:
    results = ranks.run(world, disagree, build, env=env)
    told, *others = [result[0] for result in results]
    assert others == [told] * (world - 1), "the same error on every rank"
    assert told[:2] == ("error", "DisagreementError")
    assert re.search(rf"\bparameter {POSITION[build]}\b|\bposition {POSITION[build]}\b", told[2])
    assert re.search(rf"\brank {world - 1}\b", told[2])
    agreeing = "rank 0" if world == 2 else "ranks 0, 1, 2"
    assert agreeing in told[2]
    assert all(untouched for _, untouched, _ in results), "no parameter was changed"
    assert [sound for *_, sound in results] == [[(world - 1) / 2] * 3] * world, "the group works on"
    assert issubclass(DisagreementError, CadenzaError)
    assert issubclass(DisagreementError, RuntimeError)


def disagree_in_groups(named: bool) -> tuple[Any, ...]:
    model = nn.Sequential(OrderedDict(first=nn.Linear(2, 2), second=nn.Linear(2, 1)))
    weights = [(n, p) for n, p in model.named_parameters() if p.ndim > 1]
    biases = [(n, p) for n, p in model.named_parameters() if p.ndim == 1]
    groups: list[Any] = [{"params": weights}, {"params": biases}]
    if not named:
        groups = [{"params": [p for _, p in group["params"]]} for group in groups]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    model(torch.ones(2)).backward()
    if dist.get_rank() == 1:
        model.get_parameter("second.bias").grad = None
    return outcome(OURS.average_parameters_or_parameter_groups, optimizer.param_groups, None)


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_point_13_in_parameter_groups_the_error_names_group_and_parameter(ranks: RankPool, named: bool) -> None:
    first, second = ranks.run(2, disagree_in_groups, named)
    assert first == second
    assert first[1] == "DisagreementError"
    assert "parameter 1 of group 1" in first[2]
    assert ("second.bias" in first[2]) == named


def average_at_different_steps(side: Side) -> tuple[Any, ...]:
    averager = side.PeriodicModelAverager(period=2)
    averager.step = 4 if dist.get_rank() else 2
    parameter = filled(2)
    return outcome(averager.average_parameters, [parameter])


def test_point_13_ranks_at_different_steps_get_one_error_that_names_the_steps(ranks: RankPool) -> None:
    """Torch averages the parameters of different steps and says nothing."""
    assert ranks.run(2, average_at_different_steps, TORCH) == [("ok", None)] * 2
    first, second = ranks.run(2, average_at_different_steps, OURS)
    assert first == second
    assert first[1] == "DisagreementError"
    assert re.search(r"\b2\b.*rank 0.*\b4\b.*rank 1", first[2])


def average_other_layouts() -> tuple[Any, ...]:
    image = torch.arange(2 * 3 * 4 * 4).reshape(2, 3, 4, 4) * 1.0
    memory_format = torch.channels_last if dist.get_rank() else torch.contiguous_format
    parameter = with_gradient(image.to(memory_format=memory_format))
    told = outcome(OURS.average_parameters, [parameter], None)
    return told[:2], torch.equal(parameter.detach(), image)


def test_point_13_another_memory_layout_is_averaged_rightly_or_refused_but_never_mixed_up(
    ranks: RankPool,
) -> None:
    first, second = ranks.run(2, average_other_layouts)
    assert first == second
    assert first[0] in [("ok", None), ("error", "DisagreementError")]
    assert first[1], "the mean of equal images is the image"


def bad_input_on_one_rank(kind: str) -> list[Any]:
    odd = dist.get_rank() == 1
    bad: dict[str, Any] = {
        "integers": torch.ones(3, dtype=torch.int64),
        "on the meta device": torch.ones(3, device="meta"),
        "sparse": torch.ones(3).to_sparse(),
        "expanded": torch.ones(1).expand(3),
    }
    good = torch.full((2,), float(dist.get_rank()))
    told = outcome(OURS.average_parameters, [good, bad[kind] if odd else torch.ones(3)], None)
    return [told, good.tolist()]


@TRANSPORTS
@pytest.mark.parametrize("kind", ["integers", "on the meta device", "sparse", "expanded"])
def test_point_13_a_tensor_without_a_mean_on_one_rank_is_refused_on_every_rank(
    ranks: RankPool, env: dict[str, str], kind: str
) -> None:
    results = ranks.run(3, bad_input_on_one_rank, kind, env=env)
    told = results[0][0]
    assert [result[0] for result in results] == [told] * 3
    assert told[:2] == ("error", "UnsupportedTensorError")
    assert "parameter 1" in told[2]
    assert "rank 1" in told[2]
    assert [value for _, value in results] == [[float(rank)] * 2 for rank in range(3)]
    assert issubclass(UnsupportedTensorError, CadenzaError)
    assert issubclass(UnsupportedTensorError, TypeError)


def wrong_type_on_one_rank(function: str, kind: str) -> list[Any]:
    parameter = filled(2)
    wrong: dict[str, Any] = {
        "an element": [parameter, "weight"],
        "a model": nn.Linear(2, 1),
        "a lone parameter": parameter,
        "nothing": None,
    }
    given = wrong[kind] if dist.get_rank() == 1 else [parameter]
    told = outcome(getattr(OURS, function), given, None)
    after = outcome(OURS.average_parameters, [filled(1)], None)
    return [told, parameter.tolist(), after[0]]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        ("average_parameters", "an element"),
        ("average_parameters", "nothing"),
        ("average_parameters_or_parameter_groups", "an element"),
        ("average_parameters_or_parameter_groups", "a model"),
        ("average_parameters_or_parameter_groups", "a lone parameter"),
    ],
)
def test_point_13_a_wrong_type_on_one_rank_is_an_error_on_every_rank(ranks: RankPool, function: str, kind: str) -> None:
    """Otherwise the others would wait for the rank that raised until the group's time-out."""
    results = ranks.run(2, wrong_type_on_one_rank, function, kind, group_timeout_s=3)
    (here, untouched_here, after_here), (there, untouched_there, after_there) = results
    assert (here[0], there[0]) == ("error", "error")
    assert here[2] == there[2]
    assert "rank 1" in here[2]
    assert (untouched_here, untouched_there) == ([0.0, 0.0], [1.0, 1.0])
    assert (after_here, after_there) == ("ok", "ok")


# 14


def tied_by_storage() -> list[nn.Parameter]:
    memory = torch.arange(12.0) + dist.get_rank()
    return [with_gradient(memory.view(3, 4)), with_gradient(memory.view(3, 4)), with_gradient(memory[:4])]


def memory_of(side: Side) -> dict[str, Any]:
    model = CASES["conv_channels_last"].model(dist.get_rank())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    facts = [(p.data_ptr(), p.stride(), p.untyped_storage().nbytes()) for p in model.parameters()]
    tensors = list(model.parameters())
    saved_before = saved_size(tensors[1])
    side.average_parameters(model.parameters(), None)
    after = [(p.data_ptr(), p.stride(), p.untyped_storage().nbytes()) for p in model.parameters()]
    return {
        "addresses": [a[0] for a in facts] == [a[0] for a in after],
        "strides": [a[1] for a in facts] == [a[1] for a in after],
        "storage sizes": [a[2] for a in facts] == [a[2] for a in after],
        "the same objects": all(a is b for a, b in zip(tensors, model.parameters(), strict=True)),
        "saved size of a small layer": saved_size(tensors[1]) == saved_before,
    }


def saved_size(parameter: nn.Parameter) -> int:
    file = io.BytesIO()
    torch.save(parameter, file)
    return file.tell()


@TRANSPORTS
def test_point_14_values_change_in_place_and_storage_and_strides_stay(ranks: RankPool, env: dict[str, str]) -> None:
    for facts in ranks.run(2, memory_of, TORCH):
        lost = [fact for fact, stayed in facts.items() if not stayed]
        assert lost == ["addresses", "strides", "storage sizes", "saved size of a small layer"]
    for facts in ranks.run(2, memory_of, OURS, env=env):
        assert all(facts.values()), facts


def ties_after(side: Side) -> list[bool]:
    first, second, part = tied_by_storage()
    side.average_parameters([first, second, part], None)
    expected = (torch.arange(12.0) + 0.5).view(3, 4)
    right = torch.equal(first, expected) and torch.equal(second, expected) and torch.equal(part, expected[0])
    with torch.no_grad():
        first.add_(1)
    return [right, torch.equal(first, second), torch.equal(part, first[0])]


@TRANSPORTS
def test_point_14_ties_survive_whether_whole_or_in_part(ranks: RankPool, env: dict[str, str]) -> None:
    assert ranks.run(2, ties_after, TORCH) == [[True, False, False]] * 2
    assert ranks.run(2, ties_after, OURS, env=env) == [[True, True, True]] * 2


def other_users_of_the_memory() -> list[bool]:
    """Code that holds on to the tensors: an EMA's view, an optimizer, a compiled graph, numpy."""
    parameter = filled(2, 3)
    alias, array = parameter.detach(), parameter.detach().numpy()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    OURS.average_parameters([parameter], None)
    seen = bool((alias == 0.5).all()) and bool((array == 0.5).all())
    parameter.grad = torch.ones(2, 3)
    optimizer.step()
    return [seen, bool((alias == -0.5).all())]


def test_point_14_whoever_holds_the_memory_sees_the_mean(ranks: RankPool) -> None:
    assert ranks.run(2, other_users_of_the_memory) == [[True, True]] * 2


# 15


def average_mixed(side: Side) -> list[tuple[torch.dtype, float]]:
    """Whether each dtype survives, and the error in units of half a step of that dtype."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
    parameters = [
        nn.Parameter(torch.rand(400, generator=generator).add(0.5).to(dtype)) for dtype in dtypes for _ in range(2)
    ]
    errors = []
    exact = [mean_in_double(p) for p in parameters]
    side.average_parameters(parameters, None)
    for parameter, mean in zip(parameters, exact, strict=True):
        step = torch.finfo(parameter.dtype).eps * mean.log2().floor().exp2()
        errors.append((parameter.dtype, float(((parameter.double() - mean).abs() / step).max())))
    assert_same_on_ranks("mixed", parameters)
    return errors


def mean_in_double(parameter: torch.Tensor) -> torch.Tensor:
    total = parameter.detach().to(torch.float64, copy=True)
    dist.all_reduce(total)
    return total / dist.get_world_size()


@TRANSPORTS
def test_point_15_mixed_dtypes_keep_their_dtype_and_precision(ranks: RankPool, env: dict[str, str]) -> None:
    for side in (TORCH, OURS):
        for errors in ranks.run(4, average_mixed, side, env=env):
            assert [dtype for dtype, _ in errors[::2]] == [
                torch.float32,
                torch.bfloat16,
                torch.float64,
                torch.float16,
            ]
            for dtype, error in errors:
                # Rounding the mean to the dtype costs half a step; sums in the wider dtype next to nothing more.
                assert error <= (2.0 if dtype.itemsize > 2 else 0.502), (side, dtype)


def average_half(side: Side, dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(dist.get_rank())
    parameter = nn.Parameter(torch.rand(2000, generator=generator).add(0.5).to(dtype))
    mean = mean_in_double(parameter)
    side.average_parameters([parameter], None)
    step = torch.finfo(dtype).eps * mean.log2().floor().exp2()
    return float(((parameter.double() - mean).abs() / step).max())


@TRANSPORTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_point_15_sixteen_bit_values_are_summed_in_fp32(
    ranks: RankPool, env: dict[str, str], dtype: torch.dtype
) -> None:
    assert min(ranks.run(4, average_half, TORCH, dtype)) > 0.6  # torch rounds at every hop
    assert max(ranks.run(4, average_half, OURS, dtype, env=env)) <= 0.502


# 16

MIB = 1 << 20


def peak_extra_mib(side: Side, tensors: int, dtype: torch.dtype) -> float:
    """How much more memory than before the averaging this process had at its worst moment."""
    each = 160 * MIB // dtype.itemsize // tensors
    parameters = [nn.Parameter(torch.full((each,), 1.0, dtype=dtype)) for _ in range(tensors)]
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = memory_kib("VmRSS")
    side.average_parameters(parameters, None)
    assert all(bool((p[::4096] == 1.0).all()) for p in parameters)
    return (memory_kib("VmHWM") - before) / 1024


def memory_kib(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    assert found
    return int(found[1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from /proc")
@TRANSPORTS
@pytest.mark.parametrize(("tensors", "dtype"), [(1, torch.float32), (200, torch.float32), (8, torch.bfloat16)])
def test_point_16_extra_memory_is_bounded_by_the_buckets(
    ranks: RankPool, env: dict[str, str], tensors: int, dtype: torch.dtype
) -> None:
    assert max(ranks.run(2, peak_extra_mib, OURS, tensors, dtype, env=env)) <= 64


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from /proc")
def test_point_16_torch_still_needs_a_copy_of_the_whole_model(ranks: RankPool) -> None:
    assert min(ranks.run(2, peak_extra_mib, TORCH, 200, torch.float32)) > 150


# 17


def buffers_and_state(side: Side) -> list[bool]:
    case, rank = CASES["conv_channels_last"], dist.get_rank()
    model = case.model(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        case.backward(model, rank, step)
        optimizer.step()
    state = [v for s in optimizer.state.values() for v in s.values()]
    parameters, buffers, kept = (values_of(x) for x in (model.parameters(), model.buffers(), state))
    side.PeriodicModelAverager(1000).average_parameters(optimizer.param_groups)
    gradients = [p.grad is not None for p in model.parameters()]
    return [
        any(not same_bits(a, b) for a, b in zip(parameters, values_of(model.parameters()), strict=True)),
        all(map(same_bits, buffers, values_of(model.buffers()))),
        all(map(same_bits, kept, values_of(state))),
        all(gradients),
    ]


@BOTH
def test_point_17_buffers_and_optimizer_state_are_left_alone(ranks: RankPool, side: Side) -> None:
    assert ranks.run(2, buffers_and_state, side) == [[True, True, True, True]] * 2


# 18


def average_shards(over: str) -> list[Any]:
    """Two copies of a parameter, each in two shards: average along the copies, or wrongly across the shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    copy, shard = mesh.get_coordinate() or (0, 0)
    local = torch.full((3, 2), float(10 * shard + copy))
    parameter = nn.Parameter(DTensor.from_local(local, mesh["shard"], [Shard(0)]))
    groups = {
        "copies": mesh.get_group("replicate"),
        "shards": mesh.get_group("shard"),
        "everyone": None,
    }
    told = outcome(OURS.average_parameters, [parameter], groups[over])
    after = parameter.to_local().detach()
    return [told, isinstance(parameter.data, DTensor), after.unique().tolist(), tuple(parameter.shape)]


def test_point_18_a_dtensor_is_averaged_along_its_copies(ranks: RankPool) -> None:
    results = ranks.run(4, average_shards, "copies")
    means = [[0.5], [10.5], [0.5], [10.5]]
    assert results == [[("ok", None), True, mean, (6, 2)] for mean in means]


@pytest.mark.parametrize("over", ["shards", "everyone"])
def test_point_18_averaging_across_shards_is_refused_on_every_rank(ranks: RankPool, over: str) -> None:
    results = ranks.run(4, average_shards, over)
    for rank, (told, _, values, _) in enumerate(results):
        assert told[:2] == ("error", "UnsupportedTensorError")
        assert "parameter 0" in told[2]
        assert "DTensor" in told[2]
        assert "replicate" in told[2]
        assert values == [10.0 * (rank % 2) + rank // 2]


def average_fsdp() -> bool:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    copy = mesh.get_local_rank("replicate")
    torch.manual_seed(copy)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = OURS.PeriodicModelAverager(2, process_group=mesh.get_group("replicate"))
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * copy + step)
        model(torch.randn(3, 4, generator=generator)).sum().backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    whole = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    assert len(whole) == 4
    assert_same_on_ranks("copies", [p.contiguous() for p in whole])
    return True


def test_point_18_fsdp_shards_are_averaged_along_the_replicate_dimension(ranks: RankPool) -> None:
    assert ranks.run(4, average_fsdp) == [True] * 4
