"""Somebody else writes to the store: it is bound to its address, and what he writes is ignored, never obeyed."""

from __future__ import annotations

import copy
import json
import resource
import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cadenza
from cadenza import membership
from cadenza.participants.assembly import Assembly
from cadenza.participants.beat import Beat, Heard, beat_key
from cadenza.participants.heartbeat import announce_death
from cadenza.participants.latest_round import Latest, LatestRound
from cadenza.participants.liveness import LivenessSockets
from cadenza.participants.membership import Membership, join
from cadenza.participants.roster import Arrival, Roster, RoundNotHeldError, propose
from cadenza.participants.round_id import RoundId
from cadenza.participants.signed_store import SignedStore
from cadenza.participants.signing import Signer
from cadenza.participants.sites import Scope
from cadenza.participants.vote import Vote
from cadenza.testing import Worker, workers

GARBAGE = (b"", b"\n", b"\xff\xfe\x00", "naïve ☃".encode(), b"9999999.0.0", b"[]", b"null", b"0" * 32 + b" 1.0.0 9")


def stranger(port: int, prefix: str) -> dist.Store:
    """A client of the store's port that knows where things are, and no secret."""
    return dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, None, False))


def test_the_store_listens_at_its_address_alone(store: int) -> None:
    socket.create_connection(("127.0.0.1", store), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store), 5)


def test_the_store_takes_as_many_connections_as_its_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(membership, "use_hosts_file_only", lambda: None)  # it would hold for this whole process
    monkeypatch.setattr(membership.signal, "pause", lambda: limits.append(resource.getrlimit(resource.RLIMIT_NOFILE)))
    limits: list[tuple[int, int]] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, soft), hard))
    try:
        membership.main(["--host", "127.0.0.1"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert limits == [(hard, hard)]


@pytest.mark.parametrize("data", GARBAGE)
def test_what_bears_no_signature_is_not_there_and_is_written_over(data: bytes) -> None:
    below, signer = dist.HashStore(), Signer("job", secret="word")
    ours = SignedStore(below, signer, who="me")
    below.set("key", data)
    assert ours.read("key") is None
    assert not ours.check(["key"])
    assert ours.compare_set("key", "", "mine") == b"mine"
    assert ours.read("key") == "mine"
    below.append("key", data)  # type: ignore[attr-defined]
    assert ours.read("key") == "mine"


def test_an_entry_is_worth_nothing_under_another_key_or_job() -> None:
    below, signer = dist.HashStore(), Signer("job", secret="word")
    ours = SignedStore(below, signer)
    ours.set("round/5/verdict", "commit")
    below.set("round/6/verdict", below.get("round/5/verdict"))
    assert ours.read("round/6/verdict") is None
    assert SignedStore(below, Signer("another", secret="word")).read("round/5/verdict") is None
    assert signer.ignored == 1


def test_a_vote_counts_members_and_no_strangers() -> None:
    below = dist.HashStore()
    me, other = (SignedStore(below, Signer("job", secret="word"), who=who) for who in ("0", "1"))
    below.append("v/ready", "0123456789abcdef0123456789abcdef 1\n")  # type: ignore[attr-defined]
    below.set("v/verdict", "commit")
    assert me.add("v/ready", 1) == me.add("v/ready", 1) == 1, "who is counted twice counts once"
    assert not Vote(me, "v", members=2, timeout_s=0.05).ready(lambda: False)
    assert Vote(other, "w", members=1, timeout_s=1.0).ready(lambda: False)


def test_the_latest_round_only_grows_and_one_of_long_ago_is_not_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    below, signer = dist.HashStore(), Signer("job", secret="word")
    ours, latest = SignedStore(below, signer), LatestRound(signer)
    latest.raise_to(ours, Latest(RoundId(50_000)))
    recorded = below.get("latest")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)  # another run of the job
    assert latest.read(ours) is None
    assert latest.raise_to(ours, Latest(RoundId(10))).round == RoundId(10)
    below.set("latest", recorded)
    assert latest.read(ours) is None
    assert latest.raise_to(ours, Latest(RoundId(15))).round == RoundId(15)


def test_a_beat_that_is_written_again_is_not_heard() -> None:
    first = Beat(1, "a", started=10, number=7)
    heard = Heard(first)
    heard.hear(Beat(1, "a", started=10, number=6), 1.0)
    heard.hear(Beat(1, "of an earlier process", started=9, number=99), 1.0)
    assert (heard.last, heard.silent_s, heard.again) == (first, 2.0, 2)
    heard.hear(Beat(1, "of a later process", started=11), 1.0)
    assert heard.silent_s == 0.0


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"worker": "0"}', "é", Beat(-1, "a", 1).pack()])
def test_what_is_no_entry_is_counted_and_not_fatal(text: str) -> None:
    signer = Signer("job", secret=None)
    for read in (Beat.unpack, Arrival.unpack, Roster.unpack, RoundId.parse):
        assert signer.understood(lambda read=read: read(text)) is None  # type: ignore[misc, attr-defined]
    assert signer.ignored == 4


@pytest.mark.parametrize("late", [{"1": "long"}, {"1": [2]}, {"1": None}, {"1": float("nan")}])
def test_a_roster_that_could_not_be_logged_is_none(late: dict[str, object]) -> None:
    told = json.loads(Roster((0, 1), ("a", "b"), leader=0, late={1: 0.5}, sites=("", "")).pack())
    assert Roster.unpack(json.dumps(told)).late == {1: 0.5}
    assert Signer("job", secret=None).understood(lambda: Roster.unpack(json.dumps({**told, "late": late}))) is None


def test_nobody_leads_to_a_step_that_nobody_has_come_to_by_its_own_steps() -> None:
    came = {w: Arrival(w, f"i{w}", 4, "c", "t", last=(0, 1, 2), called=True) for w in range(3)}
    known: dict[str, Any] = {"known": {0, 1, 2}, "silent": set(), "gone": set(), "workers": 3, "time_is_up": False}
    with pytest.raises(RoundNotHeldError, match="by its own steps"):
        propose(came, cadenza.shrink(), **known)
    came[2] = Arrival(2, "i2", 4, "c", "t", last=(0, 1, 2))
    roster = propose(came, cadenza.shrink(), **known)
    assert roster is not None
    assert roster.members == (0, 1, 2)


def test_a_worker_whose_arrival_is_deleted_comes_again(store: int, monkeypatch: pytest.MonkeyPatch) -> None:
    member = join(f"127.0.0.1:{store}", worker=0, workers=1, secret="word")
    other = stranger(store, f"cadenza/job/{member.signer.space}")
    sign, deleted = Assembly.sign, []

    def sign_and_lose(self: Assembly, opened: SignedStore, arrival: Arrival) -> None:
        sign(self, opened, arrival)
        if not deleted:
            deleted.append(other.delete_key("round/0.0.0/arrivals"))

    monkeypatch.setattr(Assembly, "sign", sign_and_lose)
    me = Arrival(0, member.heartbeat.incarnation, 0, "", "terms")
    assembly = Assembly(member.connection(), member.heartbeat, member.signer, RoundId(0), me, scope=Scope(0))
    assert assembly.hold(cadenza.shrink(), workers=1, patience_s=20.0).members == (0,)
    assert deleted == [True]
    member.close()


def test_a_heart_beat_survives_whatever_is_raised(store: int, monkeypatch: pytest.MonkeyPatch) -> None:
    member = join(f"127.0.0.1:{store}", worker=0, workers=1, lease_s=0.1)
    heartbeat, broken = member.heartbeat, threading.Event()

    def fail(_: object, **__: object) -> None:
        broken.set()
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(heartbeat, "_exchange", fail)
        assert broken.wait(30)
    deadline = time.monotonic() + 30
    while not heartbeat.connected:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    member.close()


def test_a_death_that_a_supervisor_saw_needs_the_secret(store: int) -> None:
    first, second = (join(f"127.0.0.1:{store}", worker=i, workers=2, secret="word", lease_s=0.5) for i in range(2))
    wrong = SignedStore(stranger(store, f"cadenza/job/{first.signer.space}"), Signer("job", secret=None))
    wrong.below.set(beat_key(1), "seen to be gone")
    time.sleep(0.3)
    assert first.heartbeat.gone() == set()
    first.connection().call(lambda store: announce_death(store, first.signer, 1))
    second.close()
    deadline = time.monotonic() + 30
    while first.heartbeat.gone() != {1}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.close()


def test_who_speaks_to_a_liveness_port_is_hung_up_on_and_one_host_cannot_fill_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cadenza.participants.liveness._MOST_OF_A_HOST", 2)
    with LivenessSockets("127.0.0.1", lambda *_: None) as ours:
        place = ("127.0.0.1", int(ours.address.rpartition(":")[2]))
        with socket.create_connection(place, 10) as talker:
            talker.sendall(b"hello")
            with suppress(ConnectionResetError):
                assert talker.recv(1) == b""
        with ExitStack() as open_ones:
            silent = [open_ones.enter_context(socket.create_connection(place, 10)) for _ in range(3)]
            assert silent[2].recv(1) == b"", "the third is closed at once"
        ours.watch({1: ("a", "no address"), 2: ("b", "host:port"), 3: ("c", "127.0.0.1:99999999")})
        theirs = LivenessSockets("127.0.0.1", lambda *_: None)
        ours.watch({4: ("d", theirs.address)})
        deadline = time.monotonic() + 30
        while not ours.watched:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        theirs.close()


def train(
    worker: Worker, model: torch.nn.Module, memberships: dict[int, Membership]
) -> tuple[int, list[int], torch.Tensor]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    memberships[worker.rank] = membership = worker.membership(secret="word", lease_s=1.0)
    told: list[cadenza.RoundReport] = []
    strategy = cadenza.diloco(period=5, faults=cadenza.shrink(grace_s=10.0, first_s=60.0))
    sync = cadenza.attach(model, optimizer, strategy, membership=membership, observers=[told.append])
    taken = 0
    while sync.clock < 40:
        model(torch.randn(4, 2, generator=worker.generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        sync.step()
        taken += 1
    sync.finish()
    return taken, [report.step for report in told if report.kind == "round"], model.weight.detach().clone()


def test_training_is_right_and_goes_on_while_a_stranger_writes_wherever_he_can() -> None:
    memberships: dict[int, Membership] = {}
    over = threading.Event()

    def disturb() -> None:
        while not memberships and not over.is_set():
            time.sleep(0.005)
        if over.is_set():
            return
        first = next(iter(memberships.values()))
        port = first._address.rpartition(":")[2]
        hostile = stranger(int(port), f"cadenza/{first.job}/{first.signer.space}")
        number = 0
        while not over.is_set():
            number += 1
            data = GARBAGE[number % len(GARBAGE)]
            round = f"round/{number % 13 * 5}.0.0"
            for key in ("latest", "workers", "finished", "beat/7", f"{round}/roster", f"{round}/vote/verdict"):
                hostile.set(key, data)
            for key in (f"{round}/arrivals", f"{round}/vote/ready", f"{round}/assembled/ready", beat_key(number % 3)):
                hostile.append(key, data)  # type: ignore[attr-defined]
            time.sleep(0.02)

    attack = threading.Thread(target=disturb)
    attack.start()
    try:
        with workers(3, timeout_s=120.0) as pool:
            found = pool.run(train, torch.nn.Linear(2, 1), memberships)
    finally:
        over.set()
        attack.join()
    assert all(taken >= 20 for taken, _, _ in found), "nobody jumps to a step that a stranger has named"
    assert all(rounds[-1] == 40 and len(rounds) >= 4 for _, rounds, _ in found), "rounds are held, to the end"
    assert all(torch.equal(found[0][2], weight) for _, _, weight in found)
    assert all(member.signer.ignored for member in memberships.values()), "and what he wrote is counted"
