"""How far the workers had moved apart: one formula, whatever a round has measured; the same number on all ranks.

Drift is sqrt(mean‖x_i − mean x‖²) / ‖mean x‖. Where differences from an anchor are sent, the numerator comes from the
headers' norms: mean‖δ_i‖² − ‖mean δ‖² is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cadenza.common.norms import distance_squared, norm_squared
from cadenza.engine.round_result import RoundResult

__all__ = ["drift", "drift_of_differences", "drift_of_values"]


def drift(spread2: float, mean_norm2: float) -> float:
    """Return the drift of a mean squared distance from the mean, relative to the mean's squared norm.

    >>> drift(0.25, 25.0)
    0.1
    """
    return math.sqrt(max(0.0, spread2) / max(mean_norm2, 1e-300))


def drift_of_values(result: RoundResult, mean: Sequence[torch.Tensor]) -> float:
    """Return the drift of a round in which values themselves were averaged."""
    return drift(result.spread2, norm_squared(*mean))


def drift_of_differences(result: RoundResult, anchors: Sequence[torch.Tensor], deltas: Sequence[torch.Tensor]) -> float:
    """Return the drift of a round in which differences from anchors were averaged to `deltas`."""
    mean2 = sum(w * header.norm2 for w, header in zip(result.weights, result.headers, strict=True))
    size2 = sum(distance_squared(anchor, delta) for anchor, delta in zip(anchors, deltas, strict=True))
    return drift(mean2 - norm_squared(*deltas), size2)
