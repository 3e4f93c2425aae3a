"""The documentation as it is built: no dead link, every name in the index, and every page in a real Chromium."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from html import unescape
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import cadenza
from cadenza import errors
from cadenza.reports import RoundReport
from cadenza.training.config import Config
from support.browser import opened_browser, why_no_browser

pytestmark = pytest.mark.timeout(300)  # the first test builds the site

ROOT = Path(__file__).parents[2]
# What a page of a source file looks like, two show: there are some three hundred, made alike.
SHOWN_FILES = ("cadenza.codecs.base.html", "cadenza.engine.synchronizer.html")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def texts(site: Path) -> dict[str, str]:
    return {path.relative_to(site).as_posix(): path.read_text() for path in sorted(site.rglob("*.html"))}


@pytest.fixture(scope="module")
def labels(texts: dict[str, str]) -> set[str]:
    return {unescape(label) for label in re.findall(r"<li><code>(.*?)</code>", texts["reference/index-of-names.html"])}


def test_no_link_is_dead(site: Path, texts: dict[str, str]) -> None:
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    dead = []
    for page, text in texts.items():
        for address in set(re.findall(r'\b(?:href|src)="([^"]+)"', text)):
            place, _, anchor = unescape(unquote(address)).partition("#")
            if re.match(r"[a-z]+:", place) or page == "404.html":
                continue
            target = os.path.normpath(os.path.join(os.path.dirname(page), place)) if place else page
            if not (site / target).is_file() or (anchor and anchor not in anchors.get(target, ())):
                dead.append(f"{page}: {address}")
    assert not dead, "\n".join(sorted(dead))


def exported() -> Iterator[tuple[str, str]]:
    """Every name that a package of the library, or a module at its top, exports; read without docs_tools."""
    yield from (("cadenza", name) for name in cadenza.__all__ if not name.startswith("_"))
    for found in pkgutil.iter_modules(cadenza.__path__, "cadenza."):
        if found.name not in ("cadenza.cli", "cadenza.integrations", "cadenza.common", "cadenza.public_names"):
            yield from ((found.name, name) for name in getattr(importlib.import_module(found.name), "__all__", ()))


def test_every_public_name_stands_in_the_reference_and_in_the_index(texts: dict[str, str], labels: set[str]) -> None:
    reference = "".join(text for page, text in texts.items() if page.startswith("modules/"))
    described = {path.rpartition(".")[2] for path in re.findall(r'id="(cadenza[\w.]+)"', reference)}
    rooms = {"codecs", "observers", "outer", "weighting"}  # exported whole, each has a page
    missing = [name for name in exported() if name[1] not in labels & described and name[1] not in rooms]
    assert not missing


def test_every_setting_flag_field_and_word_stands_in_the_index(labels: set[str]) -> None:
    def keys(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for key, value in table.items():
            if isinstance(value, dict) and value:
                yield from keys(value, f"{prefix}{key}.")
            elif not isinstance(value, dict):
                yield prefix + key

    assert set(keys(tomllib.loads(Config().to_toml()))) <= labels
    help_of_train = subprocess.run(
        [sys.executable, "-m", "cadenza.cli.app", "train", "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    flags = set(re.findall(r"^[│ ]+(?:-\w[ ,]+)?(--[a-z-]+)", help_of_train, re.MULTILINE)) - {"--help"}
    assert len(flags) > 25
    assert flags <= labels
    assert {field.name for field in fields(RoundReport)} <= labels
    words = re.findall(r"^\| (?!word)([a-z][^|]*?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(words) > 60
    assert set(words) <= labels
    assert {"CADENZA_STORE", "CADENZA_SECRET", "CADENZA_NATIVE"} <= labels


def test_every_error_ends_with_an_address_that_is_there(texts: dict[str, str]) -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        error = kind([1]) if kind is errors.ContributionRefusedError else kind("given")
        page, _, anchor = error.address.removeprefix("docs/").partition("#")
        assert f'id="{anchor}"' in texts[page.replace(".md", ".html")]
        assert error.__notes__ == [f"See {error.address}"]


def test_every_module_has_a_page_and_every_source_file_its_keywords(texts: dict[str, str]) -> None:
    sources = ROOT / "src" / "cadenza"
    modules = [
        ".".join(part for part in path.relative_to(sources.parent).with_suffix("").parts if part != "__init__")
        for path in sources.rglob("*.py")
        if path.read_text().strip()
    ]
    assert not [module for module in modules if f"reference/files/{module}.html" not in texts]
    listed = "".join(text for page, text in texts.items() if page.startswith("modules/"))
    missing = [module for module in modules if f"reference/files/{module}.html" not in listed]
    assert missing in ([], ["cadenza"], ["cadenza", "cadenza.cli.__main__"]), missing


class Reader:
    """A person with a browser."""

    def __init__(self, browser: Any, site: Path) -> None:
        self.browser, self.site, self.js = browser, site, browser.execute_script

    def look(self, *, width: int, dark: bool) -> None:
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, page: str) -> None:
        self.browser.get((self.site / page).as_uri())

    def search(self, words: str) -> list[str]:
        """Return where the first places are that a search finds."""
        self.browser.execute_async_script(
            "const [words, done] = arguments; document.getElementById('find').click();"
            "const query = document.getElementById('query'); query.value = words;"
            "(function look() {"
            "  query.dispatchEvent(new Event('input'));"
            "  document.getElementById('found').textContent ? done() : setTimeout(look, 20); })()",
            words,
        )
        return self.js(
            "const hits = [...document.querySelectorAll('#hits a')].map((a) => a.getAttribute('href'));"
            "document.getElementById('search').close(); return hits"
        )


@pytest.fixture(scope="module")
def reader(site: Path) -> Iterator[Reader]:
    reason = why_no_browser()
    if reason is not None:
        pytest.skip(reason)
    with opened_browser() as browser:
        yield Reader(browser, site)


# What is wrong with how a page looks: wider than the screen, or a bar that lies over the first line of its code.
UNTIDY = """
const found = [], at = (block, part) => block.querySelector(part).getBoundingClientRect();
if (document.documentElement.scrollWidth > innerWidth) found.push(`${document.documentElement.scrollWidth} px wide`);
for (const block of document.querySelectorAll(".highlight:has(> .bar)"))
  if (at(block, ".bar").bottom > at(block, "pre").top) found.push(block.textContent.slice(0, 60));
return found;
"""
AXE = """
const [rules, contrast, done] = arguments;
const options = {resultTypes: ["violations"], ...(rules && {runOnly: {type: "rule", values: rules}})};
if (!contrast) options.rules = {"color-contrast": {enabled: false}};
axe.run(document, options).then((result) => done(result.violations.map((one) =>
  `${one.id}: ${one.nodes.slice(0, 3).map((node) => `${node.target} ${node.html.slice(0, 90)}`).join(" | ")}`)));
"""


# Rows of the index are made alike: some are enough, and a thousand take axe as long as ten pages.
SHORTEN = "[...document.querySelectorAll('.names li')].slice(60).forEach((row) => row.remove())"
# Colours are the theme's. Looking at them takes most of axe's time, so it does where every kind of text is.
COLOURFUL = {
    "index.html",
    "tutorials/from-ddp.html",
    "benchmarks.html",
    "errors.html",
    "modules/codecs.html",
    "reference/command-line.html",
    "reference/compatibility.html",
    "reference/index-of-names.html",
    f"reference/files/{SHOWN_FILES[0]}",
}
# All rules on a wide and light screen; of those only what another screen can break on a narrow and dark one.
OF_THE_SCREEN = ["color-contrast", "scrollable-region-focusable", "meta-viewport"]


@pytest.mark.parametrize(("width", "dark", "rules"), [(1400, False, None), (400, True, OF_THE_SCREEN)])
def test_every_page_is_tidy_and_accessible(
    reader: Reader, texts: dict[str, str], width: int, dark: bool, rules: list[str] | None
) -> None:
    axe = files("axe_core_python").joinpath("axe.min.js").read_text()
    reader.look(width=width, dark=dark)
    wrong = {}
    assert set(texts) >= COLOURFUL
    for page in texts:
        if page == "404.html" or (page.startswith("reference/files/") and Path(page).name not in SHOWN_FILES):
            continue
        reader.open(page)
        reader.js(SHORTEN)
        reader.js(axe)
        found = [*reader.js(UNTIDY), *reader.browser.execute_async_script(AXE, rules, page in COLOURFUL)]
        if found:
            wrong[page] = found
    assert not wrong, "\n".join(f"{page}: {'; '.join(found)}" for page, found in wrong.items())
    assert not [entry for entry in reader.browser.get_log("browser") if entry["level"] == "SEVERE"]
    asked = "".join(entry["message"] for entry in reader.browser.get_log("performance"))
    assert not re.findall(r'"requestWillBeSent".{0,2000}?"url":"(https?:[^"]+)', asked)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("wandb", "integrations/loggers.html"),
        ("BatchNorm", "tutorials/from-ddp.html#batchnorm"),
        ("Lightning", "integrations/lightning.html"),
        ("resume with fewer workers", "tutorials/from-ddp.html#resume-with-fewer-workers-or-more"),
        ("NCCL", "gpus.html"),
        ("CheckpointError", "errors.html#checkpointerror"),
        ("--outer-lr", "reference/command-line.html"),
    ],
)
def test_the_search_finds(reader: Reader, words: str, place: str) -> None:
    reader.open("modules/codecs.html")
    hits = reader.search(words)
    assert any(hit.removeprefix("../").startswith(place) for hit in hits[:10]), hits[:12]


def test_the_index_is_filtered_as_one_types(reader: Reader) -> None:
    reader.open("reference/index-of-names.html")
    reader.js("const f = document.getElementById('filter'); f.value = 'outer_lr'; f.dispatchEvent(new Event('input'))")
    shown = reader.js("return [...document.querySelectorAll('.names li:not([hidden])')].map((row) => row.textContent)")
    assert 2 <= len(shown) < 30
    assert all("outer_lr" in row for row in shown)


def test_the_theme_and_the_menu_work_by_buttons(reader: Reader) -> None:
    reader.look(width=400, dark=False)
    reader.open("index.html")
    paper = "return getComputedStyle(document.body).backgroundColor"
    light = reader.js(paper)
    for _ in range(2):  # from auto to light to dark
        reader.js("document.getElementById('theme').click()")
    assert reader.js(paper) != light
    reader.open("glossary.html")
    assert reader.js(paper) != light  # it is kept
    reader.js("localStorage.clear()")
    shown = "return document.getElementById('nav').getClientRects().length"
    assert reader.js(shown) == 0
    reader.js("document.getElementById('menu').click()")
    assert reader.js(shown) == 1
    assert reader.js("return document.getElementById('menu').getAttribute('aria-expanded')") == "true"
