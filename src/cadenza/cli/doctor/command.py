"""The command `cadenza doctor`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cadenza.cli.amounts import parse_count
from cadenza.errors import UsageError

if TYPE_CHECKING:
    from cadenza.cli.doctor.advice import Plan
    from cadenza.cli.doctor.diagnosis import Diagnosis
    from cadenza.cli.doctor.place import Place

__all__ = ["doctor"]


@dataclass(frozen=True)
class Wishes:
    """What was asked for."""

    parameters: int | None
    step_s: float | None
    share: float
    backend: str
    timeout_s: float
    seconds: float


def doctor(
    parameters: Annotated[
        str | None, typer.Option(help="Size of your model, such as 124M: says which period and codec suit the links.")
    ] = None,
    step_seconds: Annotated[float | None, typer.Option(help="How long one of its training steps takes.")] = None,
    share: Annotated[float, typer.Option(help="Percent of the time that syncs may take.")] = 5.0,
    backend: Annotated[str, typer.Option(help="What the links are measured over: gloo or nccl.")] = "gloo",
    seconds: Annotated[float, typer.Option(help="About how long links may be measured.")] = 15.0,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a rank that does not answer.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Look at this machine or, under torchrun, at all ranks and the links between them, and say what to set.

    Alone: cadenza doctor. On ranks: torchrun --nproc-per-node 4 -m cadenza.cli.doctor, on every node as you would
    start training. Exits with 0 if there is no problem, 1 if there is one, 2 after bad input.
    """
    from cadenza.cli.doctor.place import Place, leave_it_to_rank_0

    try:
        wishes = _check(parameters, step_seconds, share, backend, seconds, timeout)
        place = Place.from_environment(os.environ)
    except UsageError:
        leave_it_to_rank_0()
        raise
    raise typer.Exit(_alone(wishes, as_json) if place is None else _on_a_rank(place, wishes, as_json))


def _check(
    parameters: str | None, step_s: float | None, share: float, backend: str, seconds: float, timeout_s: float
) -> Wishes:
    if (parameters is None) != (step_s is None):
        raise UsageError(
            "--parameters and --step-seconds belong together; for instance --parameters 124M --step-seconds 0.5."
        )
    if step_s is not None and not step_s > 0:
        raise UsageError(f"--step-seconds is more than 0; got {step_s:g}.")
    if not 0 < share < 100:
        raise UsageError(f"--share is a percentage between 0 and 100; got {share:g}.")
    if not seconds > 0 or not timeout_s > 0:
        raise UsageError(f"--seconds and --timeout are more than 0; got {seconds:g} and {timeout_s:g}.")
    if backend not in ("gloo", "nccl"):
        raise UsageError(f'--backend is gloo or nccl; got "{backend}".')
    if backend == "nccl":
        import torch

        if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
            raise UsageError("--backend nccl needs CUDA devices and a torch with NCCL, and here is no such thing.")
    count = None if parameters is None else parse_count("--parameters", parameters)
    return Wishes(count, step_s, share / 100, backend, timeout_s, seconds)


def _alone(wishes: Wishes, as_json: bool) -> int:
    from cadenza.cli.doctor.diagnosis import examine_machine
    from cadenza.cli.doctor.findings import note

    port = os.environ.get("MASTER_PORT", "")
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        raise UsageError(f"MASTER_PORT is a number between 1 and 65535; got {port!r}.")
    diagnosis = examine_machine(os.environ.get("MASTER_ADDR"), int(port) if port else None)
    advice = "start it on the ranks: torchrun --nproc-per-node 4 -m cadenza.cli.doctor"
    if wishes.parameters is not None:
        diagnosis.findings.append(note("period", "a machine alone does not tell what links carry", advice))
    _print(diagnosis, None, as_json)
    return 1 if diagnosis.problems else 0


def _on_a_rank(place: Place, wishes: Wishes, as_json: bool) -> int:
    from rich.console import Console

    from cadenza.cli.doctor.coordination import Coordinator, muted, open_store, serve
    from cadenza.cli.doctor.diagnosis import examine_ranks
    from cadenza.cli.doctor.member import Member

    with Member(place, backend=wishes.backend, timeout_s=wishes.timeout_s) as member:
        with muted() as screen:
            store = open_store(place, wishes.timeout_s)
            member.use(store)
            card = member.card()
            if place.rank:
                patience_s = 4 * wishes.timeout_s + wishes.seconds + 60  # rank 0 may be waiting for others
                return serve(store, place, card, member.perform, patience_s)
            coordinator = Coordinator(store, place, member.perform)
            with Console(file=screen).status("") as status:
                diagnosis = examine_ranks(
                    coordinator,
                    place,
                    card,
                    timeout_s=wishes.timeout_s,
                    seconds=wishes.seconds,
                    report_progress=lambda text: status.update(f"{text} …"),
                )
        _print(diagnosis, _plan(diagnosis, wishes), as_json)
        code = 1 if diagnosis.problems else 0
        with muted():
            coordinator.order({rank: {"do": "exit", "exit": code} for rank in diagnosis.hosts if rank}, timeout_s=5)
        return code


def _plan(diagnosis: Diagnosis, wishes: Wishes) -> Plan | None:
    if wishes.parameters is None or wishes.step_s is None or diagnosis.together is None:
        return None
    from cadenza.cli.doctor.advice import plan

    return plan(
        wishes.parameters,
        wishes.step_s,
        wishes.share,
        ranks=len(diagnosis.hosts),
        rate=diagnosis.together,
        latency_s=diagnosis.latency_s,
    )


def _print(diagnosis: Diagnosis, plan: Plan | None, as_json: bool) -> None:
    from rich.console import Console

    from cadenza.cli.doctor.showing import show, to_plain

    if as_json:
        print(json.dumps(to_plain(diagnosis, plan), indent=1), flush=True)
    else:
        show(diagnosis, plan, Console())
