"""What is concluded from what the ranks have told and measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cadenza.cli.amounts import bit_rate, duration
from cadenza.cli.doctor.findings import Finding, note, ok, problem
from cadenza.cli.doctor.links import Link
from cadenza.cli.doctor.place import Place, reaching

__all__ = [
    "judge_broken",
    "judge_clocks",
    "judge_links",
    "judge_ranks",
    "judge_versions",
    "judge_ways",
    "leaders",
    "listed",
    "name_hosts",
]

_SKEW_NOTED_S, _SKEW_S = 0.1, 2.0


def name_hosts(given: Mapping[int, tuple[str, str]]) -> dict[int, str]:
    """Return a name for each rank's host: its own, with the node's number if several have the same.

    >>> name_hosts({0: ("GROUP_RANK 0", "vm"), 1: ("GROUP_RANK 1", "vm")})
    {0: 'vm (node 0)', 1: 'vm (node 1)'}
    """
    nodes: dict[str, set[str]] = {}
    for node, name in given.values():
        nodes.setdefault(name, set()).add(node)
    return {
        rank: name if len(nodes[name]) == 1 else f"{name} (node {node.split()[-1]})"
        for rank, (node, name) in given.items()
    }


def leaders(hosts: Mapping[int, str]) -> list[int]:
    """Return the first rank of every host.

    >>> leaders({0: "a", 1: "a", 2: "b"})
    [0, 2]
    """
    first: dict[str, int] = {}
    for rank, host in sorted(hosts.items()):
        first.setdefault(host, rank)
    return list(first.values())


def judge_ranks(place: Place, hosts: Mapping[int, str]) -> Finding:
    """Say who is there and who is not."""
    count = len(set(hosts.values()))
    if absent := [rank for rank in range(place.ranks) if rank not in hosts]:
        text = f"{listed('rank', absent)} of {place.ranks} did not come in time"
        return problem("ranks", text, f"start them as the others are; if they run: {reaching(place)}")
    return ok("ranks", f"{place.ranks} of {place.ranks} are there, on {count} host{'s' * (count > 1)}")


def judge_versions(cards: Mapping[int, Any], hosts: Mapping[int, str]) -> list[Finding]:
    """Say where hosts differ in what should be equal."""
    findings = []
    for what, judged in (("cadenza", problem), ("torch", problem), ("python", note)):
        found = _by_value({rank: card["versions"][what] for rank, card in cards.items()}, hosts)
        if len(found) > 1:
            findings.append(judged(f"{what} versions", _told(found), f"install one version of {what} on all hosts"))
    sizes = _by_value({rank: card["mtu"] for rank, card in cards.items() if card["reachable"]}, hosts)
    if len(sizes) > 1:
        advice = "set one MTU on all hosts: large packets may get lost between them, which looks like a hang"
        findings.append(note("MTU", f"differs: {_told(sizes)}", advice))
    return findings


def _by_value(values: Mapping[int, Any], hosts: Mapping[int, str]) -> dict[Any, list[str]]:
    found: dict[Any, list[str]] = {}
    for rank, value in values.items():
        if hosts[rank] not in found.setdefault(value, []):
            found[value].append(hosts[rank])
    return found


def _told(found: Mapping[Any, Sequence[str]]) -> str:
    return "; ".join(f"{value} on {', '.join(places)}" for value, places in found.items())


def judge_ways(failures: Sequence[tuple[int, int, str]], cards: Mapping[int, Any], hosts: Mapping[int, str]) -> Finding:
    """Say who cannot reach whom, and why; a failure is (who, whom, why)."""
    me, peer, why = failures[0]
    card = cards[peer]
    address = f"{card['address']}:{card['port']} ({card['interface']})"
    text = f"{hosts[me]} cannot reach {hosts[peer]} at {address}: {why}"
    if len(failures) > 1:
        text += f"; {len(failures) - 1} more such ways are closed"
    if card["suggested"] not in (None, card["interface"]):
        return problem("ways", text, f"on {hosts[peer]}: export GLOO_SOCKET_IFNAME={card['suggested']}")
    advice = "let the hosts reach each other at all TCP ports, since Gloo opens ports of its own choice (firewall)"
    return problem("ways", text, advice)


def judge_broken(a: int, b: int, hosts: Mapping[int, str], answers: Mapping[int, Any]) -> Finding:
    """Say between whom the measuring ended."""
    why = next((answer["failed"] for answer in answers.values() if answer and "failed" in answer), "no answer")
    text = f"ranks {a} ({hosts[a]}) and {b} ({hosts[b]}) lost each other while they were measured: {why}"
    return problem("links", text, "see whether both hosts are up and their link is stable, and look again")


def judge_clocks(links: Sequence[Link], hosts: Mapping[int, str]) -> list[Finding]:
    """Compare the clocks of other hosts with that of rank 0's."""
    offsets: dict[str, Link] = {}
    for link in links:
        if link.a == 0 and hosts[link.b] != hosts[0]:
            known = offsets.get(hosts[link.b])
            if known is None or link.uncertainty_s < known.uncertainty_s:
                offsets[hosts[link.b]] = link
    if not offsets:
        return []
    host, worst = max(offsets.items(), key=lambda item: abs(item[1].offset_s))
    text = f"{host} is {duration(abs(worst.offset_s))} {'ahead of' if worst.offset_s > 0 else 'behind'} {hosts[0]}"
    text += f" (± {duration(worst.uncertainty_s)})"
    text += ", the most of all hosts" if len(offsets) > 1 else ""
    sure = abs(worst.offset_s) - worst.uncertainty_s
    advice = "synchronise the clocks (chrony or systemd-timesyncd), or times of different hosts cannot be compared"
    if sure > _SKEW_S:
        return [problem("clocks", text, advice)]
    return [note("clocks", text, advice) if sure > _SKEW_NOTED_S else ok("clocks", text)]


def judge_links(links: Sequence[Link], hosts: Mapping[int, str], together: float | None) -> list[Finding]:
    """Name the slowest link, what all links carry at once, and a host that is worth a level of its own."""
    if not links:
        return []
    ranks = len(hosts)
    ways = [way for link in links for way in ((link.to_b, link.a, link.b), (link.to_a, link.b, link.a))]
    rate, source, target = min(ways)
    typical = statistics.median(rate for rate, _, _ in ways)
    measured = f"{len(links)} of {ranks * (ranks - 1) // 2} pairs measured"
    text = f"slowest: rank {source} to rank {target}, {bit_rate(rate)} (median {bit_rate(typical)}; {measured})"
    findings = [ok("links", text)]
    if rate < typical / 4:
        advice = f"every round waits for it: look at the network of {_both(hosts[source], hosts[target])}"
        findings = [note("links", text, advice)]
    if together is not None:
        text = f"each rank sends {bit_rate(together)} when all exchange as in a round"
        findings.append(ok("all at once", text))
    inside = [rate for rate, a, b in ways if hosts[a] == hosts[b]]
    between = [rate for rate, a, b in ways if hosts[a] != hosts[b]]
    if inside and between and (times := statistics.median(inside) / statistics.median(between)) >= 4:
        advice = 'let hosts meet inside more often than all: cadenza.hierarchical({4: "host", 64: "all"})'
        findings.append(note("levels", f"links inside a host carry {times:.0f} times as much as those between", advice))
    return findings


def _both(one: str, other: str) -> str:
    return one if one == other else f"{one} and {other}"


def listed(what: str, numbers: Sequence[int]) -> str:
    """Return numbers in words.

    >>> listed("rank", [3]), listed("rank", [1, 2, 5])
    ('rank 3', 'ranks 1, 2 and 5')
    """
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    shown = [str(number) for number in numbers[:8]]
    last = f"{len(numbers) - 7} more" if len(numbers) > 8 else shown[-1]
    return f"{what}s {', '.join(shown[: min(7, len(numbers) - 1)])} and {last}"
