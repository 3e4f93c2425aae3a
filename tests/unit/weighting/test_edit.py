"""EDiT's weighting worked out by hand: shares, anomalies, what is remembered, what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from cadenza.weighting import EditNorms, PlainContribution, State, edit_norms, outliers


def norms(*given: float) -> list[PlainContribution]:
    return [PlainContribution(norm2=norm * norm) for norm in given]


def after(weighting: EditNorms, *rounds: tuple[float, ...]) -> State:
    state = weighting.start()
    for given in rounds:
        state = weighting.weigh(norms(*given), state).state
    return state


CALM = [(1.0, 1.0), (1.1, 0.9), (1.0, 1.0), (0.9, 1.1)]
EAGER = edit_norms(observe=4)


def test_shares_are_the_softmax_of_the_negative_norms() -> None:
    shares = edit_norms().weigh(norms(1.0, 2.0, 4.0), {}).shares
    parts = [math.exp(-1), math.exp(-2), math.exp(-4)]
    assert shares == pytest.approx([part / sum(parts) for part in parts], rel=1e-14)
    warm = edit_norms(temperature=10.0).weigh(norms(1.0, 2.0), {}).shares
    assert warm[0] / warm[1] == pytest.approx(math.exp(0.1))


def test_one_worker_counts_all_and_huge_norms_do_not_overflow() -> None:
    assert edit_norms().weigh(norms(5.0), {}).shares == (1.0,)
    assert edit_norms().weigh(norms(1e150, 2e150), {}).shares == (1.0, 0.0)
    assert edit_norms().weigh(norms(0.0, 0.0), {}).shares == (0.5, 0.5)


def test_the_first_norms_are_only_observed() -> None:
    assert EAGER.weigh(norms(1.0, 9.0), after(EAGER, *CALM[:3])).shares[1] > 0
    assert EAGER.weigh(norms(1.0, 9.0), after(EAGER, *CALM)).shares == (1.0, 0.0)


def test_an_anomaly_is_not_left_out_and_does_not_enter_the_average() -> None:
    state = after(EAGER, *CALM)
    weighed = EAGER.weigh(norms(1.0, 9.0), state)
    assert not weighed.left_out
    assert not weighed.refuse
    for name in ("rounds", "total", "mean", "variance"):
        assert weighed.state[name][1] == state[name][1]  # type: ignore[index]
        assert weighed.state[name][0] != state[name][0]  # type: ignore[index]


def test_only_norms_above_the_average_are_anomalous() -> None:
    assert EAGER.weigh(norms(0.0, 1.0), after(EAGER, *CALM)).shares[0] > 0.5


def test_the_limit_is_so_many_standard_deviations() -> None:
    state = after(EAGER, *CALM)
    limit = state["mean"][0] + 3.0 * math.sqrt(state["variance"][0])  # type: ignore[index]
    assert EAGER.weigh(norms(limit - 1e-9, 1.0), state).shares[0] > 0
    assert EAGER.weigh(norms(limit + 1e-9, 1.0), state).shares[0] == 0


def test_norms_that_never_changed_tell_nothing() -> None:
    assert EAGER.weigh(norms(2.0, 1.0), after(EAGER, *[(1.0, 1.0)] * 6)).shares[0] > 0


def test_the_average_is_not_pulled_to_its_start() -> None:
    state = after(edit_norms(), (2.0,), (4.0,))
    weights = [0.02 * 0.98, 0.02]
    assert state["mean"] == pytest.approx([(2.0 * weights[0] + 4.0 * weights[1]) / sum(weights)])
    assert state["rounds"] == [2.0]


def test_if_all_are_anomalous_nobody_counts_until_that_is_usual() -> None:
    weighting = edit_norms(observe=4, patience=3)
    state = after(weighting, *CALM)
    for _ in range(3):
        weighed = weighting.weigh(norms(9.0, 9.0), state)
        assert weighed.shares == (0.0, 0.0)
        state = weighed.state
    assert weighting.weigh(norms(9.0, 9.0), state).shares == (0.5, 0.5)


def test_one_usual_round_ends_the_row_and_without_patience_it_never_ends() -> None:
    weighting, stubborn = edit_norms(observe=4, patience=2), edit_norms(observe=4, patience=None)
    state = after(weighting, *CALM, (9.0, 9.0), (1.0, 1.0), (9.0, 9.0))
    assert weighting.weigh(norms(9.0, 9.0), state).shares == (0.0, 0.0)
    assert stubborn.weigh(norms(9.0, 9.0), after(stubborn, *CALM, *[(9.0, 9.0)] * 40)).shares == (0.0, 0.0)


def test_who_has_nothing_to_add_has_no_share_and_is_not_judged() -> None:
    state = after(EAGER, *CALM)
    idle, sick = PlainContribution(weight=0.0, norm2=81.0), PlainContribution(weight=1.0, faulty=True)
    for member in (idle, sick):
        weighed = EAGER.weigh([*norms(1.0), member], state)
        assert weighed.shares == (1.0, 0.0)
        assert weighed.state["rounds"] == [5.0, 4.0]
    assert EAGER.weigh([idle, idle], state).shares == (0.5, 0.5)
    assert EAGER.weigh([idle, idle], state).state == state


def test_a_norm_that_is_not_finite_is_anomalous_at_once() -> None:
    for norm2 in (math.inf, math.nan):
        assert edit_norms().weigh([*norms(1.0), PlainContribution(norm2=norm2)], {}).shares == (1.0, 0.0)


def test_another_number_of_members_starts_anew_and_the_state_is_json() -> None:
    state = after(EAGER, *CALM)
    assert json.loads(json.dumps(state)) == state
    weighed = EAGER.weigh(norms(1.0, 9.0, 1.0), state)
    assert weighed.shares[1] > 0
    assert weighed.state["rounds"] == [1.0, 1.0, 1.0]
    assert EAGER.weigh(norms(1.0, 9.0), state).shares == (1.0, 0.0)  # what was given stays as it was


def test_a_fault_policy_wraps_it() -> None:
    wrapped = outliers(edit_norms())
    weighed = wrapped.weigh([*norms(1.0, 1.0, 2.0), PlainContribution(weight=0.0, faulty=True)], wrapped.start())
    assert weighed.left_out == {3}
    assert weighed.shares[3] == 0.0
    assert sum(weighed.shares) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"threshold": 0}, ValueError, "threshold must be a number above 0; got 0"),
        ({"threshold": "3"}, TypeError, "threshold must be a number; got '3'"),
        ({"smoothing": 0}, ValueError, "smoothing is 0; give the share of a new norm in the moving average, above 0"),
        ({"smoothing": 1.5}, ValueError, "smoothing is 1.5"),
        ({"smoothing": None}, TypeError, "smoothing is None"),
        ({"observe": 0}, ValueError, "observe is at least 1; got 0"),
        ({"observe": 2.5}, TypeError, "observe is a whole number; got 2.5"),
        ({"temperature": math.inf}, ValueError, "temperature must be a number above 0"),
        ({"patience": 0}, ValueError, "patience is at least 1; got 0"),
        ({"patience": True}, TypeError, "patience is a whole number"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        edit_norms(**options)
