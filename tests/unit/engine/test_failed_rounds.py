"""A round that fails after training went on without its values: nothing that was learned is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import cadenza
from cadenza.engine.round_result import RoundResult
from cadenza.participants.base import FailedRound
from cadenza.participants.round_id import RoundId
from cadenza.testing import Worker, workers
from support.training import one_number


def walk(worker: Worker, failing: int) -> list[float]:
    """Take 8 steps of −0.1 (rank 1: −0.3); rounds every 2 land 2 later, and the one launched at `failing` fails."""
    strategy = cadenza.diloco(2, delay=2, outer_lr=1.0, outer_momentum=0.0, faults=cadenza.skip_round())
    model, sync, step = one_number(strategy, membership=worker.membership())
    participants = sync.replica.participants
    agree = participants.agree

    def fail_once(id: RoundId, exchange: Callable[[], RoundResult]) -> RoundResult | FailedRound:
        return FailedRound("the link was cut") if id.step == failing else agree(id, exchange)

    participants.agree = fail_once  # type: ignore[method-assign]
    values = [step(1.0 + 2 * worker.rank) for _ in range(8)]
    sync.finish()
    return [*values, model.x.item()]


@pytest.mark.parametrize("failing", [2, 4, 6])
def test_the_progress_of_a_failed_round_counts_in_the_next_one(failing: int) -> None:
    """A launch with a delay of a whole period takes the progress out of the parameters: it must return."""
    with workers(2) as pool:
        first, second = pool.run(walk, failing)
    assert first[-1] == pytest.approx(1 - 8 * 0.2)
    assert second[-1] == first[-1]
