"""What the doctor concludes, from what it is shown."""

from __future__ import annotations

import io
import json
import resource
import shutil
import socket
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cadenza.cli.app import main
from cadenza.cli.doctor import machine, network
from cadenza.cli.doctor.advice import plan
from cadenza.cli.doctor.diagnosis import Diagnosis, examine_machine
from cadenza.cli.doctor.findings import Finding, merge, note, ok, problem
from cadenza.cli.doctor.judging import judge_clocks, judge_links, judge_ranks, judge_versions, judge_ways
from cadenza.cli.doctor.links import Link, pairs
from cadenza.cli.doctor.machine import judge_threads
from cadenza.cli.doctor.network import GlooAddress, Interface, gloo_address, inspect_network, judge_gloo, suggested
from cadenza.cli.doctor.place import Place
from cadenza.cli.doctor.showing import plan_in_words, show, to_plain
from cadenza.codecs import Codec
from cadenza.errors import UsageError

LO = Interface("lo", up=True, addresses=("127.0.0.1",), speed_mbit=0, mtu=65536)
ETH = Interface("eth0", up=True, addresses=("10.0.0.7",), speed_mbit=1000, mtu=1500)
IB = Interface("ib0", up=False, addresses=("10.1.0.7",), speed_mbit=40000, mtu=2044)
RANKS = Place(rank=0, ranks=4, local_rank=0, master="10.0.0.7", port=29500, agent=True, attempt="0")


def link(a: int, b: int, rate: float = 1e6, **figures: float) -> Link:
    given = {"latency_s": 1e-3, "to_b": rate, "to_a": rate, "offset_s": 0.0, "uncertainty_s": 1e-3, **figures}
    return Link(a, b, **given)


# ---- one machine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "ranks", "setting", "threads", "level", "advice"),
    [
        (8, 4, "2", 2, "ok", ""),
        (8, 1, None, 8, "ok", ""),
        (2, 4, "1", 1, "note", "fewer ranks"),
        (8, 4, None, 8, "note", "export OMP_NUM_THREADS=2"),
        (16, 4, "1", 1, "note", "export OMP_NUM_THREADS=4"),
        (8, 4, "many", 8, "note", "export OMP_NUM_THREADS=2"),
    ],
)
def test_threads_are_held_against_processors(
    cores: int, ranks: int, setting: str | None, threads: int, level: str, advice: str
) -> None:
    found = judge_threads(cores, ranks, setting, threads)
    assert found.level == level
    assert advice in found.advice


def test_versions_below_what_the_package_asks_for_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "versions", lambda: {"torch": "2.1.0"})
    monkeypatch.setattr(machine.platform, "python_version", lambda: "3.9.1")
    found = {f.subject: f for f in machine.inspect_machine(ranks_here=1, ranks=1)}
    assert found["torch"].level == found["Python"].level == "problem"
    assert ">=2.13" in found["torch"].text


@pytest.mark.parametrize(
    ("environment", "advice"),
    [({"CADENZA_NATIVE": "0"}, "unset CADENZA_NATIVE"), ({"PATH": "", "CC": ""}, "install gcc")],
)
def test_codecs_without_machine_code_are_noted(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], advice: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("cadenza.codecs.native.kernels", lambda: None)
    found = machine._codecs()
    assert found.level == "note"
    assert advice in found.advice


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    version = machine.metadata.version

    def without_plotly(name: str) -> str:
        if name == "plotly":
            raise machine.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(machine.metadata, "version", without_plotly)
    found = machine._packages()
    assert (found.level, found.text) == ("note", "plotly is missing")
    assert "cadenza[cli]" in found.advice


@pytest.mark.parametrize(("limit", "ranks", "level"), [(20000, 4, "ok"), (600, 4, "note"), (1024, 500, "problem")])
def test_every_rank_needs_open_files(monkeypatch: pytest.MonkeyPatch, limit: int, ranks: int, level: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, 1 << 20))
    found = machine._files(ranks)
    assert found.level == level
    assert level == "ok" or "ulimit -n 65536" in found.advice


@pytest.mark.parametrize(("free", "level"), [(50e9, "ok"), (5e9, "note"), (0.5e9, "problem")])
def test_a_full_disk_is_seen(monkeypatch: pytest.MonkeyPatch, free: float, level: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=1e12))
    assert machine._disk().level == level


def test_little_shared_memory_is_a_note_that_speaks_of_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64e6, total=64e6))
    [found] = machine._room_in_shm()
    assert found.level == "note"
    assert "--shm-size" in found.advice


def test_a_switched_off_transport_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENZA_SHARED_MEMORY", "0")
    assert machine._shared_memory().level == "note"


# ---- its network ----------------------------------------------------------------------------------------------------


def test_gloo_takes_the_interface_it_is_told() -> None:
    assert gloo_address([LO, ETH], "eth0", "anything").address == "10.0.0.7"


def test_an_interface_that_does_not_exist_is_a_problem_that_names_one_that_does() -> None:
    chosen = gloo_address([LO, ETH], "eth9", "anything")
    found = judge_gloo([LO, ETH], chosen, "eth0", hosts=2)
    assert found.level == "problem"
    assert "GLOO_SOCKET_IFNAME=eth9" in found.text
    assert "lo, eth0" in found.text
    assert found.advice == "export GLOO_SOCKET_IFNAME=eth0"


def test_an_interface_that_is_down_is_a_problem() -> None:
    found = judge_gloo([LO, ETH, IB], gloo_address([LO, ETH, IB], "ib0", "anything"), "eth0", hosts=None)
    assert found.level == "problem"
    assert "down" in found.text


@pytest.mark.parametrize(("hosts", "level"), [(1, "ok"), (None, "note"), (2, "problem")])
def test_a_loopback_address_is_a_trap_between_hosts(hosts: int | None, level: str) -> None:
    found = judge_gloo([LO, ETH], GlooAddress("127.0.1.1", "lo", "the host name resolves to it"), "eth0", hosts)
    assert found.level == level
    assert hosts == 1 or "export GLOO_SOCKET_IFNAME=eth0" in found.advice


def test_a_host_name_that_does_not_resolve_ends_in_loopback() -> None:
    assert gloo_address([LO, ETH], None, "no-such-host.invalid").address == "127.0.0.1"


def test_the_interface_on_the_way_to_the_master_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    docker = Interface("docker0", up=True, addresses=("172.17.0.1",), speed_mbit=10000, mtu=1500)
    monkeypatch.setattr(network, "_local_end", lambda target: "10.0.0.7" if target == "10.0.0.1" else "172.17.0.1")
    assert suggested([LO, docker, ETH], "10.0.0.1") == "eth0"
    assert suggested([LO, docker, ETH]) == "docker0"
    monkeypatch.setattr(network, "_local_end", lambda target: "")
    assert suggested([LO, ETH, IB]) == "eth0"  # ib0 is faster, but down
    assert suggested([LO]) is None


def test_a_port_in_use_is_a_problem_if_it_is_the_master_s() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        found = {f.subject: f for f in inspect_network(hosts=None, master="127.0.0.1", port=port, store_runs=False)}
    assert found[f"port {port}"].level == "problem"
    assert "MASTER_PORT" in found[f"port {port}"].advice


def test_a_master_that_cannot_be_resolved_is_a_problem() -> None:
    findings = inspect_network(hosts=None, master="no-such-host.invalid", port=29500, store_runs=True)
    assert [f.level for f in findings if f.subject == "MASTER_ADDR"] == ["problem"]


def test_a_loopback_master_is_a_problem_between_hosts() -> None:
    findings = inspect_network(hosts=2, master="127.0.0.1", port=29500, store_runs=True)
    assert [f.level for f in findings if f.subject == "MASTER_ADDR"] == ["problem"]


def test_this_machine_has_no_problem_that_keeps_tests_from_running() -> None:
    subjects = {f.subject for f in examine_machine(None, None).problems}
    assert not subjects & {"Python", "torch", "backends", "ports"}


# ---- many ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", range(2, 10))
def test_every_pair_has_its_turn_once_and_ranks_take_turns(ranks: int) -> None:
    order = list(pairs(ranks))
    assert sorted(order) == [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]
    turn = ranks // 2
    for start in range(0, len(order), turn):
        assert max(Counter(rank for pair in order[start : start + turn] for rank in pair).values()) == 1


def test_hosts_come_first() -> None:
    assert list(pairs(6, first=[2, 4]))[:2] == [(0, 2), (0, 4)]
    assert len(set(pairs(6, first=[2, 4]))) == 15


def test_what_all_hosts_share_is_said_once() -> None:
    same, other = ok("torch", "2.13"), note("disk", "full", "make room")
    merged = merge({"a": [same, other], "b": [same], "c": [same, other]})
    assert merged == [same, Finding("note", "disk", "full", "make room", ("a", "c"))]


def test_a_rank_that_is_not_there_is_named() -> None:
    found = judge_ranks(RANKS, {0: "a", 2: "b"})
    assert found.level == "problem"
    assert "ranks 1 and 3 of 4" in found.text
    assert "10.0.0.7:29500" in found.advice
    assert judge_ranks(RANKS, dict.fromkeys(range(4), "a")).level == "ok"


def card(**given: Any) -> dict[str, Any]:
    versions = {"cadenza": "0.1.0", "torch": "2.13.0", "python": "3.11.7", **given.pop("versions", {})}
    return {"versions": versions, "mtu": 1500, "reachable": True, **given}


def test_versions_that_differ_are_told_with_their_hosts() -> None:
    hosts = {0: "a", 1: "b", 2: "b"}
    assert judge_versions({rank: card() for rank in hosts}, hosts) == []
    cards = {0: card(), 1: card(versions={"torch": "2.6.0"}, mtu=9000), 2: card(versions={"torch": "2.6.0"}, mtu=9000)}
    torch, mtu = judge_versions(cards, hosts)
    assert (torch.level, torch.text) == ("problem", "2.13.0 on a; 2.6.0 on b")
    assert (mtu.level, mtu.text) == ("note", "differs: 1500 on a; 9000 on b")


def test_a_closed_way_names_both_ends_and_the_interface_to_take() -> None:
    hosts = {0: "a", 1: "b"}
    at = {"address": "172.17.0.1", "port": 4000, "interface": "docker0"}
    found = judge_ways([(0, 1, "no answer")], {0: card(), 1: card(**at, suggested="eth0")}, hosts)
    assert found.text == "a cannot reach b at 172.17.0.1:4000 (docker0): no answer"
    assert found.advice == "on b: export GLOO_SOCKET_IFNAME=eth0"
    found = judge_ways([(0, 1, "no answer")], {0: card(), 1: card(**at, suggested="docker0")}, hosts)
    assert "firewall" in found.advice


@pytest.mark.parametrize(
    ("offset", "uncertainty", "level"),
    [(0.001, 0.002, "ok"), (0.3, 0.5, "ok"), (0.3, 0.001, "note"), (-30.0, 0.1, "problem")],
)
def test_clocks_are_judged_by_what_is_sure(offset: float, uncertainty: float, level: str) -> None:
    [found] = judge_clocks([link(0, 1, offset_s=offset, uncertainty_s=uncertainty)], {0: "a", 1: "b"})
    assert found.level == level
    assert ("b is 30.00 s behind a" in found.text) == (level == "problem")


def test_one_host_has_one_clock() -> None:
    assert judge_clocks([link(0, 1, offset_s=30)], {0: "a", 1: "a"}) == []


def test_a_link_much_slower_than_the_others_is_noted() -> None:
    links = [link(0, 1), link(0, 2), link(1, 2, to_a=1e5)]
    [found] = judge_links(links, {0: "a", 1: "b", 2: "c"}, together=None)
    assert found.level == "note"
    assert "rank 2 to rank 1, 800 kbit/s" in found.text
    assert "c and b" in found.advice


def test_fast_hosts_on_slow_links_are_worth_a_level() -> None:
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    links = [link(a, b, rate=1e9 if hosts[a] == hosts[b] else 1e7) for a, b in pairs(4)]
    found = {f.subject: f for f in judge_links(links, hosts, together=5e6)}
    assert "100 times" in found["levels"].text
    assert "hierarchical" in found["levels"].advice
    assert "40 Mbit/s" in found["all at once"].text


# ---- which period and codec -----------------------------------------------------------------------------------------


def handling_s(codec: Codec, ranks: int) -> float:
    """What this machine takes when it is quiet, roughly."""
    return 1e-9 if codec.exact else 4e-9


@pytest.mark.parametrize(("rate", "choice"), [(1e10, "fp32"), (12.5e6, "int8"), (1e6, None)])
def test_slower_links_ask_for_fewer_bytes(rate: float, choice: str | None) -> None:
    made = plan(10_000_000, 0.2, 0.05, ranks=4, rate=rate, latency_s=1e-4, handling_s=handling_s)
    assert made.choice == choice
    assert [cost.bytes_sent for cost in made.costs] == sorted((c.bytes_sent for c in made.costs), reverse=True)


def test_the_period_keeps_rounds_within_their_share() -> None:
    made = plan(124_000_000, 0.5, 0.05, ranks=2, rate=12.5e6, latency_s=1e-3, handling_s=handling_s)
    for cost in made.costs:
        taken = cost.seconds / (cost.seconds + cost.period * made.step_s)
        one_less = cost.seconds / (cost.seconds + (cost.period - 1) * made.step_s)
        assert taken <= 0.05 < one_less
    words = " ".join(plan_in_words(made, one_host=False))
    assert f"cadenza train --strategy diloco --codec int8 --period {made.chosen.period}" in words


# ---- the report -----------------------------------------------------------------------------------------------------


def printed(diagnosis: Diagnosis) -> str:
    file = io.StringIO()
    show(diagnosis, None, Console(file=file, width=100))
    return file.getvalue()


def test_problems_can_be_told_without_colours_and_come_first_in_what_to_do() -> None:
    findings = [ok("torch", "2.13"), note("disk", "filling", "make room"), problem("ranks", "gone", "start them")]
    text = printed(Diagnosis({"torch": "2.13"}, {0: "a"}, 2, findings))
    assert "1 of 2 ranks on 1 host" in text
    assert "PROBLEM  ranks" in text
    assert text.index("1. ranks: start them") < text.index("2. disk: make room")
    assert "1 problem to mend" in text


def test_square_brackets_in_findings_are_shown() -> None:
    text = printed(Diagnosis({}, {0: "a", 1: "b"}, 2, [Finding("note", "disk", "full", "", ("a [1]",))]))
    assert "full [a [1]]" in text


def test_a_matrix_shows_both_directions_and_what_was_not_measured() -> None:
    found = Diagnosis({}, {0: "a", 1: "a", 2: "b"}, 3, [], [link(0, 1, to_b=1e6, to_a=2e6)])
    text = printed(found)
    assert "8 Mbit/s" in text
    assert "16 Mbit/s" in text
    assert "? was not measured" in text


def test_many_ranks_are_shown_by_host() -> None:
    hosts = {rank: "ab"[rank // 6] for rank in range(12)}
    text = printed(Diagnosis({}, hosts, 12, [], [link(a, b) for a, b in pairs(12)]))
    assert "rank 11" not in text
    assert text.count("8 Mbit/s") == 4  # inside a, inside b, and both ways between


def test_scripts_get_everything() -> None:
    found = Diagnosis({"torch": "2.13"}, {0: "a", 1: "b"}, 2, [problem("x", "y", "z")], [link(0, 1)], together=1e6)
    made = plan(1_000_000, 0.5, 0.05, ranks=2, rate=1e6, latency_s=0)
    plain = json.loads(json.dumps(to_plain(found, made)))
    assert plain["problems"] == 1
    assert plain["links"][0]["bytes_per_s_to_a"] == 1e6
    assert plain["plan"]["costs"][0]["codec"] == "fp32"


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parameters", "124Q", "--step-seconds", "1"], "124Q"),
        (["--parameters", "124M"], "--step-seconds"),
        (["--parameters", "124M", "--step-seconds", "-1"], "more than 0"),
        (["--share", "200"], "between 0 and 100"),
        (["--backend", "mpi"], "gloo or nccl"),
        (["--seconds", "0"], "more than 0"),
    ],
)
def test_bad_input_is_told_in_a_paragraph(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert not said.out


def test_half_a_launcher_s_environment_is_told(alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    alone.setenv("RANK", "0")
    assert run() == 2
    assert "WORLD_SIZE" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_numbers_of_the_environment_are_checked(name: str) -> None:
    good = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    assert Place.from_environment(good) is not None
    for bad in ("x", "-1", "99999999" if name != "WORLD_SIZE" else "1"):
        with pytest.raises(UsageError, match=name):
            Place.from_environment({**good, name: bad})


def test_a_machine_alone_is_examined(alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code = run("--json")
    found = json.loads(capsys.readouterr().out)
    assert code == (1 if found["problems"] else 0)
    assert {"Python", "torch", "backends", "interfaces", "Gloo address"} <= {f["subject"] for f in found["findings"]}


def rank_one(alone: pytest.MonkeyPatch, port: int) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        alone.setenv(name, str(value))


def test_a_rank_without_rank_0_says_so(alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    rank_one(alone, port)
    assert run("--timeout", "0.3") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "Rank 1 cannot reach rank 0's store at MASTER_ADDR=127.0.0.1" in said
    assert "means each host itself" in said


def test_a_port_where_something_else_listens_is_told(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        rank_one(alone, server.getsockname()[1])
        assert run("--timeout", "0.5") == 1
    assert "no store of torch answers there" in " ".join(capsys.readouterr().err.split())


def test_a_port_in_use_is_told_by_rank_0(alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as server:
        rank_one(alone, server.getsockname()[1])
        alone.setenv("RANK", "0")
        assert run("--timeout", "0.5") == 1
    assert "is in use by another program" in " ".join(capsys.readouterr().err.split())
