"""The papers' tables, cell by cell (shared/PLANNING.md has the figures)."""

from __future__ import annotations

import math

import pytest

from cadenza.planning.idealised import GRID, KINDS, Kind, bandwidth_needed, utilisation

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
# arXiv 2501.18512, table 4: parameters, layers, seconds a step; bandwidths in Gbit/s by kind.
MODELS = {
    "1B": (1e9, 24, 0.1),
    "10B": (1e10, 48, 0.8),
    "100B": (1e11, 108, 4.9),
}
TABLE_4 = {
    "1B": (
        (86.8, 152.6, 184.2, 222.3, 569),
        (1.4, 6.2, 13.3, 23.3, 86.8),
        (1.4, 5.2, 9.1, 16, 28.1),
        (1.4, 4.3, 6.2, 9.1, 11),
        (0.4, 0.9, 1.7, 2, 3),
    ),
    "10B": (
        (104.8, 222.3, 222.3, 268.3, 471.5),
        (1.7, 7.5, 16, 33.9, 104.8),
        (1.7, 5.2, 9.1, 13.3, 19.3),
        (1.7, 3.6, 5.2, 6.2, 7.5),
        (0.4, 0.9, 1.4, 1.4, 1.7),
    ),
    "100B": (
        (184.2, 323.8, 390.7, 390.7, 471.5),
        (3, 11, 23.3, 49.4, 184.2),
        (2.4, 6.2, 9.1, 11, 19.3),
        (1.7, 3.6, 4.3, 5.2, 5.2),
        (0.5, 0.9, 1.1, 1.1, 1.4),
    ),
}
# arXiv 2503.09799, table 6, 10 B: by period.
TABLE_6 = {
    1: (104.8, 184.2, 222.3, 222.3, 390.7),
    10: (16, 49.4, 86.8, 152.6, 222.3),
    50: (3, 11, 23.3, 41, 126.5),
    100: (1.4, 6.2, 13.3, 23.3, 86.8),
    300: (0.5, 2, 4.3, 9.1, 41),
}


def step_of(gbits: float) -> int:
    return min(range(len(GRID)), key=lambda i: abs(math.log(GRID[i] / gbits / 1e9)))


def grid_steps(kind: Kind, target: float, gbits: float, model: str, period: int) -> int:
    parameters, layers, step_s = MODELS[model]
    needed = bandwidth_needed(kind, target, parameters=parameters, layers=layers, step_s=step_s, period=period)
    return GRID.index(needed) - step_of(gbits)


TABLE_4_CELLS = [
    (kind, target, gbits, model, 100)
    for model, rows in TABLE_4.items()
    for kind, row in zip(KINDS, rows, strict=True)
    for target, gbits in zip(TARGETS, row, strict=True)
]
TABLE_6_CELLS = [
    ("data parallel" if period == 1 else "diloco", target, gbits, "10B", period)
    for period, row in TABLE_6.items()
    for target, gbits in zip(TARGETS, row, strict=True)
]


@pytest.mark.parametrize("cells", [TABLE_4_CELLS, TABLE_6_CELLS], ids=["2501.18512 table 4", "2503.09799 table 6"])
def test_every_cell_is_within_two_grid_steps_and_most_within_one(
    cells: list[tuple[Kind, float, float, str, int]],
) -> None:
    steps = {cell: grid_steps(*cell) for cell in cells}
    assert {cell: step for cell, step in steps.items() if abs(step) > 2} == {}
    assert sum(abs(step) <= 1 for step in steps.values()) >= 0.85 * len(cells)


def test_the_tables_have_all_their_cells() -> None:
    assert (len(TABLE_4_CELLS), len(TABLE_6_CELLS)) == (75, 25)
    assert all(
        math.isclose(GRID[step_of(cell[2])] / 1e9, cell[2], rel_tol=0.12) for cell in TABLE_4_CELLS + TABLE_6_CELLS
    )


def test_utilisation_grows_with_bandwidth_and_with_the_period() -> None:
    model = {"parameters": 1e9, "layers": 24, "step_s": 0.1}
    for kind in KINDS:
        found = [utilisation(kind, bandwidth, **model) for bandwidth in GRID]
        assert found == sorted(found)
    found = [utilisation("diloco", 1e9, period=period, **model) for period in (1, 10, 100, 1000)]
    assert found == sorted(found)
