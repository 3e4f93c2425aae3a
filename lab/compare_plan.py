"""How far the planner's predictions are from the emulated network: `python -m lab.compare_plan [--measure]`.

Every contender of Cadenza is predicted at every period and link at which it was timed, twice: as the formulas have it,
and calibrated on one period of the same contender and link, for the others. What compute alone takes is each run's own,
measured beside it (`floor_s`), so only what rounds cost is compared. `--measure` times the periods that are missing
first (root, a quiet machine, about 40 minutes) into lab/results/plan_timing.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.race.jobs import Job
from lab.race.plans import ENTRIES, FULL, timed
from lab.race.rivals.cadenza_strategies import strategy as build
from lab.race.runner import Results, bits_a_second

import cadenza
from cadenza.planning import Cluster, Link, Model, Seen, Work, calibrate, predict

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "lab" / "results"
SOURCES = ("race_timing", "race_utilisation", "race_sites", "race_headline", "plan_timing")
TABLE = ROOT / "docs" / "planning-accuracy.md"
LAYERS, WORKERS, CALIBRATED_ON = 4, 4, 16
LINKS = ("1gbit", "100mbit", "20mbit", "sites 1gbit 100mbit", "sites 1gbit 20mbit")
BEGIN, END = "<!-- figures: python -m lab.compare_plan -->", "<!-- end of figures -->"


def labels() -> list[str]:
    return [label for label in ENTRIES if label.startswith("Cadenza")]


def measure() -> None:
    """Time every contender at two periods more, on every link; what is there already is not timed again."""
    results = Results(FOLDER / "plan_timing.json")
    for link in LINKS:
        for label in labels():
            entry = ENTRIES[label]
            if "hierarchical" in label and not link.startswith("sites"):
                continue
            for period in sorted({*entry.periods, CALIBRATED_ON} - {4}):
                results.get(timed(entry, FULL, period), link)


def runs() -> Iterator[dict[str, Any]]:
    for source in SOURCES:
        path = FOLDER / f"{source}.json"
        if path.exists():
            for run in json.loads(path.read_text())["runs"]:
                if run["job"]["method"].startswith("Cadenza") and run.get("floor_s"):
                    yield run


def points() -> dict[tuple[str, str], dict[int, list[dict[str, Any]]]]:
    """Return all runs by contender and link, and by period."""
    found: dict[tuple[str, str], dict[int, list[dict[str, Any]]]] = {}
    for run in runs():
        settings = {k: v for k, v in run["job"]["settings"].items() if not k.startswith("outer")}
        for label in labels():
            entry = ENTRIES[label]
            if entry.method == run["job"]["method"] and entry.settings == settings:
                found.setdefault((label, run["link"]), {}).setdefault(run["job"]["period"], []).append(run)
    return found


def cluster_of(link: str, step_s: float) -> Cluster:
    words = link.split()
    if words[0] == "sites":
        inside, between = (float(bits_a_second(word) or 0) for word in words[1:3])
        return Cluster(WORKERS, Link(inside), step_s, sites=2, uplink=Link(between))
    return Cluster(WORKERS, Link(float(bits_a_second(link) or 0)), step_s)


def strategy_of(run: dict[str, Any]) -> cadenza.Strategy:
    job = Job.from_json(json.dumps(run["job"]))
    return build(job, job.method.removeprefix("Cadenza "))


def comparisons() -> list[dict[str, Any]]:
    """Return a row for each contender, link and period: measured, predicted, and predicted after calibration."""
    rows = []
    for (label, link), by_period in points().items():
        seen = _seen(by_period.get(CALIBRATED_ON, []), link)
        for period, found in sorted(by_period.items()):
            step_s = statistics.median(run["floor_s"] for run in found)
            above = statistics.median(run["elapsed_s"] / run["job"]["steps"] - run["floor_s"] for run in found)
            measured = step_s + max(0.0, above)
            model, work, place = Model(found[0]["parameters"], layers=LAYERS), Work(), cluster_of(link, step_s)
            strategy = strategy_of(found[0])
            plain = predict(strategy, place, model, work).step_s
            row = {"label": label, "link": link, "period": period, "measured": measured, "plain": plain}
            if seen is not None and period != CALIBRATED_ON:
                fitted = calibrate([seen], cluster_of(link, seen_step(by_period)), model, work)
                row["calibrated"] = predict(strategy, *_scaled(fitted, place, model, work)).step_s
            rows.append(row)
    return rows


def _scaled(fitted: Any, place: Cluster, model: Model, work: Work) -> tuple[Cluster, Model, Work]:
    cluster, scaled = fitted.apply(place, work)
    return cluster, model, scaled


def seen_step(by_period: dict[int, list[dict[str, Any]]]) -> float:
    return statistics.median(run["floor_s"] for run in by_period[CALIBRATED_ON])


def _seen(found: list[dict[str, Any]], link: str) -> Seen | None:
    if not found:
        return None
    step_s = statistics.median(run["floor_s"] for run in found)
    above = statistics.median(run["elapsed_s"] / run["job"]["steps"] - run["floor_s"] for run in found)
    return Seen(strategy_of(found[0]), step_s / (step_s + max(0.0, above)))


def error(row: dict[str, Any], what: str) -> float:
    return row[what] / row["measured"] - 1


def table(rows: list[dict[str, Any]], what: str) -> list[str]:
    """Return the rows that have such a prediction as a table, worst first."""
    chosen = sorted((row for row in rows if what in row), key=lambda row: -abs(error(row, what)))
    lines = [
        "| contender | link | period | measured | predicted | error |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in chosen:
        lines.append(
            f"| {row['label'].removeprefix('Cadenza ')} | {row['link']} | {row['period']} "
            f"| {1000 * row['measured']:.0f} ms | {1000 * row[what]:.0f} ms | {100 * error(row, what):+.1f} % |"
        )
    within = sum(abs(error(row, what)) <= 0.1 for row in chosen)
    return [f"{within} of {len(chosen)} are within 10 %.", "", *lines]


def write(rows: list[dict[str, Any]]) -> None:
    """Put the figures into the page, between its marks."""
    text = TABLE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    parts = ["### Calibrated on period 16, checked on the others", "", *table(rows, "calibrated"), ""]
    parts += ["### As the formulas have it", "", *table(rows, "plain"), ""]
    TABLE.write_text(head + BEGIN + "\n\n" + "\n".join(parts) + "\n" + END + tail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="time what is missing first")
    parser.add_argument("--write", action="store_true", help="write the figures into the page")
    arguments = parser.parse_args()
    if arguments.measure:
        measure()
    rows = comparisons()
    for what in ("calibrated", "plain"):
        print(f"\n{what}\n" + "\n".join(table(rows, what)))
    if arguments.write:
        write(rows)


if __name__ == "__main__":
    main()
