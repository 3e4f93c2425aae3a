"""What is seen while a run trains: a live picture on a terminal, plain lines elsewhere.

Both are drawn from `Progress` alone, in the front's process. The live picture measures what drawing costs and draws
less often if it must, so that it stays below half a percent of one core.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from cadenza.cli.following import Progress, WorkerProgress
from cadenza.cli.report.formats import NOTHING, bytes_text, count_text, loss_text, ratio_text, seconds_text, share_text

__all__ = ["Display", "LiveDisplay", "PlainDisplay", "draw"]

_REFRESH_S = 0.5
_COST_LIMIT = 0.005  # of one core
_PLAIN_S, _PLAIN_MOST_S = 5.0, 60.0  # plain lines come every few seconds at first, every minute in a long run
_FULL, _LIGHT, _HALF = "━", "─", "╸"
_CURVE = "▁▂▃▄▅▆▇█"
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_STATUS_STYLES = {"restarting": "yellow", "dead": "red", "lost": "red", "failed": "red"}
_LEVEL_STYLES = {"warning": "yellow", "error": "red"}


class Display(Protocol):
    """Shows how far a run is."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def due(self) -> bool:
        """Say whether it is time to show again."""

    def show(self, progress: Progress, news: Iterable[tuple[int, dict[str, Any]]]) -> None:
        """Show the progress, and the lines of metrics that are new."""

    def say(self, text: str) -> None:
        """Show a text that stays in sight."""


class LiveDisplay:
    """A picture that is drawn over and over, on a terminal."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title, self._notice = console, title, ""
        self._failures = _Failures()
        self._next = 0.0
        self._live = Live(console=console, auto_refresh=False)  # its last picture stays
        self._progress = Progress()
        self._began = time.monotonic()
        self._resumed = False

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    def due(self) -> bool:
        return time.monotonic() >= self._next

    def show(self, progress: Progress, news: Iterable[tuple[int, dict[str, Any]]]) -> None:
        began = time.thread_time()
        self._progress = progress
        for worker, line in news:
            if line["kind"] == "start" and line["resumed"] and not self._resumed:
                self._resumed = True
                self._console.print(f"Going on from step {line['step']}.")
            elif line["kind"] == "event" and line["level"] != "info":
                self._console.print(Text(f"worker {worker}: {line['text']}", _LEVEL_STYLES.get(line["level"], "")))
            elif text := self._failures.take(worker, line):
                self._console.print(Text(text, _LEVEL_STYLES["warning"]))
        self._draw()
        self._next = time.monotonic() + max(_REFRESH_S, (time.thread_time() - began) / _COST_LIMIT)

    def say(self, text: str) -> None:
        self._notice = text
        self._draw()

    def _draw(self) -> None:
        size = self._console.size
        waited_s = time.monotonic() - self._began
        picture = draw(self._progress, self._title, size.width, size.height, self._notice, waited_s)
        self._live.update(picture, refresh=True)


class PlainDisplay:
    """A line now and then, for files and pipes."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title
        self._failures = _Failures()
        self._next, self._step = 0.0, -1

    def __enter__(self) -> Self:
        self._print(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def due(self) -> bool:
        return True  # evaluations are shown at once; reading for them costs little

    def show(self, progress: Progress, news: Iterable[tuple[int, dict[str, Any]]]) -> None:
        texts = [
            text
            for worker, line in news
            if (text := _news(worker, line, progress) or self._failures.take(worker, line))
        ]
        for text in texts:
            self._print(text)
        now = time.monotonic()
        if progress.loss is None or progress.step <= max(0, self._step):
            return
        if now >= self._next or progress.step == progress.steps:
            self._next = now + min(_PLAIN_MOST_S, max(_PLAIN_S, progress.elapsed / 50))
            self._step = progress.step
            self._print(_line(progress))

    def say(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def draw(
    progress: Progress, title: str, width: int = 80, height: int = 40, notice: str = "", waited_s: float = 0.0
) -> RenderableType:
    """Return the live picture: a row a worker, then what all of them have done together."""
    picture = Text(no_wrap=True, overflow="ellipsis")
    for line in _wrapped([Text(part, "bold") for part in title.split(" · ")], width):
        picture.append_text(line).append("\n")
    workers = [progress.workers[worker] for worker in sorted(progress.workers)]
    if not progress.steps:
        told = ": ".join(filter(None, ["starting the workers", progress.starting]))
        turn = _SPINNER[int(waited_s / _REFRESH_S) % len(_SPINNER)]
        picture.append(f"{turn} ", "cyan").append(f"{told} · {_clock(waited_s)}\n", "dim")
    else:
        _append_workers(picture, progress, workers, width, most=max(1, height - 9))
        if len(progress.losses) > 1:
            picture.append("loss ", "dim").append(_curve(progress.losses, min(100, width - 16)), "cyan")
            picture.append(f" {loss_text(progress.losses[-1])}\n", "bold")
        for facts in _facts(progress):
            for line in _wrapped(facts, width):
                picture.append_text(line).append("\n")
    if notice:
        picture.append("\n".join(textwrap.wrap(notice, width)) + "\n", "yellow")
    picture.right_crop(1)
    return picture


def _append_workers(picture: Text, progress: Progress, workers: list[WorkerProgress], width: int, most: int) -> None:
    rows = [_row(worker, progress) for worker in workers[:most]]
    heads = ["worker", "step", f"{progress.unit}/s", "loss", "next sync"]
    shown = [0, 1, 2, 3, 4] if width >= 64 else [0, 1, 2, 3] if width >= 48 else [0, 1, 3]
    widths = {i: max(len(row[i]) for row in [heads, *rows]) for i in shown}
    bar = min(max(40, width // 2), width - sum(widths.values()) - 2 * len(shown))
    picture.append(_cells(heads, widths, " " * max(0, bar)) + "\n", "dim")
    for worker, row in zip(workers, rows, strict=False):
        cells = [row[i].ljust(widths[i]) if i == 0 else row[i].rjust(widths[i]) for i in shown]
        picture.append(cells[0], "bold cyan").append("  ")
        if bar >= 4:
            _append_bar(picture, worker.step / max(1, progress.steps), bar)
            picture.append("  ")
        picture.append("  ".join(cells[1:]) + "\n", _STATUS_STYLES.get(worker.status, ""))
    if len(workers) > most:
        rest = [worker.step for worker in workers[most:]]
        picture.append(f"… and {len(rest)} more, at steps {min(rest)} to {max(rest)}\n", "dim")


def _cells(row: list[str], widths: dict[int, int], bar: str) -> str:
    cells = [row[i].rjust(width) for i, width in widths.items()]
    first = row[0].ljust(widths[0])
    return "  ".join([first, bar, *cells[1:]] if len(bar) >= 4 else [first, *cells[1:]])


def _row(worker: WorkerProgress, progress: Progress) -> list[str]:
    hosts = {other.host for other in progress.workers.values()}
    name = f"{worker.worker} {worker.host}" if len(hosts) > 1 else str(worker.worker)
    sync = NOTHING if worker.next_sync is None else f"in {max(0, worker.next_sync - worker.step)}"
    if worker.status not in ("training", "starting"):
        sync = worker.status
    step = f"{worker.step}/{progress.steps}"
    return [name, step, _rate(worker.samples_per_s), loss_text(worker.loss), sync]


def _append_bar(picture: Text, done: float, width: int) -> None:
    halves = round(2 * width * min(1.0, done))
    full, half = divmod(halves, 2)
    style = "green" if full == width else "cyan"
    picture.append(_FULL * full + _HALF * half, style).append(_LIGHT * (width - full - half), "dim")


def _curve(values: Sequence[float], width: int) -> str:
    """Return values as a line of bars, the mean of several in each if there are many.

    >>> _curve([4.0, 3.0, 2.0, 1.0], 4), _curve([1.0, 1.0], 4), _curve([1, 1, 8, 8], 2)
    ('█▆▃▁', '▁▁', '▁█')
    """
    count = min(len(values), max(1, width))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [fmean(values[low:high]) for low, high in pairwise(edges)]
    lowest, highest = min(means), max(means)
    scale = (len(_CURVE) - 1) / (highest - lowest) if highest > lowest else 0.0
    return "".join(_CURVE[round((mean - lowest) * scale)] for mean in means)


def _trend(losses: Sequence[float]) -> str:
    """Return how a loss has moved since it was last measured.

    >>> _trend([2.5, 2.25]), _trend([2.5])
    (' ↓ from 2.500', '')
    """
    if len(losses) < 2:
        return ""
    return f" {'↓' if losses[-1] < losses[-2] else '↑'} from {loss_text(losses[-2])}"


def _facts(progress: Progress) -> list[list[Text]]:
    """Return what all workers have done together, in three lines: bytes, time, the model."""
    sent = [
        _fact("a worker sent ", bytes_text(progress.bytes_sent)),
        _fact("DDP would have sent ", bytes_text(progress.ddp_bytes)),
        _fact("", ratio_text(progress.bytes_sent, progress.ddp_bytes)),
    ]
    spent = [
        _fact("", _clock(progress.elapsed), " elapsed"),
        _fact("", _clock(progress.seconds_left), " left"),
        _fact("stall ", f"{seconds_text(progress.stall_s)} ({share_text(progress.stall_s, progress.elapsed)})"),
        _fact("", _rate(progress.samples_per_s), f" {progress.unit}/s"),
    ]
    reached = [_fact("drift ", NOTHING if progress.drift is None else f"{progress.drift:.3g}")]
    if progress.evaluation is not None:
        step, loss = progress.evaluation
        reached.append(_fact("held-out loss ", loss_text(loss), f" at step {step}{_trend(progress.evaluated)}"))
        reached += [_fact(f"{name} ", loss_text(value)) for name, value in progress.metrics.items()]
    if progress.checkpoint is not None:
        step, size = progress.checkpoint
        reached.append(_fact("checkpoint at step ", str(step), f" ({bytes_text(size)})"))
    return [sent, spent, reached]


def _rate(rate: float | None) -> str:
    return count_text(rate) if rate is None or rate >= 100 else f"{rate:.3g}"


def _clock(seconds: float | None) -> str:
    """Return a time as a clock shows it.

    >>> _clock(9.4), _clock(75), _clock(3 * 3600 + 62), _clock(200_000)
    ('9 s', '1:15', '3:01:02', '2 d 7 h')
    """
    if seconds is None:
        return NOTHING
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def _fact(before: str, figure: str, after: str = "") -> Text:
    return Text.assemble((before, "dim"), (figure, "bold"), (after, "dim"))


def _wrapped(pieces: list[Text], width: int) -> list[Text]:
    """Return the pieces in lines that break between them, and never inside one."""
    lines = [Text()]
    for piece in pieces:
        if lines[-1] and len(lines[-1]) + 3 + len(piece) > width:
            lines.append(Text())
        if lines[-1]:
            lines[-1].append(" · ", "dim")
        lines[-1].append_text(piece)
    return lines


def _line(progress: Progress) -> str:
    """Return one plain line about all workers."""
    parts = [
        f"step {progress.step}/{progress.steps}",
        f"loss {loss_text(progress.loss)}",
        f"{_rate(progress.samples_per_s)} {progress.unit}/s",
        f"sent {bytes_text(progress.bytes_sent)} a worker (DDP {bytes_text(progress.ddp_bytes)})",
        f"stall {seconds_text(progress.stall_s)}",
    ]
    if progress.drift is not None:
        parts.append(f"drift {progress.drift:.3g}")
    if progress.step < progress.steps:
        parts.append(f"{_clock(progress.seconds_left)} left")
    return " · ".join(parts)


class _Failures:
    """What is worth telling of rounds that fail: the first of several that fail for one reason, once for all workers.

    >>> failures = _Failures()
    >>> failed = {"kind": "failed", "step": 16, "reason": "the store cannot be reached"}
    >>> failures.take(0, failed), failures.take(1, failed)
    ('step 16 · the round failed, nothing was changed: the store cannot be reached', '')
    """

    def __init__(self) -> None:
        self._reason = ""

    def take(self, worker: int, line: dict[str, Any]) -> str:
        """Return a line, or nothing."""
        if line["kind"] == "round":
            self._reason = ""
        if line["kind"] != "failed" or line["reason"] == self._reason:
            return ""
        self._reason = line["reason"]
        return f"step {line['step']} · the round failed, nothing was changed: {line['reason']}"


def _news(worker: int, line: dict[str, Any], progress: Progress) -> str:
    """Return what a line of metrics is worth telling, or nothing."""
    match line["kind"]:
        case "start":
            where = f" from step {line['step']}" if line["resumed"] else ""
            return f"worker {worker} of {line['workers']} started on {line['host']}{where}"
        case "evaluation":
            found = {"held-out loss": line["loss"], **line.get("metrics", {})}
            told = " · ".join(f"{name} {loss_text(float(value))}" for name, value in found.items())
            return f"step {line['step']}/{progress.steps} · {told}"
        case "checkpoint" if worker == progress.first:
            return f"step {line['step']}/{progress.steps} · checkpoint {line['path']} ({bytes_text(line['bytes'])})"
        case "event":
            return f"worker {worker}: {line['text']}"
    return ""
