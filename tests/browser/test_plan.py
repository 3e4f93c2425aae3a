"""The page of a plan in a real Chromium: its numbers are Python's, sliders move them, and nothing is fetched."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cadenza.cli.app import main
from cadenza.cli.plan.candidates import build
from cadenza.cli.plan.page import KINDS
from cadenza.planning import Cluster, Faults, Link, Model, Work, predict, smallest_period
from support.browser import wait_until_drawn

pytestmark = pytest.mark.timeout(300)  # the first test may have to install Chromium

COMMON = ["plan", "--parameters", "1.3B", "--step-s", "0.8", "--workers", "8", "--bandwidth", "200mbit", "--json"]
PAGES = {
    "flat": ["--latency", "40ms"],
    "rough": [
        *("--sites", "2", "--between", "150mbit", "--between-latency", "20ms", "--down", "180mbit", "--jitter", "0.1"),
        *("--straggle", "0.001:3s", "--fails-every", "72h", "--faults", "shrink", "--slowest", "1.2"),
    ],
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plans")
    found = {name: folder / f"{name}.html" for name in PAGES}
    for name, more in PAGES.items():
        with contextlib.suppress(SystemExit):
            main([*COMMON, *more, "--html", str(found[name])])
    return found


def opened(browser: Any, page: Path) -> None:
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(page.as_uri())
    wait_until_drawn(browser)


def place_of(told: dict[str, Any]) -> tuple[Cluster, Model, Work]:
    """Return what the page plans, from the page's own words."""
    links = {name: Link(**told[name]) if told[name] else None for name in ("link", "uplink")}
    assert links["link"] is not None
    names = ("workers", "step_s", "sites", "slowest", "jitter", "straggle", "straggle_s")
    cluster = Cluster(
        link=links["link"], uplink=links["uplink"], faults=Faults(**told["faults"]), **{n: told[n] for n in names}
    )
    return cluster, Model(told["parameters"], layers=told["layers"]), Work(**told["work"])


@pytest.mark.parametrize("name", PAGES)
def test_the_numbers_are_those_of_python(chromium: Any, pages: dict[str, Path], name: str) -> None:
    opened(chromium, pages[name])
    policy = "shrink" if name == "rough" else "raise_error"
    for bandwidth in (2e7, 2e8, 7e9):
        told = chromium.execute_script(f"return cadenzaPlace({bandwidth})")
        cluster, model, work = place_of(told)
        for number, (preset, codec, delay) in enumerate(KINDS):
            for period in (24, 500):
                kind = f"JSON.parse(data.textContent).kinds[{number}]"
                asked = f"return cadenzaPlan.utilisation({kind}, {period}, cadenzaPlace({bandwidth}))"
                shown = chromium.execute_script(asked)
                strategy = build(preset, codec, delay, period, policy=policy)
                assert shown == pytest.approx(predict(strategy, cluster, model, work).utilisation, rel=1e-9)


def test_sliders_move_the_numbers_and_they_stay_python_s(chromium: Any, pages: dict[str, Path]) -> None:
    opened(chromium, pages["flat"])
    rows = "return [...document.querySelectorAll('#rows tr')].map((row) => ({...row.dataset}))"
    before = chromium.execute_script(rows)
    chromium.execute_script(
        "const moves = [['parameters', -4], ['step', 3], ['bandwidth', 5], ['workers', 2], ['period', 1]];"
        "for (const [name, move] of moves) {"
        " const slider = document.getElementById(name); slider.value = Number(slider.value) + move;"
        " slider.dispatchEvent(new Event('input')); }"
    )
    after = chromium.execute_script(rows)
    values = chromium.execute_script(
        "const told = JSON.parse(data.textContent);"
        "return Object.fromEntries(Object.entries(told.sliders).map(([name, stops]) =>"
        " [name, stops[Number(document.getElementById(name).value)]]))"
    )
    told = chromium.execute_script(f"return cadenzaPlace({values['bandwidth']})")
    cluster, model, work = place_of(told)
    assert (cluster.workers, model.parameters, cluster.step_s) == (
        values["workers"],
        values["parameters"],
        values["step"],
    )
    for was, row, (preset, codec, delay) in zip(before, after, KINDS, strict=True):
        assert was["utilisation"] != row["utilisation"]

        def used(period: int, words: tuple[str, str, int] = (preset, codec, delay)) -> float:
            return predict(build(*words, period), cluster, model, work).utilisation

        assert float(row["utilisation"]) == pytest.approx(used(values["period"]), rel=1e-9)
        if preset != "ddp":
            least = max(delay + 1, 17 if preset == "streaming_diloco" else 1)
            found = smallest_period(lambda period, used=used: used(period) >= 0.95, least=least)  # type: ignore[misc]
            assert row["smallest"] == str(found)


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_is_drawn_without_any_network(chromium: Any, pages: dict[str, Path], dark: bool) -> None:
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    opened(chromium, pages["flat"])
    entries = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    urls = [e["params"]["request"]["url"] for e in entries if e["method"] == "Network.requestWillBeSent"]
    assert urls == [pages["flat"].as_uri()]
    assert [e["message"] for e in chromium.get_log("browser") if e["level"] in ("SEVERE", "WARNING")] == []
    paths = chromium.execute_script("return document.querySelectorAll('#curves path').length")
    assert paths == len(KINDS)
    wide = chromium.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert wide


def test_a_simulated_run_s_report_is_drawn_like_a_real_one_s(chromium: Any, tmp_path: Path) -> None:
    words = [*COMMON, *PAGES["rough"], "--strategy", "diloco", "--rounds", "40", "--simulate", str(tmp_path / "run")]
    with contextlib.suppress(SystemExit):
        main(words)
    opened(chromium, tmp_path / "run" / "report.html")
    assert [e["message"] for e in chromium.get_log("browser") if e["level"] in ("SEVERE", "WARNING")] == []
    text = chromium.execute_script("return document.body.innerText")
    assert "diloco" in text
    assert "rounds\t40" in text


def test_a_place_is_a_place() -> None:
    """What `place_of` reads is all that a cluster has, but for hosts, which the page does not know."""
    cluster = Cluster(8, Link(1e9), 0.5)
    assert {*cluster.__dataclass_fields__} == {
        *("workers", "link", "step_s", "sites", "uplink", "host_workers", "slowest", "jitter", "straggle"),
        *("straggle_s", "faults"),
    }
    assert replace(cluster, workers=4).workers == 4
