"""The diagnosis as a person reads it, and as a script does."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cadenza.cli.amounts import bit_rate, byte_size, duration
from cadenza.cli.doctor.advice import Plan
from cadenza.cli.doctor.diagnosis import Diagnosis
from cadenza.cli.doctor.findings import Finding
from cadenza.cli.doctor.links import Link

__all__ = ["show", "to_plain"]

_WORDS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "problem": ("PROBLEM", "bold red")}
_WIDEST = 8  # columns that a matrix may have


def show(diagnosis: Diagnosis, plan: Plan | None, console: Console) -> None:
    """Print the findings, the links, what to do, and what syncs would cost."""
    console.print(_headline(diagnosis))
    console.print(_findings(diagnosis))
    if diagnosis.links:
        _show_links(diagnosis, console)
    if plan is not None:
        _show_plan(diagnosis, plan, console)
    _show_advice(diagnosis, console)


def _headline(diagnosis: Diagnosis) -> Text:
    hosts = len(set(diagnosis.hosts.values()))
    ranks = f"{diagnosis.ranks} rank{'s' * (diagnosis.ranks > 1)}"
    there = ranks if len(diagnosis.hosts) == diagnosis.ranks else f"{len(diagnosis.hosts)} of {ranks}"
    who = f"{there} on {hosts} host{'s' * (hosts > 1)}" if diagnosis.ranks else "this machine alone"
    versions = ", ".join(f"{name} {version}" for name, version in diagnosis.versions.items())
    return Text.assemble(("cadenza doctor", "bold"), f": {who} ({versions})\n")


def _findings(diagnosis: Diagnosis) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for finding, where in _rows(diagnosis.findings):
        word, style = _WORDS[finding.level]
        table.add_row(Text(word, style), finding.subject, Text(f"{finding.text}{where}"))
    return table


def _rows(findings: list[Finding]) -> list[tuple[Finding, str]]:
    """Return a line a finding; what is fine on each host in its own way, such as free space, gets one for all."""
    rows, seen = [], set()
    for finding in findings:
        fine = [other for other in findings if other.subject == finding.subject and other.level == "ok"]
        if finding.level != "ok" or len(fine) == 1:
            rows.append((finding, f" [{', '.join(finding.where)}]" if finding.where else ""))
        elif finding.subject not in seen:
            seen.add(finding.subject)
            others = sum(len(other.where) for other in fine) - 1
            rows.append((finding, f" [{finding.where[0]}; {others} other host{'s' * (others > 1)} fine as well]"))
    return rows


def _show_links(diagnosis: Diagnosis, console: Console) -> None:
    names = {rank: f"rank {rank}" for rank in diagnosis.hosts}
    if len(names) > _WIDEST:
        names = dict(diagnosis.hosts)
    columns = list(dict.fromkeys(names.values()))
    if len(columns) > _WIDEST:
        return
    cells = link_cells(diagnosis.links, names.__getitem__)
    table = Table()
    table.add_column("from \\ to")
    for column in columns:
        table.add_column(column, justify="right")
    for row in columns:
        table.add_row(row, *(cells.get((row, column), "–" if row == column else "?") for column in columns))
    console.print(
        "\n[bold]Links[/bold]: what each carries alone, from row to column, and how long a small message takes"
    )
    console.print(table)
    if "?" in {cells.get((a, b), "?") for a in columns for b in columns if a != b}:
        console.print("? was not measured: the time was up (--seconds).")


def link_cells(links: list[Link], name: Callable[[int], str]) -> dict[tuple[str, str], str]:
    """Return the medians of rate and latency between any two names."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for link in links:
        found.setdefault((name(link.a), name(link.b)), []).append((link.to_b, link.latency_s))
        found.setdefault((name(link.b), name(link.a)), []).append((link.to_a, link.latency_s))
    return {
        ways: f"{bit_rate(statistics.median(rate for rate, _ in values))}\n"
        f"{duration(statistics.median(latency for _, latency in values))}"
        for ways, values in found.items()
    }


def _show_plan(diagnosis: Diagnosis, plan: Plan, console: Console) -> None:
    percent = f"{100 * plan.share:g} %"
    title = f"{plan.parameters / 1e6:g} M parameters, {duration(plan.step_s)} a step"
    table = Table()
    for column in ("codec", "a rank sends", "a round takes", f"period for {percent}"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    for cost in plan.costs:
        table.add_row(cost.codec, byte_size(cost.bytes_sent), duration(cost.seconds), f"{cost.period} steps")
    console.print(f"\n[bold]Rounds[/bold]: what each would cost with {title}", highlight=False)
    console.print(table)
    for line in plan_in_words(plan, one_host=len(set(diagnosis.hosts.values())) == 1):
        console.print(line, highlight=False, markup=False)


def plan_in_words(plan: Plan, *, one_host: bool) -> list[str]:
    """Return what follows from the costs."""
    cost = plan.chosen
    ddp = plan.ddp_s / (plan.ddp_s + plan.step_s)
    lines = [f"DDP would spend about {100 * ddp:.0f} % of its time on gradients (without overlap)."]
    code = "" if cost.codec == "fp32" else f", codec=cadenza.codecs.{cost.codec}()"
    words = (
        f"{cost.codec} every {cost.period} step{'s' * (cost.period > 1)}: "
        f"cadenza train --strategy diloco --codec {cost.codec} --period {cost.period}, "
        f"or cadenza.diloco({cost.period}{code})."
    )
    if plan.choice is None:
        lines.append(f"Even {words}")
        lines.append(
            "That is seldom. Hide the rounds behind training instead: cadenza.streaming_diloco, or delay= with any "
            "preset; or send less: cadenza.sparse_loco."
        )
    else:
        lines.append(f"Begin with {words}")
    if one_host:
        lines.append(
            "Ranks of one host share memory, so their rounds take less than this: cadenza bench measures them."
        )
    else:
        lines.append("Then measure it: cadenza bench, started in the same way.")
    return lines


def _show_advice(diagnosis: Diagnosis, console: Console) -> None:
    todo = [finding for level in ("problem", "note") for finding in diagnosis.findings if finding.level == level]
    todo = [finding for finding in todo if finding.advice]
    console.print()
    if todo:
        console.print("[bold]What to do[/bold]")
    for number, finding in enumerate(todo, 1):
        where = f" (on {', '.join(finding.where)})" if finding.where else ""
        line = f"{number}. {finding.subject}: {finding.advice}{where}"
        console.print(Text(line, style="bold" if finding.level == "problem" else ""))
    count = len(diagnosis.problems)
    if count:
        console.print(Text(f"{count} problem{'s' * (count > 1)} to mend before training.", style="bold red"))
    else:
        console.print(Text("No problem found.", style="green"))


def to_plain(diagnosis: Diagnosis, plan: Plan | None) -> dict[str, Any]:
    """Return everything as JSON can hold it."""
    return {
        "versions": diagnosis.versions,
        "ranks": [{"rank": rank, "host": host} for rank, host in diagnosis.hosts.items()],
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "links": [_link(link) for link in diagnosis.links],
        "all_at_once": None if diagnosis.together is None else {"bytes_per_s": diagnosis.together},
        "plan": None if plan is None else asdict(plan),
        "problems": len(diagnosis.problems),
    }


def _link(link: Link) -> Mapping[str, float]:
    return {
        "a": link.a,
        "b": link.b,
        "latency_s": link.latency_s,
        "bytes_per_s_to_b": link.to_b,
        "bytes_per_s_to_a": link.to_a,
        "clock_offset_s": link.offset_s,
        "clock_uncertainty_s": link.uncertainty_s,
    }
