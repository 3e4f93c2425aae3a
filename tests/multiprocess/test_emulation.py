"""Emulated networks: what their links carry, what they count, and that nothing is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cadenza import emulation
from cadenza.emulation import Host, Network
from cadenza.errors import CadenzaError

needs_network = pytest.mark.skipif(emulation.available() is not None, reason=str(emulation.available()))

RECEIVE = """
import socket, sys, time
with socket.create_server(("", int(sys.argv[1]))) as server:
    print("listening", flush=True)
    connection = server.accept()[0]
    total = 0
    while data := connection.recv(1 << 16):
        started = time.perf_counter() if not total else started
        total += len(data)
    print(total, time.perf_counter() - started)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[4])) as peer:
    peer.sendall(bytes(int(sys.argv[3])))
"""


def send(source: Host, target: Host, size: int, *, port: int = 4000, timeout_s: float = 20) -> float:
    """Send bytes from one host to another, and return how many arrived a second."""
    receive = target.command([sys.executable, "-c", RECEIVE, str(port)])
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        try:
            assert receiver.stdout.readline() == "listening\n"
            command = [sys.executable, "-c", SEND, target.address, str(port), str(size), str(timeout_s)]
            subprocess.run(source.command(command), check=True, timeout=60, capture_output=True)
            total, seconds = receiver.stdout.readline().split()
        finally:
            receiver.kill()
    assert int(total) == size
    return size / float(seconds)


ANSWER = """
import socket
with socket.create_server(("", 4100)) as server:
    print("listening", flush=True)
    connection = server.accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := connection.recv(1):
        connection.send(data)
"""
ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 4100), timeout=20) as peer:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips = []
    for _ in range(10):
        started = time.perf_counter()
        peer.send(b"x")
        peer.recv(1)
        trips.append(time.perf_counter() - started)
    print(1000 * min(trips))
"""


def round_trip_ms(source: Host, target: Host) -> float:
    """Return the shortest of some round trips."""
    with subprocess.Popen(
        target.command([sys.executable, "-c", ANSWER]), stdout=subprocess.PIPE, text=True
    ) as answering:
        assert answering.stdout is not None
        try:
            assert answering.stdout.readline() == "listening\n"
            asking = source.command([sys.executable, "-c", ASK, target.address])
            return float(subprocess.run(asking, check=True, timeout=60, capture_output=True, text=True).stdout)
        finally:
            answering.kill()


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


def interfaces() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


@needs_network
def test_a_link_carries_what_its_rate_says() -> None:
    with Network(2, rate="100mbit") as fast, Network(2, rate="10mbit") as slow:
        fast_rate = send(*fast.hosts, 4_000_000)
        slow_rate = send(*slow.hosts, 1_500_000)
    assert 0.4 < slow_rate / 1.25e6 < 1.3
    assert 3 < fast_rate / slow_rate < 16


@needs_network
def test_two_senders_share_what_the_receivers_link_lets_in() -> None:
    with Network(3, rate="20mbit") as network, ThreadPoolExecutor(2) as pool:
        first, *others = network.hosts
        rates = list(pool.map(lambda i: send(others[i], first, 2_000_000, port=4000 + i), range(2)))
    assert sum(rates) < 1.5 * 2.5e6  # the one that ends first leaves the link to the other


@needs_network
def test_bytes_are_counted_at_the_interface() -> None:
    with Network(2) as network:
        source, target = network.hosts
        sent, received = source.bytes_sent(), target.bytes_received()
        send(source, target, 3_000_000)
        # What TCP sends again, on a machine that is busy, counts too.
        assert 3_000_000 <= source.bytes_sent() - sent < 6_000_000
        assert 3_000_000 <= target.bytes_received() - received < 6_000_000
        assert target.bytes_sent() < 300_000


@needs_network
def test_sites_are_fast_inside_and_slow_between() -> None:
    with Network([2, 1], between="10mbit") as network:
        first, neighbour, distant = network.hosts
        inside = send(first, neighbour, 4_000_000)
        between = send(first, distant, 1_500_000)
    assert between < 1.3 * 1.25e6
    assert inside > 3 * between


@needs_network
def test_a_round_trip_takes_its_time_and_more_between_sites() -> None:
    with Network([2, 1], rate="100mbit", rtt_ms=40, between_rtt_ms=60) as network:
        first, neighbour, distant = network.hosts
        inside, between = round_trip_ms(first, neighbour), round_trip_ms(first, distant)
        rate = send(first, neighbour, 2_000_000)
    assert 40 <= inside < 90
    assert between >= 100
    assert 0.2 < rate / 12.5e6 < 1.3
    with Network([1, 1, 1], between_rtt_ms=60) as network:
        _, second, third = network.hosts
        assert round_trip_ms(second, third) >= 60
    with Network(2) as network:
        assert round_trip_ms(*network.hosts) < 20


@needs_network
@pytest.mark.parametrize("rtt_ms", [0, 2])
def test_a_cut_host_hears_nothing_until_it_is_healed(rtt_ms: float) -> None:
    with Network(2, rtt_ms=rtt_ms) as network:
        source, target = network.hosts
        network.cut(target)
        with pytest.raises(subprocess.CalledProcessError):
            send(source, target, 1, timeout_s=0.5)
        network.heal(target)
        send(source, target, 1)


@needs_network
@pytest.mark.parametrize("site", [0, 1])
def test_a_cut_site_works_inside(site: int) -> None:
    with Network([2, 2]) as network:
        first, neighbour, distant, its_neighbour = network.hosts
        network.cut_site(site)
        with pytest.raises(subprocess.CalledProcessError):
            send(first, distant, 1, timeout_s=0.5)
        send(first, neighbour, 1)
        send(distant, its_neighbour, 1)
        network.heal_site(site)
        send(first, distant, 1)


@needs_network
def test_two_networks_at_once_do_not_see_each_other() -> None:
    with Network(2) as one, Network(1) as other:
        assert one.hosts[0].address == other.hosts[0].address
        assert not {host.name for host in one.hosts} & {host.name for host in other.hosts}
        send(*one.hosts, 1)
        assert other.hosts[0].bytes_received() < 1000
        with pytest.raises(subprocess.CalledProcessError):
            send(other.hosts[0], one.hosts[1], 1, timeout_s=0.5)


@needs_network
def test_nothing_is_left_after_an_exception() -> None:
    before = interfaces()
    network = Network(2, rate="1gbit")

    def fail() -> None:
        with network:
            started.append(subprocess.Popen(network.hosts[0].command(["sleep", "60"])))
            wait_until(lambda: str(started[0].pid) in pids(network.hosts[0]))
            assert interfaces() == before
            raise KeyError("a mistake of the user's")

    started: list[subprocess.Popen[bytes]] = []
    with pytest.raises(KeyError):
        fail()
    assert started[0].wait(timeout=10) == -signal.SIGKILL
    assert not [name for name in namespaces() if name.startswith(network.hosts[0].name[:-2])]
    assert interfaces() == before


@needs_network
def test_nothing_is_left_of_a_network_that_could_not_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(3)
    link = Network._connect

    def fail_at_the_second(self: Network, host: Host) -> None:
        link(self, host)
        if host is network.hosts[1]:
            raise CadenzaError("no more")

    monkeypatch.setattr(Network, "_connect", fail_at_the_second)
    with pytest.raises(CadenzaError, match="no more"), network:
        pass
    assert not [name for name in namespaces() if name.startswith(network.hosts[0].name[:-2])]


@needs_network
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_nothing_is_left_of_a_program_that_was_killed(how: str) -> None:
    script = """if True:
        import os, signal, subprocess, sys
        from cadenza.emulation import Network
        with Network(1, rtt_ms=2) as network:
            subprocess.Popen(network.hosts[0].command(["sleep", "60"]))
            print(network.hosts[0].name, flush=True)
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    """
    command = [sys.executable, "-c", script, how]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -getattr(signal, how)
    assert done.stdout.strip()
    wait_until(lambda: not [name for name in namespaces() if name.startswith(done.stdout.strip()[:-2])])


RANK = """
import torch, torch.distributed as dist
from cadenza.model_averaging.utils import average_parameters
from cadenza.transports import C10dTransport, connect
dist.init_process_group("gloo")
value = torch.nn.Parameter(torch.full((100_000,), float(dist.get_rank())))
average_parameters(iter([value]), dist.group.WORLD)
print(float(value[0]), isinstance(connect(dist.group.WORLD), C10dTransport))
dist.destroy_process_group()
"""


@needs_network
def test_ranks_on_different_hosts_average_over_the_network() -> None:
    with Network(2) as network:
        outputs = network.run([sys.executable, "-c", RANK], env=environment(), timeout_s=100)
        assert outputs == ["0.5 True\n"] * 2
        assert all(400_000 <= host.bytes_sent() < 600_000 for host in network.hosts)


@needs_network
def test_a_rank_that_fails_ends_the_others_and_is_named() -> None:
    script = "import os, sys, time; sys.exit('out of luck') if os.environ['RANK'] == '1' else time.sleep(60)"
    with Network(2) as network, pytest.raises(CadenzaError, match=r"host 1 with code 1:\nout of luck"):
        network.run([sys.executable, "-c", script], timeout_s=50)


@needs_network
def test_ranks_that_take_too_long_are_ended() -> None:
    with Network(1) as network:
        with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
            network.run(["sleep", "60"], timeout_s=0.2)
        assert pids(network.hosts[0]) == []


@needs_network
def test_a_network_from_the_shell(capfd: pytest.CaptureFixture[str]) -> None:
    emulation.main(["--hosts", "2", "--rate", "1gbit", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE"])
    printed = capfd.readouterr()
    assert printed.out == "0 of 2\n"
    assert "10.77.0.2 sent" in printed.err


@pytest.mark.parametrize(
    ("hosts", "options", "words"),
    [
        (0, {}, "1 to 250"),
        ([2, 0], {}, "1 to 250"),
        (2, {"rate": "fast"}, "100mbit"),
        (2, {"rate": "100; reboot"}, "100mbit"),
        ([2], {"between": "1gbit"}, "one site"),
        (2, {"between_rtt_ms": 10}, "one site"),
        (2, {"rtt_ms": -1}, "0 or more"),
        (2, {"rtt_ms": float("nan")}, "0 or more"),
    ],
)
def test_a_network_that_cannot_be_is_refused(hosts: int | list[int], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Network(hosts, **options)


def test_without_root_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    emulation.available.cache_clear()
    try:
        with pytest.raises(CadenzaError, match=r"root|Linux"), Network(1):
            pass
    finally:
        emulation.available.cache_clear()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def pids(host: Host) -> list[str]:
    return subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True).stdout.split()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
