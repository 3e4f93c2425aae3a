"""The report in a real Chromium: drawn, legible, usable by keyboard, and on no network."""

from __future__ import annotations

import csv
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from cadenza.cli.report.page import write_report
from support.browser import wait_until_drawn
from support.runs import MadeUpRun

pytestmark = pytest.mark.timeout(300)  # the first test may have to install Chromium

EVIL = "<script>document.title='taken'</script >".replace("/", "∕") + "<img src=x onerror=\"document.title='taken'\">"
# Ratios of the luminances of all text and what is behind it (WCAG 2.2), in HTML and in the charts.
LOW_CONTRAST = """
const channel = (v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
function behind(element) {
  for (let at = element; at; at = at.parentElement) {
    const [r, g, b, a = 1] = parse(getComputedStyle(at).backgroundColor);
    if (a === 1) return [r, g, b];
  }
  throw new Error("nothing is behind the text");
}
const low = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !element.getClientRects().length || element.closest("script")) continue;
  const style = getComputedStyle(element);
  const front = luminance(parse(element.closest("svg") ? style.fill : style.color));
  const back = luminance(behind(element));
  const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
  if (ratio < 4.5) low.push([walker.currentNode.data, ratio]);
}
return low;
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    single = MadeUpRun(steps=60, period=6, resumed_at=30).write(folder / "single")
    hierarchy = MadeUpRun(steps=60, period=3, delay=2, fragments=2, outer_every=3, workers=2).write(
        folder / "hierarchy"
    )
    ddp = MadeUpRun(strategy="ddp", steps=60, period=None).write(folder / "ddp")
    evil = MadeUpRun(strategy=EVIL, steps=20, events=((5, EVIL, EVIL),)).write(folder / EVIL)
    long = MadeUpRun(steps=40_000, period=4).write(folder / "long")
    return {
        "single": write_report([single], folder / "single.html"),
        "compared": write_report([ddp, single, hierarchy], folder / "compared.html"),
        "evil": write_report([evil, single], folder / "evil.html"),
        "long": write_report([long], folder / "long.html"),
    }


class Tab:
    """The browser's tab, and what a person does in it."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.js = browser.execute_script

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, page: Path) -> None:
        for log in ("browser", "performance"):
            self.browser.get_log(log)  # what went before is not of this page
        self.browser.get(page.as_uri())
        wait_until_drawn(self.browser)

    def press(self, key: str, **more: Any) -> None:
        code = {"Tab": 9, "Enter": 13, "Space": 32}.get(key, ord(key[0]))
        text = {"Enter": "\r", "Tab": None}.get(key, key if len(key) == 1 else None)
        event = {"key": key, "windowsVirtualKeyCode": code, **({"text": text} if text else {}), **more}
        self.browser.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": "keyDown", **event})
        self.browser.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": "keyUp", **event})

    def focused(self) -> dict[str, Any]:
        return self.js(
            "const at = document.activeElement, style = getComputedStyle(at);"
            "const outline = style.outlineStyle === 'none' ? 0 : parseFloat(style.outlineWidth);"
            "const [text, href] = [at.textContent.trim(), at.getAttribute('href')];"
            "return {tag: at.localName, kind: at.className, text, href, outline}"
        )

    def complaints(self) -> list[str]:
        return [
            entry["message"] for entry in self.browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
        ]

    def requests(self) -> list[str]:
        entries = (json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance"))
        return [
            entry["params"]["request"]["url"] for entry in entries if entry["method"] == "Network.requestWillBeSent"
        ]


@pytest.fixture
def tab(chromium: Any) -> Tab:
    tab = Tab(chromium)
    tab.look()
    return tab


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", ["single", "compared"])
def test_the_page_is_whole_and_legible(pages: dict[str, Path], tab: Tab, name: str, width: int, dark: bool) -> None:
    tab.look(width=width, height=740, dark=dark)
    tab.open(pages[name])
    tab.js("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    drawn = tab.js(
        "return [...document.querySelectorAll('.plot')].map((p) => p.querySelectorAll('svg.main-svg path').length)"
    )
    assert len(drawn) == 10
    assert all(drawn)
    assert tab.js("return document.documentElement.scrollWidth") == width
    edges = tab.js("return [...document.querySelectorAll('svg.main-svg')].map((s) => s.getBoundingClientRect().right)")
    assert max(edges) <= width
    assert tab.js(LOW_CONTRAST) == []
    assert tab.complaints() == []
    assert tab.requests() == [pages[name].as_uri()]


def test_a_long_runs_page_is_drawn_and_small(pages: dict[str, Path], tab: Tab) -> None:
    tab.open(pages["long"])
    assert pages["long"].stat().st_size < 8_000_000
    assert tab.complaints() == []
    assert tab.js("return document.querySelectorAll('.plot svg.main-svg').length") > 0


def test_names_from_files_are_only_text(pages: dict[str, Path], tab: Tab) -> None:
    tab.open(pages["evil"])
    assert tab.complaints() == []
    assert tab.browser.title.startswith("Comparison of 2 runs")
    assert EVIL in tab.js("return document.querySelector('.switches').textContent")
    assert EVIL in tab.js("return document.querySelector('#events').textContent")
    tab.js("Plotly.Fx.hover('loss-steps', [{curveNumber: 1, pointNumber: 3}])")
    assert "<script>" in tab.js("return document.querySelector('#loss-steps .hoverlayer').textContent")
    assert tab.requests() == [pages["evil"].as_uri()]


def test_a_script_from_elsewhere_is_not_run(pages: dict[str, Path], tab: Tab) -> None:
    tab.open(pages["single"])
    tab.js("const s = document.createElement('script'); s.textContent = 'window.taken = 1'; document.body.append(s)")
    assert tab.js("return window.taken") is None
    assert any("Content Security Policy" in complaint for complaint in tab.complaints())


def test_everything_is_reached_by_the_keyboard_and_shows_it(pages: dict[str, Path], tab: Tab) -> None:
    tab.open(pages["compared"])
    stops = []
    while (not stops or tab.focused()["tag"] != "body") and len(stops) < 120:
        tab.press("Tab")
        stops.append(tab.focused())
    assert stops[0]["text"] == "Skip to the figures"
    assert stops[1]["text"].startswith("Theme:")
    assert [stop["href"] for stop in stops if stop["tag"] == "a"][1:4] == ["#summary", "#loss", "#timeline"]
    assert sum(stop["tag"] == "input" for stop in stops) == 3
    assert sum(stop["kind"] == "frame" for stop in stops) == 10
    assert sum(stop["text"] == "The figures as tables" for stop in stops) == 3
    assert sum(stop["kind"] == "copy" for stop in stops) == 2  # those outside <details>: levels, events
    assert all(stop["outline"] >= 2 for stop in stops if stop["tag"] != "body")


def test_a_chart_is_moved_and_its_views_are_changed_by_keys(pages: dict[str, Path], tab: Tab) -> None:
    tab.open(pages["single"])
    axis = "return document.getElementById('loss-steps').layout.xaxis.range"
    whole = tab.js(axis)
    tab.js("document.querySelector('.frame').focus()")
    tab.press("+")
    zoomed = tab.js(axis)
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[1] - whole[0]) / 2)
    others = "return ['learning-rate', 'loss-workers'].map((id) => document.getElementById(id).layout.xaxis.range)"
    assert tab.js(others) == [pytest.approx(zoomed)] * 2  # which have the same axis
    before = tab.js("return document.getElementById('loss-time').layout.xaxis.range")
    tab.press("ArrowRight", windowsVirtualKeyCode=39)
    assert tab.js(axis)[0] > zoomed[0]
    tab.press("0")
    assert tab.js(axis) == pytest.approx(whole)
    assert all(low < zoomed[0] for low, _ in tab.js(others))
    assert tab.js("return document.getElementById('loss-time').layout.xaxis.range") == before
    tab.js("document.querySelector('.views button[data-view=\"1\"]').focus()")
    tab.press("Enter")
    assert tab.js("return document.querySelectorAll('#timeline-0 .bars path').length") > 8
    assert tab.js("return document.querySelector('.views [aria-pressed=true]').textContent") == "First rounds"
    assert tab.js("return document.querySelector('.view-note:not([hidden])').textContent").startswith("First rounds:")


def test_a_table_is_copied_as_csv_by_a_key(pages: dict[str, Path], tab: Tab) -> None:
    tab.open(pages["single"])
    tab.browser.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    tab.js("document.querySelector('#summary .copy').focus()")
    tab.press("Enter")
    text = tab.browser.execute_async_script("setTimeout(() => navigator.clipboard.readText().then(arguments[0]), 200)")
    rows = {row[0]: row[1] for row in csv.reader(StringIO(text))}
    sent = json.loads((pages["single"].parent / "single" / "summary.json").read_text())["bytes_sent"]
    assert rows["figure"] == "value"
    assert int(rows["sent by a worker (bytes)"]) == sent
    assert tab.js("return document.getElementById('said').textContent") == f"{len(rows) - 1} rows copied"


def test_the_theme_is_changed_by_a_key_and_is_kept(pages: dict[str, Path], tab: Tab) -> None:
    text = "return getComputedStyle(document.querySelector('#loss-steps .xtick text')).fill"
    tab.open(pages["single"])
    light = tab.js(text)
    for _ in range(2):  # from auto to light to dark
        tab.js("document.getElementById('theme').focus()")
        tab.press("Enter")
    dark = tab.js(text)
    assert dark != light
    tab.open(pages["single"])
    assert tab.js(text) == dark
    tab.js("localStorage.clear()")


def test_a_run_is_switched_off_in_all_charts(pages: dict[str, Path], tab: Tab) -> None:
    tab.open(pages["compared"])
    lines = "return document.querySelectorAll('#loss-steps .trace, #loss-bytes .trace').length"
    before = tab.js(lines)
    tab.js("document.querySelector('.switches input').click()")
    assert tab.js(lines) == before - 2 * 3
