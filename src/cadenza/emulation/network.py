"""A network of hosts on one machine, which exists inside a ``with`` block."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Self

from cadenza.emulation.cables import Cable, lay
from cadenza.emulation.hosts import INTERFACE, Host
from cadenza.emulation.tools import PATH, call, environment
from cadenza.errors import CadenzaError

__all__ = ["Network", "available"]

_PREFIX = "cadenza"
# Waits until its input ends, which is when the network's owner closes it or is gone; then ends what runs in the
# namespaces, and removes them. The interfaces go with them.
_GUARD = """
read -r _
for name in "$@"; do
    [ -e "/run/netns/$name" ] || continue
    for process in $(ip netns pids "$name"); do kill -9 "$process"; done
    ip netns delete "$name"
done
"""
_MASTER_PORT = 29500  # every network has ports of its own, so this one is always free


@functools.cache
def available() -> str | None:
    """Return why networks cannot be emulated here, or None if they can.

    >>> reason = available()
    >>> reason is None or "emulat" in reason
    True
    """
    if sys.platform != "linux":
        return f"Emulating a network needs Linux's network namespaces; this is {sys.platform}."
    if os.geteuid() != 0:
        return (
            "Emulating a network needs root, to make network namespaces; run it with sudo, or in a container as root."
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool, path=PATH) is None]
    if missing:
        return f"Emulating a network needs {' and '.join(missing)}; install iproute2."
    trial = Network([1, 1], rate="1gbit", between="1gbit")
    try:
        trial.build()
        return None
    except CadenzaError as error:
        return f"Emulating a network does not work here, though this is root: {error}"
    finally:
        trial.remove()


class Network:
    """A network that exists inside a ``with`` block.

    Two networks may exist at once: their hosts have the same addresses and do not see each other.

    Args:
        hosts: How many, or how many at each site: ``[2, 2]`` is two sites of two hosts.
        rate: What a host's link carries in each direction, in `tc`'s words ("100mbit", "1gbit"); None: no limit.
        between: The same for a site's link to the other sites.
        rtt_ms: The round trip from one host to another of the same site, in milliseconds, when nothing else is sent.
        between_rtt_ms: What is added to it from one site to another.

    >>> with Network(2, rate="100mbit") as network:  # doctest: +SKIP
    ...     [host.address for host in network.hosts]
    ['10.77.0.1', '10.77.0.2']
    """

    def __init__(
        self,
        hosts: int | Sequence[int],
        *,
        rate: str | None = None,
        between: str | None = None,
        rtt_ms: float = 0.0,
        between_rtt_ms: float = 0.0,
    ) -> None:
        self.sites = [hosts] if isinstance(hosts, int) else list(hosts)
        if not self.sites or not all(1 <= count <= 250 for count in self.sites) or len(self.sites) > 250:
            raise ValueError(f"A network has 1 to 250 sites of 1 to 250 hosts each; got {hosts}.")
        if len(self.sites) == 1 and (between is not None or between_rtt_ms):
            raise ValueError("between is about the links between sites, and there is one site; give hosts as [2, 2].")
        self.rate, self.between = _check_rate("rate", rate), _check_rate("between", between)
        self.rtt_ms = _check_rtt("rtt_ms", rtt_ms)
        self.between_rtt_ms = _check_rtt("between_rtt_ms", between_rtt_ms)
        self._relay: subprocess.Popen[str] | None = None
        self._guard: subprocess.Popen[str] | None = None
        self._name = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
        self._switch = f"{self._name}-sw"
        self.hosts = tuple(
            Host(f"{self._name}-h{number}", f"10.77.{site}.{place + 1}", site)
            for number, (site, place) in enumerate(
                (site, place) for site, count in enumerate(self.sites) for place in range(count)
            )
        )

    def __enter__(self) -> Self:
        if (reason := available()) is not None:
            raise CadenzaError(reason)
        try:
            self.build()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    # ---- what users call -------------------------------------------------------------------------------------------

    def environment(self, rank: int) -> dict[str, str]:
        """Return what torchrun would tell the rank on the host of that number, and which interface Gloo is to use."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "GROUP_RANK": str(rank),
            "WORLD_SIZE": str(len(self.hosts)),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": str(_MASTER_PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def start(
        self, rank: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command as one rank, on the host of that number, and return its process.

        Args:
            rank: The rank, and the number of its host.
            argv: The command.
            env: Environment variables, beside this process's own.
            options: More arguments of `subprocess.Popen`, such as stdout.
        """
        known = {**os.environ, "PATH": PATH, **(env or {}), **self.environment(rank)}
        return subprocess.Popen(self.hosts[rank].command(argv), env=known, **options)

    def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> list[str]:
        """Run a command as one rank on every host, and return what each wrote to its standard output.

        Args:
            argv: The command; the same on all hosts, which differ by their environment.
            env: Environment variables for all of them, beside this process's own.
            timeout_s: After so long, all are ended and TimeoutError is raised.

        Raises:
            CadenzaError: One of them failed. The others are ended, and the message holds the end of its standard error.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2 * len(self.hosts))]
            ranks: list[subprocess.Popen[str]] = []
            stack.callback(_end, ranks)
            for rank in range(len(self.hosts)):
                out, err = files[2 * rank], files[2 * rank + 1]
                ranks.append(self.start(rank, argv, env=env, stdout=out, stderr=err, text=True))
            while None in (codes := [process.poll() for process in ranks]) and not any(codes):
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{argv[0]} did not end within {timeout_s:g} s on all hosts.")
                time.sleep(0.02)
            for rank, code in enumerate(codes):
                if code:
                    error = _text(files[2 * rank + 1])[-4000:]
                    raise CadenzaError(f"{argv[0]} failed on host {rank} with code {code}:\n{error}")
            return [_text(file) for file in files[::2]]

    def cut(self, host: Host) -> None:
        """Take a host's cable out of the switch: packets are lost and nobody is told; `heal` puts it back."""
        self._ip("-n", self._switch, "link", "set", self._port(host), "nomaster")

    def heal(self, host: Host) -> None:
        """Put a host's cable back into the switch."""
        self._ip("-n", self._switch, "link", "set", self._port(host), "master", f"site{host.site}")

    def cut_site(self, site: int) -> None:
        """Cut a site off from the others; inside it nothing changes."""
        self._ip("-n", self._switch, "link", "set", f"up{self._uplink(site)}", "nomaster")

    def heal_site(self, site: int) -> None:
        """Connect a site with the others again."""
        uplink = self._uplink(site)
        self._ip("-n", self._switch, "link", "set", f"up{uplink}", "master", f"site{uplink}")

    # ---- making and removing ---------------------------------------------------------------------------------------

    def build(self) -> None:
        """Make the namespaces and the links; a ``with`` block does it, and takes them away again."""
        command = ["sh", "-c", _GUARD, "guard", self._switch, *(host.name for host in self.hosts)]
        self._guard = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment(),
            text=True,
            start_new_session=True,  # what ends this program, such as Ctrl-C, does not end it
        )
        self._ip("netns", "add", self._switch)
        for host in self.hosts:
            self._ip("netns", "add", host.name)
        self._relay = lay(list(self._cables()), trial=self._switch)
        for site in range(len(self.sites)):
            self._ip("-n", self._switch, "link", "add", f"site{site}", "type", "bridge", "forward_delay", "0")
            self._ip("-n", self._switch, "link", "set", f"site{site}", "addrgenmode", "none", "up")
            if site:
                for end, bridge in ((f"up{site}", f"site{site}"), (f"down{site}", "site0")):
                    self._ip("-n", self._switch, "link", "set", end, "master", bridge, "addrgenmode", "none", "up")
        for host in self.hosts:
            self._connect(host)

    def _connect(self, host: Host) -> None:
        port = self._port(host)
        self._ip("-n", self._switch, "link", "set", port, "master", f"site{host.site}", "addrgenmode", "none", "up")
        self._ip("-n", host.name, "link", "set", "lo", "up")
        self._ip("-n", host.name, "link", "set", INTERFACE, "addrgenmode", "none", "up")
        self._ip("-n", host.name, "address", "add", f"{host.address}/16", "dev", INTERFACE)

    def _cables(self) -> Iterator[Cable]:
        """Yield the cables from hosts to their bridges, and from the bridges of sites to the first site's."""
        for host in self.hosts:  # a round trip passes two of them, twice
            yield Cable((self._switch, self._port(host)), (host.name, INTERFACE), self.rate, self.rtt_ms / 4)
        for site in range(1, len(self.sites)):
            ends = (self._switch, f"up{site}"), (self._switch, f"down{site}")
            # From one of the others to another, it passes two such cables.
            crossings = 4 if len(self.sites) > 2 else 2
            yield Cable(*ends, self.between, self.between_rtt_ms / crossings)

    def remove(self) -> None:
        """End whatever still runs on the hosts, and remove all that `build` has made."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
            self._relay = None
        if self._guard is not None:
            _, complaint = self._guard.communicate()
            self._guard = None
            if complaint:
                raise CadenzaError(f"Not all of an emulated network could be removed: {complaint.strip()}")

    def _port(self, host: Host) -> str:
        return f"h{self.hosts.index(host)}"

    def _uplink(self, site: int) -> int:
        """Return the site whose cable connects this one with the others; the first has one only if there are two."""
        if not 0 <= site < len(self.sites) or len(self.sites) == 1:
            raise ValueError(f"Site {site} cannot be cut off: the network has {len(self.sites)} site(s).")
        if site:
            return site
        if len(self.sites) > 2:
            raise ValueError("Site 0 is where the links of all other sites end; cut those instead.")
        return 1

    @staticmethod
    def _ip(*arguments: str) -> None:
        call(["ip", *arguments])


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _check_rate(name: str, rate: str | None) -> str | None:
    if rate is None or re.fullmatch(r"\d+(\.\d+)?[kmg]?bit", rate):
        return rate
    raise ValueError(f'{name} is a number and a unit of bits a second, such as "100mbit" or "1gbit"; got {rate!r}.')


def _check_rtt(name: str, milliseconds: float) -> float:
    if 0 <= milliseconds < math.inf:
        return milliseconds
    raise ValueError(f"{name} is a number of milliseconds, 0 or more; got {milliseconds!r}.")
