"""How much each member counts, worked out by hand, and the limits of what is left out."""

from __future__ import annotations

import math
from typing import Any

import pytest

import cadenza
from cadenza.weighting import (
    PlainContribution,
    Weighting,
    by_function,
    outliers,
    samples,
    shares_of,
    uniform,
)


def members(*weights: float) -> list[PlainContribution]:
    return [PlainContribution(weight=weight) for weight in weights]


def norms(*norms2: float, weight: float = 1.0) -> list[PlainContribution]:
    return [PlainContribution(weight=weight, norm2=norm2) for norm2 in norms2]


@pytest.mark.parametrize("weighting", [uniform(), samples(), by_function(lambda: 1.0), outliers()])
def test_shares_are_the_weights_over_their_sum(weighting: Weighting) -> None:
    assert weighting.weigh(members(1.0, 1.0, 1.0), {}).shares == (1 / 3, 1 / 3, 1 / 3)
    assert weighting.weigh(members(0.1, 0.7), {}).shares == (0.1 / (0.1 + 0.7), 0.7 / (0.1 + 0.7))


@pytest.mark.parametrize("weighting", [uniform(), samples(), by_function(lambda: 1.0), outliers()])
def test_if_nobody_has_anything_to_add_all_count_alike(weighting: Weighting) -> None:
    assert weighting.weigh(members(0.0, 0.0, 0.0), {}).shares == (1 / 3, 1 / 3, 1 / 3)


def test_what_a_worker_says_it_counts() -> None:
    assert uniform().own(samples=7) == 1.0
    assert samples().own(samples=7) == 7
    assert by_function(lambda: 3).own(samples=7) == 3.0
    assert outliers(samples()).own(samples=7) == 7


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_negative_or_no_number_is_refused(weight: float) -> None:
    for weighting in (by_function(lambda: weight), samples(), outliers(samples())):
        with pytest.raises(ValueError, match=f"the weight is {weight}, and must be a number that is not negative"):
            weighting.own(samples=weight)


def test_only_samples_need_samples() -> None:
    needing = [uniform(), samples(), by_function(lambda: 1.0), outliers(samples()), outliers(uniform())]
    assert [weighting.needs_samples for weighting in needing] == [False, True, False, True, False]


def test_a_norm_at_the_limit_stays_and_one_above_is_left_out() -> None:
    at = 10.0**2 * 4.0
    assert outliers(explosion=10.0).weigh(norms(4.0, 4.0, at), {}).left_out == frozenset()
    weighed = outliers(explosion=10.0).weigh(norms(4.0, 4.0, math.nextafter(at, math.inf)), {})
    assert weighed.left_out == {2}
    assert weighed.shares == (0.5, 0.5, 0.0)
    assert not weighed.refuse


def test_of_two_nobody_can_say_which_is_wrong() -> None:
    assert not outliers().weigh(norms(1.0, 1e9), {}).left_out
    idle = [*norms(1.0, 1e9), PlainContribution(weight=0.0, norm2=1.0)]
    assert not outliers().weigh(idle, {}).left_out


def test_where_nobody_moved_nobody_is_too_large() -> None:
    assert not outliers().weigh(norms(0.0, 0.0, 1.0), {}).left_out


def test_what_is_not_finite_is_left_out_and_not_counted_in_the_median() -> None:
    sick = PlainContribution(weight=0.0, norm2=0.0, faulty=True)
    weighed = outliers().weigh([sick, *norms(1.0, 1.0, 1e9)], {})
    assert weighed.left_out == {0, 3}
    assert weighed.shares == (0.0, 0.5, 0.5, 0.0)
    assert outliers(explosion=None).weigh([sick, *norms(1.0, 1.0, 1e9)], {}).left_out == {0}


def test_a_round_is_refused_only_if_someone_is_left_out() -> None:
    strict = outliers(leave_out=False)
    assert not strict.weigh(norms(1.0, 1.0, 1.0), {}).refuse
    assert strict.weigh(norms(1.0, 1.0, 1e9), {}).refuse
    assert strict.weigh([PlainContribution(weight=0.0, faulty=True)], {}).refuse


def test_outliers_keep_the_state_and_the_judgement_of_what_they_wrap() -> None:
    class Counting:
        needs_samples = False

        def start(self) -> Any:
            return {"rounds": 0.0}

        def own(self, samples: float) -> float:
            return 1.0

        def weigh(self, contributions: Any, state: Any) -> cadenza.weighting.Weighed:
            left_out, state = frozenset({0}), {"rounds": state["rounds"] + 1.0}
            return cadenza.weighting.Weighed(shares_of(contributions), left_out, state, refuse=True)

    weighting = outliers(Counting())
    weighed = weighting.weigh(norms(1.0, 1.0, 1e9), weighting.start())
    assert (weighed.left_out, weighed.state, weighed.refuse) == ({0, 2}, {"rounds": 1.0}, True)


@pytest.mark.parametrize("explosion", [1.0, 0.5, -1.0, math.nan])
def test_an_explosion_below_the_median_is_refused(explosion: float) -> None:
    with pytest.raises(ValueError, match="explosion is a multiple of the median norm"):
        outliers(explosion=explosion)


def test_by_function_refuses_what_cannot_be_called() -> None:
    with pytest.raises(TypeError, match="by_function"):
        by_function(2.0)  # type: ignore[arg-type]


def test_a_strategy_takes_words_functions_and_pieces() -> None:
    def counted() -> float:
        return 2.0

    assert cadenza.local_sgd().weighting == uniform()
    assert cadenza.local_sgd(weight="samples").weighting == samples()
    assert cadenza.local_sgd(weight=counted).weighting == by_function(counted)
    assert cadenza.local_sgd(weight=outliers(samples())).weighting == outliers(samples())


def test_policies_that_go_on_leave_out_what_would_do_harm() -> None:
    assert cadenza.local_sgd(weight="samples", faults=cadenza.raise_error()).weighting == samples()
    assert cadenza.local_sgd(weight="samples", faults=cadenza.skip_round()).weighting == outliers(samples())
    strict = cadenza.shrink(poison="skip", explosion=5.0)
    assert cadenza.local_sgd(faults=strict).weighting == outliers(explosion=5.0, leave_out=False)
