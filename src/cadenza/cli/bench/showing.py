"""The contest's figures as a person reads them, and as a script does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from cadenza.cli.amounts import bit_rate, byte_size, duration
from cadenza.cli.bench.contest import DTYPES, RAW, TORCH, Case, Result
from cadenza.cli.codec_speed import seconds_a_value
from cadenza.codecs.kernels import implementations
from cadenza.version import __version__

__all__ = ["show", "to_plain"]

_WAYS = {"native": "machine code", "triton": "Triton kernels", "torch": "torch's operations"}
_CPU = torch.device("cpu")


def show(
    case: Case, results: Sequence[Result], ranks: int, way: str, console: Console, *, device: torch.device = _CPU
) -> None:
    """Print the table, and how to read it."""
    times = {result.name: result.seconds for result in results}
    threads = torch.get_num_threads()
    console.print(
        f"[bold]cadenza bench[/bold]: {case.parameters / 1e6:g} M {case.dtype} parameters in {case.tensors} tensors, "
        f"{ranks} ranks of {threads} thread{'s' * (threads > 1)}, medians of {case.repeats} turns "
        f"(cadenza {__version__}, torch {torch.__version__})",
        highlight=False,
    )
    table = Table(box=SIMPLE)
    columns = ["", "time", "ratio", "a rank sends", "effective rate", "memory"]
    if device.type != "cpu":
        columns[-1:] = [f"on {device.type}", "on host"]
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for result in results:
        table.add_row(
            result.name,
            duration(result.seconds),
            f"{result.seconds / times[RAW]:.2f}",
            byte_size(result.bytes_sent),
            bit_rate(effective_rate(case, result, ranks)),
            *(_size(size) for size in (result.memory_bytes, result.host_bytes)[: len(columns) - 5]),
        )
    console.print(table)
    for line in in_words(results, way, device):
        console.print(line, highlight=False, markup=False)


def _size(size: int | None) -> str:
    return "–" if size is None else byte_size(size)


def _name(device: torch.device) -> str:
    """Return what kind of device it is."""
    return "cpu" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


def effective_rate(case: Case, result: Result, ranks: int) -> float:
    """Return the bytes a second that a plain all-reduce would need to be as fast."""
    return 2 * (ranks - 1) / ranks * case.parameters * DTYPES[case.dtype].itemsize / result.seconds


def in_words(results: Sequence[Result], way: str, device: torch.device = _CPU) -> list[str]:
    """Return what to know about the table."""
    times = {result.name: result.seconds for result in results}
    ours = [result for result in results if result.name not in (RAW, TORCH)]
    best = min(ours, key=lambda result: result.seconds)
    lines = [
        "all-reduce is of one flat buffer, nothing else; torch averager and cadenza drop-in are average_parameters of "
        "each; diloco is a whole round by cadenza.attach.",
        "ratio: to the all-reduce. effective rate: at which a plain all-reduce would be as fast. memory: beyond the "
        "model, to be set up and used once; DiLoCo keeps an anchor and a momentum.",
        f"Fastest of Cadenza's: {best.name}, {times[TORCH] / best.seconds:.2g} times as fast as torch's averager.",
        f"The model is on {_name(device)}; codecs are {_WAYS[implementations(device)[0]]} there.",
    ]
    if way == "shared memory":
        lines.append(
            "Cadenza's values went through shared memory, all-reduce and torch's through Gloo; CADENZA_SHARED_MEMORY=0 "
            "shows how it would be between machines."
        )
    return lines


def to_plain(
    case: Case, results: Sequence[Result], ranks: int, way: str, *, device: torch.device = _CPU
) -> dict[str, Any]:
    """Return everything as JSON can hold it."""
    raw = next(result.seconds for result in results if result.name == RAW)
    return {
        "versions": {"cadenza": __version__, "torch": torch.__version__},
        "case": asdict(case),
        "ranks": ranks,
        "threads": torch.get_num_threads(),
        "way": way,
        "device": {"kind": device.type, "name": _name(device), "codecs": implementations(device)[0]},
        "codec_s": seconds_a_value(device),
        "results": [
            {
                **result.to_plain(),
                "ratio": result.seconds / raw,
                "effective_bytes_per_s": effective_rate(case, result, ranks),
            }
            for result in results
        ],
    }
