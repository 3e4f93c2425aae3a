"""For which processors a wheel brings the kernels of native.c ready-made, and how they are compiled.

The build of a wheel (hatch_build.py) reads this file alone, so it imports nothing of Cadenza's.
"""

from __future__ import annotations

__all__ = ["FLAGS", "TARGETS", "file_name"]

# Rounding must be the same on every machine: no multiply-add, where torch's operations have none.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]

# The compiler's names, the best first, and what /proc/cpuinfo must say of a processor for them, by machine. What runs
# on every x86-64 takes seven times as long to encode, so an older one compiles for itself.
_V3 = "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
_V4 = f"{_V3} avx512bw avx512cd avx512dq avx512f avx512vl"
TARGETS: dict[str, dict[str, frozenset[str]]] = {
    "x86_64": {"x86-64-v4": frozenset(_V4.split()), "x86-64-v3": frozenset(_V3.split())},
    "aarch64": {"armv8-a": frozenset()},
}


def file_name(target: str) -> str:
    """Return what the kernels for a target are called.

    >>> file_name("armv8-a")
    'kernels-armv8-a.so'
    """
    return f"kernels-{target}.so"
