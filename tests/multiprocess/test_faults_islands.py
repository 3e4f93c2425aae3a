"""Replicas of several ranks, by FSDP2 or DDP, that lose ranks and come back, while the others train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import cadenza
from cadenza.engine.saving import local
from cadenza.topology import Level, Topology
from support.compare import same_bits
from support.faults import LEASE_S, QUICK, arm, kill, stop_for
from support.islands import RANKS, Net, board, build, local_values, make_world, rank, take_step, train
from support.ranks import RankPool, outcome

PERIOD = 4


def strategy(name: str, faults: cadenza.FaultPolicy) -> cadenza.Strategy:
    feedback = cadenza.codecs.error_feedback(cadenza.codecs.int8())
    if name == "streaming":
        return cadenza.streaming_diloco(PERIOD, layers=1, delay=2, codec=feedback, faults=faults)
    codec = feedback if name == "feedback" else cadenza.codecs.fp32()
    warmup_steps = PERIOD + 1 if name == "warm-up" else 0
    return cadenza.diloco(PERIOD, outer_lr=0.5, codec=codec, faults=faults, warmup_steps=warmup_steps)


def fixed(kind: str, name: str, steps: int) -> tuple[torch.Tensor, list[float | None]]:
    """The same replicas as ranks of one fixed group."""
    replica, number = divmod(rank(), RANKS)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("replicate", "shard"))
        model, optimizer = build(kind, replica, mesh["shard"])
        topology = Topology.from_mesh(mesh, ["replicate"])
    else:
        inner = [dist.new_group([RANKS * replica + number for number in range(RANKS)]) for replica in range(2)]
        torch.manual_seed(100 + replica)
        model = DistributedDataParallel(Net(), process_group=inner[replica])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        topology = Topology((Level(tuple((number, RANKS + number) for number in range(RANKS))),))
    reports: list[cadenza.RoundReport] = []
    chosen = strategy(name, cadenza.raise_error())
    sync = cadenza.attach(model, optimizer, chosen, topology=topology, observers=[reports.append])
    while sync.clock < steps:
        take_step(model, optimizer, replica, number, sync.clock, sync)
        sync.step(samples=8)
    sync.finish()
    return local_values(model), [report.drift for report in reports]


def undisturbed(port: int, kind: str, name: str, steps: int) -> dict[str, Any]:
    return train(port, kind, 2, strategy(name, cadenza.shrink(**QUICK)), steps)


@pytest.mark.parametrize(
    ("kind", "name"), [("fsdp", "diloco"), ("fsdp", "streaming"), ("fsdp", "warm-up"), ("ddp", "diloco")]
)
def test_islands_walk_the_way_of_fixed_ranks(ranks: RankPool, store: int, kind: str, name: str) -> None:
    steps = 3 * PERIOD
    expected = ranks.run(4, fixed, kind, name, steps)
    results = ranks.run(4, undisturbed, store, kind, name, steps, init=False)
    for (wanted, _), got in zip(expected, results, strict=True):
        assert torch.equal(got["values"], wanted)
        assert not got["failed"]
        assert got["drifts"] == results[0]["drifts"], "a number on which schedules rely, the same on all ranks"
    if kind == "ddp":
        assert results[0]["drifts"] == pytest.approx(expected[0][1])
        size = 4 * results[0]["values"].numel()
        assert size <= sum(one["raw_bytes"][0] for one in results[:RANKS]) <= 1.2 * size, "the model crosses once"


def die_in_turn(port: int, kind: str, name: str, phases: list[str], victims: list[int]) -> tuple[Any, ...]:
    """A rank of replica 1, 2, …, one of the victims, dies at a phase each; the first and the last replica live."""
    replica, at = rank() // RANKS, {}
    if rank() in victims:
        phase = phases[replica - 1]
        at = {2 * PERIOD * replica - 2: kill} if phase == "between" else {2 * PERIOD * replica: arm(phase)}
    steps = 2 * PERIOD * (len(phases) + 1)
    return outcome(train, port, kind, len(phases) + 2, strategy(name, cadenza.shrink(**QUICK)), steps, at=at)


@pytest.mark.parametrize(
    ("kind", "name", "phases"),
    [("fsdp", "diloco", ["between", "exchange", "wire to vote"]), ("ddp", "feedback", ["pack", "voting", "landing"])],
)
def test_a_rank_that_is_killed_ends_its_replica_and_costs_the_others_nothing(
    ranks: RankPool, store: int, kind: str, name: str, phases: list[str]
) -> None:
    replicas = len(phases) + 2
    dead = [RANKS * replica + replica % RANKS for replica in range(1, replicas - 1)]
    results = ranks.run(
        RANKS * replicas, die_in_turn, store, kind, name, phases, dead, init=False, expect_dead=set(dead)
    )
    for number in range(RANKS):
        (_, first), (_, last) = results[number], results[-RANKS + number]
        assert torch.equal(first["values"], last["values"])
        assert (first["rounds"], first["failed"]) == (last["rounds"], last["failed"])
        assert first["participants"][-1] == (0, replicas - 1)
    assert [step for step in results[0][1]["rounds"] if step % (2 * PERIOD)] == [
        PERIOD + 2 * PERIOD * i for i in range(replicas - 1)
    ], "the round after a death is held"
    for phase, victim in zip(phases, dead, strict=True):
        ended, kind_of_error, text = results[victim ^ 1]
        assert ended == "error"
        # Between rounds it may be the model's own collective, in the next step, that fails first.
        assert kind_of_error == "ReplicaBrokenError" or phase in ("between", "landing"), text


def die_in_the_warm_up(port: int, kind: str) -> tuple[Any, ...]:
    at = {2: arm("wire to vote")} if rank() == 3 else {}
    return outcome(train, port, kind, 3, strategy("warm-up", cadenza.shrink(**QUICK)), 2 * PERIOD, at=at)


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_rank_that_dies_in_the_warm_up_leaves_the_others_alike(ranks: RankPool, store: int, kind: str) -> None:
    results = ranks.run(3 * RANKS, die_in_the_warm_up, store, kind, init=False, expect_dead={3})
    assert results[2][0] == "error"
    for number in range(RANKS):
        (_, first), (_, last) = results[number], results[-RANKS + number]
        assert torch.equal(first["values"], last["values"])
        assert first["participants"][-1] == (0, 2)


def note_rounds(_: Any) -> None:
    board().set("rounds were held without it", "")


def lose_a_rank_and_come_back(port: int, kind: str, name: str, policy: str = "shrink") -> tuple[Any, ...]:
    """Replica 1 loses a rank; ranks 6 and 7 are its second life."""
    faults = cadenza.shrink(**QUICK) if policy == "shrink" else cadenza.skip_round(**QUICK)
    chosen, steps = strategy(name, faults), 60
    if rank() < 3 * RANKS:
        at = {0: {25: note_rounds}, RANKS: {13: kill}}.get(rank(), {})
        return outcome(train, port, kind, 3, chosen, steps, at=at, step_s=0.04)
    board().wait(["rounds were held without it"])
    return outcome(train, port, kind, 3, chosen, steps, replica=1, life=1, step_s=0.04)


@pytest.mark.parametrize(("kind", "name"), [("fsdp", "feedback"), ("ddp", "streaming")])
def test_a_replica_that_is_started_again_takes_the_state_of_the_others(
    ranks: RankPool, store: int, kind: str, name: str
) -> None:
    dead = {RANKS}
    results = ranks.run(8, lose_a_rank_and_come_back, store, kind, name, init=False, expect_dead=dead, discard=True)
    for number in range(RANKS):
        again = results[3 * RANKS + number][1]
        assert 25 <= again["joined_at"] < again["clock"] == 60
        for replica in (0, 2):
            other = results[RANKS * replica + number][1]
            assert torch.equal(other["values"], again["values"])
            assert other["participants"][-1] == (0, 1, 2)
            assert (0, 2) in other["participants"], "meanwhile the others went on"


def test_rounds_are_skipped_until_a_replica_is_back_where_all_are_needed(ranks: RankPool, store: int) -> None:
    told = ("ddp", "diloco", "skip_round")
    results = ranks.run(8, lose_a_rank_and_come_back, store, *told, init=False, expect_dead={RANKS}, discard=True)
    for number in range(RANKS):
        first, third, again = (results[RANKS * place + number][1] for place in (0, 2, 3))
        assert set(first["participants"]) == {(0, 1, 2)}
        assert first["failed"]
        assert torch.equal(first["values"], third["values"])
        assert torch.equal(first["values"], again["values"])


def poisoned(port: int, kind: str) -> dict[str, Any]:
    """One rank of replica 1 has a NaN, in its shard alone, before a round."""

    def poison(sync: Any) -> None:
        parameter = next(iter(sync.replica.view.parameters().values()))
        local(parameter.data).view(-1)[0] = float("nan")

    at = {2 * PERIOD: poison} if rank() == RANKS + 1 else {}
    return train(port, kind, 3, strategy("feedback", cadenza.shrink(**QUICK)), 4 * PERIOD, at=at)


def test_a_replica_with_a_nan_in_one_shard_is_left_out_as_a_whole(ranks: RankPool, store: int) -> None:
    results = ranks.run(6, poisoned, store, "fsdp", init=False)
    for number, one in enumerate(results):
        assert torch.equal(one["values"], results[number % RANKS]["values"])
        assert one["rounds"] == [PERIOD, 2 * PERIOD, 3 * PERIOD, 4 * PERIOD]
        assert any("worker 1 was left out" in reason for reason in one["reasons"]), "in all columns alike"
        assert one["values"].isfinite().all()


def stop_a_rank(port: int) -> dict[str, Any]:
    at = {10: stop_for(2.0)} if rank() == RANKS + 1 else {}
    return train(port, "fsdp", 3, strategy("diloco", cadenza.shrink(**QUICK)), 80, at=at, step_s=0.04)


def test_a_rank_that_stands_still_keeps_nobody_but_its_replica(ranks: RankPool, store: int) -> None:
    results = ranks.run(6, stop_a_rank, store, init=False)
    for number, one in enumerate(results):
        assert torch.equal(one["values"], results[number % RANKS]["values"])
    assert (0, 2) in results[0]["participants"], "the others went on"
    assert results[0]["participants"][-1] == (0, 1, 2), "and it came back"


def save_and_restore(port: int, kind: str, folder: str) -> list[str]:
    """Each rank of two replicas saves; those of another job go on from there. Returns what is not as it was."""

    def save(sync: Any, model: Any, optimizer: Any) -> dict[str, Any]:
        cadenza.checkpoint.save(folder, model=model, optimizer=optimizer, sync=sync)
        return dict(sync.state_dict())

    chosen, replica = strategy("feedback", cadenza.shrink(**QUICK)), rank() // RANKS
    saved = train(port, kind, 2, chosen, 2 * PERIOD + 1, then=save)["then"]
    model, optimizer = build(kind, replica)
    membership = cadenza.join(
        f"127.0.0.1:{port}", worker=replica, workers=2, replica=dist.group.WORLD, job="again", lease_s=LEASE_S
    )
    with cadenza.attach(model, optimizer, chosen, membership=membership) as sync:
        cadenza.checkpoint.load(folder, model=model, optimizer=optimizer, sync=sync)
        assert sync.clock == 2 * PERIOD + 1
        found = sync.state_dict()
        assert found.keys() == saved.keys()
        tensors = [key for key, value in saved.items() if isinstance(value, torch.Tensor)]
        return [key for key in tensors if not same_bits(found[key], saved[key])]


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_every_rank_of_a_replica_goes_on_from_its_own_checkpoint(
    ranks: RankPool, store: int, tmp_path: Path, kind: str
) -> None:
    assert ranks.run(4, save_and_restore, store, kind, str(tmp_path), init=False) == [[]] * 4


def refused(port: int) -> list[tuple[Any, ...]]:
    """What is said of models and groups that are no replica."""
    make_world(0)
    chosen, address = strategy("diloco", cadenza.shrink(**QUICK)), f"127.0.0.1:{port}"
    told = [outcome(cadenza.join, address, replica=dist.group.WORLD)]
    told.append(outcome(cadenza.join, address, worker=rank(), workers=2, replica=dist.group.WORLD))
    alone = [dist.new_group([number]) for number in range(RANKS)][rank()]
    for kind, group in (("fsdp", None), ("ddp", None), ("ddp", alone)):
        model, optimizer = build(kind, 0)
        membership = cadenza.join(address, worker=rank(), workers=1, replica=group, job=f"{rank()} {kind} {group}")
        told.append(outcome(cadenza.attach, model, optimizer, chosen, membership=membership))
        membership.close()
    torch.manual_seed(rank())
    model = Net()
    membership = cadenza.join(address, worker=0, workers=1, replica=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told.append(outcome(cadenza.attach, model, optimizer, chosen, membership=membership))
    membership.close()
    return told


def test_what_is_no_replica_is_refused_with_what_to_do(ranks: RankPool, store: int) -> None:
    for told in ranks.run(RANKS, refused, store, init=False):
        kinds = [kind for _, kind, _ in told]
        assert kinds == [
            "NotInitializedError",
            "DisagreementError",
            *["UnsupportedModelError"] * 3,
            "DisagreementError",
        ]
        texts = [text for _, _, text in told]
        assert "set CADENZA_WORKER, or" in texts[0], "RANK counts the ranks of the replica"
        assert all("cadenza.join(replica=…)" in text for text in texts[2:5])
        assert "worker is 0 on rank 0, 1 on rank 1" in texts[1]
        assert "different values" in texts[5]
