"""Squared norms: accurate in every precision, true about what is not finite, and without large temporaries."""

from __future__ import annotations

import math

import pytest
import torch

from cadenza.common.norms import distance_squared, norm_squared


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_is_as_accurate_as_the_values(dtype: torch.dtype) -> None:
    values = torch.randn(300_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = float(values.to(torch.float64).square().sum())
    assert norm_squared(values) == pytest.approx(expected, rel=1e-5)
    assert norm_squared(values[:200_000].view(200, 1000).t(), values[200_000:]) == pytest.approx(expected, rel=1e-5)


def test_the_norm_of_nothing_is_zero() -> None:
    assert norm_squared() == norm_squared(torch.empty(0)) == 0.0


def test_squares_that_overflow_have_a_norm_all_the_same() -> None:
    assert norm_squared(torch.tensor([3e30, 4e30]), torch.tensor([1.0])) == pytest.approx(25e60)
    assert norm_squared(torch.tensor([60_000.0], dtype=torch.float16)) == pytest.approx(60_000.0**2, rel=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(value: float) -> None:
    values = torch.zeros(200_000)
    values[150_000] = value
    assert not math.isfinite(norm_squared(torch.ones(3), values))


def test_a_distance_is_the_norm_of_the_difference() -> None:
    one, other = torch.randn(2, 1_100_000, generator=torch.Generator().manual_seed(0))
    expected = float((one - other).to(torch.float64).square().sum())
    assert distance_squared(one, other) == pytest.approx(expected, rel=1e-5)
