"""One machine by itself: versions, backends, packages, processors, limits, room."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from cadenza.cli.amounts import byte_size
from cadenza.cli.doctor.findings import Finding, note, ok, problem

__all__ = ["inspect_machine", "versions"]

_SHM = Path("/dev/shm")
_SHM_BYTES = 512e6
_DISK_BYTES = 10e9


def inspect_machine(*, ranks_here: int, ranks: int) -> list[Finding]:
    """Return what is to be said of this machine, on which so many of the ranks run."""
    return [
        _python(),
        _torch(),
        *_backends(ranks_here),
        _packages(),
        judge_threads(cores(), ranks_here, os.environ.get("OMP_NUM_THREADS"), _threads()),
        _files(ranks),
        _shared_memory(),
        _codecs(),
        *_codecs_on_device(),
        *_room_in_shm(),
        _disk(),
    ]


def versions() -> dict[str, str]:
    """Return the versions that should agree on all hosts."""
    import torch

    from cadenza.version import __version__

    return {"cadenza": __version__, "torch": torch.__version__, "python": platform.python_version()}


# ---- versions -------------------------------------------------------------------------------------------------------


def fits(version: str, specifier: str) -> bool:
    """Tell whether a version is at or above each `>=` and below each `<` of a specifier; other clauses are passed over.

    >>> fits("2.13.0+cpu", ">=2.6"), fits("3.10.2", ">=3.11"), fits("3.1", ">=2,<3")
    (True, False, False)
    """
    for clause in filter(None, (part.strip() for part in specifier.split(","))):
        if clause.startswith(">=") and _numbers(version) < _numbers(clause[2:]):
            return False
        if clause.startswith("<") and not clause.startswith("<=") and _numbers(version) >= _numbers(clause[1:]):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\s*(\d+(?:\.\d+)*)", version)
    return tuple(int(number) for number in found[1].split(".")) if found else ()


def _requirements() -> dict[str, dict[str, str]]:
    """Return {extra: {package: specifier}} of the installed Cadenza; what is always needed has the extra ""."""
    found: dict[str, dict[str, str]] = {}
    for line in metadata.requires("cadenza") or []:
        if parts := re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*?)\s*(?:;.*extra == ['\"]([\w-]+)['\"].*)?$", line):
            found.setdefault(parts[3] or "", {})[parts[1]] = parts[2]
    return found


def _python() -> Finding:
    version = platform.python_version()
    try:
        needed = metadata.metadata("cadenza")["Requires-Python"]
    except metadata.PackageNotFoundError:
        return note("Python", f"{version}; Cadenza itself is not installed", "install it: pip install -e .")
    if fits(version, needed):
        return ok("Python", f"{version} (Cadenza needs {needed})")
    return problem("Python", f"{version}, but Cadenza needs {needed}", "install a newer Python and make a new venv")


def _torch() -> Finding:
    version = versions()["torch"]
    try:
        needed = _requirements()[""]["torch"]
    except metadata.PackageNotFoundError:
        return ok("torch", version)
    if fits(version, needed):
        return ok("torch", f"{version} (Cadenza needs {needed})")
    return problem("torch", f"{version}, but Cadenza needs {needed}", f'pip install "torch{needed}"')


def _packages() -> Finding:
    try:
        wanted = _requirements().get("cli", {})
    except metadata.PackageNotFoundError:
        return note("packages", "unknown, since Cadenza itself is not installed")
    there, missing = [], []
    for package, specifier in wanted.items():
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            missing.append(f"{package} is missing")
            continue
        there.append(f"{package} {version}")
        if not fits(version, specifier):
            missing.append(f"{package} {version} is not {specifier}")
    if missing:
        return note("packages", ", ".join(missing), "pip install 'cadenza[cli]'")
    return ok("packages", ", ".join(there))


def _backends(ranks_here: int) -> list[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        advice = "install a build of torch with torch.distributed"
        return [problem("backends", "this torch has no torch.distributed", advice)]
    found = [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()]
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    text = f"{', '.join(found) or 'none'}; {f'{devices} CUDA devices' if devices else 'no CUDA device'}"
    if "gloo" not in found:
        return [problem("backends", text, "Gloo carries the small messages: install a build of torch that has it")]
    if devices and "nccl" not in found:
        return [note("backends", text, "GPUs synchronise fastest over NCCL: install a build of torch that has it")]
    if devices and ranks_here > devices:
        return [note("backends", f"{text} for {ranks_here} ranks", f"start {devices} ranks on this host, one a device")]
    return [ok("backends", text)]


# ---- resources ------------------------------------------------------------------------------------------------------


def cores() -> int:
    """Return how many processors this process may keep busy: its affinity, within its container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return allowed if quota == "max" else max(1, min(allowed, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return allowed


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def judge_threads(cores: int, ranks: int, setting: str | None, threads: int) -> Finding:
    """Compare the processors of a host with the threads that its ranks start.

    >>> judge_threads(16, 4, "1", 1).advice
    'export OMP_NUM_THREADS=4'
    """
    subject = "processors"
    text = f"{cores} for {ranks} rank{'s' * (ranks > 1)}, {threads} thread{'s' * (threads > 1)} each"
    best = max(1, cores // ranks)
    if setting and not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", setting):
        return note(subject, f"OMP_NUM_THREADS={setting} is no number", f"export OMP_NUM_THREADS={best}")
    if ranks > cores:
        text += ": ranks take turns, so steps take longer"
        advice = "fine for trying things out; else start fewer ranks here"
        return note(subject, text, f"export OMP_NUM_THREADS=1, {advice}" if threads > 1 else advice)
    if ranks * threads > cores:
        return note(subject, f"{text}: more threads than processors", f"export OMP_NUM_THREADS={best}")
    if ranks > 1 and best >= 2 * threads:
        return note(subject, f"{text}: most processors stay idle", f"export OMP_NUM_THREADS={best}")
    return ok(subject, text)


def _files(ranks: int) -> Finding:
    import resource

    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 256 + 4 * ranks  # Gloo connects every rank of a group with every other, and Cadenza has groups of its own
    subject = "open files"
    if limit == resource.RLIM_INFINITY or limit >= max(needed, 1024):
        return ok(subject, f"at most {limit if limit >= 0 else 'any number'} (about {needed} are needed)")
    wanted = max(needed, 65536) if most == resource.RLIM_INFINITY else min(max(needed, 65536), most)
    text = f"at most {limit}, and {ranks} rank{'s' * (ranks > 1)} need about {needed}"
    if limit < needed:
        return problem(subject, text, f"ulimit -n {wanted}")
    return note(subject, text, f"ulimit -n {wanted} leaves room for more ranks and data loaders")


def _shared_memory() -> Finding:
    subject = "shared memory"
    if os.environ.get("CADENZA_SHARED_MEMORY") == "0":
        text = "switched off by CADENZA_SHARED_MEMORY=0; ranks of one host talk over Gloo"
        return note(subject, text, "unset CADENZA_SHARED_MEMORY, unless you meant it")
    if not hasattr(os, "memfd_create"):
        return note(subject, f"not on {sys.platform}; ranks of one host talk over Gloo")
    return ok(subject, "ranks that are all on one host exchange through it")


def _codecs() -> Finding:
    from cadenza.codecs import native

    subject, slow = "codecs", "int8, E3M0 and top-k take several times the processor's time"
    if native.kernels() is not None:
        return ok(
            subject, f"int8, E3M0 and top-k are machine code, {native.packaged() or f'made by {native.compiler()}'}"
        )
    if os.environ.get("CADENZA_NATIVE") == "0":
        return note(subject, f"CADENZA_NATIVE=0: {slow}", "unset CADENZA_NATIVE, unless you meant it")
    if (command := native.compiler()) is not None:
        return note(subject, f"{command} cannot compile them: {slow}", "set CC to a C compiler that works")
    return note(subject, f"no C compiler: {slow}", "install gcc or clang")


def _codecs_on_device() -> list[Finding]:
    import torch

    from cadenza.codecs.kernels import implementations
    from cadenza.codecs.triton_launch import triton_version

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return []
    subject = f"codecs on {device.type}"
    if implementations(device)[0] == "triton":
        return [ok(subject, f"int8, E3M0 and top-k are kernels of Triton {triton_version()}")]
    advice = "install the triton that belongs to this torch, and a C compiler; CADENZA_TRITON=0 must not be set"
    return [note(subject, "no Triton: torch's operations read and write memory several times", advice)]


def _room_in_shm() -> list[Finding]:
    if not _SHM.is_dir():
        return []
    usage = shutil.disk_usage(_SHM)
    text = f"{byte_size(usage.free)} free of {byte_size(usage.total)}"
    if usage.free >= _SHM_BYTES:
        return [ok("/dev/shm", text)]
    text += "; worker processes of data loaders pass batches through it (Cadenza does not need it)"
    return [note("/dev/shm", text, "in a container: docker run --shm-size=2g, or --ipc=host")]


def _disk() -> Finding:
    folder = Path.cwd()
    free = shutil.disk_usage(folder).free
    text = f"{byte_size(free)} free where runs are written ({folder})"
    if not os.access(folder, os.W_OK):
        return note("disk", f"{folder} cannot be written to", "start training in a folder of your own")
    if free < _DISK_BYTES / 10:
        return problem("disk", text, "make room: a run keeps several checkpoints, each several times the model's size")
    if free < _DISK_BYTES:
        return note("disk", text, "make room, or keep few checkpoints: each takes several times the model's size")
    return ok("disk", text)
