"""What works with what, found by trying it: each preset with each choice, and on each kind of model.

A cell says yes if nothing was refused, and otherwise has the number of the library's own message.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import cadenza
from cadenza import presets

__all__ = ["COLUMNS", "Cell", "matrix", "tried"]


@dataclass(frozen=True)
class Column:
    """A choice: what the preset is given, and what is done to the model and the loop."""

    name: str
    options: Callable[[], dict[str, Any]] = dict
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    amp: bool = False
    group: str = ""


@dataclass(frozen=True)
class Cell:
    """What came of a preset with a choice: why it was refused, or nothing."""

    preset: str
    column: str
    refused: str


def _ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))  # type: ignore[return-value]


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def _codec(name: str) -> Callable[[], dict[str, Any]]:
    return lambda: {"codec": getattr(cadenza.codecs, name)()}


COLUMNS = (
    Column("DDP", wrap=_ddp, group="model"),
    Column("FSDP2", wrap=_fsdp2, group="model"),
    Column("torch.compile", wrap=_compiled, group="model"),
    Column("AMP, GradScaler", amp=True, group="model"),
    Column("skip_round", lambda: {"faults": cadenza.skip_round()}, group="faults"),
    Column("shrink", lambda: {"faults": cadenza.shrink()}, group="faults"),
    *(Column(name, _codec(name), group="codecs") for name in ("bf16", "int8", "e3m0", "topk", "auto")),
    Column(
        "error_feedback(int8)",
        lambda: {"codec": cadenza.codecs.error_feedback(cadenza.codecs.int8())},
        group="codecs",
    ),
    Column("delay=1", lambda: {"delay": 1}, group="choices"),
    Column("warmup_steps=2", lambda: {"warmup_steps": 2}, group="choices"),
    Column('period="auto"', lambda: {"period": "auto"}, group="choices"),
    Column("by_layers", lambda: {"fragments": cadenza.by_layers(1)}, group="choices"),
    Column("balanced", lambda: {"balanced": True}, group="choices"),
    Column('weight="samples"', lambda: {"weight": "samples"}, group="choices"),
    Column("buffers=True", lambda: {"buffers": True}, group="choices"),
    Column('optimizer_state="average"', lambda: {"optimizer_state": "average"}, group="choices"),
    Column("offload", lambda: {"offload": True}, group="choices"),
)


@contextmanager
def _alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# What a preset cannot do without, and periods that are short, but longer than its delay.
_GIVEN: dict[str, dict[str, Any]] = {
    "hierarchical": {"levels": {2: "host", 4: "all"}},
    "post_local_sgd": {"warmup_steps": 1},
    "streaming_diloco": {"period": 8, "delay": 1},
}
_PERIOD = 2


def _try(preset: str, column: Column) -> None:
    """Make the strategy; where the model is another one, attach it and train for a round. What cannot work raises."""
    make = getattr(presets, preset)
    shortest = {"period": _PERIOD} if "period" in inspect.signature(make).parameters else {}
    strategy = make(**{**shortest, **_GIVEN.get(preset, {}), **column.options()})
    if column.group != "model":
        return
    model = column.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=column.amp)
    sync = cadenza.attach(model, optimizer, strategy)
    for _ in range(_PERIOD + 1):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=column.amp):
            loss = model(torch.ones(1, 4)).float().square().mean()
        scaler.scale(loss).backward()
        sync.average_gradients()
        scaler.step(optimizer)
        scaler.update()
        sync.step()
    sync.close()


ITS_OWN = "The preset makes this choice itself; compose a Strategy of your own to make another."


@functools.cache
def tried() -> tuple[Cell, ...]:
    """Return what came of every preset with every choice."""
    found = []
    with _alone(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for preset in presets.__all__:
            for column in COLUMNS:
                try:
                    _try(preset, column)
                    refused = ""
                except TypeError as error:  # Python's own: the preset has no such argument, or gives it itself
                    refused = str(error) if "argument" not in str(error) else ITS_OWN
                except (cadenza.errors.CadenzaError, ValueError) as error:
                    refused = str(error)
                found.append(Cell(preset, column.name, refused))
    return tuple(found)


def matrix() -> str:
    """Return a table for each group of choices, and the messages that their cells refer to."""
    parts, notes = [], list(dict.fromkeys(cell.refused for cell in tried() if cell.refused))
    cells = {(cell.preset, cell.column): cell.refused for cell in tried()}
    for group in dict.fromkeys(column.group for column in COLUMNS):
        own = [column.name for column in COLUMNS if column.group == group]
        head = "".join(f'<th scope="col"><code>{escape(name)}</code></th>' for name in own)
        rows = []
        for preset in presets.__all__:
            row = "".join(_cell(cells[preset, name], notes) for name in own)
            rows.append(f'<tr><th scope="row"><code>{preset}</code></th>{row}</tr>')
        table = f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        parts.append(f"## {_TITLES[group]}\n\n{table}")
    listed = "".join(f'<li id="why-{number}">{escape(note)}</li>' for number, note in enumerate(notes, 1))
    return "\n\n".join(parts) + f'\n\n## Why not\n\n<ol class="why">{listed}</ol>\n'


_TITLES = {
    "model": "Around the model",
    "faults": "Fault policies",
    "codecs": "Codecs",
    "choices": "Other choices",
}


def _cell(refused: str, notes: list[str]) -> str:
    if not refused:
        return '<td class="yes">yes</td>'
    number = notes.index(refused) + 1
    return f'<td class="no">no, <a href="#why-{number}">{number}</a></td>'
