"""The contest on one rank: contenders that take turns on one model, so that noise hits all alike."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import cadenza
from cadenza.model_averaging.utils import average_parameters
from cadenza.training.strategies import build_codec
from cadenza.transports import C10dTransport, connect

__all__ = ["DTYPES", "Case", "Result", "hold", "needed_bytes"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RAW, TORCH, DROP_IN = "all-reduce", "torch averager", "cadenza drop-in"


@dataclass(frozen=True)
class Case:
    """What is synchronised, in which ways, how often."""

    parameters: int
    tensors: int
    dtype: str
    codecs: tuple[str, ...]
    repeats: int


@dataclass(frozen=True)
class Result:
    """What one contender needed.

    Attributes:
        name: The contender: a raw all-reduce of one flat buffer, torch's `average_parameters`, Cadenza's, or a DiLoCo
            round as `cadenza.attach` runs it.
        times_s: How long each repeat took until all ranks were done.
        bytes_sent: Bytes that a rank sends in each.
        memory_bytes: How far the device's memory rose above the model's own while it was set up and used for the first
            time; None where that cannot be seen.
        host_bytes: The same of the host's memory, where the model is on another device.
    """

    name: str
    times_s: tuple[float, ...]
    bytes_sent: int
    memory_bytes: int | None
    host_bytes: int | None = None

    @property
    def seconds(self) -> float:
        """The median of the repeats."""
        return statistics.median(self.times_s)

    def to_plain(self) -> dict[str, Any]:
        """Return the result as JSON can hold it."""
        return {**asdict(self), "seconds": self.seconds}


def needed_bytes(case: Case) -> int:
    """Return about how much memory a rank needs: the model, its start, a flat copy, anchor and momentum a codec."""
    return case.parameters * 4 * (4 + 2 * len(case.codecs))


class Model(torch.nn.Module):
    """Nothing but parameters, in tensors of about one size."""

    def __init__(self, parameters: int, tensors: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        sizes = [parameters // tensors + (number < parameters % tensors) for number in range(tensors)]
        values = torch.Generator().manual_seed(dist.get_rank())
        self.layers = torch.nn.ParameterList(torch.randn(n, generator=values).to(device, dtype) for n in sizes)


class Attached:
    """A DiLoCo round in one codec, as `cadenza.attach` runs it."""

    def __init__(self, model: Model, codec: str) -> None:
        self.reports: list[cadenza.RoundReport] = []
        own = torch.nn.ParameterList(parameter.detach() for parameter in model.parameters())  # on the same memory
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        strategy = cadenza.diloco(1, codec=build_codec(codec))
        self._sync = cadenza.attach(own, optimizer, strategy, observers=[self.reports.append])

    def __call__(self) -> None:
        self._sync.step()

    def close(self) -> None:
        """Let the process groups go."""
        self._sync.close()


def hold(case: Case, device: torch.device, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Let the contenders take turns on this rank; every rank calls this, and all get about the same figures."""
    with contextlib.closing(Attached(Model(1000, 1, torch.float32, device), "fp32")) as first:
        first()  # loads what whoever comes first would be charged for
    model = Model(case.parameters, case.tensors, DTYPES[case.dtype], device)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    sent, memory = {}, {}
    actions: dict[str, Callable[[], object]] = {}
    for name, build in _contenders(case, model, device).items():
        report_progress(f"warming up: {name}")
        with _rise(device) as rise:
            actions[name] = build()
            _timed(actions[name], model, start, device)
        sent[name], memory[name] = _bytes_sent(actions[name], model), (rise.bytes, rise.host_bytes)
    times: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(case.repeats):
        for name, action in actions.items():
            report_progress(f"repeat {repeat + 1} of {case.repeats}: {name}")
            times[name].append(_timed(action, model, start, device))
    for action in actions.values():
        if isinstance(action, Attached):
            action.close()
    return [Result(name, tuple(times[name]), sent[name], *memory[name]) for name in actions]


def way() -> str:
    """Return the way that Cadenza's values take between these ranks; every rank calls this."""
    transport = connect(_world())
    return dist.get_backend() if isinstance(transport, C10dTransport) else "shared memory"


def _contenders(case: Case, model: Model, device: torch.device) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return what makes each contender ready."""
    from torch.distributed.algorithms.model_averaging.utils import average_parameters as torch_average

    flat = torch.zeros(case.parameters, dtype=DTYPES[case.dtype], device=device)
    return {
        RAW: lambda: lambda: dist.all_reduce(flat),
        TORCH: lambda: lambda: torch_average(model.parameters(), _world()),
        DROP_IN: lambda: lambda: average_parameters(model.parameters(), _world()),
        **{f"diloco, {codec}": partial(Attached, model, codec) for codec in case.codecs},
    }


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _timed(action: Callable[[], object], model: Model, start: Sequence[torch.Tensor], device: torch.device) -> float:
    """Return how long an action takes all ranks, from values that differ between them."""
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), list(start))
    _settle(device)
    dist.barrier()
    begin = time.perf_counter()
    action()
    _settle(device)
    dist.barrier()
    return time.perf_counter() - begin


def _bytes_sent(action: Callable[[], object], model: Model) -> int:
    if isinstance(action, Attached):
        return action.reports[-1].bytes_sent
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    ranks = dist.get_world_size()
    return 2 * (ranks - 1) * size // ranks  # a ring: every value once on its way to the sum, and once back


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# ---- memory ---------------------------------------------------------------------------------------------------------


@dataclass
class _Rise:
    bytes: int | None = None
    host_bytes: int | None = None


@contextlib.contextmanager
def _rise(device: torch.device) -> Iterator[_Rise]:
    """Measure how far memory rises above its level at the start, of the device and of the host."""
    rise = _Rise()
    if device.type == "cpu":
        with _host_rise() as host:
            yield rise
        rise.bytes = host.bytes
        return
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    with _host_rise() as host:
        yield rise
    rise.bytes, rise.host_bytes = module.max_memory_allocated(device) - before, host.bytes


@contextlib.contextmanager
def _host_rise() -> Iterator[_Rise]:
    """Measure the same of this process, from the kernel's high-water mark."""
    rise = _Rise()
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    try:
        clear.write_text("5")
    except OSError:
        yield rise
        return
    before = _high_water(status)
    yield rise
    rise.bytes = _high_water(status) - before


def _high_water(status: Path) -> int:
    return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
