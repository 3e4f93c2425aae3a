"""A plan on the terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from cadenza.cli.amounts import bit_rate, byte_size, duration
from cadenza.cli.plan.candidates import shown_codec
from cadenza.common.wording import count_workers

__all__ = ["show"]


def show(told: dict[str, Any]) -> None:
    """Print a plan: the table, the recommendation, and how to use it."""
    console = Console(highlight=False)
    if told["model"] == "idealised":
        _show_idealised(told, console)
        return
    _show_inputs(told, console)
    console.print(_table(told))
    for line in _notes(told):
        console.print(line, markup=False)
    _show_recommendation(told, console)
    if "html" in told:
        console.print(f"The curves, with sliders: {told['html']}", markup=False)
    if "simulation" in told:
        console.print(told["simulation"]["text"], markup=False)


def _show_inputs(told: dict[str, Any], console: Console) -> None:
    inputs = told["inputs"]
    cluster = inputs["cluster"]
    rate = bit_rate(cluster["link"]["up"] / 8)
    sites = f" in {cluster['sites']} sites" if cluster["sites"] > 1 else ""
    workers = count_workers(cluster["workers"])
    console.print(
        f"[bold]cadenza plan[/bold]: {inputs['parameters'] / 1e6:g} M parameters, {duration(cluster['step_s'])} a "
        f"step, {workers}{sites} on links of {rate}; target {inputs['target_utilisation']:.1%}"
    )
    for source in inputs["sources"]:
        console.print(f"Taken: {source}.", markup=False)
    if told["calibration"] is not None:
        console.print(
            f"Calibrated: rounds take {told['calibration']['factor']:.2f} times what the model says (worst error left: "
            f"{told['calibration']['worst']:.1%}).",
            markup=False,
        )


def _table(told: dict[str, Any]) -> Table:
    timed = told["rows"][0]["seconds"] is not None
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="underline")
    took = "tokens" if timed else "1k steps"
    for name in ["strategy", "codec", "period", "late", "used", took, "a step", "memory", "loss"]:
        table.add_column(name, justify="left" if name in ("strategy", "codec") else "right", no_wrap=True)
    for row in told["rows"]:
        seconds = row["seconds"] if timed else 1000 * row["step_s"]
        table.add_row(
            row["strategy"],
            shown_codec(row["strategy"], row["codec"]),
            str(row["period"]),
            str(row["delay"]),
            f"{100 * row['utilisation']:.1f}%" + ("" if row["reaches_target"] else "✗"),
            _span(seconds),
            byte_size(row["bytes_a_step"]),
            byte_size(row["memory"]["device"]) + ("" if row["fits_memory"] else "✗"),
            _percent(row["loss"]),
        )
    return table


def _percent(loss: dict[str, Any]) -> str:
    if loss["percent"] is None:
        return "–"
    return f"{loss['percent']:+.1f}%" + ("" if loss["valid"] else "*")


def _span(seconds: float) -> str:
    """Return a time of hours and days."""
    if seconds < 7200:
        return duration(seconds)
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} d"


def _notes(told: dict[str, Any]) -> list[str]:
    lines = [
        "late: steps from launch to landing. used: share of the time that is compute. a step: bytes that a worker "
        "sends, on average. loss: above data parallel's, each side tuned, as published (arXiv 2503.09799)."
    ]
    chosen = told["recommendation"]["loss"]
    if any(row["loss"]["percent"] is not None and not row["loss"]["valid"] for row in told["rows"]):
        note = "" if chosen["valid"] or chosen["percent"] is None else f"; the recommended one: {chosen['note']}"
        lines.append(f"* outside the range in which it was measured (35M to 2.4B, 1 to 8 workers, H = 30){note}.")
    if any(not (row["reaches_target"] and row["fits_memory"]) for row in told["rows"]):
        lines.append("✗ does not reach the target, or does not fit.")
    return lines


def _show_recommendation(told: dict[str, Any], console: Console) -> None:
    chosen = told["recommendation"]
    title = "Begin with" if chosen["possible"] else "Not possible as asked; the nearest that works"
    console.print(f"\n[bold]{title}[/bold]: {chosen['python']}")
    console.print(chosen["why"], markup=False)
    if chosen["strategy"] in ("diloco", "muloco"):
        outer = chosen["published_outer"]
        console.print(
            f"Published for this many workers: outer_lr={outer['outer_lr']:g}, outer_momentum="
            f"{outer['outer_momentum']:g} (arXiv 2503.09799).",
            markup=False,
        )
    console.print("\nFor cadenza train --config:")
    console.print(chosen["toml"], markup=False)


def _show_idealised(told: dict[str, Any], console: Console) -> None:
    console.print("[bold]cadenza plan[/bold]: the papers' own model; measured runs took 1.08 to 1.92 times its cost.")
    table = Table(box=SIMPLE)
    targets = list(told["rows"][0]["bandwidth_for"])
    table.add_column("strategy")
    for name in ["period", "utilisation", *(f"for {float(target):.0%}" for target in targets)]:
        table.add_column(name, justify="right")
    for row in told["rows"]:
        needed = [row["bandwidth_for"][target] for target in targets]
        cells = ["–" if rate is None else bit_rate(rate / 8) for rate in needed]
        table.add_row(row["strategy"], str(row["period"]), f"{row['utilisation']:.1%}", *cells)
    console.print(table)
