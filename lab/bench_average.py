"""Average a model by Cadenza and by its rivals, side by side in one run, and print the ratios.

    python lab/bench_average.py                        # the whole table of docs/benchmarks.md, about 12 minutes
    python lab/bench_average.py --millions 25 --ranks 4

Every case starts its ranks anew on this machine. Within a case the contenders take turns, so that noise hits all
alike, and medians are compared:

    cadenza        average_parameters over what `connect` chooses on this machine: shared memory
    cadenza-c10d   the same without shared memory, as between machines: Gloo all-reduces
    torch          torch's average_parameters
    all-reduce     one Gloo all-reduce of one prepared flat buffer: the floor of everything that goes through Gloo
    a-parameter    one all-reduce for each parameter, then a division
    copy           one plain memory copy of all values, no communication
    header         Cadenza's exchange of headers alone

Peak memory is the growth of the process's resident set over one averaging, read from the kernel's high-water mark.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.utils import average_parameters as torch_average

from cadenza.engine.header import Header
from cadenza.model_averaging.utils import average_parameters
from cadenza.transports import connect

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MIB = 1 << 20


def make_parameters(millions: float, tensors: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Cut `millions` of values into tensors of about one size, like the layers of a network."""
    each = int(millions * 1e6) // tensors
    torch.manual_seed(dist.get_rank())
    return [torch.nn.Parameter(torch.randn(each).to(dtype)) for _ in range(tensors)]


def between_machines() -> dist.ProcessGroup:
    """Return a group of all ranks that does not share memory."""
    group = dist.new_group()
    os.environ["CADENZA_SHARED_MEMORY"] = "0"
    connect(group)
    del os.environ["CADENZA_SHARED_MEMORY"]
    return group


def contenders(parameters: list[torch.nn.Parameter]) -> dict[str, Callable[[], object]]:
    world = dist.group.WORLD
    assert world is not None
    shared, direct = connect(world), between_machines()
    copies = [parameter.detach().clone() for parameter in parameters]
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    header = Header(0, bytes(16), able=True).pack()

    def each_alone() -> None:
        for parameter in parameters:
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()

    return {
        "cadenza": lambda: average_parameters(iter(parameters), world),
        "cadenza-c10d": lambda: average_parameters(iter(parameters), direct),
        "torch": lambda: torch_average(iter(parameters), world),
        "all-reduce": lambda: dist.all_reduce(flat),
        "a-parameter": each_alone,
        "copy": lambda: [a.copy_(b.detach()) for a, b in zip(copies, parameters, strict=True)],
        "header": lambda: shared.exchange(header)(),
    }


def high_water() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def extra_memory(action: Callable[[], object]) -> int:
    """Return how far the resident set rises above its size before the action."""
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water()
    action()
    return high_water() - before


def run_case(case: dict[str, object], repeats: int) -> None:
    """Run one case on this rank; rank 0 prints its result as a line of JSON."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    parameters = make_parameters(float(str(case["millions"])), int(str(case["tensors"])), DTYPES[str(case["dtype"])])
    memory = {}
    world = dist.group.WORLD
    assert world is not None
    # First of all, while nothing is allocated: what one averaging needs from nothing.
    memory["cadenza"] = extra_memory(lambda: average_parameters(iter(parameters), world))
    memory["torch"] = extra_memory(lambda: torch_average(iter(parameters), world))
    actions = contenders(parameters)
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    with torch.no_grad():
        for repeat in range(repeats + 1):
            for name, action in actions.items():
                dist.barrier()
                start = time.perf_counter()
                action()
                dist.barrier()
                if repeat:  # the first one warms up
                    seconds[name].append(time.perf_counter() - start)
    peaks = torch.tensor([memory["cadenza"], memory["torch"]])
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        print(json.dumps({**case, "seconds": medians, "memory": dict(zip(memory, peaks.tolist(), strict=True))}))
    dist.destroy_process_group()


def measure(case: dict[str, object], repeats: int) -> dict[str, object]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case["ranks"])]
    command += [__file__, "--case", json.dumps(case), "--repeats", str(repeats)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"The case {case} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def cases(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    for dtype in arguments.dtype:
        for millions in arguments.millions:
            for tensors in arguments.tensors:
                for ranks in arguments.ranks:
                    yield {"millions": millions, "dtype": dtype, "tensors": tensors, "ranks": ranks}


COLUMNS = [
    "millions", "dtype", "tensors", "ranks", "cadenza ms", "× all-reduce", "torch ÷ cadenza", "a-parameter ÷ cadenza",
    "c10d × all-reduce", "torch ÷ c10d", "copy ms", "header %", "cadenza MiB", "torch MiB",
]  # fmt: skip


def row(result: dict) -> list[str]:
    seconds, memory = result["seconds"], result["memory"]
    ours, direct, floor = seconds["cadenza"], seconds["cadenza-c10d"], seconds["all-reduce"]
    return [
        f"{result['millions']:g}", result["dtype"], str(result["tensors"]), str(result["ranks"]),
        f"{ours * 1e3:.0f}", f"{ours / floor:.2f}", f"{seconds['torch'] / ours:.2f}",
        f"{seconds['a-parameter'] / ours:.2f}", f"{direct / floor:.2f}", f"{seconds['torch'] / direct:.2f}",
        f"{seconds['copy'] * 1e3:.0f}", f"{100 * seconds['header'] / ours:.1f}",
        f"{memory['cadenza'] / MIB:.0f}", f"{memory['torch'] / MIB:.0f}",
    ]  # fmt: skip


def machine() -> str:
    model = next((x.split(":")[1] for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "?")
    return (
        f"{os.cpu_count()} cores of {model.strip()}, {platform.system()}, torch {torch.__version__}, Gloo on loopback"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, nargs="+", default=[25, 100], help="values, in millions")
    parser.add_argument("--tensors", type=int, nargs="+", default=[12, 1140], help="how many tensors they are cut into")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        run_case(arguments.case, arguments.repeats)
        return
    print(f"{machine()}; medians of {arguments.repeats} interleaved repeats\n")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + " ---: |" * len(COLUMNS))
    for case in cases(arguments):
        print("| " + " | ".join(row(measure(case, arguments.repeats))) + " |", flush=True)


if __name__ == "__main__":
    main()
