"""What comes after what, told to devices by events: what is asked of torch, with doubles for its streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import cadenza
from cadenza.common import streams
from cadenza.common.streams import Moment, SideStreams, keep_for_stream, made_once, refuse_capture

ONE, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


class StreamDouble:
    def __init__(self, device: torch.device, name: str = "side") -> None:
        self.device, self.name = device, name

    def record_event(self) -> str:
        return f"{self.name} {self.device.index}"

    def wait_event(self, event: str) -> None:
        told.append(f"{self.name} {self.device.index} after {event}")


told: list[str] = []


class Accelerator:
    """A thread's current device and streams, as `torch.accelerator` has them: to set a stream sets the device."""

    def __init__(self) -> None:
        self.device = 1
        self.current = {device: StreamDouble(device, "main") for device in (ONE, OTHER)}

    def current_stream(self, device: torch.device) -> StreamDouble:
        return self.current[device]

    def set_stream(self, stream: StreamDouble) -> None:
        self.current[stream.device] = stream
        self.device = stream.device.index

    @contextmanager
    def device_index(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        try:
            yield
        finally:
            self.device = before


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    told.clear()
    double = Accelerator()
    monkeypatch.setattr(streams.torch, "accelerator", double)
    monkeypatch.setattr(streams.torch, "Stream", StreamDouble)
    return double


def test_what_is_enqueued_beside_comes_after_the_moment(accelerator: Accelerator) -> None:
    moment = Moment([ONE, torch.device("cpu"), OTHER])
    with SideStreams().use([ONE, OTHER]):
        moment.wait()
    assert told == ["side 0 after main 0", "side 1 after main 1"]


def test_there_is_one_side_stream_for_each_device(accelerator: Accelerator) -> None:
    side = SideStreams()
    seen = []
    for _ in range(2):
        with side.use([ONE]):
            seen.append(accelerator.current_stream(ONE))
    assert seen[0] is seen[1]
    assert seen[0] is not accelerator.current_stream(ONE)


def test_streams_and_device_of_the_thread_are_as_before(accelerator: Accelerator) -> None:
    before = dict(accelerator.current)
    with SideStreams().use([ONE]):
        assert accelerator.current != before
    assert (accelerator.current, accelerator.device) == (before, 1)
    with pytest.raises(ZeroDivisionError), SideStreams().use([ONE, OTHER]):
        _ = 1 / 0
    assert (accelerator.current, accelerator.device) == (before, 1)


def test_memory_is_kept_for_the_current_stream(accelerator: Accelerator) -> None:
    class Memory:
        device = ONE

        def record_stream(self, stream: StreamDouble) -> None:
            told.append(f"kept for {stream.name} {stream.device.index}")

    tensors: list[Any] = [Memory(), torch.ones(1)]
    with SideStreams().use([ONE]):
        keep_for_stream(tensors)
    assert told == ["kept for side 0"]


def test_a_constant_is_made_once_for_all_threads() -> None:
    both = threading.Barrier(2, timeout=10)

    @made_once
    def make(size: int) -> torch.Tensor:
        time.sleep(0.05)  # long enough for the other thread to come to it
        return torch.zeros(size)

    def ask(_: int) -> torch.Tensor:
        both.wait()
        return make(2)

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(ask, range(2))
    assert one is other is make(2)


def test_torch_has_all_that_devices_are_asked_for() -> None:
    assert {"current_stream", "set_stream", "is_available"} <= set(dir(torch.accelerator))
    assert {"record_event", "wait_event", "device"} <= set(dir(torch.Stream))
    assert {"synchronize"} <= set(dir(torch.Event))
    assert {"is_initialized", "is_current_stream_capturing"} <= set(dir(torch.cuda))


def test_a_step_is_not_captured_into_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(cadenza.errors.CadenzaError, match=r"call sync.step\(\) after every replay\(\)"):
        refuse_capture("sync.step()")
