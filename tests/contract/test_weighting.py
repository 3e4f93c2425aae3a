"""What every weighting promises. A new one is added below, and is held to all of it."""

from __future__ import annotations

import pytest

from cadenza.testing import check_weighting
from cadenza.weighting import Weighting, by_function, edit_norms, outliers, samples, uniform

WEIGHTINGS: list[Weighting] = [
    uniform(),
    samples(),
    by_function(lambda: 2.5),
    edit_norms(),
    outliers(),
    outliers(samples(), explosion=2.0),
    outliers(explosion=None),
    outliers(leave_out=False),
    outliers(outliers(explosion=100.0), explosion=2.0),
]


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda weighting: repr(weighting).split(" at ")[0])
def test_keeps_its_contract(weighting: Weighting) -> None:
    check_weighting(weighting)
