"""Figures in pages come from `lab/results`: `<!-- figure: KEY -->18.4<!-- /figure -->` is filled in from the files.

    python -m docs_tools.figures           # says which figures differ from the files, and ends with 1 if any does
    python -m docs_tools.figures --write   # puts the files' figures into the pages, and the race's tables

A key is a path: `to-loss.LINK.CONTENDER.s` (or `.above`), `syncs.CONTENDER.MILLIONS`, `kills.median`, `kills.worst`,
`convergence.METHOD.loss` (or `.against-ddp`, in percent), `compare.METHOD.loss` (likewise; or `.sent`, `.of-ddp`: of
`cadenza train --compare ddp,diloco`), `quality.against-ddp.ENTRY` (an entry of lab/quality's queue,
with - for blanks), `quality.table.bars` (or `finals`, `averages`, `changes`, `measured`: a table of its report).
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab.race.figures import Finish, Times, quickest, target_of, ways
from lab.race.plans import FULL
from lab.race.runner import Results

from docs_tools.rooms import DOCS, ROOT

__all__ = ["CONTENDERS", "differing", "figure", "pages", "quickest_on", "rewritten"]

RESULTS = ROOT / "lab" / "results"
_MARKED = re.compile(r"(<!-- figure: ([\w.-]+) -->)(.*?)(<!-- /figure -->)", re.DOTALL)
CONTENDERS = {
    "ddp": "DDP",
    "torch": "torch PeriodicModelAverager",
    "accelerate": "Accelerate LocalSGD",
    "torchft-streaming": "torchft Streaming DiLoCo",
    "late": "Cadenza local_sgd int8, late",
    "streaming": "Cadenza streaming_diloco",
    "local_sgd": "Cadenza local_sgd",
    "diloco-fp32": "Cadenza diloco fp32",
    "diloco-int8": "Cadenza diloco int8",
    "diloco-e3m0": "Cadenza diloco e3m0",
}


@functools.cache
def _results(race: str) -> Results:
    return Results(RESULTS / f"race_{race}.json")


@functools.cache
def _json(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


@functools.cache
def quickest_on(link: str) -> dict[str, Finish]:
    """Return each contender's quickest way to the same loss on a link, by its label."""
    training = _results("training")
    found = ways(training, Times(_results("timing").runs, FULL), FULL, target_of(training, FULL), link)
    return {way.label: way for way in quickest(found)}


def _to_loss(link: str, contender: str, what: str) -> str:
    way = quickest_on(link)[CONTENDERS[contender]]
    return f"{way.seconds:.1f}" if what == "s" else f"{way.overhead_s:.1f}"


def _syncs(contender: str, millions: str) -> str:
    seconds = Times(_results("syncs").runs, FULL).sync(CONTENDERS[contender], float(millions), "1gbit")
    if seconds is None:
        raise KeyError(millions)
    return f"{seconds * 1000:.0f}"


def _kills(what: str) -> str:
    return f"{_json('kills')['stall_s']['all'][what]:.2f}"


def _convergence(method: str, what: str) -> str:
    """Return the best of a method's runs that were trained with the recipe for all."""
    runs = [run for run in _json("convergence")["runs"] if run["settings"]["lr"] == 0.001]
    best = {name: min(run["held_out"] for run in runs if run["method"] == name) for name in ("ddp", method)}
    return f"{best[method]:.3f}" if what == "loss" else _percent(best[method], best["ddp"])


def _compare(method: str, what: str) -> str:
    runs = _json("compare")["runs"]
    run = runs[method]
    return {
        "loss": f"{run['held_out']:.2f}",
        "against-ddp": _percent(run["held_out"], runs["ddp"]["held_out"]),
        "sent": f"{run['bytes_sent'] / 1e6:,.0f}",
        "of-ddp": f"1/{run['ddp_bytes'] / run['bytes_sent']:.0f}",
    }[what]


def _percent(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.1f}".replace("-", "−")


_TABLES = {
    "bars": "Bars",
    "finals": "Each side at its best",
    "averages": "A moving average of the mean, instead of the last one",
    "changes": "One thing changed",
    "measured": "Measured, and not",
}


def _quality(what: str, name: str) -> str:
    if what == "table":
        report = (RESULTS / "quality" / "report.md").read_text()
        [found] = re.findall(rf"^## {_TABLES[name]}\n\n((?:\|.*\n)+)", report, re.MULTILINE)
        return f"\n\n{found}\n"
    from lab.quality.figures import baseline_of, excess, final_of
    from lab.quality.records import Records
    from lab.quality.studies import find

    entry, records = find(name.replace("-", " ")), Records()
    ours, theirs = final_of(entry, records), final_of(baseline_of(entry), records)
    if what != "against-ddp" or ours is None or theirs is None:
        raise KeyError(name)
    return f"{excess(ours, theirs)[0]:+.1f}".replace("-", "−")


_KINDS: dict[str, Callable[..., str]] = {
    "to-loss": _to_loss,
    "syncs": _syncs,
    "kills": _kills,
    "convergence": _convergence,
    "compare": _compare,
    "quality": _quality,
}


def figure(key: str) -> str:
    """Return what the results say for a key; an error names the key if they say nothing."""
    kind, *rest = key.split(".")
    try:
        return _KINDS[kind](*rest)
    except (KeyError, TypeError, ValueError) as error:
        raise KeyError(f'"{key}": there is no such figure in lab/results; see docs_tools/figures.py.') from error


def pages() -> list[Path]:
    """Return the pages that may hold figures."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def rewritten(text: str) -> str:
    """Return a text with every marked figure as the results have it.

    >>> rewritten("DDP needs <!-- figure: to-loss.100mbit.ddp.s -->7<!-- /figure --> s.")
    'DDP needs <!-- figure: to-loss.100mbit.ddp.s -->101.6<!-- /figure --> s.'
    """
    return _MARKED.sub(lambda mark: f"{mark[1]}{figure(mark[2])}{mark[4]}", text)


def differing() -> Iterator[str]:
    """Say each figure of a page that is not the results'."""
    for page in pages():
        for _, key, shown, _ in _MARKED.findall(page.read_text()):
            if shown != figure(key):
                yield f"{page.relative_to(ROOT)}: {key} is {shown} on the page, {figure(key)} in lab/results"


def main() -> None:
    """Compare the pages with the results, or write them."""
    if "--write" in sys.argv[1:]:
        from lab.race import report

        report.write(RESULTS)
        for page in pages():
            page.write_text(rewritten(page.read_text()))
        return
    wrong = list(differing())
    print("\n".join(wrong) or "All figures are those of lab/results.")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
