"""The report: tables in Markdown and pictures, from the runs that are done; what is not measured is said to be so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lab.quality import charts
from lab.quality.bars import BARS
from lab.quality.figures import baseline_of, bytes_sent, change_of, excesses, final_of, told, trail
from lab.quality.model import SHAPES
from lab.quality.records import FOLDER, Records
from lab.quality.studies import QUEUE, SEEDS, TUNING_SEED, Study, Variant, missing
from lab.quality.training import Setting

__all__ = ["averages", "measured", "write"]

PICTURES = Path(__file__).resolve().parent.parent.parent / "docs" / "img"


def write(records: Records, folder: Path = FOLDER, pictures: Path = PICTURES) -> None:
    """Write report.md beside the runs, and the pictures that there are figures for."""
    lines = [*_head(records), *_bars(records), *_finals(records)]
    lines += [*averages(records), *_variants(records), *measured(records), *_trails(records)]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    print(folder / "report.md")
    for path in charts.draw(records, pictures):
        print(path)


def _head(records: Records) -> Iterator[str]:
    hours = sum(run["cpu_seconds"] for run in records.runs.values()) / 3600
    yield "# Learning quality\n"
    seeds = ", ".join(map(str, SEEDS))
    yield f"{len(records.runs)} runs, {hours:.1f} hours of one core; {len(missing(records))} more can be done next."
    yield f"Tuned with seed {TUNING_SEED} on a text for tuning; final figures with seeds {seeds} on a third text.\n"


def _bars(records: Records) -> Iterator[str]:
    yield "## Bars\n\n| bar | bound | found |\n| --- | --- | --- |"
    for bar in BARS:
        yield f"| {bar.name} | {bar.bound} | {bar.verdict(records)} |"


def _finals(records: Records) -> Iterator[str]:
    yield "\n## Each side at its best\n"
    yield "| method | tuned to | rounds | loss, nats | spread | against its DDP | MB sent |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    for entry in QUEUE:
        final = final_of(entry, records)
        if final is None:
            continue
        baseline = final_of(baseline_of(entry), records)
        against = "" if baseline is None else told(excesses(final.losses, baseline.losses))
        period = final.setting.strategy.get("period")
        rounds = final.setting.steps // period if isinstance(period, int) else ""
        sent = f"{bytes_sent(final) / 1e6:.1f}" if bytes_sent(final) else ""
        yield (
            f"| {entry.name} | {_tuned_to(final.setting)} | {rounds} | {final.mean:.4f} | {final.spread:.4f} | "
            f"{against} | {sent} |"
        )


def averages(records: Records) -> Iterator[str]:
    """Yield what a moving average of the mean model is worth at the end, with the final seeds."""
    found = []
    for entry in QUEUE:
        final, baseline = final_of(entry, records), final_of(baseline_of(entry), records)
        if final is None or final.averages is None:
            continue
        both = baseline is not None and baseline.averages is not None
        against = told(excesses(final.averages, baseline.averages)) if both else ""
        found.append(f"| {entry.name} | {told(excesses(final.averages, final.losses))} | {against} |")
    if found:
        yield "\n## A moving average of the mean, instead of the last one\n"
        yield "| method | loss | against its DDP, averages on both sides |\n| --- | ---: | ---: |"
        yield from found


def _variants(records: Records) -> Iterator[str]:
    yield "\n## One thing changed\n\n| change | to | loss | seeds |\n| --- | --- | ---: | ---: |"
    for entry in QUEUE:
        if isinstance(entry, Variant):
            found = change_of(entry, records)
            yield f"| {entry.name} | {entry.of} | {told(found) if found else 'not measured yet'} | {len(found)} |"


def measured(records: Records) -> Iterator[str]:
    """Yield which method is measured with how many workers, at which period and size."""
    cells: dict[str, dict[str, list[str]]] = {}
    for entry in QUEUE:
        if isinstance(entry, Study) and entry.seeds:
            row = cells.setdefault(_method_of(entry), {size: [] for size in SHAPES})
            row[entry.fixed.size].append(f"{_where(entry)}{_how_far(entry, records)}")
    yield "\n## Measured, and not\n"
    yield f"| method | {' | '.join(SHAPES)} |\n| --- |{' --- |' * len(SHAPES)}"
    for method, row in cells.items():
        yield f"| {method} | {' | '.join(', '.join(found) or '–' for found in row.values())} |"


def _method_of(study: Study) -> str:
    return re.sub(r" \d+ workers.*", "", study.name.removesuffix(f" {study.fixed.size}"))


def _where(study: Study) -> str:
    strategy = study.fixed.strategy
    if strategy["name"] == "ddp":
        return "yes"
    return f"{study.fixed.workers} × {strategy.get('period') or ' and '.join(strategy['levels'])}"


def _how_far(study: Study, records: Records) -> str:
    if final_of(study, records) is not None:
        return ""
    return " (tuning alone)" if trail(study, records) else " (not yet)"


def _trails(records: Records) -> Iterator[str]:
    yield "\n## What was tried while tuning\n"
    for entry in QUEUE:
        runs = trail(entry, records) if isinstance(entry, Study) else []
        if runs:
            ended = "" if entry.tuned(records) else " (goes on)"
            yield f"\n{entry.name}{ended}\n\n| setting | validation loss, nats |\n| --- | ---: |"
            yield from (f"| {_tuned_to(setting)} | {run['validation']:.4f} |" for setting, run in runs)


def _tuned_to(setting: Setting) -> str:
    outer = [
        f"{key} {value}" for key, value in setting.strategy.items() if key in ("outer_lr", "outer_momentum", "beta")
    ]
    return ", ".join([f"lr {setting.lr:g}", f"{setting.batch} windows a worker", *outer])
