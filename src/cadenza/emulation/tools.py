"""Running iproute2's `ip` and `tc`, wherever they are installed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from cadenza.errors import CadenzaError

__all__ = ["PATH", "call", "environment"]

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def call(argv: Sequence[str]) -> str:
    """Run a command and return what it printed; raise if it fails.

    >>> call(["printf", "eth0"])
    'eth0'
    """
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise CadenzaError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def environment() -> dict[str, str]:
    """Return an environment in which the tools are found, and speak English.

    >>> environment()["LC_ALL"]
    'C'
    """
    return {**os.environ, "PATH": PATH, "LC_ALL": "C"}
