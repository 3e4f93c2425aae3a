"""DDP's gradients in few bits: against a plain reference, whatever the buckets, and bit for bit after a resume."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cadenza.codecs import Codec, bf16, e3m0, error_feedback, fp32, int8, topk
from cadenza.ddp_comm_hooks.quantized_hook import QuantizedState, quantized_hook
from cadenza.engine.header import HEADER_BYTES
from cadenza.errors import CheckpointError
from support.ranks import RankPool, outcome

CODECS = {
    "int8": int8(),
    "int8, fed back": error_feedback(int8()),
    "e3m0, fed back": error_feedback(e3m0()),
    "e3m0 and int8 back, fed back": error_feedback(e3m0(back=int8())),
}
SMALL_BUCKETS = {"bucket_cap_mb": 0.002}


class Net(nn.Module):
    """Layers of several sizes, one of them used only if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(9, 40), nn.Linear(40, 40), nn.Linear(40, 3)
        self.seldom = nn.Linear(40, 3)

    def forward(self, inputs: torch.Tensor, *, seldom: bool = True) -> torch.Tensor:
        hidden = self.second(self.first(inputs).tanh()).tanh()
        return self.last(hidden) + (self.seldom(hidden) if seldom else 0)


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 9, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int, **options: Any) -> torch.Tensor:
    return model(data(step, rank), **options).square().sum()


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(dtype)


def hooked(codec: Codec | None = None, model: nn.Module | None = None, **options: Any) -> tuple[Any, QuantizedState]:
    state = QuantizedState(codec=codec)
    ddp = DistributedDataParallel(net() if model is None else model, **options)
    ddp.register_comm_hook(state, quantized_hook)
    return ddp, state


def train(ddp: nn.Module, steps: Sequence[int], **options: Any) -> list[list[torch.Tensor]]:
    """Steps of SGD; the gradients of each step."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    gradients = []
    for step in steps:
        loss_of(ddp, step, dist.get_rank(), **options).backward()
        gradients.append([p.grad.clone() for p in ddp.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return gradients


# ---- what it computes ---------------------------------------------------------------------------------------------


def encoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """A parameter's values in bytes: they begin a block, and zeros fill the last one."""
    whole = torch.zeros(-(-values.numel() // codec.block) * codec.block)
    whole[: values.numel()] = values.flatten()
    data = torch.empty(codec.encoded_bytes(whole.numel()), dtype=torch.uint8)
    codec.encode(whole, data)
    return data


def added(codec: Codec, data: torch.Tensor, total: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    """What the bytes mean, times the weight, on top of a total."""
    whole = torch.zeros(-(-total.numel() // codec.block) * codec.block)
    whole[: total.numel()] = total.flatten()
    codec.decode_add(data, whole, weight)
    return whole[: total.numel()].view(total.shape)


class Reference:
    """Quantised gradients of all ranks, in one process and parameter by parameter."""

    def __init__(self, codec: Codec, ranks: int, parameters: int) -> None:
        self.codec, self.ranks, self.decay = codec, ranks, codec.feedback or 0.0
        self.own = [[torch.zeros(()) for _ in range(parameters)] for _ in range(ranks)]
        self.of_mean = [torch.zeros(()) for _ in range(parameters)]

    def mean(self, number: int, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros_like(gradients[0])
        for rank, gradient in enumerate(gradients):
            values = gradient + self.own[rank][number]
            data = encoded(self.codec, values)
            self.own[rank][number] = (values - added(self.codec, data, torch.zeros_like(values))) * self.decay
            total = added(self.codec, data, total, 1 / self.ranks)
        total += self.of_mean[number]
        back = added(self.codec.back, encoded(self.codec.back, total), torch.zeros_like(total))
        self.of_mean[number] = (total - back) * self.decay
        return back


def reference(name: str, ranks: int, steps: int) -> list[list[torch.Tensor]]:
    codec, model = CODECS[name], net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    averaged = Reference(codec, ranks, len(list(model.parameters())))
    found = []
    for step in range(steps):
        each = [torch.autograd.grad(loss_of(model, step, rank), list(model.parameters())) for rank in range(ranks)]
        found.append([averaged.mean(number, given) for number, given in enumerate(zip(*each, strict=True))])
        for parameter, gradient in zip(model.parameters(), found[-1], strict=True):
            parameter.grad = gradient
        optimizer.step()
    return found


def test_gradients_are_those_of_a_plain_reference_and_the_same_bits_on_all_ranks(ranks: RankPool) -> None:
    for count, name in [(2, "int8"), (3, "int8, fed back"), (4, "e3m0, fed back"), (2, "e3m0 and int8 back, fed back")]:
        results = ranks.run(count, gradients_under, name, 5)
        for found in results[1:]:
            torch.testing.assert_close(found, results[0], rtol=0, atol=0)
        [wanted] = ranks.run(1, reference, name, count, 5)  # in a rank: the same threads add up in the same order
        torch.testing.assert_close(results[0], wanted, rtol=0, atol=0)


def gradients_under(name: str, steps: int, **options: Any) -> list[list[torch.Tensor]]:
    return train(hooked(CODECS[name], **options)[0], range(steps))


def test_the_buckets_make_no_difference(ranks: RankPool) -> None:
    """DDP makes its buckets anew after the first pass, so this also sees that residuals follow."""
    whole = ranks.run(3, gradients_under, "e3m0, fed back", 4)[0]
    for options in (SMALL_BUCKETS, {**SMALL_BUCKETS, "gradient_as_bucket_view": True}):
        cut = ranks.run(3, gradients_under, "e3m0, fed back", 4, **options)[0]
        torch.testing.assert_close(cut, whole, rtol=0, atol=0)


def compiled(name: str) -> list[list[torch.Tensor]]:
    ddp, _ = hooked(CODECS[name], static_graph=True)
    return train(torch.compile(ddp, backend="eager"), range(3))  # type: ignore[arg-type]


def test_a_static_graph_and_a_compiled_model_make_no_difference_either(ranks: RankPool) -> None:
    [found, _], [wanted, _] = ranks.run(2, compiled, "int8"), ranks.run(2, gradients_under, "int8", 3)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def bytes_and_buckets() -> tuple[int, int, int]:
    ddp, state = hooked(int8(), nn.Linear(512, 512, bias=False))
    ddp(torch.ones(1, 512)).sum().backward()
    return state.bytes_sent, state.iterations, int8().encoded_bytes(512 * 512)


def test_each_rank_sends_a_quarter_of_what_ddp_sends(ranks: RankPool) -> None:
    for sent, iterations, encoded in ranks.run(4, bytes_and_buckets):
        assert iterations == 1
        assert sent == 2 * 3 * encoded // 4 + 3 * HEADER_BYTES  # and a header to each of the others


# ---- what DDP does ------------------------------------------------------------------------------------------------


def accumulated() -> list[torch.Tensor]:
    ddp, _ = hooked(int8(), **SMALL_BUCKETS)
    train(ddp, [7])  # the buckets are made anew after this one
    with ddp.no_sync():
        loss_of(ddp, 0, dist.get_rank()).backward()
    loss_of(ddp, 1, dist.get_rank()).backward()
    found = [p.grad.clone() for p in ddp.parameters()]
    ddp.zero_grad()
    model = ddp.module
    exact = [loss_of(model, 0, rank) + loss_of(model, 1, rank) for rank in range(2)]
    wanted = torch.autograd.grad(sum(exact) / 2, list(model.parameters()))  # type: ignore[arg-type]
    return [(one - other).abs().max() / other.abs().max() for one, other in zip(found, wanted, strict=True)]


def test_accumulated_gradients_are_averaged_with_the_last(ranks: RankPool) -> None:
    for errors in ranks.run(2, accumulated):
        assert max(errors) < 2 / 127


def seldom_used() -> list[Any]:
    ddp, state = hooked(find_unused_parameters=True, **SMALL_BUCKETS)
    train(ddp, [0])
    train(ddp, [1, 2], seldom=dist.get_rank() == 1)  # one rank uses all: the others have zeros for it
    loss_of(ddp, 3, dist.get_rank(), seldom=False).backward()
    return [[p.grad for p in ddp.module.seldom.parameters()], [p.detach() for p in ddp.parameters()], state.iterations]


def test_parameters_that_are_not_used_everywhere(ranks: RankPool) -> None:
    (unused, first, iterations), (_, second, _) = ranks.run(2, seldom_used)
    assert unused == [None, None]
    assert iterations == 4
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def sixteen_bits(dtype: torch.dtype) -> tuple[list[torch.Tensor], float]:
    ddp, _ = hooked(model=net(dtype))
    gradients = []
    for step in range(3):
        ddp.zero_grad()
        ddp(data(step, dist.get_rank()).to(dtype)).square().sum().backward()
        gradients += [p.grad.clone() for p in ddp.parameters()]
    model = ddp.module
    model.zero_grad()
    sum(model(data(2, rank).to(dtype)).square().sum() for rank in range(2)).backward()  # type: ignore[union-attr]
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()]).float() / 2
    found = torch.cat([g.flatten() for g in gradients[-len(list(model.parameters())) :]]).float()
    return gradients, float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_sixteen_bits(ranks: RankPool, dtype: torch.dtype) -> None:
    (first, error), (second, _) = ranks.run(2, sixteen_bits, dtype)
    assert {gradient.dtype for gradient in first} == {dtype}
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert error < 0.02


def not_finite(value: float) -> tuple[list[bool], list[torch.Tensor], bool]:
    ddp, state = hooked()
    train(ddp, [0, 1])
    before = state.state_dict()
    loss = loss_of(ddp, 2, dist.get_rank())
    (loss * value if dist.get_rank() == 1 else loss).backward()
    seen = [bool(p.grad.isfinite().any()) for p in ddp.parameters()]
    ddp.zero_grad()
    same = all(
        torch.equal(one[kind], other[kind])
        for one, other in zip(before["residuals"], state.state_dict()["residuals"], strict=True)
        for kind in ("own", "share")
    )
    return seen, train(ddp, [3])[0], same


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_on_one_rank_is_seen_on_all_and_spoils_no_later_step(ranks: RankPool, value: float) -> None:
    for seen, later, same in ranks.run(2, not_finite, value):
        assert not any(seen)
        assert same
        assert all(bool(gradient.isfinite().all()) for gradient in later)


def scaled() -> list[Any]:
    ddp, _ = hooked()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1000)
    before = [p.detach().clone() for p in ddp.parameters()]
    scaler.scale(loss_of(ddp, 0, dist.get_rank()) * (math.inf if dist.get_rank() == 1 else 1)).backward()
    scaler.step(optimizer)
    scaler.update()
    unchanged = all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
    return [unchanged, scaler.get_scale()]


def test_a_grad_scaler_skips_the_step_on_every_rank(ranks: RankPool) -> None:
    assert ranks.run(2, scaled) == [[True, 1.0]] * 2


# ---- saving -------------------------------------------------------------------------------------------------------


def resumed(name: str, **options: Any) -> bool:
    straight, _ = hooked(CODECS[name], **options)
    whole = train(straight, range(6))
    first, saved_state = hooked(CODECS[name], **options)
    train(first, range(3))
    saved = copy.deepcopy((first.module.state_dict(), saved_state.state_dict()))
    train(first, [9])  # what was saved does not change any more
    model = net()
    model.load_state_dict(saved[0])
    second, state = hooked(CODECS[name], model, **options)
    state.load_state_dict(saved[1])
    assert state.iterations == 3
    rest = train(second, range(3, 6))
    return all(
        torch.equal(one, other)
        for ours, theirs in zip(rest, whole[3:], strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )


def test_a_resumed_run_goes_on_bit_for_bit(ranks: RankPool) -> None:
    assert ranks.run(3, resumed, "e3m0, fed back", **SMALL_BUCKETS) == [True] * 3
    assert ranks.run(2, resumed, "int8, fed back") == [True] * 2


def saved_by_rank(steps: int = 2) -> dict[str, Any]:
    ddp, state = hooked(**SMALL_BUCKETS)
    train(ddp, range(steps))
    return state.state_dict()


def go_on_from(saved: list[dict[str, Any]]) -> tuple[Any, ...]:
    ddp, state = hooked(**SMALL_BUCKETS)
    state.load_state_dict(saved[dist.get_rank()])
    return outcome(lambda: len(train(ddp, [5, 6])))


def test_states_are_taken_by_another_number_of_ranks_but_not_by_another_rank(ranks: RankPool) -> None:
    four, longer = ranks.run(4, saved_by_rank), ranks.run(2, saved_by_rank, 3)
    assert ranks.run(2, go_on_from, four[:2]) == [("ok", 2)] * 2
    for kind, _, text in ranks.run(2, go_on_from, [longer[0]] * 2):
        assert kind == "error"
        assert "On rank 1: the restored state is that of rank 0 of 2" in text
    for kind, _, text in ranks.run(2, go_on_from, [longer[0], four[1]]):
        assert kind == "error"
        assert "The ranks average at different steps: step 3 on rank 0; step 2 on rank 1" in text


def copied() -> list[Any]:
    ddp, state = hooked()
    train(ddp, [0])
    other = copy.deepcopy(state)
    return [other.codec == state.codec, other.iterations, len(other.state_dict()["residuals"])]


def test_a_state_can_be_copied_and_pickled(ranks: RankPool) -> None:
    assert ranks.run(2, copied) == [[True, 1, 1]] * 2


def test_the_residuals_of_another_codec_are_refused() -> None:
    saved = QuantizedState(codec=error_feedback(e3m0())).state_dict()
    with pytest.raises(CheckpointError, match=r"another codec \(.*Exponents; here .*Integers\)"):
        QuantizedState().load_state_dict(saved)


# ---- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [fp32(), topk()])
def test_codecs_that_do_not_fit_are_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match=r"give one that writes every value in fewer bits, such as int8"):
        QuantizedState(codec=codec)


def test_what_is_no_codec_is_refused() -> None:
    with pytest.raises(TypeError, match="give a codec"):
        QuantizedState(codec=int8)  # type: ignore[arg-type]


def other_codecs() -> tuple[Any, ...]:
    ddp, _ = hooked(int8() if dist.get_rank() == 0 else bf16())
    return outcome(train, ddp, [0])


def test_ranks_with_different_codecs_are_told_so(ranks: RankPool) -> None:
    for kind, _, text in ranks.run(2, other_codecs):
        assert kind == "error"
        assert "The ranks disagree" in text
        assert "Integers on rank 0" in text


def without_its_state() -> tuple[Any, ...]:
    state = QuantizedState()
    ddp = DistributedDataParallel(net())

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return quantized_hook(state, bucket)

    hook.__annotations__ = dict(quantized_hook.__annotations__)
    ddp.register_comm_hook(None, hook)
    return outcome(train, ddp, [0])


def test_a_state_that_was_not_registered_is_told_how(ranks: RankPool) -> None:
    for kind, _, text in ranks.run(2, without_its_state):
        assert kind == "error"
        assert "ddp.register_comm_hook(state, quantized_hook)" in text
