"""Every preset beside the plain algorithm whose way it must walk, step by step."""

from __future__ import annotations

from collections.abc import Callable

import torch

import cadenza
from cadenza import Strategy, codecs
from support import algorithms
from support.algorithms import History, Workers
from support.compare import same_bits
from support.training import LR, Trace

Reference = Callable[[Workers], History]


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


FRAGMENTS = [[0, 1, 4, 5], [2, 3]]  # of the MLP's layers "0", "2" and "4", strided by 2

PRESETS: dict[str, tuple[Strategy, Reference, bool]] = {
    "local_sgd": (
        cadenza.local_sgd(4),
        lambda w: algorithms.local_sgd(w, 10, period=4),
        True,
    ),
    "post_local_sgd": (
        cadenza.post_local_sgd(3, warmup_steps=4),
        lambda w: algorithms.post_local_sgd(w, 10, period=3, warmup_steps=4),
        True,
    ),
    "slowmo": (
        cadenza.slowmo(4, alpha=0.9, beta=0.5),
        lambda w: algorithms.slowmo(w, 10, period=4, alpha=0.9, beta=0.5, lr=LR),
        False,
    ),
    "diloco": (
        cadenza.diloco(4),
        lambda w: algorithms.diloco(w, 10, period=4),
        True,
    ),
    "diloco in fragments": (
        cadenza.diloco(4, fragments=cadenza.by_layers(2)),
        lambda w: algorithms.streaming_diloco(w, 10, period=4, lr=0.7, fragments=FRAGMENTS),
        True,
    ),
    "late diloco": (
        cadenza.diloco(4, delay=2),
        lambda w: algorithms.streaming_diloco(w, 10, period=4, lr=0.7, fragments=[list(range(6))], delay=2),
        True,
    ),
    "streaming_diloco": (
        cadenza.streaming_diloco(6, layers=2, delay=2, alpha=0.3, codec=codecs.fp32()),
        lambda w: algorithms.streaming_diloco(w, 10, period=6, lr=0.4, fragments=FRAGMENTS, delay=2, alpha=0.3),
        False,
    ),
    "streaming_diloco with three in flight": (
        cadenza.streaming_diloco(6, layers=1, delay=5, alpha=0.5, codec=codecs.fp32()),
        lambda w: algorithms.streaming_diloco(
            w, 10, period=6, lr=0.4, fragments=[[0, 1], [2, 3], [4, 5]], delay=5, alpha=0.5
        ),
        False,
    ),
    "late local_sgd": (
        cadenza.local_sgd(4, delay=3),
        lambda w: algorithms.late_local_sgd(w, 10, period=4, delay=3),
        False,
    ),
    "sparse_loco": (
        cadenza.sparse_loco(4, density=0.1),
        lambda w: algorithms.sparse_loco(w, 10, period=4, codec=codecs.topk(density=0.1)),
        False,
    ),
    "sparse_loco of all": (
        cadenza.sparse_loco(4, density=0.1, mean_of="all"),
        lambda w: algorithms.sparse_loco(w, 10, period=4, codec=codecs.topk(density=0.1), of_senders=False),
        False,
    ),
    "int8 diloco": (
        cadenza.diloco(4, codec=codecs.int8(block=16)),
        lambda w: algorithms.compressed_diloco(w, 10, period=4, codec=codecs.int8(block=16)),
        False,
    ),
    "e3m0 diloco back in int8": (
        cadenza.diloco(4, codec=codecs.e3m0(block=16, back=codecs.int8(block=16))),
        lambda w: algorithms.compressed_diloco(
            w, 10, period=4, codec=codecs.e3m0(block=16, back=codecs.int8(block=16))
        ),
        False,
    ),
    "e3m0 diloco with error feedback": (
        cadenza.diloco(4, codec=codecs.error_feedback(codecs.e3m0(block=16), decay=0.9)),
        lambda w: algorithms.compressed_diloco(
            w, 10, period=4, codec=codecs.error_feedback(codecs.e3m0(block=16), decay=0.9)
        ),
        False,
    ),
}
