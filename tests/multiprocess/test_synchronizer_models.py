"""Models and loops as people have them: wrappers, sharding, scalers, ties, dtypes, parameters that come and go."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import cadenza
from cadenza import LevelPlan, Strategy, Topology, codecs
from cadenza.testing import references as algorithms
from cadenza.testing.references import Workers
from support.compare import assert_same_on_ranks, same_bits
from support.models import CASES
from support.ranks import RankPool, outcome
from support.training import adam, everyone, momentum_sgd, plain_sgd, train, values


def mlp() -> nn.Module:
    return CASES["mlp"].model(dist.get_rank())


def backward(model: nn.Module, n: int, case: str = "mlp") -> None:
    model.zero_grad()
    CASES[case].backward(model, dist.get_rank(), n)


# ---- where all start -----------------------------------------------------------------------------------------------


class EveryKind(nn.Module):
    """Trained and frozen parameters, float and integer buffers; all different on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.trained = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.short = nn.Parameter(torch.randn(3).bfloat16())
        self.register_buffer("statistics", torch.randn(2))
        self.register_buffer("count", torch.tensor(rank + 5))
        self.register_buffer("mask", torch.rand(4) > 0.5)


def start() -> dict[str, torch.Tensor]:
    model = EveryKind(dist.get_rank())
    cadenza.attach(model, torch.optim.SGD([model.trained, model.short], lr=0.1), cadenza.diloco(4))
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def test_all_ranks_start_from_everything_that_the_first_has(ranks: RankPool) -> None:
    first = EveryKind(0).state_dict()
    for state in ranks.run(3, start):
        for name, tensor in first.items():
            assert same_bits(state[name], tensor), name


def names_and_class() -> Any:
    model = mlp()
    before = type(model), list(model.state_dict()), [p.data_ptr() for p in model.parameters()]
    inner = momentum_sgd(model)
    sync = cadenza.attach(model, inner, cadenza.diloco(2))
    for n in (1, 2, 3):
        backward(model, n)
        inner.step()
        sync.step()
    sync.finish()
    return before == (type(model), list(model.state_dict()), [p.data_ptr() for p in model.parameters()])


def test_the_model_keeps_its_class_its_names_and_its_memory(ranks: RankPool) -> None:
    assert ranks.run(2, names_and_class) == [True, True]


# ---- every kind of model -------------------------------------------------------------------------------------------


def finished_equal(case: str, strategy: Strategy) -> Any:
    """Train a model of a kind; return what rank 0 and this rank hold after a global round and at the end."""
    rank = dist.get_rank()
    model = CASES[case].model(rank)
    inner = momentum_sgd(model)
    strides = [p.stride() for p in model.parameters()]
    sync = cadenza.attach(model, inner, strategy)
    for n in range(1, 6):
        backward(model, n, case)
        inner.step()
        sync.step()
        if n == 4 and not strategy.delay:
            assert_same_on_ranks("after a global round", model.parameters())
    sync.finish()
    assert_same_on_ranks("after finish()", model.parameters())
    assert strides == [p.stride() for p in model.parameters()]
    return [p.detach() for p in model.parameters() if p.requires_grad]


KINDS = ["conv_channels_last", "tied_transformer", "mixed_bf16", "frozen", "unused_branch"]


@pytest.mark.parametrize("case", KINDS)
def test_every_kind_of_model_ends_equal_on_all_ranks(ranks: RankPool, case: str) -> None:
    for strategy in (
        cadenza.local_sgd(4),
        cadenza.diloco(4, codec=codecs.error_feedback(codecs.int8())),
        cadenza.streaming_diloco(4, layers=2, delay=2),
    ):
        ranks.run(3, finished_equal, case, strategy)


@pytest.mark.parametrize("case", ["conv_channels_last", "tied_transformer", "frozen"])
def test_every_kind_of_model_walks_the_way_of_diloco(ranks: RankPool, case: str) -> None:
    traces = ranks.run(2, train, cadenza.diloco(2, defaults="paper"), 5, case=case)
    history = algorithms.diloco(Workers(CASES[case], 2, momentum_sgd), 5, period=2)
    for n, expected in enumerate(history):
        for rank, trace in enumerate(traces):
            torch.testing.assert_close(trace.history[n], expected[rank], rtol=1e-4, atol=1e-5)


def keep_ties() -> bool:
    model = CASES["tied_transformer"].model(dist.get_rank())
    inner = momentum_sgd(model)
    sync = cadenza.attach(model, inner, cadenza.diloco(2))
    for n in (1, 2, 3):
        backward(model, n, "tied_transformer")
        inner.step()
        sync.step()
    sync.finish()
    return model.get_submodule("head").weight is model.get_submodule("embedding").weight


def test_ties_survive(ranks: RankPool) -> None:
    assert ranks.run(2, keep_ties) == [True, True]


class Inner(nn.Module):
    """A model whose child is called `module`, as wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.module = nn.Linear(2, 2, bias=False)
        self.layers = nn.ModuleDict({"_orig": nn.Linear(2, 2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["_orig"](self.module(x * self.weight))


def a_child_called_module() -> None:
    model = Inner()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = cadenza.attach(model, inner, cadenza.local_sgd(1))
    model(torch.full((3, 2), 1.0 + dist.get_rank())).sum().backward()
    inner.step()
    sync.step()
    assert_same_on_ranks("after a round", model.parameters())


def test_a_child_called_module_is_averaged_too(ranks: RankPool) -> None:
    ranks.run(2, a_child_called_module)


# ---- parameters that come and go -----------------------------------------------------------------------------------


def thaw(strategy: Strategy, at: int) -> list[list[torch.Tensor]]:
    """The first layer is frozen until `at` steps are done."""
    model = mlp()
    layer = model.get_submodule("0").requires_grad_(False)
    inner = plain_sgd(model)
    sync = cadenza.attach(model, inner, strategy)
    after = []
    for n in range(1, 10):
        backward(model, n)
        inner.step()
        sync.step()
        if n == at:
            layer.requires_grad_(True)
            inner.add_param_group({"params": list(layer.parameters()), "lr": 0.1})
        after.append([p.detach().clone() for p in model.parameters()])
    sync.finish()
    after.append([p.detach().clone() for p in model.parameters()])
    return after


@pytest.mark.parametrize("at", [4, 5], ids=["at a round", "between rounds"])
@pytest.mark.parametrize(
    "strategy",
    [cadenza.local_sgd(4), cadenza.diloco(4), cadenza.diloco(4, codec=codecs.error_feedback(codecs.int8()))],
    ids=["mean", "diloco", "error feedback"],
)
def test_parameters_that_are_unfrozen_take_part_from_then_on(ranks: RankPool, strategy: Strategy, at: int) -> None:
    results = ranks.run(2, thaw, strategy, at)
    for n in (7, 9):  # after the round of step 8, and at the end
        for a, b in zip(results[0][n], results[1][n], strict=True):
            assert same_bits(a, b), f"after step {n + 1}"
    for n in range(at):
        assert same_bits(results[0][n][0], results[0][0][0]), "a frozen parameter moved"
    assert not same_bits(results[0][9][0], results[0][0][0])


def test_unfrozen_parameters_walk_the_way_of_diloco(ranks: RankPool) -> None:
    """The anchor of a parameter that is unfrozen at step 4 is its value at step 4, like that of all others."""
    results = ranks.run(2, thaw, cadenza.diloco(4, outer_lr=1.0, outer_momentum=0.0), 4)
    start = results[0][3]
    before = [results[rank][6] for rank in (0, 1)]
    moved = all(not same_bits(x[0], start[0]) for x in before)
    assert moved
    # With lr 1 and no momentum, DiLoCo is local SGD: the last of them is a mean of what the workers hold at the end.
    mean = ranks.run(2, thaw, cadenza.local_sgd(4), 4)
    for a, b in zip(results[0][9], mean[0][9], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def thaw_in_flight(strategy: Strategy) -> None:
    model = mlp()
    layer = model.get_submodule("0").requires_grad_(False)
    inner = plain_sgd(model)
    sync = cadenza.attach(model, inner, strategy)
    for n in range(1, 12):
        backward(model, n)
        inner.step()
        sync.step()
        if n == 5:  # what was launched at step 4 lands at step 6
            layer.requires_grad_(True)
            inner.add_param_group({"params": list(layer.parameters()), "lr": 0.1})
    sync.finish()
    assert_same_on_ranks("after finish()", model.parameters())


LATE = [
    cadenza.local_sgd(4, delay=2),
    cadenza.diloco(4, delay=2, alpha=0.5),
    cadenza.diloco(4, delay=2, keep_progress=True),
]


@pytest.mark.parametrize("strategy", LATE, ids=["mean", "mixed", "progress kept"])
def test_parameters_may_be_unfrozen_while_a_round_is_in_flight(ranks: RankPool, strategy: Strategy) -> None:
    ranks.run(2, thaw_in_flight, strategy)


def freeze_in_flight(strategy: Strategy) -> None:
    model = mlp()
    layer = model.get_submodule("0")
    inner = plain_sgd(model)
    sync = cadenza.attach(model, inner, strategy)
    for n in range(1, 12):
        backward(model, n)
        inner.step()
        sync.step()
        if n == 5:
            layer.requires_grad_(False)
            layer.zero_grad()
    sync.finish()
    assert_same_on_ranks("after finish()", [p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("strategy", [*LATE, cadenza.diloco(4, delay=2)])
def test_parameters_may_be_frozen_while_a_round_is_in_flight(ranks: RankPool, strategy: Strategy) -> None:
    ranks.run(2, freeze_in_flight, strategy)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def grow(strategy: Strategy) -> None:
    torch.manual_seed(0)
    model = Growing()
    inner = plain_sgd(model)
    sync = cadenza.attach(model, inner, strategy)
    for n in range(1, 12):
        inner.zero_grad()
        torch.manual_seed(100 * n + dist.get_rank())
        model(torch.randn(3, 4)).square().sum().backward()
        inner.step()
        sync.step()
        if n == 5:
            torch.manual_seed(7)
            model.layers.append(nn.Linear(4, 4))
            inner.add_param_group({"params": list(model.layers[1].parameters()), "lr": 0.1})
        if n == 8 and not strategy.delay:
            assert_same_on_ranks("after the round of step 8", model.parameters())
    sync.finish()
    assert_same_on_ranks("after finish()", model.parameters())


@pytest.mark.parametrize(
    "strategy",
    [
        cadenza.local_sgd(4),
        cadenza.diloco(4),
        cadenza.slowmo(4),
        Strategy(levels=(LevelPlan(4, outer=cadenza.outer.optimizer(torch.optim.Adam, lr=0.01)),)),
        cadenza.diloco(4, codec=codecs.error_feedback(codecs.int8())),
        cadenza.diloco(4, fragments=cadenza.by_layers(1)),
    ],
    ids=["mean", "diloco", "slowmo", "adam", "error feedback", "fragments"],
)
def test_parameters_that_are_added_later_take_part(ranks: RankPool, strategy: Strategy) -> None:
    ranks.run(2, grow, strategy)


# ---- the warm-up ---------------------------------------------------------------------------------------------------


def warm_up_by_hand() -> list[torch.Tensor]:
    model = mlp()
    inner = momentum_sgd(model)
    sync = cadenza.attach(model, inner, cadenza.post_local_sgd(4, warmup_steps=3))
    gradients = []
    for n in (1, 2, 3):
        backward(model, n)
        sync.average_gradients()
        gradients.append(algorithms.flat([p.grad for p in model.parameters() if p.grad is not None]))
        inner.step()
        sync.step()
    backward(model, 4)
    own = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    sync.average_gradients()  # does nothing after the warm-up
    now = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(own, now, strict=True))
    return gradients


def warm_up_by_ddp() -> list[torch.Tensor]:
    model = CASES["mlp"].model(0)
    ddp = DistributedDataParallel(model)
    inner = momentum_sgd(model)
    gradients = []
    for n in (1, 2, 3):
        backward(ddp, n)
        gradients.append(algorithms.flat([p.grad for p in model.parameters() if p.grad is not None]))
        inner.step()
    return gradients


def test_average_gradients_gives_what_ddp_gives(ranks: RankPool) -> None:
    ours, theirs = ranks.run(3, warm_up_by_hand), ranks.run(3, warm_up_by_ddp)
    for mine, ddp in zip(ours, theirs, strict=True):
        for a, b in zip(mine, ddp, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def forget_to_average() -> tuple[Any, ...]:
    model = mlp()
    inner = momentum_sgd(model)
    sync = cadenza.attach(model, inner, cadenza.post_local_sgd(4, warmup_steps=3))
    backward(model, 1)
    inner.step()
    return outcome(sync.step)


def test_forgetting_average_gradients_is_told(ranks: RankPool) -> None:
    for result in ranks.run(2, forget_to_average):
        assert result[1] == "CadenzaError"
        assert "sync.average_gradients()" in result[2]


# ---- DDP -----------------------------------------------------------------------------------------------------------


def under_ddp(strategy: Strategy, wrap: str, steps: int) -> Any:
    """Train under DDP; count the broadcasts of its buffers, and see when gradients are averaged."""
    rank = dist.get_rank()
    model = CASES["conv_channels_last"].model(rank)
    ddp: nn.Module = DistributedDataParallel(model)
    wrapped = torch.compile(ddp, backend="eager") if wrap == "compiled" else ddp
    inner = momentum_sgd(model)
    sync = cadenza.attach(wrapped, inner, strategy)
    broadcasts: list[int] = []
    synchronise = ddp._sync_buffers
    ddp._sync_buffers = lambda: (broadcasts.append(sync.clock), synchronise())  # type: ignore[assignment,method-assign]
    equal_gradients = []
    for n in range(1, steps + 1):
        wrapped.zero_grad()
        CASES["conv_channels_last"].backward(wrapped, rank, n)
        gradients = everyone([p.grad.clone() for p in model.parameters() if p.grad is not None])
        equal_gradients.append(all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)))
        inner.step()
        sync.step()
    sync.finish()
    assert_same_on_ranks("after finish()", model.parameters())
    return equal_gradients, broadcasts, ddp.require_backward_grad_sync


@pytest.mark.parametrize("wrap", ["", "compiled"])
def test_ddp_falls_silent_at_once_without_a_warm_up(ranks: RankPool, wrap: str) -> None:
    for equal, broadcasts, syncs in ranks.run(2, under_ddp, cadenza.diloco(2), wrap, 4):
        assert equal == [False] * 4
        assert syncs is False
        assert broadcasts == []


def test_ddp_averages_gradients_in_the_warm_up_and_falls_silent_after_it(ranks: RankPool) -> None:
    strategy = cadenza.post_local_sgd(2, warmup_steps=3)
    for equal, broadcasts, syncs in ranks.run(2, under_ddp, strategy, "", 7):
        assert equal == [True] * 3 + [False] * 4
        assert syncs is False
        assert all(clock < 3 for clock in broadcasts), broadcasts


def ddp_inside_a_host(warmup_steps: int) -> Any:
    """Two hosts of two ranks; DDP inside each, DiLoCo across."""
    rank = dist.get_rank()
    host = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    model = mlp()
    ddp = DistributedDataParallel(model, process_group=host)
    inner = momentum_sgd(model)
    sync = cadenza.attach(ddp, inner, cadenza.diloco(2, warmup_steps=warmup_steps))
    equal = []
    for n in range(1, 6):
        backward(ddp, n)
        gradients = everyone([p.grad.clone() for p in model.parameters() if p.grad is not None])
        pairs = [(0, 1), (2, 3), (0, 2)]
        equal.append([all(map(torch.equal, gradients[a], gradients[b])) for a, b in pairs])
        inner.step()
        sync.step()
        if n - warmup_steps in (2, 4):
            assert_same_on_ranks("after a global round", model.parameters())
    sync.finish()
    assert_same_on_ranks("after finish()", model.parameters())
    return equal


def test_ddp_inside_a_host_goes_on_averaging_there(ranks: RankPool) -> None:
    for equal in ranks.run(4, ddp_inside_a_host, 0):
        assert equal == [[True, True, False]] * 5


def test_ddp_inside_a_host_has_a_warm_up_over_all(ranks: RankPool) -> None:
    for equal in ranks.run(4, ddp_inside_a_host, 2):
        assert equal[2:] == [[True, True, False]] * 3


# ---- FSDP2 ---------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 3)  # 3 rows on 2 shards are uneven

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def blocks_batch(replica: int, n: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * n + replica))


def sharded(strategy: Strategy, steps: int, evaluate_at: int = 0) -> Any:
    """Two replicas of two shards; both shards of a replica see the same batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Blocks()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reports: list[Any] = []
    sync = cadenza.attach(
        model, inner, strategy, topology=Topology.from_mesh(mesh, ["replicate"]), observers=[reports.append]
    )
    history = []
    for n in range(1, steps + 1):
        inner.zero_grad()
        model(blocks_batch(dist.get_rank() // 2, n)).square().mean().backward()
        sync.average_gradients()
        inner.step()
        sync.step()
        history.append(algorithms.flat([p.full_tensor() for p in model.parameters()]))  # type: ignore[attr-defined]
        if evaluate_at == n:
            with sync.averaged():
                model(blocks_batch(0, 0))
    sync.finish()
    history.append(algorithms.flat([p.full_tensor() for p in model.parameters()]))  # type: ignore[attr-defined]
    return history, [(report.step, report.drift) for report in reports]


def unsharded(strategy: Strategy, steps: int) -> Any:
    model = Blocks()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reports: list[Any] = []
    sync = cadenza.attach(model, inner, strategy, observers=[reports.append])
    history = []
    for n in range(1, steps + 1):
        inner.zero_grad()
        model(blocks_batch(dist.get_rank(), n)).square().mean().backward()
        sync.average_gradients()
        inner.step()
        sync.step()
        history.append(values(model))
    sync.finish()
    return [*history, values(model)], [(report.step, report.drift) for report in reports]


@pytest.mark.parametrize(
    "strategy",
    [
        cadenza.diloco(3),
        cadenza.post_local_sgd(3, warmup_steps=2),
        cadenza.streaming_diloco(4, layers=1, delay=2, codec=codecs.fp32()),
    ],
    ids=["diloco", "warm-up", "streaming"],
)
def test_shards_walk_the_way_of_the_whole(ranks: RankPool, strategy: Strategy) -> None:
    whole = ranks.run(2, unsharded, strategy, 8)
    for rank, (history, rounds) in enumerate(ranks.run(4, sharded, strategy, 8)):
        expected, expected_rounds = whole[rank // 2]
        assert [step for step, _ in rounds] == [step for step, _ in expected_rounds]
        for n, (got, wanted) in enumerate(zip(history, expected, strict=True), start=1):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6, msg=lambda m, n=n: f"after step {n}: {m}")


def what_needs_the_whole(strategy: Strategy) -> tuple[Any, ...]:
    return outcome(sharded, strategy, 1)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (cadenza.diloco(3, clip=0.01), "without clip"),
        (cadenza.diloco(cadenza.adaptive(2, target_drift=0.02, minimum=1, maximum=6)), "does not follow the drift"),
    ],
    ids=["clip", "adaptive"],
)
def test_what_needs_the_whole_is_refused_on_shards(ranks: RankPool, strategy: Strategy, words: str) -> None:
    for told in ranks.run(4, what_needs_the_whole, strategy):
        assert told[:2] == ("error", "UnsupportedModelError")
        assert words in told[2]


def test_evaluating_the_mean_does_not_disturb_shards(ranks: RankPool) -> None:
    """After a forward pass FSDP2 keeps the root's parameters whole, with the values that they had in it."""
    undisturbed = ranks.run(4, sharded, cadenza.diloco(3), 7)
    for (history, _), (expected, _) in zip(
        ranks.run(4, sharded, cadenza.diloco(3), 7, evaluate_at=4), undisturbed, strict=True
    ):
        for n, (got, wanted) in enumerate(zip(history, expected, strict=True), start=1):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6, msg=lambda m, n=n: f"after step {n}: {m}")


def hsdp() -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Blocks(), mesh=mesh)
    topology = Topology.from_mesh(mesh, ["replicate"])
    return outcome(cadenza.attach, model, plain_sgd(model), cadenza.diloco(4), topology=topology)


def test_fsdp_that_replicates_by_itself_is_refused(ranks: RankPool) -> None:
    for result in ranks.run(4, hsdp):
        assert result[:2] == ("error", "UnsupportedModelError")
        assert "mesh['shard']" in result[2]


def over_shards() -> tuple[Any, ...]:
    model = fully_shard(Blocks(), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    return outcome(cadenza.attach, model, plain_sgd(model), cadenza.diloco(4))


def test_averaging_over_shards_is_refused(ranks: RankPool) -> None:
    for result in ranks.run(2, over_shards):
        assert result[:2] == ("error", "TopologyError")
        assert "replicate" in result[2]


# ---- loops ---------------------------------------------------------------------------------------------------------


def walk(loop: str, strategy: Strategy, steps: int) -> torch.Tensor:
    """The same training in the loop of another style."""
    rank = dist.get_rank()
    model = mlp()
    inner = momentum_sgd(model)
    target: nn.Module = torch.compile(model, backend="aot_eager") if loop == "compiled" else model
    optimizers: Any = inner
    if loop == "two optimizers":
        split = [[p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]]
        optimizers = [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in split]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=True) if "scaler" in loop else None
    options: dict[str, Any] = {"auto": True} if loop.startswith("auto") else {}
    if scaler is not None and options:
        options["scaler"] = scaler
    sync = cadenza.attach(target, optimizers, strategy, **options)
    for n in range(1, steps + 1):
        model.zero_grad()
        batch = CASES["mlp"].data(rank, n)
        if loop == "accumulated":
            for part in batch.split([2, 3]):
                (target(part).square().sum() / batch.numel() * 6 / 3).backward()
        elif loop == "checkpointed":
            checkpoint(target, batch, use_reentrant=False).square().mean().backward()  # type: ignore[union-attr]
        elif scaler is not None:
            scaler.scale(target(batch).square().mean()).backward()
        else:
            target(batch).square().mean().backward()
        if not options:
            sync.average_gradients()
        if scaler is not None:
            scaler.step(inner)
            scaler.update()
        else:
            for optimizer in optimizers if isinstance(optimizers, list) else [inner]:
                optimizer.step()
        if not options:
            sync.step()
    assert sync.clock == steps
    sync.finish()
    return values(model)


LOOPS = ["auto", "auto scaler", "scaler", "compiled", "two optimizers", "accumulated", "checkpointed"]


@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_walks_the_same_way(ranks: RankPool, loop: str) -> None:
    warmup_steps = 0 if loop == "auto scaler" else 2
    strategy = cadenza.diloco(3, warmup_steps=warmup_steps)
    plain = ranks.run(2, walk, "plain", strategy, 9)
    others = ranks.run(2, walk, loop, strategy, 9)
    assert same_bits(others[0], others[1])
    torch.testing.assert_close(others[0], plain[0], rtol=1e-4, atol=1e-5)


def skip_a_step() -> Any:
    """Rank 1's gradient overflows at step 2: its scaler skips the step, and the clock goes on."""
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    sync = cadenza.attach(model, inner, cadenza.local_sgd(3), auto=True, scaler=scaler)
    moved = []
    for n in range(1, 7):
        inner.zero_grad()
        factor = float("inf") if n == 2 and dist.get_rank() == 1 else 1.0
        scaler.scale(model(torch.ones(2)).sum() * factor).backward()
        before = values(model)
        scaler.step(inner)
        if n % 3:
            moved.append(not torch.equal(values(model), before))
        scaler.update()
    clock = sync.clock
    sync.finish()
    original = scaler.update.__func__ is torch.amp.GradScaler.update  # type: ignore[attr-defined]
    return moved, clock, values(model), original


def test_the_clock_ticks_for_steps_that_a_scaler_skips(ranks: RankPool) -> None:
    first, second = ranks.run(2, skip_a_step)
    assert first[0] == [True, True, True, True]
    assert second[0] == [True, False, True, True]
    assert first[1] == second[1] == 6
    assert same_bits(first[2], second[2])
    assert first[3]
    assert second[3], "finish() takes its hook off the scaler"


def hooks_are_taken_off() -> Any:
    model = mlp()
    inner = momentum_sgd(model)
    sync = cadenza.attach(model, inner, cadenza.diloco(2, warmup_steps=1), auto=True)
    for n in (1, 2):
        backward(model, n)
        inner.step()
    sync.finish()
    clock = sync.clock
    backward(model, 3)
    inner.step()
    return clock, sync.clock, len(inner._optimizer_step_post_hooks), len(inner._optimizer_step_pre_hooks)


def test_finish_takes_its_hooks_off_the_optimizer(ranks: RankPool) -> None:
    assert ranks.run(2, hooks_are_taken_off) == [(2, 2, 0, 0)] * 2


# ---- buffers and optimizer state -----------------------------------------------------------------------------------


def with_batch_norm(buffers: bool) -> Any:
    rank = dist.get_rank()
    model = CASES["conv_channels_last"].model(rank)
    inner = plain_sgd(model)
    sync = cadenza.attach(model, inner, cadenza.local_sgd(2, buffers=buffers))
    for n in (1, 2):
        backward(model, n, "conv_channels_last")
        if rank == 1:  # one forward more a step
            model(CASES["conv_channels_last"].data(rank, 100 + n))
        inner.step()
        if n == 2:
            own = copy.deepcopy(dict(model.named_buffers()))
        sync.step()
    return own, dict(model.named_buffers())


def test_statistics_are_averaged_and_counters_taken_from_the_largest(ranks: RankPool) -> None:
    results = ranks.run(2, with_batch_norm, True)
    for _, after in results:
        for name, value in after.items():
            mine, theirs = results[0][0][name], results[1][0][name]
            if name.endswith("num_batches_tracked"):
                assert (mine, theirs, value) == (2, 4, 4)
            else:
                assert not torch.equal(mine, theirs)
                torch.testing.assert_close(value, (mine + theirs) / 2)


def test_buffers_are_left_alone_unless_asked_for(ranks: RankPool) -> None:
    for own, after in ranks.run(2, with_batch_norm, False):
        assert all(torch.equal(own[name], after[name]) for name in own)


def moments(strategy: Strategy) -> Any:
    model = mlp()
    inner = adam(model)
    sync = cadenza.attach(model, inner, strategy)
    for n in (1, 2):
        backward(model, n)
        inner.step()
        if n == 2:
            before = copy.deepcopy([inner.state[p] for p in model.parameters()])
        sync.step()
    return before, [dict(inner.state.get(p, {})) for p in model.parameters()]


def test_the_moments_of_adam_are_averaged(ranks: RankPool) -> None:
    results = ranks.run(2, moments, cadenza.diloco(2, optimizer_state="average"))
    for _, after in results:
        for mine, theirs, now in zip(results[0][0], results[1][0], after, strict=True):
            assert now["step"] == 2
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(now[key], (mine[key] + theirs[key]) / 2)


def test_the_moments_of_adam_are_reset(ranks: RankPool) -> None:
    for _, after in ranks.run(2, moments, cadenza.diloco(2, optimizer_state="reset")):
        assert all(not state for state in after)


@pytest.mark.parametrize("strategy", [cadenza.diloco(2), cadenza.slowmo(2)], ids=["diloco", "slowmo"])
def test_the_moments_of_adam_are_left_alone_unless_asked_for(ranks: RankPool, strategy: Strategy) -> None:
    for before, after in ranks.run(2, moments, strategy):
        for was, now in zip(before, after, strict=True):
            assert all(torch.equal(was[key], now[key]) for key in ("exp_avg", "exp_avg_sq", "step"))
