"""Sites with rounds of their own between those of all: workers and whole sites go, come back, and miss rounds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import cadenza
from cadenza.participants.latest_round import LatestRound
from cadenza.participants.signing import Signer
from cadenza.participants.store import StoreConnection
from support.faults import OUTER, QUICK, arm, build, hierarchy, kill, rank, stop_for, take_step, train
from support.ranks import RankPool


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train_at(
    port: int,
    site: str,
    steps: int,
    *,
    workers: int = 4,
    worker: int | None = None,
    strategy: cadenza.Strategy | None = None,
    at: dict[int, Callable[[Any], None]] | None = None,
    step_s: float = 0.02,
) -> dict[str, Any]:
    """Train at a site; tell also who held which round, whether by stages, and hold that nothing has come apart."""
    staged: dict[int, bool] = {}
    messages = Messages()
    logging.getLogger("cadenza").addHandler(messages)

    def watch(step: int) -> Callable[[Any], None]:
        def look(sync: Any) -> None:
            staged[step - 1] = sync.replica.participants.levels[-1].stage is not None
            if at is not None and step in at:
                at[step](sync)

        return look

    watched = {step: watch(step) for step in {*range(OUTER + 1, steps + 1, OUTER), *(at or ())}}
    try:
        told = train(port, workers, strategy or hierarchy(), steps, worker=worker, at=watched, step_s=step_s, site=site)
    finally:
        logging.getLogger("cadenza").removeHandler(messages)
    assert not [text for text in messages.texts if "not the same to the last bit" in text]
    held = dict(zip(told["rounds"], told["participants"], strict=True))
    return told | {"staged": staged, "held": held}


def wait_for_round_of_all(port: int, step: int) -> None:
    """Wait until somebody has come to a round of all at a step, or later."""
    signer = Signer("job", secret=None)
    connection, latest = StoreConnection(f"127.0.0.1:{port}", signer), LatestRound(signer)
    while (found := connection.call(latest.read)) is None or found.round.step < step:
        time.sleep(0.02)
    connection.close()


# ---- nothing happens -------------------------------------------------------------------------------------------------


def undisturbed(port: int) -> dict[str, Any]:
    return train_at(port, "eu" if rank() < 2 else "us", 20, step_s=0.0)


def in_fixed_groups(start: torch.Tensor) -> torch.Tensor:
    model, optimizer = build(0)
    torch.nn.utils.vector_to_parameters(start, model.parameters())
    sync = cadenza.attach(model, optimizer, hierarchy(2, cadenza.raise_error()))
    for step in range(20):
        take_step(model, optimizer, rank(), step)
        sync.step()
    sync.finish()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def test_without_faults_a_hierarchy_gives_the_bits_of_fixed_groups(ranks: RankPool, store: int) -> None:
    elastic = ranks.run(4, undisturbed, store, init=False)
    start = torch.nn.utils.parameters_to_vector(build(0)[0].parameters()).detach()
    fixed = ranks.run(4, in_fixed_groups, start)
    for one, other in zip(elastic, fixed, strict=True):
        assert torch.equal(one["values"], other)
        assert not one["failed"]
        assert one["staged"] == {6: True, 12: True, 18: True}
    assert elastic[0]["held"] == elastic[1]["held"]
    assert [elastic[2]["held"][step] for step in (2, 4, 6)] == [(2, 3), (2, 3), (0, 1, 2, 3)]


# ---- workers die -----------------------------------------------------------------------------------------------------


def die_in_turn(port: int) -> dict[str, Any]:
    """Sites of three: one dies in a round of its site, then one of each site in a round of all."""
    at = {1: {10: arm("exchange")}, 4: {18: arm("pack", 1)}, 2: {30: arm("wire to vote", 1)}}.get(rank())
    return train_at(port, "eu" if rank() < 3 else "us", 44, workers=6, at=at)


def test_deaths_in_rounds_of_both_levels_cost_nobody_else_anything(ranks: RankPool, store: int) -> None:
    results = ranks.run(6, die_in_turn, store, init=False, expect_dead={1, 2, 4})
    first, fourth, last = results[0], results[3], results[5]
    assert torch.equal(first["values"], fourth["values"])
    assert torch.equal(first["values"], last["values"])
    assert first["taken"] == fourth["taken"] == 44
    assert 10 in first["failed"]
    assert 10 in fourth["rounds"], "the other site has nothing to do with it"
    for step in (18, 30):
        assert all(step in result["failed"] for result in (first, fourth, last))
    assert (first["held"][12], first["held"][24], first["held"][36]) == ((0, 2, 3, 4, 5), (0, 2, 3, 5), (0, 3, 5))
    # By stages where the sites are of one size above one: at first, and when both have lost one.
    known = {step: staged for step, staged in first["staged"].items() if step in first["held"]}
    assert known == {6: True, 12: False, 24: True, 36: False, 42: False}
    assert {32, 34} <= set(first["failed"]), "one of two is no majority of its site"
    assert first["held"][38] == (0,), "until a round of all was held without the other: it goes on by itself"


def grows_again(port: int) -> dict[str, Any]:
    if rank() < 4:
        at = {9: kill} if rank() == 1 else None
        return train_at(port, "eu" if rank() < 2 else "us", 72, at=at, step_s=0.05)
    wait_for_round_of_all(port, 24)
    return train_at(port, "eu", 72, worker=1, step_s=0.05)


def test_a_site_shrinks_to_one_and_grows_again(ranks: RankPool, store: int) -> None:
    first, _, third, _, again = ranks.run(5, grows_again, store, init=False, expect_dead={1})
    assert torch.equal(first["values"], third["values"])
    assert torch.equal(first["values"], again["values"])
    assert (first["held"][18], first["held"][20]) == ((0, 2, 3), (0,))
    assert again["joined_at"] >= 24
    assert again["held"][70] == first["held"][70] == (0, 1)
    assert (first["staged"][18], first["staged"][66]) == (False, True)


# ---- sites go --------------------------------------------------------------------------------------------------------


def half() -> cadenza.Strategy:
    return hierarchy(faults=cadenza.shrink(quorum=0.4, **QUICK))  # one of two sites may go on by itself


def site_dies(port: int) -> dict[str, Any]:
    if rank() < 2:
        return train_at(port, "eu", 90, strategy=half(), step_s=0.05)
    if rank() < 4:
        return train_at(port, "us", 90, strategy=half(), at={9: kill}, step_s=0.05)
    wait_for_round_of_all(port, 18)
    return train_at(port, "us", 90, worker=rank() - 2, strategy=half(), step_s=0.05)


def test_a_site_that_has_died_comes_back_with_the_state_of_another(ranks: RankPool, store: int) -> None:
    first, second, _, _, *again = ranks.run(6, site_dies, store, init=False, expect_dead={2, 3})
    assert all(torch.equal(first["values"], other["values"]) for other in (second, *again))
    assert first["taken"] == 90
    assert (0, 1) in [members for step, members in first["held"].items() if step % OUTER == 0]
    assert all(one["joined_at"] > 9 and one["joined_at"] % OUTER == 0 for one in again), "in a round of all"
    assert all(one["held"][88] == (2, 3) for one in again), "and holds its own rounds again"
    assert first["held"][84] == (0, 1, 2, 3)


def site_stops(port: int) -> dict[str, Any]:
    at = {13: stop_for(2.5)} if rank() > 1 else None
    return train_at(port, "eu" if rank() < 2 else "us", 110, strategy=half(), at=at, step_s=0.05)


def test_a_site_that_misses_rounds_of_all_comes_back_with_its_progress(ranks: RankPool, store: int) -> None:
    results = ranks.run(4, site_stops, store, init=False)
    assert all(torch.equal(results[0]["values"], other["values"]) for other in results)
    first, third, fourth = results[0], results[2], results[3]
    assert (0, 1) in [members for step, members in first["held"].items() if step % OUTER == 0]
    assert first["held"][108] == (0, 1, 2, 3)
    assert third["taken"] < 110, "it went on from the step of the others"
    for one, other, mate in ((third, fourth, 3), (fourth, third, 2)):  # either may be a round ahead when both go on
        together = {step: members for step, members in one["held"].items() if mate in members}
        assert together == {step: other["held"][step] for step in together}
        assert len(one["held"]) - len(together) <= 1
    assert first["taken"] == 110


# ---- three levels ----------------------------------------------------------------------------------------------------


def in_three_levels(port: int) -> dict[str, Any]:
    faults = cadenza.shrink(**QUICK)
    strategy = cadenza.hierarchical({2: "site", 4: "site", 8: "all"}, faults=faults)
    at = {12: arm("exchange", 1)} if rank() == 1 else None
    site = ["eu/a", "eu/a", "eu/b", "us/a"][rank()]
    return train_at(port, site, 30, strategy=strategy, at=at)


def test_racks_in_sites_in_a_whole(ranks: RankPool, store: int) -> None:
    results = ranks.run(4, in_three_levels, store, init=False, expect_dead={1})
    first, third, fourth = results[0], results[2], results[3]
    assert torch.equal(first["values"], third["values"])
    assert torch.equal(first["values"], fourth["values"])
    assert [first["held"][step] for step in (2, 4, 8)] == [(0, 1), (0, 1, 2), (0, 1, 2, 3)]
    assert [fourth["held"][step] for step in (2, 4, 12)] == [(3,), (3,), (3,)]
    assert 12 in first["failed"]
    assert 12 in third["failed"]
    assert first["held"][16] == (0, 2, 3)
    assert first["held"][18] == (0,)
    assert first["held"][20] == (0, 2)


# ---- a warm-up -------------------------------------------------------------------------------------------------------


def warm_up_at_sites(port: int) -> dict[str, Any]:
    """Worker 1 dies in the warm-up, and comes back as a new process, of rank 4, in mid-warm-up."""
    strategy = replace(hierarchy(), warmup_steps=30)
    if rank() == 4:
        wait_for_round_of_all(port, 9)
        return train_at(port, "eu", 48, worker=1, strategy=strategy)
    at = {5: arm("wire to vote", 1)} if rank() == 1 else None
    return train_at(port, "eu" if rank() < 2 else "us", 48, strategy=strategy, at=at)


def test_a_warm_up_is_of_all_sites_together(ranks: RankPool, store: int) -> None:
    first, _, *others, late = ranks.run(5, warm_up_at_sites, store, init=False, expect_dead={1})
    for other in others:
        for step, values in first["in the warm-up"].items():
            assert torch.equal(values, other["in the warm-up"][step]), step
    assert 9 <= late["joined_at"] < 30
    for other in (*others, late):
        assert torch.equal(first["values"], other["values"])
    assert {(0, 1), (0, 1, 2, 3)} <= set(first["participants"]), "after it, sites and all hold rounds"
