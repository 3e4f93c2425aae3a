"""Sketches tell distances whatever the vectors look like."""

from __future__ import annotations

import statistics

import pytest
import torch

from cadenza.common.sketches import Sketch, spread_of

NUMEL = 300_000


def dense(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(NUMEL, generator=generator)


def few_rows(generator: torch.Generator) -> torch.Tensor:
    """An embedding of which a batch has touched few rows."""
    found = torch.zeros(NUMEL // 100, 100)
    found[torch.randint(NUMEL // 100, (30,), generator=generator)] = torch.randn(30, 100, generator=generator)
    return found.view(-1)


def rank_one(generator: torch.Generator) -> torch.Tensor:
    """A matrix whose rows are multiples of one: sums of rows with one sign each would be far off."""
    return torch.outer(torch.randn(300, generator=generator), torch.randn(1000, generator=generator)).view(-1)


def heavy_tailed(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(NUMEL, generator=generator).pow(5)


@pytest.mark.parametrize("kind", [dense, few_rows, rank_one, heavy_tailed])
def test_the_error_is_what_the_docstring_says(kind) -> None:  # type: ignore[no-untyped-def]
    errors = []
    for seed in range(20):
        one, other = (kind(torch.Generator().manual_seed(2 * seed + i)) for i in range(2))
        sketches = []
        for vector in (one, other):
            sketch = Sketch(NUMEL)
            for part in vector.split(130_000):
                sketch.add(part)
            sketches.append(sketch.pack())
        true = float((one - other).double().square().sum()) / 4
        errors.append(spread_of(sketches, [0.5, 0.5]) / true - 1)
    assert abs(statistics.mean(errors)) < 0.025
    assert statistics.pstdev(errors) < 0.05


def test_weights_count() -> None:
    sketches = []
    for value in (0.0, 1.0, 5.0):
        sketch = Sketch(50_000)
        sketch.add(torch.full((50_000,), value))
        sketches.append(sketch.pack())
    mean = 0.3 + 5 * 0.2
    true = 0.5 * mean**2 + 0.3 * (1 - mean) ** 2 + 0.2 * (5 - mean) ** 2
    assert spread_of(sketches, [0.5, 0.3, 0.2]) / 50_000 == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("weights", [[1 / 3] * 3, [0.1, 0.2, 0.7]])
def test_vectors_that_are_the_same_are_not_apart(weights: list[float]) -> None:
    sketch = Sketch(100_000)
    sketch.add(torch.randn(100_000))
    assert spread_of([sketch.pack()] * 3, weights) == 0.0


def test_short_vectors_are_at_their_own_distance() -> None:
    rows = torch.randn(3, 1000)
    sketches = []
    for row in rows:
        sketch = Sketch(1000)
        sketch.add(row)
        sketches.append(sketch.pack())
    assert len(sketches[0]) == 4 * 1024
    true = float((rows - rows.mean(0)).double().square().sum()) / 3
    assert spread_of(sketches, [1 / 3] * 3) == pytest.approx(true, rel=1e-5)
