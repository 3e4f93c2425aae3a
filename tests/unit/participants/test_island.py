"""The ranks of a replica tell each other what was decided, and all know when one of them has ended."""

from __future__ import annotations

import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

import cadenza
from cadenza.errors import CadenzaError, DisagreementError, ReplicaBrokenError
from cadenza.participants.channel import Channel
from cadenza.participants.island import Island, meet_mates
from cadenza.participants.roster import RollbackError


def channels(ranks: int = 3) -> list[Channel]:
    pairs = [socket.socketpair() for _ in range(ranks - 1)]
    return [Channel(0, [ours for ours, _ in pairs]), *(Channel(n, [o]) for n, (_, o) in enumerate(pairs, start=1))]


def on_all(work: Callable[[Channel, int], Any], made: list[Channel]) -> list[Any]:
    """What the same call gives, or raises, on each rank."""

    def tried(rank: int) -> Any:
        try:
            return work(made[rank], rank)
        except CadenzaError as error:
            return error

    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(tried, range(len(made))))


@pytest.fixture
def made() -> Iterator[list[Channel]]:
    found = channels()
    yield found
    for channel in found:
        channel.close()


def test_what_the_first_rank_finds_or_raises_is_told_to_all(made: list[Channel]) -> None:
    assert on_all(lambda channel, rank: channel.tell(lambda: [rank, "ä"]), made) == [[0, "ä"]] * 3
    assert on_all(lambda channel, rank: channel.exchange(str(rank)), made) == [["0", "1", "2"]] * 3

    def refuse() -> int:
        raise RollbackError("nobody has seen the last rounds", absent=(1, 2), behind=True)

    for error in on_all(lambda channel, rank: channel.tell(refuse), made):
        assert type(error) is RollbackError
        assert (str(error), error.absent, error.behind) == ("nobody has seen the last rounds", (1, 2), True)
    assert on_all(lambda channel, rank: channel.any(rank == 2), made) == [True] * 3, "the channel is in step after it"


def test_work_that_fails_on_one_rank_fails_on_all(made: list[Channel]) -> None:

    def work(channel: Channel, rank: int) -> int:
        def own() -> int:
            if rank == 1:
                raise DisagreementError("the state arrived damaged")
            return rank

        channel.begin()
        return channel.agree(own)

    for error in on_all(work, made):
        assert isinstance(error, DisagreementError)
        assert str(error) == "the state arrived damaged"
    assert [channel.failed for channel in made] == [True] * 3
    assert on_all(lambda channel, rank: channel.agree(lambda: rank), made) == [0, 1, 2]


@pytest.mark.parametrize("ended", [0, 2])
def test_nobody_waits_for_a_rank_that_has_ended(made: list[Channel], ended: int) -> None:

    def work(channel: Channel, rank: int) -> list[str]:
        if rank == ended:
            channel.close()
            raise ReplicaBrokenError("this one has ended")
        return channel.exchange("here")

    assert all(isinstance(one, ReplicaBrokenError) for one in on_all(work, made))


def test_the_error_of_a_lost_mate_does_not_drag_along_what_the_first_rank_was_to_say(made: list[Channel]) -> None:
    def late() -> int:
        made[0].close()  # as the thread does that hears of a mate's end
        raise RollbackError("this worker came too late", absent=())

    with pytest.raises(ReplicaBrokenError) as caught:
        made[0].tell(late)
    assert "too late" not in "".join(traceback.format_exception(caught.value))


def test_an_end_without_a_word_breaks_the_island_and_one_after_the_last_round_does_not() -> None:
    for leaves in (False, True):
        (ours, theirs), broke = socket.socketpair(), threading.Event()
        one = Island((0, 1), 0, [[ours], [], []], lease_s=0.2)
        other = Island((0, 1), 1, [[theirs], [], []], lease_s=0.2)
        one.on_break(broke.set)
        if leaves:
            other.leave()
        other.close()
        if leaves:
            one.close()
            one.check()
            assert not broke.is_set()
        else:
            assert broke.wait(30)
            with pytest.raises(ReplicaBrokenError):
                one.check()


def test_what_a_mate_said_before_it_ended_is_still_heard() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    one = Island((0, 1), 0, [[pair[0]] for pair in pairs], lease_s=0.2)
    other, broke = Island((0, 1), 1, [[pair[1]] for pair in pairs], lease_s=0.2), threading.Event()
    other.on_break(broke.set)
    told = threading.Thread(target=lambda: other.loop.fail(DisagreementError("two models")))
    told.start()
    with pytest.raises(DisagreementError):
        one.loop.tell(lambda: one.loop.exchange(""))  # the first hears it, tells it all, and ends
    told.join(30)
    one.close()
    assert broke.wait(30)
    with pytest.raises(DisagreementError, match="two models"):
        other.loop.tell(lambda: 0)
    with pytest.raises(ReplicaBrokenError):
        other.loop.exchange("")
    other.close()


def test_a_mate_that_does_not_beat_makes_the_replica_stand_still() -> None:
    ours, theirs = socket.socketpair()
    island, seen = Island((0, 1), 0, [[ours], [], []], lease_s=0.05), threading.Event()
    while not island.stopped:
        seen.wait(0.01)
    theirs.send(b".")
    while island.stopped:
        seen.wait(0.01)
    island.check()
    island.close()
    theirs.close()


def test_a_mesh_of_two_dimensions_is_no_replica() -> None:
    class Mesh:
        ndim = 2

        def get_group(self) -> dist.ProcessGroup:
            raise AssertionError

    with pytest.raises(ValueError, match="a mesh of 2"):
        meet_mates(Mesh(), host="127.0.0.1", lease_s=1.0)


def test_a_replica_is_not_numbered_by_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("CADENZA_WORKER", raising=False)
    with pytest.raises(cadenza.errors.NotInitializedError, match="set CADENZA_WORKER, or"):
        cadenza.join("127.0.0.1:1", replica=object())  # type: ignore[arg-type]
