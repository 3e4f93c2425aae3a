"""What the documentation is made with: figures from the results, names from the library, words for the search."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import cadenza
from cadenza.testing import workers
from docs_tools import figures
from docs_tools.mentions import mentions_of
from docs_tools.messages import raised
from docs_tools.rooms import modules, public_names, room_of, rooms
from docs_tools.search import SearchIndex

ROOT = Path(__file__).parents[2]


def test_figures_in_pages_are_those_of_the_results() -> None:
    assert list(figures.differing()) == []
    marked = sum(page.read_text().count("<!-- figure:") for page in figures.pages())
    assert marked >= 20


def test_a_figure_that_has_gone_stale_is_mended() -> None:
    page = figures.ROOT / "README.md"
    stale = page.read_text().replace("late.s -->18.4<", "late.s -->17.0<")
    assert stale != page.read_text()
    assert figures.rewritten(stale) == page.read_text()


@pytest.mark.parametrize("key", ["speed", "to-loss.100mbit.nobody.s", "syncs.late", "kills.best"])
def test_a_figure_that_no_file_has_is_named(key: str) -> None:
    with pytest.raises(KeyError, match=key):
        figures.figure(key)


def test_the_tables_of_the_race_are_those_of_the_results() -> None:
    from lab.race import report

    page = ROOT / "docs" / "benchmarks.md"
    assert report.filled(page.read_text(), figures.RESULTS) == page.read_text()


def test_the_first_page_s_lines_train() -> None:
    [code] = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE | re.DOTALL)

    def train(worker: object) -> float:
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exec(code, {"cadenza": cadenza, "model": model, "optimizer": optimizer, "loader": [torch.ones(1, 2)] * 3})
        return sum(model.weight.tolist()[0])

    with workers(2) as pool:
        assert all(weight < 0 for weight in pool.run(train))


def test_every_module_is_in_a_room_and_no_room_is_empty() -> None:
    assert [module for module in modules() if room_of(module) is None] == ["cadenza"]
    with_names = {name.page for name in public_names()}
    assert [room.page for room in rooms() if room.page not in with_names] == ["modules/cli.md"]  # not for import
    for room in rooms():
        text = (ROOT / "docs" / room.page).read_text()
        assert [part for part in ("## Design", "## Performance", "## Safety") if part not in text] == []


def test_messages_are_read_from_the_sources() -> None:
    from cadenza import errors

    assert any("is missing" in text for text, _ in raised()["CheckpointError"])
    assert not [name for name in raised() if name.endswith("Error") and hasattr(errors, name) and not raised()[name]]


def test_a_name_is_found_where_it_is_used() -> None:
    assert "spot-machines.md" in [page for page, _ in mentions_of("shrink")]
    assert mentions_of("a_name_that_is_nowhere") == []


def test_the_search_has_a_place_for_every_heading(tmp_path: Path) -> None:
    index = SearchIndex()
    index.add(
        "a.html", "A", '<h1 id="a">A</h1><p>one</p><h2 id="b">B<a class="headerlink" href="#b">#</a></h2><p>two</p>'
    )
    index.write(tmp_path / "index.js")
    assert (tmp_path / "index.js").read_text() == (
        'window.cadenzaSearch = [["a.html#a","A","A","one",1.0],["a.html#b","B","A","two",1.0]];\n'
    )


def test_the_program_says_whether_a_figure_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["figures"])
    with pytest.raises(SystemExit, match="False"):
        figures.main()
    monkeypatch.setattr(figures, "figure", lambda key: "another")
    with pytest.raises(SystemExit, match="True"):
        figures.main()
    assert "README.md: to-loss.100mbit.late.s is 18.4 on the page, another in lab/results" in capsys.readouterr().out
