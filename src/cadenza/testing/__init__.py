"""For tests and notebooks: contracts that a piece of one's own can be held to."""

from cadenza.testing.contracts import (
    check_codec,
    check_fault_policy,
    check_fragmentation,
    check_outer,
    check_round_topology,
    check_schedule,
    check_weighting,
)

__all__ = [
    "check_codec",
    "check_fault_policy",
    "check_fragmentation",
    "check_outer",
    "check_round_topology",
    "check_schedule",
    "check_weighting",
]
