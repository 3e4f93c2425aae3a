"""What the doctor says about one thing: fine, worth knowing, or to be mended, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

__all__ = ["Finding", "Level", "merge", "note", "ok", "problem"]

Level: TypeAlias = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        level: "ok", "note" (training works, but look at it) or "problem" (training fails, or is not what it seems).
        subject: What was looked at, in a word or two.
        text: What was found.
        advice: What to do about it; empty if there is nothing to do.
        where: The hosts on which it was found; empty if it holds for all of them.
    """

    level: Level
    subject: str
    text: str
    advice: str = ""
    where: tuple[str, ...] = ()

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Finding:
        """Return the finding that another rank sent as JSON."""
        return cls(**{**fields, "where": tuple(fields["where"])})


def ok(subject: str, text: str) -> Finding:
    """Return a finding that is as it should be."""
    return Finding("ok", subject, text)


def note(subject: str, text: str, advice: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding("note", subject, text, advice)


def problem(subject: str, text: str, advice: str) -> Finding:
    """Return a finding that has to be mended."""
    return Finding("problem", subject, text, advice)


def merge(by_host: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Say once what was found on all hosts alike, and name the hosts of everything else.

    >>> merge({"a": [ok("torch", "2.13")], "b": [ok("torch", "2.6")]})[1]
    Finding(level='ok', subject='torch', text='2.6', advice='', where=('b',))
    """
    places: dict[Finding, list[str]] = {}
    for host, findings in by_host.items():
        for finding in findings:
            places.setdefault(finding, []).append(host)
    order = list(dict.fromkeys(finding.subject for finding in places))
    merged = [
        replace(finding, where=() if len(hosts) == len(by_host) else tuple(hosts)) for finding, hosts in places.items()
    ]
    return sorted(merged, key=lambda finding: order.index(finding.subject))
