"""Sites and their circles: who belongs where, what is saved, what is left in the store."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cadenza
from cadenza.checkpoint.folders import collect_part, restore
from cadenza.checkpoint.selection import select_any_part
from cadenza.errors import TopologyError
from cadenza.participants.membership import join
from cadenza.participants.roster import Arrival, Roster, RoundNotHeldError, propose
from cadenza.participants.round_id import RoundId
from cadenza.participants.sites import as_site, scopes_of
from cadenza.participants.store import serve
from cadenza.strategy import LevelPlan
from cadenza.testing import Worker, workers
from support.faults import build, take_step

SITES = ("eu", "us", "eu", "us")


def hierarchy(**more: Any) -> cadenza.Strategy:
    faults = cadenza.shrink(grace_s=20.0, first_s=60.0)
    inner = LevelPlan(2, groups="site", outer=cadenza.nesterov(momentum=0.5))
    outer = LevelPlan(4, outer=cadenza.nesterov(momentum=0.5), **more)
    return cadenza.Strategy(levels=(inner, outer), buffers=False, faults=faults)


@pytest.mark.parametrize("wrong", ["eu//a", "", "eu a", ["eu", ""], "eu\n", "a/b/"])
def test_a_site_is_made_of_names(wrong: Any) -> None:
    with pytest.raises(ValueError, match="site is a name"):
        as_site(wrong)


def test_a_worker_without_a_site_is_told_to_say_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = (LevelPlan(2, groups="site"), LevelPlan(4, groups="site"), LevelPlan(8))
    with pytest.raises(TopologyError, match=r'has 2 levels inside .* got \'eu\'.*join\(site="eu/rack3"\)'):
        scopes_of(levels, "eu")
    with pytest.raises(TopologyError, match="has one level, for all"):
        scopes_of(levels[-1:], "eu")
    monkeypatch.setenv("GROUP_RANK", "7")
    hosts = (LevelPlan(2, groups="host"), *levels[1:])
    assert scopes_of(hosts, "eu")[0] == "eu/GROUP_RANK-7", "the host's name is the smallest place, unless one is given"
    assert scopes_of(hosts, "eu/b")[0] == "eu/b"


@pytest.mark.parametrize("groups", [2, ((0, 1), (2, 3)), "all"])
def test_inner_groups_of_fixed_ranks_are_refused(groups: Any) -> None:
    with pytest.raises(ValueError, match='for one "site" or "host" each'):
        cadenza.hierarchical({2: groups, 8: "all"}, faults=cadenza.shrink())
    with pytest.raises(ValueError, match='the outermost for "all"'):
        cadenza.hierarchical({2: "site", 8: "site"}, faults=cadenza.shrink())


def test_sites_are_refused_where_nobody_says_who_is_where() -> None:
    def attach(worker: Worker) -> None:
        cadenza.attach(*build(worker.rank), cadenza.hierarchical({2: "site", 8: "all"}))

    with workers(2) as pool, pytest.raises(TopologyError, match="belongs to faults=shrink"):
        pool.run(attach)


def test_those_without_a_state_hold_no_round_of_their_site_among_themselves() -> None:
    book = {worker: Arrival(worker, f"i{worker}", 0, "", "t") for worker in (0, 2)}
    known: dict[str, Any] = {"silent": set(), "gone": set(), "workers": 0}
    for policy in (cadenza.shrink(), cadenza.skip_round()):
        waits = propose(book, policy, known={0, 2, 4}, time_is_up=False, **known)
        assert waits is None, "worker 4 may have one"
        with pytest.raises(RoundNotHeldError, match="nobody has a state"):
            propose(book, policy, known={0, 2}, time_is_up=False, **known)


def test_rounds_of_levels_have_names_of_their_own() -> None:
    assert str(RoundId(4)) == "4.0.0"
    assert RoundId.parse("4.0.0.1") == RoundId(4, level=1)
    for wrong in ("4.0", "4.0.0.-1", "4.0.0.1.1"):
        with pytest.raises(ValueError):  # noqa: PT011
            RoundId.parse(wrong)


@pytest.mark.parametrize("inside", [[[0, 1], [2]], [[0, 1]], [[0, 1], [1, 2]], [[0, 9], [1, 2]]])
def test_a_roster_whose_stages_do_not_fit_is_none(inside: Any) -> None:
    roster = Roster((0, 1, 2), ("a", "b", "c"), 0, sites=("eu", "eu", "us"), inside=inside)
    with pytest.raises(ValueError, match="no roster"):
        Roster.unpack(roster.pack())


# ---- workers as threads ----------------------------------------------------------------------------------------------


class Member:
    """A worker of a site, driven step by step."""

    def __init__(self, port: int, worker: Worker, strategy: cadenza.Strategy) -> None:
        self.worker = worker.rank
        self.model, self.optimizer = build(worker.rank)
        membership = join(f"127.0.0.1:{port}", worker=self.worker, workers=4, lease_s=3.0, site=SITES[self.worker])
        self.sync = cadenza.attach(self.model, self.optimizer, strategy, membership=membership)

    def step(self, until: int) -> None:
        while self.sync.clock < until:
            take_step(self.model, self.optimizer, self.worker, self.sync.clock)
            self.sync.step()

    def finish(self) -> torch.Tensor:
        self.sync.finish()
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach()


def interrupted(
    worker: Worker, ports: tuple[int, int], folder: Path, lost: int | None
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Save in the middle and go on; go on from what was saved, too, in another job."""
    first = Member(ports[0], worker, hierarchy())
    first.step(7)
    part = collect_part(first.model, [first.optimizer], first.sync, None)
    part.write(folder, shared=worker.rank == 0, overwrite=True)
    first.step(14)
    values = first.finish()  # all have saved by then
    again = Member(ports[1], worker, hierarchy())
    place = again.sync.replica.place()
    chosen = select_any_part(folder, place if worker.rank != lost else replace(place, position=0))
    restore(replace(chosen, own=worker.rank != lost), again.model, [again.optimizer], again.sync)
    again.step(14)
    return values, again.finish(), part.fingerprint


@pytest.mark.parametrize("lost", [None, 3])
def test_a_hierarchy_resumes_bit_for_bit_or_without_a_worker_s_part(
    lost: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = serve(host="127.0.0.1"), serve(host="127.0.0.1")
    with workers(4, timeout_s=120.0) as pool:
        results = pool.run(interrupted, tuple(server.port for server in servers), tmp_path, lost)
    assert len({fingerprint for _, _, fingerprint in results}) == 1, "the parts belong together"
    for going_on, again, _ in results:
        assert torch.equal(going_on, results[0][0])
        assert torch.equal(again, results[0][1])
        assert torch.equal(going_on, again) == (lost is None)
    assert not [text for text in caplog.messages if "not the same to the last bit" in text]


def comes_again(worker: Worker, port: int, back: threading.Event) -> int:
    """Worker 2 leaves, and comes again to a round of its site: there is none of all."""
    strategy = cadenza.hierarchical({2: "site", 1000: "all"}, faults=cadenza.shrink(grace_s=20.0, first_s=60.0))
    member = Member(port, worker, strategy)
    member.step(6)
    if worker.rank == 2:
        member.sync.replica.participants.close()
        member = Member(port, worker, strategy)
        back.set()
    while not back.is_set():
        member.step(member.sync.clock + 1)
        time.sleep(0.01)
    clock = member.sync.clock
    member.sync.close()
    return clock


def test_a_worker_comes_again_to_a_round_of_its_site() -> None:
    server = serve(host="127.0.0.1")
    with workers(4, timeout_s=120.0) as pool:
        clocks = pool.run(comes_again, server.port, threading.Event())
    assert clocks[2] > 6


def regroup(worker: Worker, port: int, counts: list[int], server: dist.TCPStore) -> list[bool]:
    """Let the group of all go before each of its rounds, so that it is made anew, with its stages."""
    feedback = cadenza.codecs.error_feedback(cadenza.codecs.int8())
    member = Member(port, worker, hierarchy(codec=feedback))
    staged = []
    for until in range(4, 52, 4):
        member.step(until)
        staged.append(member.sync.replica.participants.levels[-1].stage is not None)
        if not worker.rank:
            member.sync.replica.participants._circles[-1].part()  # type: ignore[attr-defined]
            counts.append(server.num_keys())
    member.finish()
    return staged


def test_the_keys_of_stages_do_not_grow() -> None:
    server, counts = serve(host="127.0.0.1"), list[int]()
    with workers(4, timeout_s=120.0) as pool:
        assert all(all(staged) for staged in pool.run(regroup, server.port, counts, server))
    assert min(counts[6:]) <= max(counts[:6]), "a count may see some of the next round"
