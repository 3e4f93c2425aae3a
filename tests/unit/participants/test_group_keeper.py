"""Which process groups a worker keeps, and when it goes back to one."""

from __future__ import annotations

from typing import Any

import pytest

from cadenza.errors import TransportError
from cadenza.participants import group_keeper
from cadenza.participants.group_keeper import GroupKeeper
from cadenza.participants.island import Island
from cadenza.participants.roster import Roster, group_name
from cadenza.participants.round_id import RoundId

ALL, PAIR = (0, 1, 2), (0, 1)


class FakeGeneration:
    """A group that remembers what was done with it."""

    def __init__(self, place: str, members: tuple[int, ...]) -> None:
        self.place, self.members, self.transport = place, tuple(members), f"way of {place}"
        self.usable, self.rested = True, 0

    def set_timeout(self, seconds: float) -> None:
        assert self.usable

    def rest(self) -> None:
        self.rested += 1

    def close(self) -> None:
        self.usable = False


class FakeMembership:
    worker, signer, island = 0, None, Island()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeGeneration]:
    """Every group that was made, in their order."""
    found: list[FakeGeneration] = []

    def assemble(*_: Any, place: str, members: tuple[int, ...], **__: Any) -> FakeGeneration:
        found.append(FakeGeneration(place, members))
        return found[-1]

    monkeypatch.setattr(group_keeper, "assemble", assemble)
    return found


@pytest.fixture
def keeper() -> GroupKeeper:
    return GroupKeeper(FakeMembership(), None)  # type: ignore[arg-type]


def roster(members: tuple[int, ...], keep: str = "", process: str = "a", **more: Any) -> Roster:
    return Roster(members, tuple(f"{process}{worker}" for worker in members), leader=0, keep=keep, **more)


def hold(keeper: GroupKeeper, step: int, members: tuple[int, ...], **more: Any) -> Any:
    return keeper.form(roster(members, **more), RoundId(step), timeout_s=1.0)


def test_two_groups_take_turns_and_none_is_made_anew(keeper: GroupKeeper, made: list[FakeGeneration]) -> None:
    assert hold(keeper, 5, ALL) == ("way of round/5.0.0", None)
    assert hold(keeper, 10, PAIR) == ("way of round/10.0.0", None)
    both = keeper.names()
    assert both == (group_name("5.0.0", ALL), group_name("10.0.0", PAIR))
    for step in range(15, 40, 10):
        assert hold(keeper, step, ALL, keep=both[0]) == ("way of round/5.0.0", None)
        assert keeper.names() == (both[1], both[0]), "the one that was used last is the last one"
        assert hold(keeper, step + 5, PAIR, keep=both[1]) == ("way of round/10.0.0", None)
    assert hold(keeper, 45, PAIR, keep=both[1]) is None, "nothing has changed"
    assert len(made) == 2
    assert made[0].rested == 5, "memory is held by the group that is used"


def test_who_is_behind_takes_the_state_over_a_group_that_is_kept_as_long_as_it_fits(
    keeper: GroupKeeper, made: list[FakeGeneration]
) -> None:
    hold(keeper, 5, ALL)
    [name] = keeper.names()
    hold(keeper, 10, ALL, keep=name, behind=(2,))
    some = keeper.among_concerned(timeout_s=1.0)
    assert (some.members, made[-1].place) == ((0, 2), "round/10.0.0/joining")
    hold(keeper, 15, ALL, keep=name, behind=(2,))
    assert keeper.among_concerned(timeout_s=1.0) is some
    hold(keeper, 20, ALL, keep=name, behind=(1,))
    assert not some.usable
    assert keeper.among_concerned(timeout_s=1.0).members == (0, 1)
    hold(keeper, 25, ALL, keep=name)
    assert [one.usable for one in made] == [True, False, False]


def test_a_process_that_takes_another_ones_place_ends_the_groups_of_that_one(
    keeper: GroupKeeper, made: list[FakeGeneration]
) -> None:
    hold(keeper, 5, ALL)
    hold(keeper, 10, PAIR)
    hold(keeper, 15, ALL, process="b")
    assert [one.usable for one in made] == [False, False, True]


def test_not_more_than_some_groups_are_kept(keeper: GroupKeeper, made: list[FakeGeneration]) -> None:
    for step in range(1, 11):
        hold(keeper, step, (0, step))
    assert sum(one.usable for one in made) == len(keeper.names()) == 4
    assert all(one.usable for one in made[-4:])


def test_a_group_that_was_let_go_is_not_waited_for(keeper: GroupKeeper, made: list[FakeGeneration]) -> None:
    hold(keeper, 5, ALL)
    [name] = keeper.names()
    keeper.part()
    assert not made[0].usable
    with pytest.raises(TransportError, match="let go"):
        hold(keeper, 10, ALL, keep=name)
    with pytest.raises(TransportError, match="let go"):
        keeper.among_concerned(timeout_s=1.0)


def test_connections_that_nobody_used_for_long_are_not_used_again(
    keeper: GroupKeeper, made: list[FakeGeneration], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(keeper, 5, ALL)
    hold(keeper, 10, PAIR)
    now = group_keeper.time.monotonic()
    monkeypatch.setattr(group_keeper.time, "monotonic", lambda: now + 400)
    assert keeper.names() == (group_name("10.0.0", PAIR),), "the last one is: periods may be long"
    assert len(made) == 2
