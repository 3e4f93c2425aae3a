"""The page: template, style and script filled with a report's figures, one file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from cadenza.cli.report.charts import Chart, Key, colour_of_run
from cadenza.cli.report.communication import bytes_charts, drift_chart, drift_table, levels_table
from cadenza.cli.report.data import RunData, read_runs
from cadenza.cli.report.formats import count_text
from cadenza.cli.report.losses import loss_charts, loss_table
from cadenza.cli.report.progress import progress_charts
from cadenza.cli.report.summary import comparison_table, event_table, same_loss, summary_tables, tiles, verdict
from cadenza.cli.report.tables import Table, text_cell
from cadenza.cli.report.timeline import timeline_chart, timeline_table
from cadenza.cli.report.values import value_charts
from cadenza.common.wording import count_workers
from cadenza.version import __version__

__all__ = ["render", "write_report"]

_EVENTS = 500


def write_report(runs: Sequence[Path], target: Path) -> Path:
    """Write the report of one or more runs to a file, and return where it is.

    The page is whole: it loads nothing from a network, and may be sent to others by itself. Raises `UsageError` if one
    of the folders is not a run.

    >>> import tempfile
    >>> from cadenza.training.config import Config
    >>> from cadenza.training.runs import create
    >>> run = create(Path(tempfile.mkdtemp()) / "first", Config())
    >>> write_report([run.folder], run.report_file).name
    'report.html'
    """
    page = render(read_runs(runs))
    partial = target.with_name(f"{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(target)) from error
    return target


def render(runs: Sequence[RunData]) -> str:
    """Return the page of these runs."""
    charts: list[Chart] = []
    sections = [
        _summary(runs),
        _losses(runs, charts),
        _timelines(runs, charts),
        _drift(runs, charts),
        _bytes(runs, charts),
        _events(runs),
        _settings(runs),
    ]
    scripts = {"plotly": _plotly(), "script": _resource("report.js")}
    several = len(runs) > 1
    title = f"Comparison of {len(runs)} runs" if several else runs[0].name
    return Template(_resource("report.html")).substitute(
        scripts,
        policy=_policy(scripts.values()),
        style=_resource("report.css"),
        charts=_json({chart.id: [view.figure for view in chart.views] for chart in charts}),
        title=escape(title),
        subtitle=escape(_subtitle(runs)),
        runs=_run_switches(runs) if several else "",
        sections="\n".join(sections),
        version=escape(__version__),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _summary(runs: Sequence[RunData]) -> str:
    if len(runs) == 1:
        tables = "".join(table.html() for table in summary_tables(runs[0]))
        body = f'<ul class="tiles">\n{tiles(runs[0])}</ul>\n<div class="pair">\n{tables}</div>\n'
        return _section("summary", "Summary", body)
    target = same_loss(runs)
    note = "" if target is None else (
        "The time and the bytes to the same loss are those of the first evaluation at or below "
        "the lowest held-out loss that all runs reached."
    )  # fmt: skip
    told, table = verdict(runs), comparison_table(runs).html() + _note(note)
    if not told:
        return _section("summary", "Comparison", table)
    body = f'<p class="verdict">{escape(told)}</p>\n<details><summary>All figures</summary>\n{table}</details>\n'
    return _section("summary", "Comparison", body)


def _losses(runs: Sequence[RunData], charts: list[Chart]) -> str:
    if not any(run.training.steps or run.held_out.steps for run in runs):
        return _section("loss", "Loss", _note("No step has been taken, so there is no loss yet."))
    made = [*loss_charts(runs), *value_charts(runs), *progress_charts(runs)]
    return _section("loss", "Loss", _figures(made, charts) + _tables([loss_table(run) for run in runs]))


def _timelines(runs: Sequence[RunData], charts: list[Chart]) -> str:
    body = ""
    for number, run in enumerate(runs):
        chart = timeline_chart(number, run, len(runs) > 1)
        if chart is None:
            body += _note(f"{run.name} has no rounds to draw: {_why_no_rounds(run)}")
        else:
            body += _figures([chart], charts)
    return _section("timeline", "Timeline of the rounds", body + _tables([timeline_table(run) for run in runs]))


def _why_no_rounds(run: RunData) -> str:
    if run.strategy == "ddp":
        return "DDP exchanges gradients inside every step."
    return "none had landed when this page was made."


def _drift(runs: Sequence[RunData], charts: list[Chart]) -> str:
    chart = drift_chart(runs)
    if chart is None:
        return _section("drift", "Drift", _note("No drift was measured."))
    tables = [drift_table(run) for run in runs if run.reference.rounds]
    return _section("drift", "Drift", _figures([chart], charts) + _tables(tables))


def _bytes(runs: Sequence[RunData], charts: list[Chart]) -> str:
    made = bytes_charts(runs)
    body = _figures(made, charts) if made else _note("Nothing was sent.")
    return _section("bytes", "Bytes", body + levels_table(runs).html())


def _events(runs: Sequence[RunData]) -> str:
    count = sum(len(run.events) for run in runs)
    if not count:
        return _section("events", "Events", _note("Nothing out of the ordinary happened."))
    left = f"{count_text(count - _EVENTS)} more are in the runs’ metrics." if count > _EVENTS else ""
    return _section("events", "Events", event_table(runs, _EVENTS).html() + _note(left))


def _settings(runs: Sequence[RunData]) -> str:
    body = ""
    for run in runs:
        rows = [(text_cell(str(name)), text_cell(_plain(value))) for name, value in run.environment.items()]
        name = f" of {run.name}" if len(runs) > 1 else ""
        body += (
            f"<details><summary>{escape(f'Configuration{name}')}</summary>\n"
            f'<pre tabindex="0">{escape(run.config)}</pre></details>\n'
            f"<details><summary>{escape(f'Environment{name}')}</summary>\n"
            f"{Table(f'Environment of {run.name}', ('what', 'value'), rows).html()}</details>\n"
        )
    return _section("settings", "Settings", body)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _section(name: str, title: str, body: str) -> str:
    return f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 id="{name}-title">{title}</h2>\n{body}</section>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>\n' if text else ""


def _tables(tables: Sequence[Table]) -> str:
    body = "".join(table.html() for table in tables)
    return (
        f"<details><summary>The figures as {'tables' if len(tables) > 1 else 'a table'}</summary>\n{body}</details>\n"
    )


def _figures(made: Sequence[Chart], charts: list[Chart]) -> str:
    charts.extend(made)
    return f'<div class="charts">\n{"".join(_figure(chart) for chart in made)}</div>\n'


def _figure(chart: Chart) -> str:
    wide = " wide" if chart.wide else ""
    keys = "".join(_key(key) for key in chart.keys)
    legend = f'<ul class="legend" aria-hidden="true">{keys}</ul>' if keys else ""
    notes = "".join(
        f'<span class="view-note" data-view="{number}"{" hidden" if number else ""}>{escape(view.note)} </span>'
        for number, view in enumerate(chart.views)
        if view.note
    )
    caption = f'<p class="note">{notes}{escape(chart.note)}</p>' if notes or chart.note else ""
    how = f"{chart.title}. Plus and minus zoom, the arrows move, 0 shows all."
    return (
        f'<figure class="chart{wide}" aria-labelledby="{chart.id}-title">\n'
        f'<figcaption id="{chart.id}-title">{escape(chart.title)}</figcaption>\n{_views(chart)}{legend}\n'
        f'<div class="frame" role="group" tabindex="0" aria-label="{escape(how)}">'
        f'<div class="plot" id="{chart.id}" role="img" aria-label="{escape(chart.words)}" data-height="{chart.height}" '
        f'data-linked="{chart.linked}">'
        f"</div></div>\n{caption}</figure>\n"
    )


def _views(chart: Chart) -> str:
    if len(chart.views) < 2:
        return ""
    buttons = "".join(
        f'<button type="button" data-chart="{chart.id}" data-view="{number}" '
        f'aria-pressed="{"false" if number else "true"}">{escape(view.name)}</button>'
        for number, view in enumerate(chart.views)
    )
    return f'<div class="views" role="group" aria-label="{escape(chart.title)}: what to show">{buttons}</div>\n'


def _key(key: Key) -> str:
    run = "" if key.run is None else f' data-run="{key.run}"'
    return f'<li{run}><span class="key key-{key.style} colour-{key.colour}"></span>{escape(key.label)}</li>'


def _run_switches(runs: Sequence[RunData]) -> str:
    boxes = "".join(
        f'<li><label><input type="checkbox" checked data-run="{number}">'
        f'<span class="key key-box colour-{colour_of_run(number)}"></span>{escape(run.name)}</label></li>\n'
        for number, run in enumerate(runs)
    )
    return f'<fieldset class="switches"><legend>Runs in the charts</legend><ul>\n{boxes}</ul></fieldset>'


def _subtitle(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        return ", ".join(run.name for run in runs)
    run = runs[0]
    codec = f" with {run.codec}" if run.codec else ""
    began = datetime.fromtimestamp(run.began, UTC).strftime(", begun %Y-%m-%d %H:%M UTC") if run.began else ""
    workers = count_workers(run.worker_count)
    return f"{run.strategy}{codec} on {workers}, {run.steps:,} of {run.planned_steps:,} steps, {run.status}{began}"


def _resource(name: str) -> str:
    return files("cadenza.cli.report").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    """Return plotly's own script, from the installed package."""
    script = files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
    return script.replace("</script", "<\\/script")


def _policy(scripts: Any) -> str:
    """Return what the page allows itself: these scripts and no others, its style, pictures it makes, no network."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def _json(value: object) -> str:
    """Return JSON that may stand in a page: no `<` can end the script or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c")
