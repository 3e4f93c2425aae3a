"""What is shown of a run: metrics followed as they grow, pictures that fit the terminal, plain lines."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cadenza.cli import display as shown
from cadenza.cli.display import LiveDisplay, PlainDisplay, draw
from cadenza.cli.following import Follower, Progress

START = {
    "kind": "start", "time": 0.0, "elapsed": 0.0, "step": 0, "workers": 2, "host": "a", "strategy": "diloco",
    "parameters": 100, "gradient_bytes": 600, "steps": 40, "unit": "tokens", "period": 16, "resumed": False,
}  # fmt: skip


def step(number: int, **figures: Any) -> dict[str, Any]:
    told = {"loss": 2.5, "samples": 100 * number, "bytes_sent": 10 * number, "stall_s": 0.1, "lr": 0.1, "next_sync": 16}
    return {"kind": "step", "time": 0.0, "elapsed": float(number), "step": number, **told, **figures}


def append(folder: Path, worker: int, *lines: dict[str, Any]) -> None:
    with (folder / f"worker-{worker:05}.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def running() -> Progress:
    progress = Progress()
    for worker in range(2):
        progress.take(worker, START)
        for number in range(1, 11 + worker):
            progress.take(worker, step(number))
    progress.take(0, {"kind": "round", "elapsed": 10.0, "step": 8, "drift": 0.0123})
    progress.take(0, {"kind": "evaluation", "elapsed": 10.0, "step": 8, "loss": 2.25})
    progress.take(0, {"kind": "checkpoint", "elapsed": 10.0, "step": 8, "path": "x", "bytes": 12_300_000})
    return progress


def text_of(progress: Progress, width: int, height: int = 40, notice: str = "") -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(draw(progress, "cadenza train diloco int8 · 2 workers · runs/first", width, height, notice))
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue()


# ---- following -------------------------------------------------------------------------------------------------------


def test_what_is_added_is_read_once_and_a_line_that_is_half_written_later(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    append(tmp_path, 0, START, step(1))
    assert [line["kind"] for _, line in follower.read()] == ["start"]
    whole = json.dumps({"kind": "evaluation", "elapsed": 2.0, "step": 2, "loss": 1.5}) + "\n"
    with (tmp_path / "worker-00000.jsonl").open("a") as file:
        file.write(whole[:20])
    assert follower.read() == []
    with (tmp_path / "worker-00000.jsonl").open("a") as file:
        file.write(whole[20:])
    assert [(worker, line["loss"]) for worker, line in follower.read()] == [(0, 1.5)]
    assert follower.read() == []
    assert follower.progress.evaluation == (2, 1.5)


def test_only_the_last_of_many_steps_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"kind": "values", "elapsed": 1.0, "step": 1, "values": {"norm": 2.5}}
    append(tmp_path, 0, START, *(line for number in range(1, 1001) for line in (step(number), values)))
    parsed: list[bytes] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    follower = Follower(tmp_path)
    follower.read()
    assert follower.progress.step == 1000
    assert len(parsed) == 2


def test_a_run_that_is_resumed_is_followed_from_now(tmp_path: Path) -> None:
    append(tmp_path, 0, START, step(1), {"kind": "end", "time": 5.0, "elapsed": 1.0, "step": 1, "status": "failed"})
    file = tmp_path / "worker-00000.jsonl"
    file.write_bytes(file.read_bytes() + b'{"kind": "st')  # a crash tore it, and the worker will cut it off
    follower = Follower(tmp_path, from_now=True)
    file.write_bytes(file.read_bytes()[:-12])
    append(tmp_path, 0, {**START, "step": 1, "resumed": True}, step(2))
    assert [line["kind"] for _, line in follower.read()] == ["start"]
    assert follower.progress.workers[0].status == "training"


def test_progress_is_what_all_workers_have_done() -> None:
    progress = running()
    assert progress.step == 10
    assert progress.samples_per_s == pytest.approx(200)
    assert progress.bytes_sent == 105
    assert progress.ddp_bytes == 600 * 10.5
    assert progress.seconds_left == pytest.approx(30)
    assert progress.drift == 0.0123


def test_a_worker_that_is_lost_does_not_hold_up_the_others_progress() -> None:
    progress = running()
    progress.take(0, {"kind": "end", "time": 1.0, "elapsed": 10.0, "step": 10, "status": "lost", "error": "killed"})
    assert (progress.step, progress.first) == (11, 1)
    assert "lost" in text_of(progress, 100)


def test_a_loss_that_is_not_a_number_is_shown_as_that() -> None:
    progress = running()
    progress.take(0, step(11, loss="nan"))
    assert "not a number" in text_of(progress, 100)


# ---- the picture -----------------------------------------------------------------------------------------------------


def test_the_picture_has_everything() -> None:
    told = text_of(running(), 100)
    for figure in (
        "10/40", "11/40", "tokens/s", "in 6", "in 5", "a worker sent 105 B", "DDP would have sent 6.30 kB", "1/60",
        "11 s elapsed", "30 s left", "stall 100 ms", "drift 0.0123", "held-out loss 2.250 at step 8",
        "checkpoint at step 8 (12.3 MB)",
    ):  # fmt: skip
        assert figure in told, figure


@pytest.mark.parametrize("width", [200, 100, 80, 60, 47, 40, 32])
def test_the_picture_fits(width: int) -> None:
    told = text_of(running(), width, notice="Stopping: the workers finish their step and save.")
    assert max(len(line) for line in told.splitlines()) <= width
    for figure in ("10/40", "2.5", "105 B", "30 s left", "finish"):
        assert figure in told, figure


def test_many_workers_are_cut_to_the_terminals_height() -> None:
    progress = Progress()
    for worker in range(100):
        progress.take(worker, {**START, "workers": 100})
        progress.take(worker, step(1 + worker % 3))
    told = text_of(progress, 80, height=24)
    assert len(told.splitlines()) <= 24
    assert "more, at steps 1 to 3" in told


def test_workers_of_several_hosts_are_shown_with_them() -> None:
    progress = running()
    progress.take(1, {**START, "host": "b"})
    assert "1 b" in text_of(progress, 100)


def test_before_the_workers_start_it_says_so() -> None:
    progress = Progress()
    assert "starting the workers · 0 s" in text_of(progress, 80)
    for worker in range(3):
        progress.take(worker, {"kind": "phase", "elapsed": 0.0, "step": 0, "text": "building the task"})
    progress.take(2, {"kind": "phase", "elapsed": 0.0, "step": 0, "text": "looking for a checkpoint"})
    told = text_of(progress, 80)
    assert "starting the workers: 2 building the task, 1 looking for a checkpoint · 0 s" in told


def test_a_picture_that_costs_much_is_drawn_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, used = [100.0], [0.0]
    monkeypatch.setattr(shown.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(shown.time, "thread_time", lambda: used[0])

    def slow(*arguments: object) -> str:
        used[0] += 0.01
        return "picture"

    monkeypatch.setattr(shown, "draw", slow)
    with LiveDisplay(Console(file=io.StringIO(), force_terminal=True), "title") as display:
        display.show(running(), [])
        clock[0] += 1.9
        assert not display.due()  # 10 ms in 2 s are half a percent
        clock[0] += 0.2
        assert display.due()


def test_warnings_of_workers_stay_in_sight_above_the_picture() -> None:
    file = io.StringIO()
    with LiveDisplay(Console(file=file, force_terminal=True, width=100), "title") as display:
        event = {"kind": "event", "elapsed": 1.0, "step": 1, "level": "warning", "text": "step-00000030 is not whole"}
        display.show(running(), [(0, event), (0, {**event, "level": "info", "text": "nothing"})])
    assert "worker 0: step-00000030 is not whole" in file.getvalue()
    assert "nothing" not in file.getvalue()


# ---- plain lines -----------------------------------------------------------------------------------------------------


def test_plain_lines_come_now_and_then_and_news_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(shown.time, "monotonic", lambda: clock[0])
    file = io.StringIO()
    progress = running()
    with PlainDisplay(Console(file=file, width=40), "title") as display:
        display.show(progress, [(1, START)])
        for worker in range(2):
            progress.take(worker, step(12))
        clock[0] += 1
        display.show(progress, [(0, {"kind": "evaluation", "elapsed": 10.0, "step": 12, "loss": 2.25})])
        clock[0] += 5
        display.show(progress, [])
        clock[0] += 5
        display.show(progress, [])  # nothing has happened since
        display.say("Stopping")
    title, started, first, evaluation, second, last = file.getvalue().splitlines()
    assert (title, started, last) == ("title", "worker 1 of 2 started on a", "Stopping")
    assert first.startswith("step 10/40 · loss 2.500 · 200 tokens/s · sent 105 B a worker (DDP 6.30 kB) · stall 100 ms")
    assert evaluation == "step 12/40 · held-out loss 2.250"
    assert second.startswith("step 12/40")


# ---- what is true of workers that die, and of what nobody measures ---------------------------------------------------


def test_a_dead_worker_is_shown_to_be_restarting_and_the_others_speak_for_the_run() -> None:
    progress = running()
    event = {"kind": "event", "elapsed": 12.0, "step": 10, "level": "warning", "text": "Worker 0 was ended by SIGKILL."}
    progress.take(0, {**event, "status": "restarting"})
    assert progress.step == 11
    assert progress.workers[0].samples_per_s is None
    row = next(line for line in text_of(progress, 100).splitlines() if line.startswith("0 "))
    assert row.rstrip().endswith("restarting")
    progress.take(0, {"kind": "phase", "elapsed": 13.0, "step": 0, "text": "building the task"})
    assert progress.workers[0].status == "restarting"
    progress.take(0, {**START, "elapsed": 14.0, "step": 11})
    assert progress.workers[0].status == "training"
    progress.take(1, {**event, "status": "dead"})
    assert "dead" in text_of(progress, 100)


def test_what_ddp_waits_is_not_said_to_be_nothing() -> None:
    progress = Progress()
    progress.take(0, {**START, "strategy": "ddp"})
    progress.take(0, step(1, stall_s=0.0))
    progress.take(0, step(2, stall_s=0.0))
    assert "stall – (–)" in text_of(progress, 100)


def test_the_way_of_the_losses_is_drawn(tmp_path: Path) -> None:
    append(tmp_path, 0, START)
    follower = Follower(tmp_path)
    for number in range(1, 9):
        append(tmp_path, 0, step(number, loss=float(9 - number)))
        follower.read()
    for loss in (2.5, 2.25):
        append(tmp_path, 0, {"kind": "evaluation", "elapsed": 8.0, "step": 8, "loss": loss})
    follower.read()
    told = text_of(follower.progress, 100)
    assert "loss █▇▆▅▄▃▂▁ 1.000" in told
    assert "held-out loss 2.250 at step 8 ↓ from 2.500" in told


def test_a_long_run_is_remembered_in_few_losses() -> None:
    progress = Progress()
    progress.take(0, START)
    for number in range(1, 2000):
        progress.take(0, step(number))
        progress.remember()
    assert 100 < len(progress.losses) <= 400


def test_the_last_picture_stays_on_the_screen() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    with LiveDisplay(console, "cadenza train diloco int8 · 1 worker · runs/first") as display:
        display.show(running(), [])
    written = console.file
    assert isinstance(written, io.StringIO)
    last = written.getvalue().rpartition("cadenza train")[2]
    assert "\x1b[2K" not in last  # which would wipe a line away
