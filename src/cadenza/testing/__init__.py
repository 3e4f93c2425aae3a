"""For tests and notebooks: workers that are threads of this process, and contracts for pieces of one's own."""

from cadenza.testing.contracts import (
    check_codec,
    check_fault_policy,
    check_fragmentation,
    check_outer,
    check_round_topology,
    check_schedule,
    check_weighting,
)
from cadenza.testing.workers import Worker, WorkerPool, workers

__all__ = [
    "Worker",
    "WorkerPool",
    "check_codec",
    "check_fault_policy",
    "check_fragmentation",
    "check_outer",
    "check_round_topology",
    "check_schedule",
    "check_weighting",
    "workers",
]
