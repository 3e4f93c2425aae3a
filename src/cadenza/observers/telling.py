"""Telling observers of a round, and the plainest of them: a line in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeAlias

from cadenza.common.wording import count_workers
from cadenza.reports import RoundReport

__all__ = ["Observer", "log", "notify"]

Observer: TypeAlias = Callable[[RoundReport], object]

_logger = logging.getLogger("cadenza")

# Observers that have raised: one that fails fails every round, and one message about it is enough.
_failed: list[Observer] = []


def notify(observers: Iterable[Observer], report: RoundReport) -> None:
    """Tell every observer; one that raises is logged the first time and never disturbs the training or the others.

    >>> steps = []
    >>> notify([lambda report: steps.append(report.step)], RoundReport.example(step=16))
    >>> steps
    [16]
    """
    for observer in observers:
        try:
            observer(report)
        except Exception:
            if not any(known == observer for known in _failed):
                _failed.append(observer)
                _logger.exception(
                    "The observer %r raised at step %d. Training goes on and it is told of later rounds too, but its "
                    "errors are not logged again.",
                    observer,
                    report.step,
                )


def log(logger: logging.Logger | None = None, level: int = logging.INFO) -> Observer:
    """Return an observer that writes a line a round to a logger, by default "cadenza".

    >>> import sys
    >>> logger = logging.Logger("example")
    >>> logger.addHandler(logging.StreamHandler(sys.stdout))
    >>> log(logger)(RoundReport.example(drift=0.02))
    step 500: level world, fragment all, 3.00 MB sent in 0.250 s, stalled 0.010 s, drift 0.02, fp32, 4 workers
    """
    target = _logger if logger is None else logger

    def write(report: RoundReport) -> None:
        if target.isEnabledFor(level):
            target.log(level, "%s", _line(report))

    return write


def _line(report: RoundReport) -> str:
    """Say in one line what a person who watches the run wants to know of a round."""
    if report.kind == "failed":
        return f"step {report.step}: the round of {report.fragment_name} failed, nothing was changed: {report.reason}"
    parts = [
        f"level {report.level_name or report.level}",
        f"fragment {report.fragment_name or report.fragment}",
        f"{report.bytes_sent / 1e6:.2f} MB sent in {report.wire_s:.3f} s",
        f"stalled {report.stall_s:.3f} s",
    ]
    if report.drift is not None:
        parts.append(f"drift {report.drift:.3g}")
    if report.codec:
        error = "" if report.codec_error is None else f" with error {report.codec_error:.3g}"
        parts.append(report.codec + error)
    if report.participants:
        parts.append(count_workers(len(report.participants)))
    return f"step {report.step}: " + ", ".join(parts)
