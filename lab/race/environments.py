"""An environment for each rival's packages, made when it is first needed, on top of the one that runs this.

Each is a virtual environment under `.venv-race` that also sees this one's packages, so that torch is never fetched
again; `constraints.txt` holds for it as well.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

__all__ = ["PACKAGES", "python", "versions"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-race"
PACKAGES = {
    "torch": [],
    "accelerate": ["accelerate==1.15.0"],
    "torchft": ["torchft==0.2.0"],
    "fairscale": ["fairscale==0.4.13"],
    "hivemind": ["hivemind==1.1.12"],
}


def python(environment: str) -> str:
    """Return the interpreter of an environment, which is made first if it does not exist."""
    if not PACKAGES[environment]:
        return sys.executable
    folder = FOLDER / environment
    interpreter, done = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join(PACKAGES[environment])
    if not done.exists() or done.read_text() != wanted:
        make(folder, interpreter, PACKAGES[environment])
        done.write_text(wanted)
    return str(interpreter)


def make(folder: Path, interpreter: Path, packages: list[str]) -> None:
    print(f"Making {folder.relative_to(ROOT)} for {' '.join(packages)}", flush=True)
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    own = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (own / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    command = [str(interpreter), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PIP_NO_INPUT": "1"})
    if done.returncode:
        raise RuntimeError(f"{' '.join(packages)} cannot be installed:\n{done.stderr[-2000:]}")


def versions(environment: str) -> dict[str, str]:
    """Return the versions that an environment has, torch's among them; to be called inside it."""
    names = ["torch", *(package.split("==")[0] for package in PACKAGES[environment])]
    return {name: importlib.metadata.version(name) for name in names}
