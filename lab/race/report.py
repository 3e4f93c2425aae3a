"""Tables and charts from the results, for the terminal and for docs/benchmarks.md."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.race import charts, plans
from lab.race.figures import Finish, Times, final_losses, link_allows, quickest, target_of, ways
from lab.race.plans import ENTRIES, FULL, Scale
from lab.race.runner import Link, Results, bits_a_second

__all__ = ["filled", "told", "write"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURES = ROOT / "docs" / "img"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Return a table in Markdown; the first `words` columns are text, the others figures."""
    rule = " --- |" * words + " ---: |" * (len(head) - words)
    return "\n".join([f"| {' | '.join(head)} |", f"|{rule}", *(f"| {' | '.join(row)} |" for row in rows)])


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


# ---- the races ------------------------------------------------------------------------------------------------------


def to_loss(results: dict[str, Results], scale: Scale) -> str:
    """Tell time, bytes and steps to the same loss on every link."""
    training, times = results["training"], Times(results["timing"].runs, scale)
    target = target_of(training, scale)
    parts = [
        f"To a held-out loss of {target:.2f} nats; every contender at the settings that are quickest on that link."
    ]
    for link in scale.links:
        every = ways(training, times, scale, target, link)
        found = quickest(every)
        if not found:
            continue
        fewest = min(way.alone_s for way in found)
        ddp = next((way.seconds for way in found if way.label == "DDP"), None)
        parts.append(f"**{link}**: compute alone takes {times.alone(link):.3f} s a step.")
        parts.append(finish_table(found, fewest, ddp, link))
        parts.append(bar(every))
    return "\n\n".join(parts)


def finish_table(found: Sequence[Finish], fewest: float, ddp: float | None, link: str) -> str:
    rate = bits_a_second(link)
    rows = []
    for way in sorted(found, key=lambda way: way.seconds):
        job = way.job
        outer = [f"{job.settings[key]:g}" for key in ("outer_lr", "outer_momentum") if key in job.settings]
        rows.append(
            [
                way.label,
                str(job.period),
                ", ".join([f"{job.lr:g}", *outer]),
                f"{way.steps:.0f}",
                f"{way.seconds:.1f}",
                number(None if ddp is None else ddp / way.seconds, 1),
                number(way.seconds / fewest),
                number(way.seconds / way.alone_s),
                f"{way.overhead_s:.1f}",
                "" if rate is None else f"{way.megabytes * 8e6 / rate:.1f}",
                f"{way.megabytes:.1f}",
            ]
        )
    head = [
        "contender",
        "H",
        "lr, outer lr, momentum",
        "steps",
        "s",
        "DDP ÷ it",
        "÷ fewest steps alone",
        "÷ its steps alone",
    ]
    return table([*head, "s above compute", "the link needs, s", "MB a worker"], rows)


def bar(every: Sequence[Finish]) -> str:
    """Tell Cadenza's overhead against that of the quickest rival: at its quickest, and at its leanest if no slower."""
    ours = [way for way in every if way.label.startswith("Cadenza")]
    rivals = [way for way in every if way not in ours]
    if not ours or not rivals:
        return ""
    best, rival = (min(some, key=lambda way: way.seconds) for some in (ours, rivals))
    told = [
        f"The quickest rival is {said(rival)}.",
        f"The quickest of Cadenza is {said(best)}, {against(best, rival)}.",
    ]
    lean = min((way for way in ours if way.seconds <= rival.seconds), key=lambda way: way.overhead_s, default=best)
    if lean is not best:
        told.append(
            f"No slower than that rival, and nearest to compute alone, is {said(lean)}, {against(lean, rival)}."
        )
    return " ".join(told)


def said(way: Finish) -> str:
    return f"{way.label} at H = {way.job.period}: {way.seconds:.1f} s, {way.overhead_s:.1f} s of it above compute alone"


def against(way: Finish, rival: Finish) -> str:
    return f"{way.overhead_s / max(rival.overhead_s, 1e-9):.2f} of the rival's"


def utilisation(results: dict[str, Results], scale: Scale) -> str:
    """Tell stall and the share of time that is compute, by link, at one period."""
    times = Times([run for race in ("timing", "utilisation") if race in results for run in results[race].runs], scale)
    known_links = {*scale.links, *scale.curve_links}
    links = sorted((link for link in known_links if times.alone(link)), key=lambda link: -(bits_a_second(link) or 0))
    rows = []
    for label in plans.UTILISATION[1:]:
        cells = []
        for link in links:
            step, alone = times.step(label, link), times.alone(link)
            known = step is not None and alone is not None
            cells.append(f"{100 * alone / step:.0f} % · {step - alone:.3f}" if known else "")
        rows.append([label, *cells])
    note = "Share of the time that is compute, and seconds of stall in a step (H = 16 where it is not DDP)."
    return f"{note}\n\n{table(['contender', *links], rows)}"


def sites(results: dict[str, Results], scale: Scale) -> str:
    """Tell flat against hierarchical on two sites: by the step, and to the same loss."""
    times = Times(results["sites"].runs, scale)
    links = plans.site_links(scale)
    rows = []
    for label in plans.SITES[1:]:
        row = [label]
        for link in links:
            step, alone = times.step(label, link), times.alone(link)
            known = step is not None and alone is not None
            row += [number(step, 3), number(step / alone) if known else ""]
        sent = times.sent(label, links[-1])
        rows.append([*row, number(None if sent is None else sent / 1e6)])
    head = [cell for link in links for cell in (f"{between(link)} between: s a step", "÷ alone")]
    target = target_of(results["training"], scale)
    finished = [
        [
            way.label,
            between(link),
            str(way.job.period),
            f"{way.steps:.0f}",
            f"{way.seconds:.1f}",
            f"{way.overhead_s:.1f}",
        ]
        for link in links
        for way in quickest(ways(results["training"], times, scale, target, link))
    ]
    to_target = table(["contender", "between the sites", "H", "steps", "s", "s above compute"], finished, words=2)
    return "\n\n".join(
        [
            table(["contender, H = 16", *head, "MB a step"], rows),
            f"To a held-out loss of {target:.2f} nats, each at its best H:",
            to_target,
        ]
    )


def between(link: str) -> str:
    return link.split()[-1]


def syncs(results: dict[str, Results], scale: Scale) -> str:
    """Tell what one synchronisation takes, by size and by workers, and what it needs in memory."""
    times = Times(results["syncs"].runs, scale)
    places = [(millions, plans.SYNC_LINK) for millions in scale.millions]
    places += [(plans.middle(scale), plans.sync_link(workers)) for workers in scale.workers if workers != 4]
    rows = [["the link allows, fp32", *(f"{1e3 * link_allows(*place):.0f}" for place in places)]]
    for label in plans.SYNCS[1:]:
        costs = [times.sync(label, *place) for place in places]
        rows.append([label, *(number(None if value is None else 1e3 * value, 0) for value in costs)])
    head = [f"{millions:g} M" + (f", {Link(link).hosts} workers" if "x" in link else "") for millions, link in places]
    return f"Milliseconds, at {plans.SYNC_LINK}, 4 workers if not said.\n\n{table(['contender', *head], rows)}"


def memory(results: dict[str, Results], scale: Scale) -> str:
    """Tell the peak of the resident set above compute alone's, in copies of the model."""
    largest = [millions for millions in scale.millions if millions >= 10] or list(scale.millions)
    times = Times(results["syncs"].runs, scale)
    rows = []
    for label in plans.SYNCS[1:]:
        rows.append([label, *(number(times.extra_models(label, millions)) for millions in largest)])
    return table(["contender", *(f"{millions:g} M: models above compute alone" for millions in largest)], rows)


def losses(results: dict[str, Results], scale: Scale) -> str:
    """Tell the loss at equal tokens, with the spread between seeds."""
    ends = final_losses(results["losses"], scale)
    ddp = statistics.fmean(ends["DDP"]) if ends["DDP"] else None
    rows = [
        [
            label,
            number(statistics.fmean(values), 4),
            number(statistics.stdev(values) if len(values) > 1 else None, 4),
            "" if ddp is None else f"{100 * (statistics.fmean(values) / ddp - 1):+.2f} %",
            str(len(values)),
        ]
        for label, values in ends.items()
        if values
    ]
    return table(["strategy, codec", "held-out, nats", "± between seeds", "against DDP", "seeds"], rows)


def gradients(results: dict[str, Results], scale: Scale) -> str:
    """Tell what averages gradients in every step: seconds and bytes of a step, and the loss at equal tokens."""
    kept = results["gradients"]
    times, links = Times(kept.runs, scale), plans.GRADIENT_LINKS
    ends: dict[str, list[float]] = {}
    for label in plans.GRADIENTS[1:]:
        jobs = [(job, link) for job, link in plans.gradients(scale, [label]) if job.evaluate_every]
        found = [run for job, link in jobs if (run := kept.find(job, link)) is not None and run.get("curve")]
        ends[label] = [run["curve"][-1][1] for run in found]
    rows = [["compute alone", *(cell for link in links for cell in (number(times.alone(link), 3), "")), "", "", "", ""]]
    for label, losses in ends.items():
        cells = []
        for link in links:
            step, fp16 = times.step(label, link), times.step("DDP, fp16 hook", link)
            cells += [number(step, 3), number(step / fp16) if step and fp16 else ""]
        sent, of_ddp = times.sent(label, links[0]), paired(losses, ends["DDP"])
        loss = number(statistics.fmean(losses), 4) if losses else ""
        told = "" if of_ddp is None else f"{100 * of_ddp:+.2f} %"
        rows.append([label, *cells, number(None if sent is None else sent / 1e6), loss, told, str(len(losses))])
    head = [cell for link in links for cell in (f"{link}: s a step", "÷ fp16 hook's")]
    return table(["contender", *head, "MB a step", "held-out, nats", "against DDP", "seeds"], rows)


def paired(losses: Sequence[float], others: Sequence[float]) -> float | None:
    """Return how far losses lie above others on average, seed by seed; None if not all seeds have run."""
    if not losses or len(losses) != len(others):
        return None
    return statistics.fmean(one / other - 1 for one, other in zip(losses, others, strict=True))


def headline(results: dict[str, Results], scale: Scale) -> str:
    """Tell the short race: seconds a step on each link, and the loss after the same number of steps."""
    kept = results["headline"]
    times = Times(kept.runs, scale)
    links = list(dict.fromkeys(link for _, link in plans.headline(scale) if link != "unlimited"))
    ends = {job.method: kept.find(job, link) for job, link in plans.headline(scale) if link == "unlimited"}
    rows = []
    for label in plans.HEADLINE:
        entry = ENTRIES[label]
        row = [label]
        for link in links:
            step, alone, ddp = times.step(label, link), times.alone(link), times.step("DDP", link)
            known = step is not None and alone is not None
            row += [
                number(step, 3),
                number(step / alone) if known else "",
                number(ddp / step, 1) if ddp and step else "",
            ]
        sent = times.sent(label, links[-1])
        run = ends.get(ENTRIES[plans.SAME_CURVE.get(label, label)].method) or {}
        loss = run["curve"][-1][1] if run.get("curve") else None
        rows.append([*row, number(None if sent is None else sent * entry.timed_period / 1e6), number(loss, 3)])
    head = [cell for link in links for cell in (f"{link}: s a step", "÷ compute alone", "DDP ÷ it")]
    steps = scale.steps // 2
    return table(["contender", *head, "MB a synchronisation", f"loss after {steps} steps"], rows)


def trained(results: dict[str, Results], scale: Scale) -> str:
    """Tell how every contender trained at each setting."""
    rows = []
    for job, link in plans.training(scale):
        run = results["training"].find(job, link)
        if run is not None:
            settings = ", ".join(f"{key} {value}" for key, value in job.settings.items())
            end = "failed" if "failed" in run else number(run["curve"][-1][1], 4)
            rows.append([job.method, str(job.period), settings, f"{job.lr:g}", end])
    return table(["method", "H", "settings", "lr", f"held-out after {scale.steps} steps"], rows, words=3)


PICTURED = {  # the charts, and what they show
    "to-loss": ("race_to_loss.svg", "Seconds to the same held-out loss, by link"),
    "sites": ("race_sites.svg", "Seconds to the same held-out loss on two sites"),
    "utilisation": ("race_utilisation.svg", "Share of the time that is compute, by bandwidth"),
    "syncs": ("race_syncs.svg", "What one synchronisation takes, by the size of the model and the number of workers"),
    "memory": ("race_memory.svg", "Peak memory above compute alone"),
    "losses": ("race_losses.svg", "Held-out loss at equal tokens, above DDP's"),
}
Telling = Callable[[dict[str, Results], Scale], str]
SECTIONS: dict[str, tuple[tuple[str, ...], Telling]] = {
    "headline": (("headline",), headline),
    "to-loss": (("training", "timing"), to_loss),
    "sites": (("training", "sites"), sites),
    "utilisation": (("timing",), utilisation),
    "syncs": (("syncs",), syncs),
    "memory": (("syncs",), memory),
    "losses": (("losses",), losses),
    "gradients": (("gradients",), gradients),
    "training": (("training",), trained),
}


def told(race: str, results: Results, scale: Scale) -> str:
    """Return the tables that a race's results alone are enough for."""
    return "\n\n".join(tell({race: results}, scale) for needed, tell in SECTIONS.values() if needed == (race,))


def write(folder: Path, page: Path = PAGE, pictures: Path = PICTURES, scale: Scale = FULL) -> None:
    """Put every table whose results are there between its markers in the page, and draw the charts."""
    charts.draw(folder, pictures, scale)
    page.write_text(filled(page.read_text(), folder, scale))


def filled(text: str, folder: Path, scale: Scale = FULL) -> str:
    """Return a page with every table whose results are there between its markers."""
    paths = {race: path for race in plans.RACES if (path := folder / f"race_{race}.json").exists()}
    results = {race: Results(path) for race, path in paths.items()}
    for name, (needed, tell) in SECTIONS.items():
        if all(race in results for race in needed):
            parts = [environment([paths[race] for race in needed]), tell(results, scale)]
            if name in PICTURED:
                file, shown = PICTURED[name]
                parts.insert(0, f"![{shown}](img/{file})")
            text = insert(text, name, "\n\n".join(parts))
    return text


def environment(paths: Sequence[Path]) -> str:
    """Return the machine that results come from, and the versions of what ran."""
    kept = [json.loads(path.read_text()) for path in paths]
    versions = {
        name: version for one in kept for run in one["runs"] for name, version in run.get("versions", {}).items()
    }
    rivals = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()) if name != "torch")
    machines = "; ".join(dict.fromkeys(one["environment"] for one in kept))
    return f"*{machines}{f'; {rivals}' if rivals else ''}.*"


def insert(text: str, name: str, content: str) -> str:
    """Return a page with what is between a section's markers replaced; as it was if it has no such markers."""
    begin, end = f"<!-- race:{name} -->", f"<!-- /race:{name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n\n{content}\n\n{end}", text)
