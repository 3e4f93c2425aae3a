"""The codecs' kernels as machine code, from native.c: a wheel brings them, or a C compiler makes them.

If the installed package has none for the processor at hand, the first use on a machine compiles them for it, in a
fraction of a second, and keeps them in the user's cache (``$XDG_CACHE_HOME/cadenza``, ``~/.cache/cadenza``). Without a
compiler, or with ``CADENZA_NATIVE=0``, the codecs work in torch's operations: the same format, several times the
processor's time. They run on one thread, which is quicker than the links they are for, and leave Python's lock to
others meanwhile.
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
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from cadenza.codecs.native_targets import FLAGS, TARGETS, file_name
from cadenza.common.later import torch

__all__ = ["NativeKernels", "compiler", "kernels", "packaged"]

_SOURCE = Path(__file__).with_name("native.c")
_TIMEOUT_S = 60
_PLACE, _COUNT, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "int8_encode": [_PLACE, _COUNT, _COUNT, _PLACE],
    "int8_decode": [_PLACE, _COUNT, _COUNT, _PLACE],
    "int8_decode_add": [_PLACE, _COUNT, _COUNT, _NUMBER, _PLACE],
    "e3m0_encode": [_PLACE, _COUNT, _COUNT, _PLACE, _PLACE],
    "e3m0_decode": [_PLACE, _COUNT, _COUNT, _PLACE, _PLACE],
    "e3m0_decode_add": [_PLACE, _COUNT, _COUNT, _NUMBER, _PLACE, _PLACE],
    "topk_encode": [_PLACE, _COUNT, _COUNT, _COUNT, _COUNT, _COUNT, _PLACE],
    "topk_decode": [_PLACE, _COUNT, _COUNT, _COUNT, _COUNT, _COUNT, _NUMBER, ctypes.c_int32, _PLACE],
    "difference": [_PLACE, _PLACE, _PLACE, _COUNT, _PLACE, _PLACE, _PLACE, _PLACE, _PLACE],
}
_logger = logging.getLogger("cadenza")


class NativeKernels:
    """The compiled functions, called with tensors in the memory of the CPU: see `cadenza.codecs.kernels.Kernels`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self._library = library

    def difference(
        self,
        minuend: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        sketch: Sequence[torch.Tensor] | None,
        rows: torch.Tensor | None,
        norm2: torch.Tensor,
    ) -> None:
        """Take a difference with all that a round must know of it: see `cadenza.engine.differences`."""
        signs, starts, sums = (tensor.data_ptr() for tensor in sketch) if sketch else (None, None, None)
        places = [tensor.data_ptr() for tensor in (minuend, values, out)]
        row_sums = None if rows is None else rows.data_ptr()
        self._library.difference(*places, out.numel(), signs, starts, sums, row_sums, norm2.data_ptr())

    def int8_encode(self, values: torch.Tensor, block: int, out: torch.Tensor) -> None:
        self._library.int8_encode(values.data_ptr(), values.numel(), block, out.data_ptr())

    def int8_decode(self, data: torch.Tensor, block: int, out: torch.Tensor, weight: float | None) -> None:
        if weight is None:
            self._library.int8_decode(data.data_ptr(), out.numel(), block, out.data_ptr())
        else:
            self._library.int8_decode_add(data.data_ptr(), out.numel(), block, weight, out.data_ptr())

    def e3m0_encode(self, values: torch.Tensor, block: int, out: torch.Tensor) -> int:
        scratch = torch.empty(3 * block)
        self._library.e3m0_encode(values.data_ptr(), values.numel(), block, out.data_ptr(), scratch.data_ptr())
        return values.numel()

    def e3m0_decode(self, data: torch.Tensor, block: int, out: torch.Tensor, weight: float | None) -> int:
        scratch = torch.empty(3 * block)
        places = (out.data_ptr(), scratch.data_ptr())
        if weight is None:
            self._library.e3m0_decode(data.data_ptr(), out.numel(), block, *places)
        else:
            self._library.e3m0_decode_add(data.data_ptr(), out.numel(), block, weight, *places)
        return out.numel()

    def topk_encode(
        self, values: torch.Tensor, chunk: int, kept: tuple[int, int], bits: int, out: torch.Tensor
    ) -> None:
        self._library.topk_encode(values.data_ptr(), values.numel(), chunk, *kept, bits, out.data_ptr())

    def topk_decode(
        self,
        data: torch.Tensor,
        chunk: int,
        kept: tuple[int, int],
        bits: int,
        out: torch.Tensor,
        weight: float | None,
    ) -> None:
        add = weight is not None
        self._library.topk_decode(data.data_ptr(), out.numel(), chunk, *kept, bits, weight or 0.0, add, out.data_ptr())


@cache
def kernels() -> NativeKernels | None:
    """Return the kernels, ready-made or compiled, or None if there is no way to have them.

    >>> found = kernels()
    >>> found is not None or compiler() is None
    True
    """
    library = None if _unwanted() else _ready_made() or _compiled()
    return None if library is None else NativeKernels(library)


def compiler() -> str | None:
    """Return the C compiler that would be used: ``$CC``, or the first of cc, gcc and clang; None if none is wanted."""
    if _unwanted():
        return None
    found = (shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name)
    return next(filter(None, found), None)


def _unwanted() -> bool:
    return os.environ.get("CADENZA_NATIVE") == "0"


def packaged() -> Path | None:
    """Return the best of the kernels that the wheel has brought for this processor; None if it has brought none.

    >>> found = packaged()
    >>> found is None or found.exists()
    True
    """
    targets = TARGETS.get(platform.machine(), {})
    files = {_SOURCE.with_name(file_name(target)): needed for target, needed in targets.items()}
    known = set(_processor().split())
    return next((file for file, needed in files.items() if file.exists() and needed <= known), None)


def _ready_made() -> ctypes.CDLL | None:
    library = packaged()
    try:
        return None if library is None else ctypes.CDLL(str(library))
    except OSError as error:  # of another C library than this system's
        _logger.info("%s cannot be used here: %s", library, error)
        return None


def _compiled() -> ctypes.CDLL | None:
    command = compiler()
    if command is None:
        return None
    try:
        return _load(command)
    except (OSError, subprocess.SubprocessError) as error:
        _logger.info("The codecs run without machine code: %s", _reason(error))
        return None


def _load(command: str) -> ctypes.CDLL:
    """Load the kernels from the cache, into which they are compiled if they are not there."""
    if (folder := _cache()) is not None:
        return _load_from(folder, command)
    with tempfile.TemporaryDirectory() as nowhere:  # loaded code stays when its file goes
        return _load_from(Path(nowhere), command)


def _load_from(folder: Path, command: str) -> ctypes.CDLL:
    key = _key(command)
    found = next((path for path in sorted(folder.glob(f"kernels-{key}-*.so")) if _is_whole(path)), None)
    return ctypes.CDLL(str(found or _compile(command, folder, key)))


def _is_whole(library: Path) -> bool:
    """Tell whether a library is what was compiled, by the hash in its name: one cut short would end the process."""
    try:
        return library.stem.rpartition("-")[2] == _hash(library)
    except OSError:  # deleted meanwhile, not ours to read, or no file
        return False


def _hash(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def _compile(command: str, folder: Path, key: str) -> Path:
    # Under a name of its own at first: several ranks may be at it.
    with tempfile.TemporaryDirectory(dir=folder) as place:
        made = Path(place) / "kernels.so"
        for target in (["-march=native"], []):  # not every compiler knows the processor
            argv = [command, *FLAGS, *target, str(_SOURCE), "-o", str(made), "-lm"]
            done = subprocess.run(argv, capture_output=True, timeout=_TIMEOUT_S, check=False)
            if done.returncode == 0:
                break
        done.check_returncode()
        return made.replace(folder / f"kernels-{key}-{_hash(made)}.so")


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
    facts = [_SOURCE.read_text(), *FLAGS, command, platform.machine(), _processor()]
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
