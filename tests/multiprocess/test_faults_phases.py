"""A worker is killed at every phase of a round: what is not agreed on changes nothing, and the others go on."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch

import cadenza
from cadenza.participants import circle
from cadenza.participants import generation as generations
from support.faults import QUICK, arm, before, kill, rank, train
from support.ranks import RankPool

PERIOD = 5


def die_in_turn(port: int, phases: list[str], codec: str) -> dict[str, Any]:
    """Workers 1, 2, … die at one phase each, a round apart; the first and the last one live."""
    made = {"fp32": cadenza.codecs.fp32, "int8": cadenza.codecs.int8}[codec]()
    feedback = made if codec == "fp32" else cadenza.codecs.error_feedback(made)
    strategy = cadenza.diloco(period=PERIOD, outer_lr=0.5, codec=feedback, faults=cadenza.shrink(**QUICK))
    doomed = 1 <= rank() <= len(phases)
    at = {2 * PERIOD * rank(): arm(phases[rank() - 1])} if doomed else None
    return train(port, len(phases) + 2, strategy, 2 * PERIOD * (len(phases) + 1), at=at)


@pytest.mark.parametrize(
    ("codec", "phases"),
    [
        ("fp32", ["signed", "exchange", "launch", "land"]),
        ("int8", ["pack", "combine", "wire to vote", "voting", "landing"]),
    ],
)
def test_a_kill_at_any_phase_of_a_round_costs_nobody_else_anything(
    ranks: RankPool, store: int, codec: str, phases: list[str]
) -> None:
    dead = range(1, len(phases) + 1)
    results = ranks.run(len(phases) + 2, die_in_turn, store, phases, codec, init=False, expect_dead=set(dead))
    first, last = results[0], results[-1]
    assert torch.equal(first["values"], last["values"])
    assert first["taken"] == last["taken"] == 2 * PERIOD * (len(phases) + 1)
    assert (first["rounds"], first["failed"]) == (last["rounds"], last["failed"])
    for worker, phase in zip(dead, phases, strict=True):
        step = 2 * PERIOD * worker
        # What everyone had agreed on before the death counts; what came too late for that changed nothing.
        expected = "rounds" if phase == "landing" else "failed"
        assert step in first[expected] or phase in ("signed", "voting")
        assert step + PERIOD in first["rounds"], "the next round is held by those who are left"
    assert first["participants"][-1] == (0, len(phases) + 1)


def die_while_the_others_connect(port: int) -> dict[str, Any]:
    strategy = cadenza.diloco(period=PERIOD, outer_lr=0.5, faults=cadenza.shrink(**QUICK))
    at = {1: {2 * PERIOD: arm("pack")}, 2: {2 * PERIOD + 1: arm("connecting")}}.get(rank())
    return train(port, 5, strategy, 5 * PERIOD, at=at)


def test_a_death_while_a_group_is_made_is_known_at_once(ranks: RankPool, store: int) -> None:
    first, *_, last = ranks.run(5, die_while_the_others_connect, store, init=False, expect_dead={1, 2})
    assert torch.equal(first["values"], last["values"])
    assert first["failed"] == [2 * PERIOD, 3 * PERIOD]
    assert any("died while the members connected" in reason for reason in first["reasons"])
    assert first["participants"][-1] == (0, 3, 4)


def leader_dies_while_giving(port: int) -> Any:
    strategy = cadenza.diloco(period=PERIOD, outer_lr=0.5, faults=cadenza.shrink(**QUICK))
    if rank() < 3:
        if rank() == 0:  # the leader, as long as it lives; at the start it must not die yet
            original = circle.transfer_state
            calls: list[int] = []

            def die_at_the_second(*args: Any, **kwargs: Any) -> Any:
                calls.append(1)
                return kill() if len(calls) == 2 else original(*args, **kwargs)

            mock.patch.object(circle, "transfer_state", die_at_the_second).start()
        return train(port, 3, strategy, 50, step_s=0.04)
    time.sleep(1.0)
    return train(port, 3, strategy, 50, worker=3, step_s=0.04)


def test_a_leader_that_dies_while_another_joins_costs_a_round(ranks: RankPool, store: int) -> None:
    _, second, third, late = ranks.run(4, leader_dies_while_giving, store, init=False, expect_dead={0}, discard=True)
    assert torch.equal(second["values"], third["values"])
    assert torch.equal(second["values"], late["values"])
    assert second["taken"] == third["taken"] == 50
    assert second["participants"][-1] == (1, 2, 3)


def joiner_dies(port: int) -> Any:
    strategy = cadenza.diloco(period=PERIOD, outer_lr=0.5, faults=cadenza.shrink(**QUICK))
    if rank() == 2:
        time.sleep(1.0)
        mock.patch.object(generations.Generation, "broadcast", before).start()
    return train(port, 2, strategy, 50, step_s=0.04)


def test_a_worker_that_dies_while_it_joins_costs_a_round(ranks: RankPool, store: int) -> None:
    first, second, _ = ranks.run(3, joiner_dies, store, init=False, expect_dead={2})
    assert torch.equal(first["values"], second["values"])
    assert first["taken"] == second["taken"] == 50
    assert first["participants"][-1] == (0, 1)
