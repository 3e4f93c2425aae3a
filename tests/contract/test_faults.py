"""What every fault policy promises. A new one is added below, and is held to all of it."""

from __future__ import annotations

import pytest

from cadenza.faults import FaultPolicy, raise_error, shrink, skip_round
from cadenza.testing import check_fault_policy

POLICIES: list[FaultPolicy] = [
    raise_error(),
    skip_round(),
    skip_round(poison="skip", explosion=None),
    shrink(),
    shrink(min_workers=3),
    shrink(quorum=0.0),
    shrink(quorum=0.9, explosion=2.0),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_keeps_its_contract(policy: FaultPolicy) -> None:
    check_fault_policy(policy)
