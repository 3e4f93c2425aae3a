"""The network as one host sees it: its interfaces, the one that Gloo would take, the ports it may open."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cadenza.cli.doctor.findings import Finding, note, ok, problem
from cadenza.participants.addresses import family_of, local_end

__all__ = [
    "GlooAddress",
    "Interface",
    "answers",
    "gloo_address",
    "inspect_network",
    "interfaces",
    "is_loopback",
    "listening",
    "network_id",
    "suggested",
]

_BEYOND = "203.0.113.1"  # an address reserved for documentation: the route to it is the default one
DEFAULT_PORT = 29500  # torch's own


@dataclass(frozen=True)
class Interface:
    """A network interface with the addresses that can be reached from elsewhere or, for loopback, from here."""

    name: str
    up: bool
    addresses: tuple[str, ...]
    speed_mbit: int
    mtu: int

    @property
    def loopback(self) -> bool:
        """Whether it leads nowhere but to this host."""
        return bool(self.addresses) and all(is_loopback(address) for address in self.addresses)

    def describe(self) -> str:
        """Return the interface in a few words."""
        speed = f", {self.speed_mbit} Mbit/s" if self.speed_mbit else ""
        return f"{self.name} {'up' if self.up else 'DOWN'} ({', '.join(self.addresses)}{speed}, MTU {self.mtu})"


@dataclass(frozen=True)
class GlooAddress:
    """The address at which Gloo would listen, or why there is none."""

    address: str
    interface: str
    how: str
    trouble: str = ""


def network_id() -> str:
    """Return what tells this network stack from others: two launchers on one machine share it, containers do not."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    return socket.gethostname()


def interfaces() -> list[Interface]:
    """Return the interfaces that have an address."""
    import psutil  # type: ignore[import-untyped]

    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        addresses = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        usable = tuple(address for address in addresses if not address.startswith("fe80"))
        if usable and name in stats:
            found.append(Interface(name, stats[name].isup, usable, stats[name].speed, stats[name].mtu))
    return found


def is_loopback(address: str) -> bool:
    """Tell whether an address means the host itself, on every host.

    >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.7")
    (True, False)
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return False


def gloo_address(known: Sequence[Interface], setting: str | None, host_name: str) -> GlooAddress:
    """Find the address as Gloo does: of the interface it is told, else what the host's own name resolves to."""
    if setting:
        name = setting.split(",")[0].strip()
        how = f"GLOO_SOCKET_IFNAME={setting}"
        for interface in known:
            if interface.name == name:
                return GlooAddress(
                    interface.addresses[0], name, how, "" if interface.up else f"{how}, but this interface is down"
                )
        return GlooAddress("", name, how, f"{how}, but there is no such interface with an address here")
    how = f"the host name {host_name} resolves to it"
    for address in _usable(host_name):
        return GlooAddress(address, _owner(known, address), how)
    how = f"the host name {host_name} does not resolve to an address of this host, so Gloo falls back to loopback"
    return GlooAddress("127.0.0.1", _owner(known, "127.0.0.1"), how)


def _usable(host_name: str) -> Iterator[str]:
    """Yield the addresses of a host name that a socket of this host can be bound to."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(host_name, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind((place[0], 0))
                yield str(place[0])


def _owner(known: Sequence[Interface], address: str) -> str:
    names = [interface.name for interface in known if address in interface.addresses]
    return names[0] if names else "lo" if is_loopback(address) else "?"


def suggested(known: Sequence[Interface], master: str | None = None) -> str | None:
    """Return the interface over which other hosts are best reached: the one on the way to the master, or elsewhere."""
    for target in filter(None, (master, _BEYOND)):
        name = _owner(known, _local_end(target))
        if any(interface.name == name and not interface.loopback and interface.up for interface in known):
            return name
    others = [interface for interface in known if interface.up and not interface.loopback]
    return max(others, key=lambda interface: interface.speed_mbit).name if others else None


def _local_end(target: str) -> str:
    """Return the address from which packets to the target would leave; none is sent."""
    with contextlib.suppress(OSError):
        return local_end(target)
    return ""


# ---- findings -------------------------------------------------------------------------------------------------------


def inspect_network(*, hosts: int | None, master: str | None, port: int | None, store_runs: bool) -> list[Finding]:
    """Return what is to be said of this host's network.

    Args:
        hosts: On how many hosts the ranks are, or None if that is not known.
        master: MASTER_ADDR, if it is set.
        port: MASTER_PORT, if it is set.
        store_runs: Whether something is expected to listen at that port already.
    """
    known = interfaces()
    chosen = gloo_address(known, os.environ.get("GLOO_SOCKET_IFNAME"), socket.gethostname())
    findings = [_judge_interfaces(known), judge_gloo(known, chosen, suggested(known, master), hosts)]
    if master is not None:
        findings.append(_judge_master(known, master, hosts))
    findings.append(_judge_listening(chosen.address))
    if not store_runs:
        findings.append(_judge_port(known, master, port))
    return findings


def _judge_interfaces(known: Sequence[Interface]) -> Finding:
    text = "; ".join(interface.describe() for interface in known)
    if any(interface.up and not interface.loopback for interface in known):
        return ok("interfaces", text)
    return note("interfaces", f"{text}: no way to other hosts", "fine on one machine; else bring an interface up")


def judge_gloo(known: Sequence[Interface], chosen: GlooAddress, better: str | None, hosts: int | None) -> Finding:
    """Say whether other hosts can reach what Gloo would listen at; `better` is the interface to name if not."""
    subject = "Gloo address"
    mend = f"export GLOO_SOCKET_IFNAME={better}" if better else "connect this host to the network of the others"
    if chosen.trouble:
        names = ", ".join(interface.name for interface in known)
        return problem(subject, f"{chosen.trouble}; there are: {names}", mend if better else "unset GLOO_SOCKET_IFNAME")
    text = f"{chosen.address} on {chosen.interface} ({chosen.how})"
    if not is_loopback(chosen.address):
        return ok(subject, text)
    if hosts == 1:
        return ok(subject, f"{text}; enough for ranks of one host")
    text = f"{text}: a loopback address, which no other host can reach"
    if hosts is None:
        return note(subject, text, f"before training on several hosts, on each of them: {mend}")
    return problem(subject, text, mend)


def _judge_master(known: Sequence[Interface], master: str, hosts: int | None) -> Finding:
    subject = "MASTER_ADDR"
    try:
        places = socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return problem(subject, f"{master} cannot be resolved: {error.strerror}", "give an address of rank 0's host")
    address = str(places[0][4][0])
    text = master if master == address else f"{master} is {address}"
    if is_loopback(address) and (hosts or 1) > 1:
        advice = "give an address of rank 0's host that the others can reach: torchrun --local-addr, or MASTER_ADDR"
        return problem(subject, f"{text}: on every host it means that host itself", advice)
    mine = any(address in interface.addresses for interface in known)
    return ok(subject, f"{text}, {'on this host' if mine or is_loopback(address) else 'on another host'}")


@contextlib.contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    """Listen at a port that the system chooses, as Gloo does."""
    with socket.create_server((address, 0), family=family_of(address), backlog=1024) as server:
        yield server


def _judge_listening(address: str) -> Finding:
    subject = "ports"
    if not address:
        return note(subject, "not tried, since Gloo has no address")
    try:
        with listening(address) as server:
            return ok(subject, f"listening works ({address}:{server.getsockname()[1]})")
    except OSError as error:
        advice = "allow this program to listen at ports of its own choice; Gloo needs one a group"
        return problem(subject, f"cannot listen at {address}: {error.strerror}", advice)


def _judge_port(known: Sequence[Interface], master: str | None, port: int | None) -> Finding:
    """Look at the port where rank 0's store will be, before anything runs there."""
    number = DEFAULT_PORT if port is None else port
    subject = f"port {number}"
    mine = {address for interface in known for address in interface.addresses}
    if master is not None and not is_loopback(there := _resolved(master)) and there not in mine:
        if answers(master, number, timeout_s=2) is None:
            return ok(subject, f"something listens at {master}")
        text = f"nothing answers at {master}"
        return note(subject, text, "normal before rank 0 is started; else a firewall may be in the way")
    try:
        with socket.create_server(("", number)):
            pass
    except OSError as error:
        where = "MASTER_PORT" if port is not None else "torch's default for MASTER_PORT"
        text = f"{where}: cannot listen there: {error.strerror}"
        advice = "give another one: MASTER_PORT, or torchrun --master-port; torchrun --standalone finds a free one"
        return (problem if port is not None else note)(subject, text, advice)
    return ok(subject, f"free ({'MASTER_PORT' if port is not None else 'the default of MASTER_PORT'})")


def _resolved(host: str) -> str:
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return ""


def answers(host: str, port: int, *, timeout_s: float) -> str | None:
    """Return None if a TCP connection can be made, else why not."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return None
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
