"""The papers' own model of utilisation, kept apart from ours.

Streaming DiLoCo (arXiv 2501.18512, table 4) and the scaling laws of DiLoCo (2503.09799, table 6) give the bandwidth
at which some share of the time is compute. This is a reading of those tables, which they do not spell out: a
synchronisation moves 16 bits a parameter once (c = 16 N / W seconds); two thirds of a step hide it, but never its last
layer; streaming sends a fragment of three layers at a time; overlap hides one more step; 4 bits are a quarter of the
bytes. The tables imply steps of about 1.15 times the printed ones, which `STEP` puts in.

It differs from ours in what it leaves out: the number of workers (a ring moves 2 (M − 1) / M times the bytes), fp32,
the way back of a reduced mean, latency, all work of packing and encoding, shared links, waits. And it hides a
synchronisation without delay behind two thirds of a step, which needs gradients, not parameters. Real GPUs on shaped
links were measured at 1.08 to 1.92 times its cost.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["GRID", "KINDS", "STEP", "Kind", "bandwidth_needed", "utilisation"]

Kind = Literal["data parallel", "diloco", "streaming", "overlap", "4 bits"]
KINDS: tuple[Kind, ...] = ("data parallel", "diloco", "streaming", "overlap", "4 bits")

STEP = 1.15
GRID = tuple(0.1e9 * 10 ** (4 * i / 49) for i in range(50))  # the tables' bandwidths, in bits a second
_LAYERS = 3  # of a fragment


def utilisation(
    kind: Kind, bandwidth: float, *, parameters: float, layers: int, step_s: float, period: int = 100
) -> float:
    """Return the share of the time that is compute.

    Args:
        kind: What is synchronised how; "overlap" and "4 bits" are streaming with what stands before them in the table.
        bandwidth: Bits a second.
        parameters: The size of the model.
        layers: How many layers it has.
        step_s: What a step takes, as the tables print it.
        period: Steps between synchronisations; data parallel has 1.

    >>> round(utilisation("diloco", 6.2e9, parameters=1e9, layers=24, step_s=0.1), 2)
    0.82
    """
    step = STEP * step_s
    bits = 4 if kind == "4 bits" else 16
    if kind == "data parallel":
        period = 1
    fragments = max(1, layers // _LAYERS) if kind in ("streaming", "overlap", "4 bits") else 1
    hidden = (5 / 3 if kind in ("overlap", "4 bits") else 2 / 3) * step
    whole = bits * parameters / fragments / bandwidth
    stall = max(whole - hidden, whole / layers)
    return period * step / (period * step + fragments * stall)


def bandwidth_needed(
    kind: Kind, target: float, *, parameters: float, layers: int, step_s: float, period: int = 100
) -> float:
    """Return the smallest bandwidth of the tables' grid that reaches a utilisation; infinity if none does.

    >>> bandwidth_needed("data parallel", 0.5, parameters=1e9, layers=24, step_s=0.1) / 1e9
    86.8...
    """
    for bandwidth in GRID:
        found = utilisation(kind, bandwidth, parameters=parameters, layers=layers, step_s=step_s, period=period)
        if found >= target:
            return bandwidth
    return float("inf")
