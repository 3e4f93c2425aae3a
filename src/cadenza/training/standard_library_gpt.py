"""The default task: a small byte-level GPT on the sources of Python's standard library."""

from __future__ import annotations

from cadenza.training.config import Config
from cadenza.training.task import Task

__all__ = ["build"]


def build(config: Config) -> Task:
    """Return the task."""
    raise NotImplementedError
