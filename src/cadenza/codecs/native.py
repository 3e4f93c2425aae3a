"""The codecs' kernels as machine code, from native.c, where there is a C compiler.

The first use on a machine compiles it, in a fraction of a second, for the processor at hand, and keeps it in the user's
cache (``$XDG_CACHE_HOME/cadenza``, ``~/.cache/cadenza``). Without a compiler, or with ``CADENZA_NATIVE=0``, the
codecs work in torch's operations: the same format, several times the processor's time. They run on one thread, which
is quicker than the links they are for, and leave Python's lock to others meanwhile.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from cadenza.common.later import torch

__all__ = ["compiler", "kernels", "kernels_for"]

_SOURCE = Path(__file__).with_name("native.c")
# Rounding must be the same on every machine: no multiply-add, where torch's operations have none.
_FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
_TIMEOUT_S = 60
_PLACE, _COUNT, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "int8_encode": [_PLACE, _COUNT, _COUNT, _PLACE],
    "int8_decode": [_PLACE, _COUNT, _COUNT, _PLACE],
    "int8_decode_add": [_PLACE, _COUNT, _COUNT, _NUMBER, _PLACE],
    "e3m0_encode": [_PLACE, _COUNT, _COUNT, _PLACE, _PLACE],
    "e3m0_decode": [_PLACE, _COUNT, _COUNT, _PLACE, _PLACE],
    "e3m0_decode_add": [_PLACE, _COUNT, _COUNT, _NUMBER, _PLACE, _PLACE],
    "difference": [_PLACE, _PLACE, _PLACE, _COUNT, _PLACE, _PLACE, _PLACE, _PLACE, _PLACE],
}
_logger = logging.getLogger("cadenza")


def kernels_for(*tensors: torch.Tensor) -> ctypes.CDLL | None:
    """Return the kernels if there are some, and these tensors are where they can work."""
    return kernels() if on_the_cpu(*tensors) else None


def on_the_cpu(*tensors: torch.Tensor) -> bool:
    """Say whether the host can read and write the memory of some tensors."""
    return all(tensor.device.type == "cpu" for tensor in tensors)


@cache
def kernels() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if there is no way to have them.

    >>> (kernels() is None) == (compiler() is None)
    True
    """
    command = compiler()
    if command is None:
        return None
    try:
        library = _load(command)
    except (OSError, subprocess.SubprocessError) as error:
        _logger.info("The codecs run without machine code: %s", _reason(error))
        return None
    for name, arguments in _ARGUMENTS.items():
        kernel = getattr(library, name)
        kernel.argtypes, kernel.restype = arguments, None
    return library


def compiler() -> str | None:
    """Return the C compiler that would be used: ``$CC``, or the first of cc, gcc and clang; None if none is wanted."""
    if os.environ.get("CADENZA_NATIVE") == "0":
        return None
    found = (shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name)
    return next(filter(None, found), None)


def _load(command: str) -> ctypes.CDLL:
    """Load the kernels from the cache, into which they are compiled if they are not there."""
    if (folder := _cache()) is not None:
        return _load_from(folder, command)
    with tempfile.TemporaryDirectory() as nowhere:  # loaded code stays when its file goes
        return _load_from(Path(nowhere), command)


def _load_from(folder: Path, command: str) -> ctypes.CDLL:
    library = folder / f"kernels-{_key(command)}.so"
    if not library.exists():
        _compile(command, library)
    return ctypes.CDLL(str(library))


def _compile(command: str, library: Path) -> None:
    # Under a name of its own at first: several ranks may be at it.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        for target in (["-march=native"], []):  # not every compiler knows the processor
            argv = [command, *_FLAGS, *target, str(_SOURCE), "-o", str(made), "-lm"]
            done = subprocess.run(argv, capture_output=True, timeout=_TIMEOUT_S, check=False)
            if done.returncode == 0:
                break
        done.check_returncode()
        made.replace(library)


def _cache() -> Path | None:
    """Return the folder of compiled kernels; None if there can be none, or others could put code there."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cadenza"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except (OSError, RuntimeError):  # the latter where nobody knows whose home it would be
        return None
    ours = facts.st_uid == os.getuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if ours and os.access(folder, os.W_OK) else None


def _key(command: str) -> str:
    """Return a name for what is compiled, by what, and for which processor: homes are shared among machines."""
    facts = [_SOURCE.read_text(), *_FLAGS, command, platform.machine(), _processor()]
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=8).hexdigest()


def _processor() -> str:
    """Return the instructions that the processor knows, as Linux tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())


def _reason(error: Exception) -> str:
    told = getattr(error, "stderr", None)
    return told.decode(errors="replace").strip() if told else str(error)
