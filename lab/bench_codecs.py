"""Time the codecs, in torch's operations and as machine code, against a copy; print one table in GB/s of fp32 values.

    python lab/bench_codecs.py                       # 16 M values, one thread, about two minutes
    python lab/bench_codecs.py --threads 2 --codecs int8 e3m0

All contenders take turns, so that noise hits them alike. What is compared is the median of the processor's time, not
the clock's: a rank shares its cores with the others, and so does this benchmark. The copy goes into memory that exists
already. The last line tells what compiling costs: the first encoding and decoding in a new process, with the cache of
kernels empty and full.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cadenza import codecs
from cadenza.codecs.kernels import using

CODECS: dict[str, Callable[[], codecs.Codec]] = {
    "fp32": codecs.fp32,
    "bf16": codecs.bf16,
    "fp16": codecs.fp16,
    "int8": codecs.int8,
    "e3m0": codecs.e3m0,
    "topk": codecs.topk,
}
COMPILED = ["int8", "e3m0", "topk"]
WAYS = ["encode", "decode", "decode_add"]


def contenders(codec: codecs.Codec, values: torch.Tensor) -> dict[str, Callable[[], None]]:
    data = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    out = torch.zeros_like(values)
    return {
        "encode": lambda: codec.encode(values, data),
        "decode": lambda: codec.decode(data, out),
        "decode_add": lambda: codec.decode_add(data, out, 0.25),
    }


def measure(names: list[str], numel: int, repeats: int) -> dict[tuple[str, str, bool], float]:
    """Return the median processor seconds of each codec, way, and whether it was compiled."""
    torch.manual_seed(0)
    values, copy = torch.randn(numel), torch.empty(numel)
    actions = {("copy", "encode", False): lambda: copy.copy_(values)}
    for name in names:
        for way, action in contenders(CODECS[name](), values).items():
            actions[name, way, False] = action
            if name in COMPILED:
                actions[name, way, True] = action
    seconds: dict[tuple[str, str, bool], list[float]] = {key: [] for key in actions}
    for repeat in range(repeats + 1):
        for key, action in actions.items():
            with using("native" if key[2] else "torch"):
                start = time.process_time()
                action()
                if repeat:  # the first one warms up
                    seconds[key].append(time.process_time() - start)
    return {key: statistics.median(times) for key, times in seconds.items()}


def first_use_s(compiled: bool, cache: str) -> float:
    """Return the processor's time for int8's first encoding and decoding in a new process, the compiler's included."""
    script = (
        "import os, torch; from cadenza.codecs import int8; torch.set_num_threads(1); codec = int8()\n"
        "values = torch.randn(1 << 18); data = torch.empty(codec.encoded_bytes(1 << 18), dtype=torch.uint8)\n"
        "start = sum(os.times()[:4]); codec.encode(values, data); codec.decode(data, values)\n"
        "print(sum(os.times()[:4]) - start)"
    )
    environment = {**os.environ, "CADENZA_NATIVE": str(int(compiled)), "XDG_CACHE_HOME": cache}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def machine(threads: int) -> str:
    model = next((x.split(":")[1] for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "?")
    return f"{threads} of {os.cpu_count()} cores of {model.strip()}, {platform.system()}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", choices=CODECS, nargs="+", default=list(CODECS))
    parser.add_argument("--millions", type=float, default=16, help="values, in millions")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    numel = int(arguments.millions * 1e6)
    seconds = measure(arguments.codecs, numel, arguments.repeats)
    speeds = {key: 4e-9 * numel * arguments.threads / value for key, value in seconds.items()}
    print(f"{machine(arguments.threads)}; {numel / 1e6:g} M values, medians of {arguments.repeats} interleaved repeats")
    print(f"A plain copy: {speeds['copy', 'encode', False]:.1f} GB/s\n")
    columns = [f"{way}, {kind}" for way in WAYS for kind in ("torch", "machine code")]
    print("| codec | of fp32's bytes | " + " | ".join(columns) + " |")
    print("| --- |" + " ---: |" * (1 + len(columns)))
    for name in arguments.codecs:
        share = CODECS[name]().encoded_bytes(1 << 20) / (4 << 20)
        cells = [f"{speeds[name, w, c]:.1f}" if (name, w, c) in speeds else "" for w in WAYS for c in (False, True)]
        print(f"| {name} | {share:.4f} | " + " | ".join(cells) + " |")
    with tempfile.TemporaryDirectory() as cache:
        eager, cold, warm = first_use_s(False, cache), first_use_s(True, cache), first_use_s(True, cache)
    print(
        f"\nFirst use of int8 in a process: torch {eager:.2f} s, compiled {cold:.2f} s, {warm:.2f} s with a full cache"
    )


if __name__ == "__main__":
    main()
