"""The report: tables in Markdown and pictures, from the runs that are done; what is not measured is said to be so."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from lab.quality import charts
from lab.quality.figures import BARS, baseline_of, change_of, excess, final_of, trail
from lab.quality.records import FOLDER, Records
from lab.quality.studies import QUEUE, SEEDS, TUNING_SEED, Study, Variant, missing
from lab.quality.training import Setting

__all__ = ["write"]

PICTURES = Path(__file__).resolve().parent.parent.parent / "docs" / "img"


def write(records: Records, folder: Path = FOLDER, pictures: Path = PICTURES) -> None:
    """Write report.md beside the runs, and the pictures that there are figures for."""
    lines = [*_head(records), *_bars(records), *_finals(records)]
    lines += [*_averages(records), *_variants(records), *_trails(records)]
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
    yield "## Bars\n\n| bar | at most | found |\n| --- | --- | --- |"
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
        against = "" if baseline is None else "{:+.2f} % ± {:.2f}".format(*excess(final, baseline))
        period = final.setting.strategy.get("period")
        rounds = final.setting.steps // period if isinstance(period, int) else ""
        sent = f"{final.bytes_sent / 1e6:.1f}" if final.bytes_sent else ""
        yield (
            f"| {entry.name} | {_told(final.setting)} | {rounds} | {final.mean:.4f} | {final.spread:.4f} | "
            f"{against} | {sent} |"
        )


def _averages(records: Records) -> Iterator[str]:
    """Yield what a moving average of the mean model is worth at the end, with the final seeds."""
    found = []
    for entry in QUEUE:
        final = final_of(entry, records)
        if final is not None and all("average_test" in run for run in final.runs):
            worth = statistics.fmean(100 * (run["average_test"] / run["test"] - 1) for run in final.runs)
            found.append(f"| {entry.name} | {worth:+.2f} % |")
    if found:
        yield "\n## A moving average of the mean, instead of the last one\n\n| method | loss |\n| --- | ---: |"
        yield from found


def _variants(records: Records) -> Iterator[str]:
    yield "\n## One thing changed\n\n| change | to | loss | seeds |\n| --- | --- | ---: | ---: |"
    for entry in QUEUE:
        if isinstance(entry, Variant):
            found = change_of(entry, records)
            worth = f"{statistics.fmean(found):+.2f} %" if found else "not measured yet"
            yield f"| {entry.name} | {entry.of} | {worth} | {len(found)} |"


def _trails(records: Records) -> Iterator[str]:
    yield "\n## What was tried while tuning\n"
    for entry in QUEUE:
        runs = trail(entry, records) if isinstance(entry, Study) else []
        if runs:
            ended = "" if entry.tuned(records) else " (goes on)"
            yield f"\n{entry.name}{ended}\n\n| setting | validation loss, nats |\n| --- | ---: |"
            yield from (f"| {_told(setting)} | {run['validation']:.4f} |" for setting, run in runs)


def _told(setting: Setting) -> str:
    outer = [
        f"{key} {value}" for key, value in setting.strategy.items() if key in ("outer_lr", "outer_momentum", "beta")
    ]
    return ", ".join([f"lr {setting.lr:g}", f"{setting.batch} windows a worker", *outer])
