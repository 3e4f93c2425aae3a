"""Sites of replicas of several ranks: both levels hold their rounds column by column, and lose and regain replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import cadenza
from cadenza.topology import Level, Topology
from support.faults import FEEDBACK, arm, hierarchy
from support.islands import RANKS, Net, board, build, local_values, rank, take_step, train
from support.ranks import RankPool, outcome

REPLICAS = 4  # two at each of two sites
SITES = ("eu", "eu", "us", "us")
# By DDP, a rank's part of the model goes to all at once, and in fixed groups by stages: sums in another order, which
# would be other bytes.
CODECS = {"fsdp": FEEDBACK, "ddp": cadenza.codecs.fp32()}


# ---- nothing happens -------------------------------------------------------------------------------------------------


def undisturbed(port: int, kind: str, steps: int) -> dict[str, Any]:
    return train(port, kind, REPLICAS, hierarchy(codec=CODECS[kind]), steps, site=SITES[rank() // RANKS])


def in_fixed_groups(kind: str, steps: int) -> torch.Tensor:
    """The same sites and replicas as ranks of one fixed group."""
    replica, number = divmod(rank(), RANKS)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("replicate", "shard"))
        model, optimizer = build(kind, 0, mesh["shard"])
    else:
        inner = [dist.new_group([RANKS * replica, RANKS * replica + 1]) for replica in range(REPLICAS)]
        torch.manual_seed(100)
        model = DistributedDataParallel(Net(), process_group=inner[replica])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    topology = Topology((Level(((0, 2), (1, 3), (4, 6), (5, 7))), Level(((0, 2, 4, 6), (1, 3, 5, 7)))))
    sync = cadenza.attach(model, optimizer, hierarchy(2, cadenza.raise_error(), CODECS[kind]), topology=topology)
    while sync.clock < steps:
        take_step(model, optimizer, replica, number, sync.clock)
        sync.step(samples=8)
    sync.finish()
    return local_values(model)


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_sites_of_islands_walk_the_way_of_fixed_ranks(ranks: RankPool, store: int, kind: str) -> None:
    steps = 20
    expected = ranks.run(RANKS * REPLICAS, in_fixed_groups, kind, steps)
    results = ranks.run(RANKS * REPLICAS, undisturbed, store, kind, steps, init=False)
    for number, (got, wanted) in enumerate(zip(results, expected, strict=True)):
        assert torch.equal(got["values"], results[number % RANKS]["values"])
        if kind == "fsdp":
            assert torch.equal(got["values"], wanted)
        else:
            torch.testing.assert_close(got["values"], wanted)
        assert not got["failed"]
        assert got["participants"][:3] == [(0, 1) if number < 4 else (2, 3)] * 2 + [(0, 1, 2, 3)]


# ---- ranks die, and a replica comes back -----------------------------------------------------------------------------


def note_rounds(_: Any) -> None:
    board().set("rounds were held without them", "")


def die_and_come_back(port: int, kind: str) -> tuple[Any, ...]:
    """A rank of replica 1 dies in a round of its site, one of 3 in a round of all; 8 and 9 are replica 1 again."""
    at = {3: {10: arm("exchange")}, 6: {24: arm("wire to vote")}, 0: {37: note_rounds}}
    replica, life = rank() // RANKS, 0
    if replica == REPLICAS:
        board().wait(["rounds were held without them"])
        replica, life = 1, 1
    acts, site = at.get(rank()), SITES[replica]
    return outcome(
        train, port, kind, REPLICAS, hierarchy(), 84, replica=replica, life=life, at=acts, site=site, step_s=0.05
    )


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_ranks_die_in_rounds_of_both_levels_and_a_replica_comes_back(ranks: RankPool, store: int, kind: str) -> None:
    results = ranks.run(10, die_and_come_back, store, kind, init=False, expect_dead={3, 6}, discard=True)
    for mate in (2, 7):
        assert results[mate][0] == "error"
    for number in range(RANKS):
        first, third, again = (results[RANKS * place + number][1] for place in (0, 2, 4))
        assert torch.equal(first["values"], third["values"])
        assert torch.equal(first["values"], again["values"])
        held, elsewhere = (dict(zip(one["rounds"], one["participants"], strict=True)) for one in (first, third))
        assert 10 in first["failed"]
        assert elsewhere[10] == (2, 3), "the other site has nothing to do with it"
        assert held[12] == elsewhere[12] == (0, 2, 3)
        assert 24 in first["failed"]
        assert 24 in third["failed"]
        assert held[30] == elsewhere[30] == (0, 2)
        assert (held[32], elsewhere[32]) == ((0,), (2,)), "a site that has shrunk to one goes on by itself"
        assert 36 <= again["joined_at"] < again["clock"] == 84
        assert again["rounds"][-1] == 84
        assert held[84] == (0, 1, 2)
        assert held[82] == (0, 1), "and holds the rounds of its site again"
