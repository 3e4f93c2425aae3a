"""How a round begins: headers from everyone to everyone; nothing is sent before all of them agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from cadenza.engine.header import Header, Stance, disagreement
from cadenza.errors import (
    CadenzaError,
    ContributionRefusedError,
    DisagreementError,
    NobodyLeftError,
    NotFiniteError,
    RoundAbortedError,
    RoundError,
    TransportError,
    UnsupportedTensorError,
)
from cadenza.transports import Transport
from cadenza.weighting import State, Weighed, Weighting, uniform

_MEND = (
    "Train the same parameters on every rank, and call sync.step(), sync.averaged() and sync.finish() on all of them "
    "together, never on one alone"
)
_MEND_STEPS = (
    "If ranks have unequal numbers of batches, let whoever runs out call sync.drain() before sync.finish(). Call "
    "sync.step() once per optimizer step, and sync.averaged() and sync.finish() on all ranks at the same step, never "
    "on one alone; resume all ranks from the same checkpoint"
)

__all__ = ["Scales", "abandoning", "failing_as_round", "open_round", "text_of_first", "unsent"]


def open_round(
    transport: Transport,
    header: Header,
    *,
    problem: str | None,
    describe: Callable[[], list[str]],
    meanwhile: Callable[[], None] | None = None,
    by_averager: bool = False,
) -> list[Header]:
    """Exchange headers, and return them if every member is able and about to send the same.

    Otherwise all members raise the same error, which tells the user of a synchronizer what to do or, `by_averager`,
    the user of an averager. `meanwhile` runs while the headers are under way.
    """
    header = Header(**{**header.__dict__, "able": problem is None})
    try:
        replies = transport.exchange(header.pack())
        if meanwhile is not None:
            meanwhile()
        headers = [Header.unpack(reply) for reply in replies()]
        if len({header.intent for header in headers}) == 1 and header.able:
            return headers
        mends = {} if by_averager else {"mend": _MEND, "mend_steps": _MEND_STEPS}
        raise _disagreement(transport, Stance(header.step, problem, describe(), header.atomic), headers, mends)
    except TransportError as error:
        raise unsent(header.step, error) from error


class Scales:
    """Weighs the contributions to a round, from what the headers tell: the same on all members.

    Args:
        weighting: The piece that does it.
        state: What the piece remembers of earlier rounds.
        per_step: Whether contributions are differences over unequal numbers of steps, to be put on an equal footing.

    >>> headers = [Header(0, b"", True, weight=3.0), Header(0, b"", True, weight=1.0)]
    >>> Scales().weigh(headers, [0, 1])[1]
    [0.75, 0.25]
    """

    def __init__(
        self, weighting: Weighting | None = None, state: State | None = None, *, per_step: bool = False
    ) -> None:
        self._weighting = weighting or uniform()
        self._state = self._weighting.start() if state is None else state
        self._per_step = per_step

    def weigh(self, headers: Sequence[Header], members: Sequence[int]) -> tuple[Weighed, list[float]]:
        """Return what the piece says, and the factor on each contribution; raise if the round must fail for it."""
        weighed = self._weighting.weigh(headers, self._state)
        if weighed.refuse:
            raise ContributionRefusedError([members[position] for position in sorted(weighed.left_out)])
        weights = list(weighed.shares)
        if not self._per_step:
            return weighed, weights
        typical = sum(weight * header.steps for weight, header in zip(weights, headers, strict=True))
        return weighed, [w * typical / max(1, header.steps) for w, header in zip(weights, headers, strict=True)]


def text_of_first(transport: Transport, text: str) -> str:
    """Return what the first member says, on every member."""
    mine = text.encode()
    sizes = transport.exchange(len(mine).to_bytes(8, "little"))()
    longest = max(int.from_bytes(size, "little") for size in sizes)
    first = transport.exchange(mine.ljust(longest))()[0]
    return first[: int.from_bytes(sizes[0], "little")].decode()


@contextmanager
def abandoning(transport: Transport) -> Iterator[None]:
    """Give the transport up when a round breaks off, whatever the reason: its members are out of step."""
    try:
        yield
    except (DisagreementError, NotFiniteError, UnsupportedTensorError, ContributionRefusedError):
        raise  # found by all members alike, so they are still in step
    except BaseException:
        transport.abandon()
        raise


@contextmanager
def failing_as_round(step: int) -> Iterator[None]:
    """Let a failure of the transport, wherever it happens in a round, be the RoundError that callers are promised."""
    try:
        yield
    except NobodyLeftError:
        raise  # no round was begun
    except TransportError as error:
        raise RoundError(
            f"The round at step {step} failed on its way, and ranks may hold different values now. Restore all of them "
            f"from a checkpoint. {error}"
        ) from error


def _disagreement(
    transport: Transport, stance: Stance, headers: Sequence[Header], mends: Mapping[str, str]
) -> CadenzaError:
    """Collect every member's side and return the error that all of them raise."""
    mine = stance.pack()
    sizes = transport.exchange(len(mine).to_bytes(8, "little"))()
    longest = max(int.from_bytes(size, "little") for size in sizes)
    replies = transport.exchange(mine.ljust(longest))()
    stances = dict(zip(transport.members, map(Stance.unpack, replies), strict=True))
    text = f"{disagreement(stances, **mends)} Nothing was sent and no parameter was changed."
    if not any(stance.problem for stance in stances.values()):
        return DisagreementError(text)
    poisoned = any(not math.isfinite(header.norm2) for header in headers)
    return NotFiniteError(text) if poisoned else UnsupportedTensorError(text)


def unsent(step: int, error: TransportError) -> RoundAbortedError:
    """Return what to raise where a round failed before it had begun."""
    return RoundAbortedError(
        f"The round at step {step} failed before any value was sent; the parameters are as they were. {error}"
    )
