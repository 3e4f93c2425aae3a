"""What a report says of runs of every kind, and what it refuses."""

from __future__ import annotations

import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from cadenza.cli.report.command import report
from cadenza.cli.report.data import read_runs
from cadenza.cli.report.page import write_report
from cadenza.cli.report.timeline import activity
from cadenza.errors import UsageError
from support.runs import MadeUpRun

PLAIN = MadeUpRun(steps=40, period=8, workers=2)
KINDS = {
    "plain": PLAIN,
    "unfinished": MadeUpRun(steps=40, stopped_at=23, status=None),
    "interrupted": MadeUpRun(steps=40, stopped_at=23, status="interrupted"),
    "failed": MadeUpRun(steps=40, stopped_at=23, status="failed", error="worker 1 died: signal 9"),
    "resumed": MadeUpRun(steps=40, resumed_at=20),
    "one worker": MadeUpRun(steps=40, workers=1),
    "twenty workers": MadeUpRun(steps=12, workers=20, period=4),
    "ddp": MadeUpRun(strategy="ddp", steps=40, period=None, codec=""),
    "no evaluation": MadeUpRun(steps=40, evaluate_every=None),
    "not a number": MadeUpRun(steps=40, nan_from=15),
    "nothing but NaN": MadeUpRun(steps=9, nan_from=1, evaluate_every=3),
    "no step": MadeUpRun(steps=40, stopped_at=0, status=None),
    "one step": MadeUpRun(steps=1, period=1),
    "no drift": MadeUpRun(steps=40, drift=False),
    "levels and fragments": MadeUpRun(
        steps=40, period=2, delay=1, fragments=3, outer_every=4, wire_s=0.1, stall_s=0.01
    ),
}


class Page(HTMLParser):
    """The elements of a page, its tables as rows of exact values, and its figures."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._open = ""
        self._rows: list[list[str]] = []
        self.feed(self.text)
        figures = re.search(r'<script type="application/json" id="figures">(.*?)</script>', self.text, re.DOTALL)
        assert figures is not None
        self.figures: dict[str, Any] = json.loads(figures[1])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            exact = dict(attrs).get("data-value")
            self._rows[-1].append("" if exact is None else exact)
        self._open = tag

    def handle_data(self, data: str) -> None:
        if self._open == "caption" and data.strip():
            self.tables[data] = self._rows
        elif self._open in ("td", "th") and self._rows[-1][-1] == "" and "data-value" not in self.elements[-1][1]:
            self._rows[-1][-1] = data

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def summary(self, run: str) -> dict[str, str]:
        return {row[0]: row[1] for part in ("Results", "Set-up") for row in self.tables[f"{part} of {run}"]}


def page_of(folder: Path, run: MadeUpRun, name: str = "mine") -> Page:
    return Page(write_report([run.write(folder / name)], folder / "report.html"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_has_a_report(tmp_path: Path, kind: str) -> None:
    page = page_of(tmp_path, KINDS[kind])
    assert [attributes["id"] for attributes in page.all("section")] == [
        "summary", "loss", "timeline", "drift", "bytes", "events", "settings",
    ]  # fmt: skip
    plots = [attributes for attributes in page.all("div") if attributes.get("class") == "plot"]
    assert {plot["id"] for plot in plots} == set(page.figures)
    assert all(plot["role"] == "img" and plot["aria-label"] for plot in plots)
    assert len(page.all("caption")) == len(page.all("table")) == len([b for b in page.all("button") if b.get("class")])


def test_the_summary_is_what_the_run_says_of_itself(tmp_path: Path) -> None:
    page = page_of(tmp_path, PLAIN)
    told, summed = page.summary("mine"), json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert float(told["held-out loss, last"]) == summed["held_out"]
    assert int(told["sent by a worker (bytes)"]) == summed["bytes_sent"]
    assert int(told["DDP would have sent (bytes)"]) == summed["ddp_bytes"]
    assert int(told["rounds"]) == summed["rounds"] == 5
    assert int(told["steps"]) == summed["steps"] == 40
    assert float(told["standing still (s)"]) == pytest.approx(summed["stall_s"], abs=1e-3)
    assert told["status"] == "finished"


def test_several_runs_are_compared_and_keep_their_colours(tmp_path: Path) -> None:
    ddp = MadeUpRun(strategy="ddp", steps=40, period=None, evaluate_every=4, final_loss=1.8).write(tmp_path / "ddp")
    ours = MadeUpRun(steps=40, evaluate_every=4, final_loss=2.0).write(tmp_path / "diloco")
    page = Page(write_report([ddp, ours], tmp_path / "both.html"))
    table = {row[0]: row[1:] for row in page.tables["The runs beside each other"]}
    assert table["figure"] == ["ddp", "diloco"]
    target = max(float(loss) for loss in table["held-out loss, lowest"])
    (name,) = [name for name in table if name.startswith("sent to held-out loss")]
    assert f"{target:.3f}" in name
    assert int(table[name][0]) > 10 * int(table[name][1])
    colours: dict[int, set[str]] = {}
    for chart in ("loss-steps", "loss-time", "loss-bytes", "drift"):
        for trace in page.figures[chart][0]["data"]:
            colours.setdefault(trace["meta"]["run"], set()).add(trace["line"]["color"])
    assert colours == {0: {"var(--run-0)"}, 1: {"var(--run-1)"}}


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    runs = [PLAIN.write(tmp_path / parent / "run") for parent in ("a", "b")]
    assert [run.name for run in read_runs(runs)] == [str(run) for run in runs]


def test_nothing_in_a_run_can_become_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)<∕script><img src=x onerror=alert(1)>\"'&"
    run = MadeUpRun(steps=20, strategy=evil, events=((5, "<b>", evil),), outer_every=2, period=2)
    folders = [run.write(tmp_path / evil), run.write(tmp_path / "<script>")]
    (folders[0] / "config.toml").write_text(evil)
    (folders[0] / "environment.json").write_text(json.dumps({evil: [evil]}))
    harmless = Page(
        write_report([PLAIN.write(tmp_path / "x"), PLAIN.write(tmp_path / "y")], tmp_path / "harmless.html")
    )
    for target, given in (("one.html", folders[:1]), ("two.html", folders)):
        page = Page(write_report(given, tmp_path / target))
        assert len(page.all("script")) == len(harmless.all("script")) == 3
        assert not page.all("img")
        assert not page.all("b")
        assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
        texts = json.dumps(page.figures)
        assert "<script" not in texts
        assert "<img" not in texts


def test_the_page_forbids_itself_the_network_and_scripts_of_others(tmp_path: Path) -> None:
    page = page_of(tmp_path, PLAIN)
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split(";")[1]
    addresses = [
        value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href")
    ]
    assert all(str(address).startswith(("#", "data:")) for address in addresses)


def test_a_loss_that_is_not_a_number_is_a_gap_and_is_told(tmp_path: Path) -> None:
    page = page_of(tmp_path, MadeUpRun(steps=40, nan_from=15, evaluate_every=None))
    raw = page.figures["loss-steps"][0]["data"][0]
    assert [x for x, y in zip(raw["x"], raw["y"], strict=True) if y is None] == list(range(15, 25))
    assert "not a number at 10 steps, first at step 15" in page.text


def test_stale_steps_of_a_resumed_run_are_not_drawn(tmp_path: Path) -> None:
    page = page_of(tmp_path, MadeUpRun(steps=40, resumed_at=20))
    assert page.figures["loss-steps"][0]["data"][0]["x"] == list(range(1, 41))
    assert [row[4] for row in page.tables["Events"][1:]] == ["Resumed", "a damaged checkpoint was skipped"]


def test_an_end_that_was_not_good_is_an_event(tmp_path: Path) -> None:
    page = page_of(tmp_path, KINDS["failed"])
    assert [row[3:] for row in page.tables["Events"][1:]] == [["error", "Failed: worker 1 died: signal 9"]]
    assert page.summary("mine")["status"] == "failed"


def test_a_run_that_lost_a_worker_tells_of_it_and_of_rounds_that_failed(tmp_path: Path) -> None:
    run = PLAIN.write(tmp_path / "run")
    lost = run / "metrics" / "worker-00000.jsonl"
    kept = [line for line in lost.read_text().splitlines() if json.loads(line)["step"] <= 20]
    died = {"time": 1.8e9, "elapsed": 3.0, "step": 20}
    kept.append(json.dumps({"kind": "event", "text": "Worker 0 was ended by SIGKILL.", "level": "warning", **died}))
    kept.append(json.dumps({"kind": "end", "status": "lost", "error": "It was ended by SIGKILL.", **died}))
    lost.write_text("\n".join(kept) + "\n")
    with (run / "metrics" / "worker-00001.jsonl").open("a") as file:
        for step in (24, 32):
            failed = {
                "kind": "failed",
                "time": 1.8e9 + step,
                "elapsed": 4.0,
                "step": step,
                "reason": "worker 0 is gone",
            }
            file.write(json.dumps(failed) + "\n")
    data = read_runs([run])[0]
    assert (data.status, data.reference.number, data.steps) == ("finished", 1, 40)
    page = Page(write_report([run], tmp_path / "report.html"))
    told = [row[-1] for row in page.tables["Events"]]
    assert "Worker 0 was ended by SIGKILL." in told
    assert "2 rounds failed, up to step 32, and nothing was changed: worker 0 is gone" in told
    assert "(2 failed)" in page.text
    assert "(1 lost on the way)" in page.text


def test_bytes_by_level_add_up(tmp_path: Path) -> None:
    page = page_of(tmp_path, KINDS["levels and fragments"])
    rows = page.tables["Rounds and bytes by level"]
    sent = rows[0].index("sent (bytes)")
    assert [row[0] for row in rows[1:]] == ["site", "sites"]
    assert sum(int(row[sent]) for row in rows[1:]) == int(page.summary("mine")["sent by a worker (bytes)"])


def test_bytes_outside_rounds_are_shown_as_gradients(tmp_path: Path) -> None:
    page = page_of(tmp_path, KINDS["ddp"])
    (row,) = page.tables["Rounds and bytes by level"][1:]
    assert row[0] == "gradients, outside rounds"
    assert row[3] == page.summary("mine")["DDP would have sent (bytes)"]


@pytest.mark.parametrize("run", [PLAIN, KINDS["levels and fragments"]])
def test_the_parts_of_a_workers_time_add_up(tmp_path: Path, run: MadeUpRun) -> None:
    (data,) = read_runs([run.write(tmp_path / "mine")])
    for worker in data.workers:
        act = activity(worker)
        spans = sorted([*act.computing, *act.wire, *act.standing])
        assert spans[0][0] == 0
        assert spans[-1][1] == pytest.approx(worker.end_s)
        assert all(math.isclose(a[1], b[0], abs_tol=1e-9) for a, b in itertools.pairwise(spans))


def test_a_long_run_is_thinned_and_its_peaks_stay(tmp_path: Path) -> None:
    folder = MadeUpRun(steps=9000, period=3, workers=1, evaluate_every=None, checkpoint_every=None).write(
        tmp_path / "long"
    )
    file = folder / "metrics" / "worker-00000.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    next(line for line in lines if line["kind"] == "step" and line["step"] == 4567)["loss"] = 99.0
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Page(write_report([folder], tmp_path / "report.html"))
    for views in page.figures.values():
        for figure in views:
            assert all(len(trace["x"]) <= 2000 for trace in figure["data"])
    raw = page.figures["loss-steps"][0]["data"][0]
    assert raw["y"][raw["x"].index(4567)] == 99.0
    assert "thinned to 2,000 points" in page.text


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        write_report([tmp_path / "none"], tmp_path / "report.html")
    with pytest.raises(UsageError, match="is not a run"):
        write_report([tmp_path], tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


class TestCommand:
    app = Typer()
    app.command()(report)

    def test_the_page_of_a_run_is_in_its_folder(self, tmp_path: Path) -> None:
        folder = PLAIN.write(tmp_path / "mine")
        done = CliRunner().invoke(self.app, [str(folder)])
        assert done.exit_code == 0, done.output
        assert done.output.replace("\n", "") == str(folder / "report.html")
        assert (folder / "report.html").is_file()

    def test_the_page_goes_where_it_is_asked_to(self, tmp_path: Path) -> None:
        folders = [str(PLAIN.write(tmp_path / name)) for name in "ab"]
        target = tmp_path / "deeper" / "page.html"
        done = CliRunner().invoke(self.app, [*folders, "--output", str(target)])
        assert done.exit_code == 0, done.output
        assert "Comparison of 2 runs" in target.read_text()

    def test_a_place_that_cannot_be_written_is_refused(self, tmp_path: Path) -> None:
        folder = PLAIN.write(tmp_path / "mine")
        done = CliRunner().invoke(self.app, [str(folder), "--output", str(folder / "config.toml" / "x.html")])
        assert isinstance(done.exception, UsageError)
        assert "cannot be written" in str(done.exception)


def test_a_comparison_opens_with_who_is_best_at_what(tmp_path: Path) -> None:
    quick = MadeUpRun(steps=40, period=8, final_loss=2.0, step_s=0.05).write(tmp_path / "quick")
    good = MadeUpRun(steps=40, period=8, final_loss=1.5).write(tmp_path / "good")
    text = write_report([quick, good], tmp_path / "page.html").read_text()
    told = re.search(r'<p class="verdict">(.*?)</p>', text)
    assert told is not None
    assert "good has the lowest held-out loss (" in told[1]
    assert text.index('class="verdict"') < text.index("<details")
    rows = [row for row in re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL) if 'class="best"' in row]
    named = {re.sub(r"<.*?>", "", re.findall(r"<th.*?</th>", row)[0]): row for row in rows}
    assert 'class="best"' in named["held-out loss, last"].split("<td")[2]
    assert "status" not in named


def test_what_ddp_waits_is_left_open(tmp_path: Path) -> None:
    page = Page(write_report([KINDS["ddp"].write(tmp_path / "ddp")], tmp_path / "page.html"))
    figures = dict(page.tables["Results of ddp"][1:])
    assert figures["standing still (s)"] == ""
    assert "inside backward(), not measured" in page.text


def test_a_worker_that_was_dead_for_a_while_is_a_gap(tmp_path: Path) -> None:
    folder = PLAIN.write(tmp_path / "run")
    file = folder / "metrics" / "worker-00001.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    start = next(line for line in lines if line["kind"] == "start")
    dead, back = 2.0, 3.0
    kept = [line for line in lines if line["elapsed"] < dead or line["elapsed"] > back]
    place = next(i for i, line in enumerate(kept) if line["elapsed"] > back)
    again = {**start, "elapsed": back, "step": kept[place]["step"] - 1}
    event = {**start, "kind": "event", "elapsed": dead + 0.1, "step": 1, "level": "warning", "text": "Worker 1 died."}
    file.write_text("".join(json.dumps(line) + "\n" for line in [*kept[:place], event, again, *kept[place:]]))
    (run,) = read_runs([folder])
    assert len(run.workers[1].alive) == 2
    acted = activity(run.workers[1])
    within_gap = [span for span in acted.computing if span[0] < back - 0.01 and span[1] > dead]
    assert not within_gap
    assert "A gap is a time in which a worker was dead" in write_report([folder], tmp_path / "page.html").read_text()


def test_rates_and_each_workers_loss_are_drawn_and_zoom_together(tmp_path: Path) -> None:
    page = Page(write_report([PLAIN.write(tmp_path / "run")], tmp_path / "page.html"))
    linked = {attributes["id"] for _, attributes in page.elements if attributes.get("data-linked") == "steps"}
    assert linked == {"loss-steps", "learning-rate", "throughput", "loss-workers"}
    assert len(page.figures["loss-workers"][0]["data"]) == PLAIN.workers
    assert all(rate > 0 for rate in page.figures["throughput"][0]["data"][0]["y"])


def test_metrics_of_the_task_are_compared_and_drawn(tmp_path: Path) -> None:
    folders = []
    for name, accuracy in (("one", [0.5, 0.9, 0.8]), ("two", [0.4, 0.6, 0.7])):
        folder = MadeUpRun(steps=60, workers=2).write(tmp_path / name)
        folders.append(folder)
        path = folder / "metrics" / "worker-00000.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        values = iter(accuracy)
        for line in lines:
            if line["kind"] == "start":
                line["higher_is_better"] = ["accuracy"]
            if line["kind"] == "evaluation":
                line["metrics"] = {"accuracy": next(values)}
            if line["kind"] == "step":
                line["values"] = {"<norm>": 2.0 * line["step"]}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Page(write_report(folders, tmp_path / "report.html"))
    rows = {row[0]: row[1:] for row in page.tables["The runs beside each other"]}
    assert [float(cell) for cell in rows["held-out accuracy, highest"]] == [0.9, 0.7]
    assert re.search(r"one has the highest held-out accuracy \(0\.90*\)", page.text)
    drawn = [trace["y"] for trace in page.figures["metric-0"][0]["data"]]
    assert drawn == [[0.5, 0.9, 0.8], [0.4, 0.6, 0.7]]
    assert page.figures["value-0"][0]["data"][0]["y"][-1] == 120.0
    assert "<norm>" not in page.text  # names from files are only text
