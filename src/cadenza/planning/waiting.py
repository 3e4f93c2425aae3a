"""What unequal workers and failures cost: how long a round waits for the last, and what a fault takes away."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING

from cadenza.planning.inputs import Cluster

if TYPE_CHECKING:
    from cadenza.faults import FaultPolicy

__all__ = ["expected_maximum", "fault_share", "pause_s", "waiting_s"]


def expected_maximum(count: int) -> float:
    """Return about the largest of so many standard normal numbers (Blom's rule; within 2 % from 2 to 10,000).

    >>> round(expected_maximum(8), 2)
    1.43
    """
    return 0.0 if count < 2 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def waiting_s(cluster: Cluster, members: int, steps: int) -> float:
    """Return how long a round is expected to wait for the last of its members, after so many local steps.

    Jitter adds up as independent noise does, so it grows with the root of the steps. A straggler holds up all others,
    once however many there are at a time.
    """
    if members < 2 or not steps:
        return 0.0
    noise = cluster.jitter * cluster.step_s * math.sqrt(steps) * expected_maximum(members)
    at_all = 1 - (1 - cluster.straggle) ** (members * steps)
    own = min(1.0, cluster.straggle * steps)
    return noise + cluster.straggle_s * max(0.0, at_all - own)


def pause_s(policy: FaultPolicy) -> float:
    """Return for how long the others wait for a worker that has failed; 0 where they do not go on.

    >>> from cadenza.faults import raise_error, shrink
    >>> pause_s(shrink(grace_s=3.0)), pause_s(raise_error())
    (3.0, 0.0)
    """
    return policy.patience.grace_s if policy.tolerant else 0.0


def fault_share(policy: FaultPolicy, cluster: Cluster, period_s: float) -> float:
    """Return the share of the training that is left after faults.

    Under `raise_error` all stop, start again and take the steps since the last checkpoint anew. Under `skip_round` and
    `shrink` the others notice within the lease or the grace and go on; what is lost is that pause, the progress of the
    failed worker's period, and its work until it is back. A skipped round is not lost: its differences count in the
    next one.

    >>> from cadenza.faults import raise_error, shrink
    >>> from cadenza.planning import Cluster, Faults, Link
    >>> daily = Cluster(100, Link(1e9), 1.0, faults=Faults(mean_time_s=30 * 86400))
    >>> round(fault_share(raise_error(), daily, 100.0), 3), round(fault_share(shrink(), daily, 100.0), 3)
    (0.978, 1.0)
    """
    faults = cluster.faults
    rate = faults.rate(cluster.workers)
    if not rate:
        return 1.0
    if not policy.tolerant:
        return 1 / (1 + rate * (faults.restart_s + faults.checkpoint_s / 2))
    lost_work_s = (faults.restart_s + period_s / 2) / cluster.workers
    return 1 / (1 + rate * (pause_s(policy) + lost_work_s))
