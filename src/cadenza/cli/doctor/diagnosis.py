"""The examination: what is looked at, in which order, and where it has to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cadenza.cli.doctor.coordination import Coordinator
from cadenza.cli.doctor.findings import Finding, merge, note, ok, problem
from cadenza.cli.doctor.judging import (
    judge_broken,
    judge_clocks,
    judge_links,
    judge_ranks,
    judge_versions,
    judge_ways,
    leaders,
    listed,
    name_hosts,
)
from cadenza.cli.doctor.links import Link, pairs
from cadenza.cli.doctor.machine import inspect_machine, versions
from cadenza.cli.doctor.network import inspect_network
from cadenza.cli.doctor.place import Place

__all__ = ["Diagnosis", "examine_machine", "examine_ranks"]

_INSPECTION_S = 30.0
_TOGETHER_S = 0.4
_SMALLEST, _LARGEST = 1 << 16, 1 << 26
_KNOCKS = 64  # how many ranks of other hosts each rank tries to reach


@dataclass
class Diagnosis:
    """All that was found.

    Attributes:
        versions: Of Cadenza, torch and Python, on rank 0.
        hosts: Host by rank, of those that came; empty for a machine alone.
        ranks: How many ranks there should be.
        findings: What is to be said of everything that was looked at.
        links: The pairs that were measured.
        together: Bytes a second that each rank sends while all do, or None if that was not measured.
    """

    versions: dict[str, str]
    hosts: dict[int, str] = field(default_factory=dict)
    ranks: int = 0
    findings: list[Finding] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    together: float | None = None

    @property
    def problems(self) -> list[Finding]:
        """What has to be mended."""
        return [finding for finding in self.findings if finding.level == "problem"]

    @property
    def latency_s(self) -> float:
        """The one-way time of the slowest pair that was measured."""
        return max((link.latency_s for link in self.links), default=0.0)


def examine_machine(master: str | None, port: int | None) -> Diagnosis:
    """Look at this machine alone."""
    findings = inspect_machine(ranks_here=1, ranks=1)
    findings += inspect_network(hosts=None, master=master, port=port, store_runs=False)
    return Diagnosis(versions(), findings=findings)


def examine_ranks(
    coordinator: Coordinator,
    place: Place,
    card: Mapping[str, Any],
    *,
    timeout_s: float,
    seconds: float,
    report_progress: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Look at all ranks, from rank 0; stop where going on could only hang."""
    report_progress(f"waiting for {place.ranks} ranks")
    cards = coordinator.collect_cards(card, timeout_s)
    hosts = name_hosts({rank: (card["host"], card["host_name"]) for rank, card in cards.items()})
    diagnosis = Diagnosis(versions(), hosts, place.ranks)
    report_progress(f"looking at {len(set(hosts.values()))} hosts")
    diagnosis.findings = _inspect_hosts(coordinator, hosts, networks=len({card["network"] for card in cards.values()}))
    diagnosis.findings.append(judge_ranks(place, hosts))
    diagnosis.findings += judge_versions(cards, hosts)
    if place.ranks > 1 and _can_meet(coordinator, place, cards, hosts, diagnosis, timeout_s, report_progress):
        _measure_links(coordinator, diagnosis, timeout_s, seconds, report_progress)
        diagnosis.findings += judge_clocks(diagnosis.links, hosts)
        diagnosis.findings += judge_links(diagnosis.links, hosts, diagnosis.together)
    return diagnosis


def _inspect_hosts(coordinator: Coordinator, hosts: Mapping[int, str], networks: int) -> list[Finding]:
    ranks_on = {host: list(hosts.values()).count(host) for host in hosts.values()}
    orders = {
        rank: {"do": "inspect", "networks": networks, "ranks_here": ranks_on[hosts[rank]]} for rank in leaders(hosts)
    }
    found = coordinator.order(orders, _INSPECTION_S)
    by_host = {hosts[rank]: [Finding.from_plain(item) for item in items] for rank, items in found.items()}
    return merge(by_host)


# ---- can they meet? -------------------------------------------------------------------------------------------------


def _can_meet(
    coordinator: Coordinator,
    place: Place,
    cards: Mapping[int, Any],
    hosts: Mapping[int, str],
    diagnosis: Diagnosis,
    timeout_s: float,
    report_progress: Callable[[str], None],
) -> bool:
    """Find out step by step whether a process group can be made, and make it."""
    blocking = ("ranks", "Gloo address", "MASTER_ADDR", "ports", "backends")
    if any(finding.subject in blocking for finding in diagnosis.problems):
        diagnosis.findings.append(note("links", "not measured, because of the problems above"))
        return False
    report_progress("knocking at the ranks' ports")
    if blocked := _knock(coordinator, cards, hosts):
        diagnosis.findings.append(blocked)
        return False
    report_progress("making a process group")
    answers = coordinator.order({rank: {"do": "connect"} for rank in cards}, 2 * timeout_s + 10)
    failed = {rank: answer["failed"] for rank, answer in answers.items() if answer}
    failed |= {rank: "no answer" for rank in cards if rank not in answers}
    if failed:
        rank, why = next(iter(failed.items()))
        text = f"could not be made on {listed('rank', list(failed))} of {place.ranks}; rank {rank} says: {why}"
        advice = "if an address in this message is not one that the others reach, set GLOO_SOCKET_IFNAME on its host"
        diagnosis.findings.append(problem("process group", text, advice))
        return False
    diagnosis.findings.append(ok("process group", "all ranks are connected with each other"))
    return True


def _knock(coordinator: Coordinator, cards: Mapping[int, Any], hosts: Mapping[int, str]) -> Finding | None:
    """Let a rank of each host try to reach the others where Gloo will be."""
    first = leaders(hosts)[: _KNOCKS + 1]
    doors = {rank: (cards[rank]["address"], cards[rank]["port"]) for rank in first}
    orders = {me: {"do": "knock", "at": {str(peer): doors[peer] for peer in first if peer != me}} for me in first}
    failures = [
        (me, int(peer), why)
        for me, answer in coordinator.order(orders, 5.0 * len(first) + 10).items()
        for peer, why in answer.items()
    ]
    return judge_ways(failures, cards, hosts) if failures else None


# ---- what do they carry? --------------------------------------------------------------------------------------------


def _measure_links(
    coordinator: Coordinator,
    diagnosis: Diagnosis,
    timeout_s: float,
    seconds: float,
    report_progress: Callable[[str], None],
) -> None:
    ranks = len(diagnosis.hosts)
    total = ranks * (ranks - 1) // 2
    end = time.monotonic() + seconds
    for number, (a, b) in enumerate(pairs(ranks, leaders(diagnosis.hosts)[1:])):
        if number and time.monotonic() > end:
            break
        report_progress(f"measuring ranks {a} and {b} (link {number + 1} of {total})")
        orders = {a: {"do": "measure", "peer": b}, b: {"do": "measure", "peer": a}}
        answers = coordinator.order(orders, timeout_s)
        if any(rank not in answers or (answers[rank] and "failed" in answers[rank]) for rank in (a, b)):
            diagnosis.findings.append(judge_broken(a, b, diagnosis.hosts, answers))
            return
        diagnosis.links.append(Link(**answers[a]))
    report_progress("letting all ranks send at once")
    slowest = min(min(link.to_a, link.to_b) for link in diagnosis.links)
    size = int(min(_LARGEST, max(_SMALLEST, slowest * _TOGETHER_S / 2)))
    answers = coordinator.order({rank: {"do": "together", "bytes": size} for rank in diagnosis.hosts}, timeout_s)
    rates = [answer for answer in answers.values() if isinstance(answer, float)]
    if len(rates) == ranks:
        diagnosis.together = min(rates)
