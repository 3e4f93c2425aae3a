"""Where the nodes of a run meet: torchrun's words, and what can be known before anything is started.

torch finds out from host names which node listens at the endpoint and under which address the others reach worker 0.
Machines with several networks, containers and namespaces have names that lead elsewhere; so both are asked of the
kernel here: an address is this node's if it can be bound, and the address of this node is the one that leads there. Its
interface is the one that Gloo is told to use.
"""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import sys
import uuid
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped]

from cadenza.emulation import Network
from cadenza.errors import UsageError
from cadenza.participants.addresses import family_of, is_host, local_end, parse_address
from cadenza.training.config import Config, LaunchSettings

__all__ = ["Rendezvous", "StorePlace", "arrange", "node_range", "store_place"]

_DEFAULT_PORT = 29400  # torch's
_ANSWER_S = 5
_ELSEWHERE = "192.0.2.1"  # an address of no machine
_ASK = """
import signal, sys, torch.distributed as dist
signal.alarm(int(sys.argv[3]))  # no timeout of torch's ends the wait for a program that listens and says nothing
dist.TCPStore(sys.argv[1], int(sys.argv[2]), wait_for_workers=False)
"""


@dataclass(frozen=True)
class Rendezvous:
    """What torch's launcher wants to know about a rendezvous, and whether this node speaks for all."""

    backend: str
    endpoint: str
    name: str
    configs: dict[str, Any]
    local_addr: str | None
    interface: str | None
    leads: bool


def node_range(nnodes: str) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes.

    >>> node_range("2"), node_range("1:4")
    ((2, 2), (1, 4))
    """
    least, _, most = nnodes.partition(":")
    found = int(least), int(most or least)
    if not 1 <= found[0] <= found[1]:
        raise UsageError(f'--nnodes "{nnodes}": a number of at least 1 is required, or a range such as 2:4.')
    return found


def arrange(launch: LaunchSettings, *, name: str) -> Rendezvous:
    """Return how this node meets the others; raise if the endpoint cannot be used.

    Args:
        launch: The settings.
        name: The job's name if the settings have none.

    >>> arrange(LaunchSettings(), name="first").endpoint
    'localhost:0'
    """
    _, nodes = node_range(launch.nnodes)
    if not launch.rdzv_endpoint:
        if nodes > 1:
            raise UsageError(
                f"{launch.nnodes} nodes need a place to meet: give all of them the same --rdzv-endpoint HOST:PORT, "
                f"where HOST is one of them and PORT is free there, such as {_DEFAULT_PORT}."
            )
        here = "127.0.0.1"  # as torchrun --standalone
        return Rendezvous("c10d", "localhost:0", uuid.uuid4().hex, {}, here, _interface_of(here), leads=True)
    job = launch.rdzv_id or name
    if launch.rdzv_backend != "c10d":
        configs = {"rank": launch.node_rank} if launch.rdzv_backend == "static" else {}
        return Rendezvous(
            launch.rdzv_backend, launch.rdzv_endpoint, job, configs, None, None, leads=launch.node_rank == 0
        )
    host, port = _parsed(launch.rdzv_endpoint)
    address = _resolved(host, launch.rdzv_endpoint)
    if not _is_here(address):
        own = _route_to(address)
        if own is None:
            raise UsageError(f"--rdzv-endpoint {launch.rdzv_endpoint}: there is no way from here to {address}.")
        return Rendezvous("c10d", f"{host}:{port}", job, {"is_host": False}, own, _interface_of(own), leads=False)
    listens = not _is_taken(address, port)
    if not listens and (nodes == 1 or not _answers(host, port)):
        raise UsageError(
            f"Port {port} of {host} is in use by another program (--rdzv-endpoint {launch.rdzv_endpoint}): give all "
            "nodes another one, or end that program."
        )
    # Where the port is taken by a node of the same run on this machine, this one is its guest. A name may lead to the
    # loopback on its own machine, and to the network elsewhere.
    outward = _route_to(_ELSEWHERE) if nodes > 1 and ipaddress.ip_address(address).is_loopback else address
    return Rendezvous("c10d", f"{host}:{port}", job, {"is_host": listens}, host, _interface_of(outward), leads=listens)


@dataclass(frozen=True)
class StorePlace:
    """Where elastic workers find each other: a store, and whether this node serves it.

    Attributes:
        host: The store's host.
        port: Its port, 0 for a free one.
        serves: Whether this node starts it.
        leads: Whether this node shows and draws what all have done.
        workers: How many start together, on all nodes.
        interface: What Gloo is to use, if that is known.
    """

    host: str
    port: int
    serves: bool
    leads: bool
    workers: int
    interface: str | None


def store_place(config: Config, network: Network | None = None) -> StorePlace:
    """Return where the elastic workers of a run find each other; raise if they cannot.

    >>> place = store_place(Config().with_(**{"faults.policy": "shrink", "launch.workers": 3}))
    >>> place.host, place.port, place.serves, place.workers
    ('127.0.0.1', 0, True, 3)
    """
    launch = config.launch
    least, most = node_range(launch.nnodes)
    workers = least * launch.workers
    if network is not None:
        return StorePlace(network.hosts[0].address, 0, True, True, len(network.hosts), None)
    if launch.node_rank >= most:
        raise UsageError(
            f"--node-rank {launch.node_rank}: with --nnodes {launch.nnodes}, nodes are numbered from 0 to {most - 1}."
        )
    given = config.faults.store or launch.rdzv_endpoint
    if not given:
        if most > 1:
            raise UsageError(
                f"{launch.nnodes} nodes need a store to meet in: give all of them the same --rdzv-endpoint HOST:PORT, "
                f"where HOST is the first node (--node-rank 0), which then serves it, or the address of one that "
                "python -m cadenza.membership serves, as faults.store."
            )
        here = "127.0.0.1"
        return StorePlace(here, 0, True, True, workers, _interface_of(here))
    leads = launch.node_rank == 0
    host, port = parse_address(config.faults.store) if config.faults.store else _parsed(launch.rdzv_endpoint)
    address = _resolved(host, given)
    own = address if _is_here(address) else _route_to(address)
    if own is None:
        raise UsageError(f"{given}: there is no way from here to {address}.")
    serves = leads and not config.faults.store
    if serves and own != address:
        raise UsageError(
            f"--rdzv-endpoint {launch.rdzv_endpoint}: the first node (--node-rank 0) serves the store there, and "
            f"{address} is not an address of this machine."
        )
    if serves and _is_taken(address, port):
        raise UsageError(f"Port {port} of {host} is in use by another program (--rdzv-endpoint {given}).")
    outward = _route_to(_ELSEWHERE) if most > 1 and ipaddress.ip_address(own).is_loopback else own
    return StorePlace(host, port, serves, leads, workers, _interface_of(outward))


def _parsed(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, ":", str(_DEFAULT_PORT))
    if not is_host(host.strip("[]")) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f'--rdzv-endpoint "{endpoint}": HOST:PORT is required, such as 10.0.0.1:{_DEFAULT_PORT}.')
    return host.strip("[]"), int(port)


def _resolved(host: str, endpoint: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UsageError(f"--rdzv-endpoint {endpoint}: the host {host} is not known here ({error.strerror}).") from None


def _socket(address: str, kind: socket.SocketKind) -> socket.socket:
    return socket.socket(family_of(address), kind)


def _is_here(address: str) -> bool:
    with _socket(address, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((address, 0))
        except OSError:
            return False
    return True


def _is_taken(address: str, port: int) -> bool:
    with _socket(address, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, port))
            trial.listen(1)
        except OSError:
            return True
    return False


def _answers(host: str, port: int) -> bool:
    """Say whether what listens there is a store of torch's, as another node of a run on this machine has."""
    asking = [sys.executable, "-c", _ASK, host, str(port), str(_ANSWER_S)]
    return subprocess.run(asking, capture_output=True, check=False).returncode == 0


def _route_to(address: str) -> str | None:
    """Return the address of this node on the way there, None if there is no way; nothing is sent."""
    try:
        return local_end(address)
    except OSError:
        return None


def _interface_of(address: str | None) -> str | None:
    """Return the name of the interface with this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return str(name)
    return None
