"""The command `cadenza bench`."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cadenza.cli.amounts import byte_size, parse_count
from cadenza.errors import TransportError, UsageError

if TYPE_CHECKING:
    import torch

    from cadenza.cli.bench.contest import Case
    from cadenza.cli.doctor.place import Place

__all__ = ["bench"]

_MOST_WORKERS = 64
_MEETING_S = 60.0
_HELP = "`cadenza doctor`, started in the same way, tells what is in the way."


def bench(
    parameters: Annotated[str, typer.Option(help="Size of the model: 25M, 1.3G, 100k.")] = "25M",
    tensors: Annotated[int, typer.Option(help="Into how many tensors it is cut.")] = 148,
    dtype: Annotated[str, typer.Option(help="The parameters' type: fp32 or bf16.")] = "fp32",
    codec: Annotated[
        list[str] | None, typer.Option(help="Codecs of the DiLoCo rounds; may be given several times, or with commas.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="How often each contender has its turn.")] = 5,
    workers: Annotated[int, typer.Option(help="Workers on this machine, where torchrun does not start them.")] = 4,
    backend: Annotated[str, typer.Option(help="gloo, or nccl with the parameters on GPUs.")] = "gloo",
    device: Annotated[str | None, typer.Option(help="cpu or cuda, where the backend alone does not say it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Measure what synchronising a model costs: a raw all-reduce, torch's averager, Cadenza's drop-in, DiLoCo rounds.

    Alone it starts workers on this machine: cadenza bench --workers 4. On your cluster, on every node as you would
    start training: torchrun --nproc-per-node 4 -m cadenza.cli.bench.
    """
    from cadenza.cli.doctor.place import Place, leave_it_to_rank_0

    try:
        place = Place.from_environment(os.environ)
        given = [name for part in codec or ["fp32,int8,e3m0"] for name in part.split(",")]
        case = _check(parameters, tensors, dtype, given, repeats)
        here = _check_workers(workers) if place is None else _ranks_here(place)
        on = _check_backend(backend, device)
        _check_memory(case, here, on)
    except UsageError:
        leave_it_to_rank_0()
        raise
    if place is None:
        _start(workers, _words(case, backend, on, as_json))
    else:
        _contend(place, case, backend, on, as_json)


def _check(parameters: str, tensors: int, dtype: str, codecs: list[str], repeats: int) -> Case:
    from cadenza.cli.bench.contest import DTYPES, Case
    from cadenza.training.strategies import CODECS, build_codec, nearest

    count = parse_count("--parameters", parameters)
    if not 1 <= tensors <= count:
        raise UsageError(f"--tensors is between 1 and the number of parameters ({count}); got {tensors}.")
    if dtype not in DTYPES:
        raise UsageError(f'--dtype is {" or ".join(DTYPES)}; got "{dtype}".')
    if repeats < 1:
        raise UsageError(f"--repeats is at least 1; got {repeats}.")
    for name in codecs:
        if name.removesuffix("+feedback") not in CODECS:
            raise UsageError(
                f'--codec: there is no codec "{name}".{nearest(name, CODECS)} Allowed: {", ".join(CODECS)}, and each '
                'but fp32 with "+feedback" behind it.'
            )
        build_codec(name)
    return Case(count, tensors, dtype, tuple(dict.fromkeys(codecs)), repeats)


def _check_workers(workers: int) -> int:
    if not 2 <= workers <= _MOST_WORKERS:
        raise UsageError(f"--workers is between 2 and {_MOST_WORKERS} on one machine; got {workers}.")
    return workers


def _ranks_here(place: Place) -> int:
    if place.ranks < 2:
        raise UsageError("One rank has nobody to synchronise with: start at least two.")
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _check_backend(backend: str, device: str | None) -> torch.device:
    """Return where the parameters of this rank are: on a GPU under NCCL, and under Gloo too if asked for."""
    import torch

    if backend not in ("gloo", "nccl"):
        raise UsageError(f'--backend is gloo or nccl; got "{backend}".')
    kind = device or ("cpu" if backend == "gloo" else "cuda")
    if kind not in ("cpu", "cuda") or (backend == "nccl" and kind == "cpu"):
        raise UsageError(f'--device is cuda, or cpu with --backend gloo; got "{device}" with {backend}.')
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or (backend == "nccl" and not torch.distributed.is_nccl_available()):
        given = "--backend nccl" if backend == "nccl" else "--device cuda"
        raise UsageError(f"{given} needs CUDA devices and a torch with NCCL, and here is no such thing.")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _check_memory(case: Case, workers: int, device: torch.device) -> None:
    """Refuse what would not fit, before the machine starts to swap."""
    import psutil  # type: ignore[import-untyped]

    from cadenza.cli.bench.contest import needed_bytes

    needed, free = workers * needed_bytes(case), psutil.virtual_memory().available
    if device.type == "cpu" and needed > free:
        raise UsageError(
            f"{workers} workers with {case.parameters / 1e6:g} M parameters and {len(case.codecs)} codecs need about "
            f"{byte_size(needed)} of memory, and {byte_size(free)} are free: give fewer --parameters, --workers or "
            "--codec."
        )


# ---- many workers ---------------------------------------------------------------------------------------------------


def _words(case: Case, backend: str, device: torch.device, as_json: bool) -> list[str]:
    """Return the command line by which a worker gets the same case."""
    words = ["--parameters", str(case.parameters), "--tensors", str(case.tensors), "--dtype", case.dtype]
    words += ["--codec", ",".join(case.codecs), "--repeats", str(case.repeats), "--backend", backend]
    words += ["--device", device.type]
    return [*words, *(["--json"] if as_json else [])]


def _start(workers: int, words: list[str]) -> None:
    """Start workers on this machine by torch's elastic launcher, and wait for them."""
    import logging
    import uuid

    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from cadenza.cli.doctor.machine import cores

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // workers)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # a worker tells itself why it failed
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "cadenza.cli.bench", *words)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        raise typer.Exit(code if code > 0 else 1) from None
    except SignalException as error:
        raise typer.Exit(128 + error.sigval) from None


def _meet(place: Place, backend: str) -> None:
    """Make the process group, once all ranks are known to be there."""
    from datetime import timedelta

    import torch.distributed as dist

    from cadenza.cli.doctor.coordination import muted, open_store

    with muted():
        store = open_store(place, _MEETING_S)
        store.set(f"bench/{place.rank}", "here")
        for rank in range(place.ranks):
            try:
                store.wait([f"bench/{rank}"], timedelta(seconds=_MEETING_S))
            except (dist.DistStoreError, dist.DistNetworkError):
                raise TransportError(
                    f"Rank {rank} of {place.ranks} did not come within {_MEETING_S:g} s. {_HELP}"
                ) from None
        try:
            kinds = "gloo" if backend == "gloo" else f"cpu:gloo,cuda:{backend}"
            dist.init_process_group(kinds, store=store, rank=place.rank, world_size=place.ranks)
            dist.barrier()
        except RuntimeError as error:
            raise TransportError(f"The ranks cannot be connected: {str(error).splitlines()[0]}. {_HELP}") from error


def _contend(place: Place, case: Case, backend: str, device: torch.device, as_json: bool) -> None:
    """Take part as one rank; rank 0 prints what came out."""
    import torch.distributed as dist
    from rich.console import Console

    from cadenza.cli.bench.contest import hold, way
    from cadenza.cli.bench.showing import show, to_plain

    _meet(place, backend)
    try:
        first = place.rank == 0
        with Console(stderr=True, quiet=not first).status("") as status:
            results = hold(case, device, lambda text: status.update(f"{text} …"))
            path = way()
        if first and as_json:
            print(json.dumps(to_plain(case, results, place.ranks, path, device=device), indent=1), flush=True)
        elif first:
            show(case, results, place.ranks, path, Console(), device=device)
        dist.barrier()
    finally:
        dist.destroy_process_group()
