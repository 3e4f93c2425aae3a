"""Every preset beside the plain algorithm whose way it must walk, step by step."""

from __future__ import annotations

import torch

from cadenza.testing.references import History
from cadenza.testing.trajectories import PRESETS
from support.compare import same_bits
from support.training import Trace

__all__ = ["PRESETS", "assert_same_way"]


def assert_same_way(traces: list[Trace], reference: History, *, bits: bool) -> None:
    """Every worker holds, after every step and at the end, what the reference says."""
    __tracebackhide__ = True
    assert len(reference) == len(traces[0].history)
    for n, expected in enumerate(reference, start=1):
        for rank, trace in enumerate(traces):
            got, wanted = trace.history[n - 1], expected[rank]
            where = f"rank {rank} after step {n}" if n < len(reference) else f"rank {rank} after finish()"
            if bits:
                assert same_bits(got, wanted), f"{where}: off by {(got - wanted).abs().max()}"
            else:
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-6, msg=lambda m, w=where: f"{w}: {m}")
    for trace in traces[1:]:
        assert same_bits(trace.finished, traces[0].finished)
