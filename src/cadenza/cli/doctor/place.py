"""Where a rank stands among the others, as its launcher tells it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from cadenza.cli.doctor.network import is_loopback
from cadenza.errors import UsageError

__all__ = ["Place", "leave_it_to_rank_0", "reaching"]

_RANK_0_FIRST_S = 10.0


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks, as the launcher tells it.

    Attributes:
        rank: This rank.
        ranks: How many there are.
        local_rank: Its number on its host.
        master: MASTER_ADDR.
        port: MASTER_PORT.
        agent: Whether the launcher runs the store; else rank 0 does.
        attempt: Counts the launcher's restarts, whose notes must not be mixed up.
    """

    rank: int
    ranks: int
    local_rank: int
    master: str
    port: int
    agent: bool
    attempt: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Place | None:
        """Return the place that torchrun's variables describe, or None if this process is alone.

        >>> Place.from_environment({"HOME": "/root"})
        """
        given = {name: environment[name] for name in ("RANK", "WORLD_SIZE") if name in environment}
        if not given:
            return None
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if missing := [name for name in needed if name not in environment]:
            raise UsageError(
                f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set, but not {', '.join(missing)}. Start "
                "with torchrun, which sets all of them, or unset them to look at this machine alone."
            )
        rank, ranks, port = (_whole(environment, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if not rank < ranks or not 0 < port < 65536:
            raise UsageError(
                f"RANK is below WORLD_SIZE and MASTER_PORT between 1 and 65535; got RANK={rank}, WORLD_SIZE={ranks}, "
                f"MASTER_PORT={port}."
            )
        return cls(
            rank=rank,
            ranks=ranks,
            local_rank=_whole(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else 0,
            master=environment["MASTER_ADDR"],
            port=port,
            agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )


def _whole(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].strip().isdecimal():
        raise UsageError(f"{name} is a whole number; got {environment[name]!r}.")
    return int(environment[name])


def reaching(place: Place) -> str:
    """Return what to look at if a rank does not find the others."""
    if place.master == "localhost" or is_loopback(place.master):
        mend = (
            "start torchrun on each node with --local-addr and its address" if place.agent else "set MASTER_ADDR to it"
        )
        return (
            f"MASTER_ADDR={place.master} means each host itself, so ranks of other hosts cannot find rank 0; they need "
            f"an address of rank 0's host: {mend}"
        )
    where = f"{place.master}:{place.port}"
    return f"see from each host whether {where} can be reached; a firewall or another network may be in the way"


def leave_it_to_rank_0() -> None:
    """On other ranks, exit as after bad input, without a word and not before rank 0 has said it.

    A launcher ends all ranks when the first one exits.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_RANK_0_FIRST_S)
        sys.exit(2)
