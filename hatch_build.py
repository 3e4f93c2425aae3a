"""Puts the codecs' kernels into a wheel as machine code, if there is a C compiler; without one the wheel is pure.

``CADENZA_NATIVE=0`` makes a pure wheel in any case. What is made depends on the compiler and the sources alone.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = "src/cadenza/codecs"
_REPRODUCIBLE = ["-s", "-Wl,--build-id=none"]


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles native.c for each target of this machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the kernels to what the wheel holds."""
        self._made = Path(tempfile.mkdtemp(prefix="cadenza-kernels-"))
        compiler = None if os.environ.get("CADENZA_NATIVE") == "0" else _compiler()
        if version == "editable" or compiler is None:
            return
        folder = Path(self.root) / _FOLDER
        facts = runpy.run_path(str(folder / "native_targets.py"))
        for target in facts["TARGETS"].get(platform.machine(), {}):
            made = self._made / facts["file_name"](target)
            options = [*facts["FLAGS"], f"-march={target}", *_REPRODUCIBLE]
            command = [compiler, *options, "native.c", "-o", str(made), "-lm"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:  # an older compiler does not know every target
                self.app.display_warning(f"No kernels for {target}: {done.stderr.strip()}")
                continue
            build_data["force_include"][str(made)] = f"cadenza/codecs/{made.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete what was compiled, which the wheel holds by now."""
        shutil.rmtree(self._made, ignore_errors=True)


def _compiler() -> str | None:
    found = (shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name)
    return next(filter(None, found), None)
