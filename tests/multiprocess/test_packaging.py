"""What is released: the same bytes from every build, a wheel that works where nothing else of the project is."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import cadenza
from cadenza.codecs import native

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(find_spec("hatchling") is None, reason="needs hatchling")
TRY = """
import torch, cadenza
from cadenza.codecs import int8, native
data = torch.empty(int8().encoded_bytes(3), dtype=torch.uint8)
int8().encode(torch.tensor([127.0, -2.4, 0.0]), data)
print(cadenza.__file__, bytes(data.tolist()[4:]).hex(), native.packaged())
"""


def build(root: Path, to: Path, *targets: str, **environment: str) -> list[Path]:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(to)]
    for target in targets:
        command += ["-t", target]
    settings = {**os.environ, "SOURCE_DATE_EPOCH": "1790000000", **environment}
    done = subprocess.run(command, cwd=root, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(to.iterdir())


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist of this tree."""
    wheel, sdist = build(ROOT, tmp_path_factory.mktemp("dist"), "sdist", "wheel")
    return (wheel, sdist) if wheel.suffix == ".whl" else (sdist, wheel)


def test_a_wheel_from_the_sdist_has_the_bytes_of_one_from_the_tree(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "somewhere else", filter="data")
    [root] = (tmp_path / "somewhere else").iterdir()
    again = build(root, tmp_path / "again", "sdist", "wheel")
    assert {path.name: sha(path) for path in again} == {path.name: sha(path) for path in (wheel, sdist)}


def test_the_wheel_has_kernels_where_there_is_a_compiler_and_is_pure_otherwise(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    name = f"cadenza-{cadenza.__version__}-py3-none"
    if native.compiler() is not None:
        assert built[0].name == f"{name}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl"
        assert any(file.endswith(".so") for file in zipfile.ZipFile(built[0]).namelist())
    [pure] = build(ROOT, tmp_path, "wheel", CADENZA_NATIVE="0")
    assert pure.name == f"{name}-any.whl"
    assert not any(file.endswith(".so") for file in zipfile.ZipFile(pure).namelist())


def test_the_wheel_works_in_an_empty_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Torch and the other packages are lent by a path: downloading them would take gigabytes."""
    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    python = tmp_path / "empty" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, str(built[0])], check=True)
    [site] = (tmp_path / "empty" / "lib").glob("python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    cache = tmp_path / "cache"
    without = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "CC")}
    environment = {**without, "XDG_CACHE_HOME": str(cache), "PATH": str(python.parent)}  # where no compiler is

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run(str(python.parent / "cadenza"), "--version") == f"cadenza {cadenza.__version__}"
    where, encoded, kernels = run(str(python), "-c", TRY).split()
    assert Path(where).is_relative_to(site)
    assert encoded == "7ffe00"
    if native.compiler() is not None and "avx2" in Path("/proc/cpuinfo").read_text():
        assert Path(kernels).is_relative_to(site)
    assert not cache.exists() or not list(cache.rglob("*.so"))  # nothing was compiled
    small = ["options.layers=1", "options.width=16", "options.heads=2", "options.context=16", "options.batch=1"]
    sets = [word for setting in small for word in ("--set", setting)]
    told = run(str(python.parent / "cadenza"), "train", "--steps", "2", "--workers", "1", "--run", "first", *sets)
    assert "Report: first/report.html" in told
    assert (tmp_path / "first" / "model.safetensors").exists()


def test_the_sdist_holds_what_a_packager_needs(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "SECURITY.md",
        "constraints.txt",
        "hatch_build.py",
    ]
    assert names.issuperset([*wanted, "src/cadenza/codecs/native.c", "tests/conftest.py", "pyproject.toml"])


def test_everything_that_is_asked_for_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    asked += [one for extra in project["project"]["optional-dependencies"].values() for one in extra]
    names = {re.match(r"[\w.-]+", one)[0].lower().replace("_", "-") for one in asked} - {"cadenza"}
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert names <= {name.lower().replace("_", "-") for name in pins}


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs the repository")
def test_nothing_that_is_built_is_kept_in_the_repository() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in files if name.endswith((".so", ".whl", ".pyc"))]
