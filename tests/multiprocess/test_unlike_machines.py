"""Machines that round differently train together: what all must share is the same bits on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cadenza
from support.unlike_machines import strategies, train_on_unlike_machines

NAMES = list(strategies())
MADE_BY_ALL_ALIKE = [name for name in NAMES if name != "torch's Adam"]  # whose steps fuse where they can


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Any]]]:
    """What each machine found, by strategy."""
    root = tmp_path_factory.mktemp("unlike")
    return root, train_on_unlike_machines(root, NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_all_end_with_the_same_bits(runs: tuple[Any, list[dict[str, Any]]], name: str) -> None:
    first, *others = (run[name]["parameters"] for run in runs[1])
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_drift_is_one_number(runs: tuple[Any, list[dict[str, Any]]], name: str) -> None:
    first, *others = (run[name]["drift"] for run in runs[1])
    assert len(first) >= 2
    assert all(drift is not None for _, _, drift in first)
    assert any(drift > 0 for _, _, drift in first)
    assert all(first == other for other in others)


@pytest.mark.parametrize("name", MADE_BY_ALL_ALIKE)
def test_anchors_and_outer_states_are_the_same_bits(runs: tuple[Any, list[dict[str, Any]]], name: str) -> None:
    first, *others = (run[name]["shared"] for run in runs[1])
    for other in others:
        assert first.keys() == other.keys()
        for key, value in first.items():
            assert torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key], key


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_are_whole(runs: tuple[Any, list[dict[str, Any]]], name: str) -> None:
    root, found = runs
    first, *others = (run[name]["fingerprints"] for run in found)
    assert all(first == other for other in others)
    assert len(set(first)) == len(first)  # a state of another step is told apart
    assert cadenza.checkpoint.latest(root / name) == root / name / "step"
