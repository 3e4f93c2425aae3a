"""What the protocols promise, as functions that try to break a piece; torch is all they need.

Each raises AssertionError with the promise that is broken, and returns None if all are kept. Cadenza's own pieces are
held to the same (tests/contract).

>>> from cadenza.schedules import every
>>> check_schedule(every(16))
"""

from cadenza.testing.contracts.codecs import check_codec
from cadenza.testing.contracts.faults import check_fault_policy
from cadenza.testing.contracts.fragments import check_fragmentation
from cadenza.testing.contracts.outer import check_outer
from cadenza.testing.contracts.schedules import check_schedule
from cadenza.testing.contracts.topology import check_round_topology
from cadenza.testing.contracts.weighting import check_weighting

__all__ = [
    "check_codec",
    "check_fault_policy",
    "check_fragmentation",
    "check_outer",
    "check_round_topology",
    "check_schedule",
    "check_weighting",
]
