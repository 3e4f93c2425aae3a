"""The table of docs/gpus.md is what the planner computes."""

from __future__ import annotations

import re
from pathlib import Path

import cadenza
from cadenza import Strategy, codecs
from cadenza.planning import Cluster, Link, Model, memory_of

PAGE = Path(__file__).parents[3] / "docs" / "gpus.md"
STRATEGIES: dict[str, list[Strategy]] = {
    "`local_sgd`": [cadenza.local_sgd(500)],
    "`slowmo`, `diloco`": [cadenza.slowmo(500), cadenza.diloco(500)],
    "`diloco`, int8 with error feedback": [cadenza.diloco(500, codec=codecs.error_feedback(codecs.int8()))],
    "`diloco`, `delay=5`": [cadenza.diloco(500, delay=5)],
    "`streaming_diloco`": [cadenza.streaming_diloco(500)],
    "`sparse_loco`": [cadenza.sparse_loco(500)],
}


def test_the_page_has_the_planner_s_figures() -> None:
    rows = {row[0]: row[1:] for row in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE.read_text(), re.M)}
    cluster, models = Cluster(2, Link(1e9), 1.0), [Model(int(billions * 1e9)) for billions in (1, 7, 70)]
    alone = [f"{memory_of(cadenza.diloco(500), cluster, model).model / 1e9:.1f}" for model in models]
    assert list(rows["training alone"]) == alone
    for name, strategies in STRATEGIES.items():
        for strategy in strategies:
            extra = [f"+ {memory_of(strategy, cluster, model).extra / 1e9:.1f}" for model in models]
            assert list(rows[name]) == extra, name
