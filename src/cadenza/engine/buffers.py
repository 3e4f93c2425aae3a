"""What workers share of the model's buffers: running statistics take the mean, counters the largest value."""

from __future__ import annotations

import logging
import math

from cadenza.engine.collectives import average_tensors, take_largest
from cadenza.engine.replica import Replica
from cadenza.transports import Transport

__all__ = ["average_buffers"]

_logger = logging.getLogger("cadenza")


def average_buffers(replica: Replica, transport: Transport, *, weight: float) -> int:
    """Average the buffers that the strategy names over the members, in place; return how many bytes were sent.

    It is a blocking moment, also where rounds land late: what is under way on the same transport comes first. Values
    that are not finite do not count; their worker takes the others'. Where a round may fail and training goes on,
    they travel with it instead (`SideValues`), because nothing may change before all have agreed.
    """
    view, state, which = replica.view, replica.state, replica.strategy.buffers
    tensors, counters = view.float_buffers(which), view.counters(which)
    if not (tensors or counters):
        return 0
    state.wait_for_pending()
    if weight and not math.isfinite(float(sum(tensor.double().sum() for tensor in tensors.values()))):
        weight = 0.0
        _logger.warning("At step %d buffers of this worker are not finite; it takes the others'.", state.clock)
    sent = average_tensors(transport, tensors, step=state.moment, what="buffer", weight=weight)
    return sent + take_largest(transport, counters)
