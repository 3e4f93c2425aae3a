"""One rank under the doctor's eyes: its card, and what it does when rank 0 orders it."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from cadenza.cli.doctor import links
from cadenza.cli.doctor.coordination import Order
from cadenza.cli.doctor.machine import inspect_machine, versions
from cadenza.cli.doctor.network import (
    answers,
    gloo_address,
    inspect_network,
    interfaces,
    listening,
    network_id,
    suggested,
)
from cadenza.cli.doctor.place import Place
from cadenza.topology import host_name

__all__ = ["Member"]

_KNOCK_S = 3.0


class Member:
    """A rank; `perform` is what rank 0 may order of it."""

    def __init__(self, place: Place, *, backend: str, timeout_s: float) -> None:
        self.place = place
        self._backend = backend
        self._timeout_s = timeout_s
        self._store: dist.Store | None = None
        self._device = torch.device("cuda", place.local_rank) if backend == "nccl" else torch.device("cpu")
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        links.disconnect()

    def use(self, store: dist.Store) -> None:
        """Meet the others in this store when it comes to the process group."""
        self._store = dist.PrefixStore("group", store)

    def card(self) -> dict[str, Any]:
        """Return who this rank is, where Gloo would find it, and a port at which it listens in the meantime."""
        known = interfaces()
        chosen = gloo_address(known, os.environ.get("GLOO_SOCKET_IFNAME"), socket.gethostname())
        return {
            "host": host_name(),
            "host_name": socket.gethostname(),
            "network": network_id(),
            "versions": versions(),
            "address": chosen.address,
            "interface": chosen.interface,
            "suggested": suggested(known, self.place.master),
            "mtu": next((interface.mtu for interface in known if interface.name == chosen.interface), None),
            "reachable": not chosen.trouble,
            "port": self._listen(chosen.address) if not chosen.trouble else None,
        }

    def _listen(self, address: str) -> int | None:
        try:
            server = self._open.enter_context(listening(address))
        except OSError:
            return None
        return int(server.getsockname()[1])

    def perform(self, order: Order) -> Any:
        """Do what rank 0 orders, and return the answer as JSON can hold it."""
        match order["do"]:
            case "inspect":
                return self._inspect(order)
            case "knock":
                found = {rank: answers(host, port, timeout_s=_KNOCK_S) for rank, (host, port) in order["at"].items()}
                return {rank: trouble for rank, trouble in found.items() if trouble is not None}
            case "connect":
                assert self._store is not None
                place = self.place
                links.connect(self._store, place.rank, place.ranks, backend=self._backend, timeout_s=self._timeout_s)
            case "measure":
                link = links.measure(self.place.rank, order["peer"], self._device)
                return asdict(link) if link else None
            case "together":
                return links.together(order["bytes"], self._device)
        return None

    def _inspect(self, order: Order) -> list[dict[str, Any]]:
        findings = inspect_machine(ranks_here=order["ranks_here"], ranks=self.place.ranks)
        findings += inspect_network(
            hosts=order["networks"], master=self.place.master, port=self.place.port, store_runs=True
        )
        return [asdict(finding) for finding in findings]
