"""Cables between namespaces: pairs of interfaces with a rate and a latency.

Latency comes from ``tc … netem`` or, where the kernel lacks it, from a process that carries the frames (`relay`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cadenza.emulation.tools import call
from cadenza.errors import CadenzaError

__all__ = ["Cable", "lay"]

_BURST = "128kb"  # as much may pass at once; small against what a second carries, large against a timer's tick
_PATIENCE = "300ms"  # how long a packet may wait in the shaper before it is dropped
_IN_FLIGHT = "100000"  # packets that netem holds at most


@dataclass(frozen=True)
class Cable:
    """A cable between two interfaces, each named by its namespace and its name."""

    one: tuple[str, str]
    other: tuple[str, str]
    rate: str | None
    delay_ms: float


def lay(cables: Sequence[Cable], *, trial: str) -> subprocess.Popen[str] | None:
    """Lay cables, plain ones and those that take time; return the process that carries frames, if one must.

    Args:
        cables: The cables, between namespaces that are there.
        trial: A namespace on which may be tried what the kernel can do.
    """
    by_kernel = not any(cable.delay_ms for cable in cables) or _knows_netem(trial)
    late = [] if by_kernel else [cable for cable in cables if cable.delay_ms]
    relay = _start_relay(late) if late else None
    try:
        for cable in cables:
            if cable not in late:
                _lay_plain(cable)
            for namespace, interface in (cable.one, cable.other):
                _shape(namespace, interface, cable.rate, cable.delay_ms if by_kernel else 0.0)
    except BaseException:
        if relay is not None:
            relay.kill()
            relay.communicate()
        raise
    return relay


def _lay_plain(cable: Cable) -> None:
    (place, name), (other_place, other_name) = cable.one, cable.other
    call(["ip", "-n", place, "link", "add", name, "type", "veth", "peer", "name", other_name, "netns", other_place])


def _start_relay(cables: Sequence[Cable]) -> subprocess.Popen[str]:
    if not Path("/dev/net/tun").exists():
        raise CadenzaError("Latency needs the kernel's netem or /dev/net/tun, and there is neither.")
    told = [{"ends": [cable.one, cable.other], "delay_s": cable.delay_ms / 1000} for cable in cables]
    relay = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("relay.py")), json.dumps(told)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert relay.stdout is not None
    if relay.stdout.readline() != "ready\n":
        _, complaint = relay.communicate()
        raise CadenzaError(f"The process that carries frames did not start: {complaint.strip()[-500:]}")
    return relay


def _shape(namespace: str, interface: str, rate: str | None, delay_ms: float) -> None:
    add, place = ["tc", "-n", namespace, "qdisc", "add", "dev", interface], ["root"]
    if rate is not None:
        call([*add, *place, "handle", "1:", "tbf", "rate", rate, "burst", _BURST, "latency", _PATIENCE])
        place = ["parent", "1:1"]
    if delay_ms:
        call([*add, *place, "netem", "delay", f"{delay_ms}ms", "limit", _IN_FLIGHT])


def _knows_netem(namespace: str) -> bool:
    """Tell whether the kernel has netem, by trying it on a namespace's loopback."""
    try:
        call(["tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    except CadenzaError:
        return False
    call(["tc", "-n", namespace, "qdisc", "delete", "dev", "lo", "root"])
    return True
