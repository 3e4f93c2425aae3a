"""Where elastic workers are, and which of them hold the rounds of a level together: those of one site.

A site is a path from the largest place to the smallest, as "eu/rack3". The outermost level is for all; each level
inside it is for those whose paths agree in one part more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cadenza.errors import TopologyError
from cadenza.strategy import LevelPlan
from cadenza.topology import host_name

__all__ = ["Scope", "as_site", "scopes_of"]

_PART = re.compile(r"[\w.:-]+")


def as_site(given: str | Sequence[str]) -> str:
    """Return a site as it is written, or raise if it is none.

    >>> as_site(["eu", "rack3"])
    'eu/rack3'
    """
    parts = given.split("/") if isinstance(given, str) else list(given)
    if not all(_PART.fullmatch(part) for part in parts):
        raise ValueError(
            'site is a name, or names with slashes from the largest place to the smallest, such as "eu/rack3"; of '
            f"letters, digits, dots, colons, hyphens and underscores; got {given!r}."
        )
    return "/".join(parts)


@dataclass(frozen=True)
class Scope:
    """Who may be in a circle, and where its entries in the store are.

    Attributes:
        level: The level whose rounds it holds.
        path: The parts of a site that its workers have in common; none at the outermost level.
        staged: Whether values may go through the sites inside it by stages.

    >>> Scope(0, ("eu",)).holds("eu/rack3"), Scope(0, ("eu",)).holds("us"), Scope(0, ("eu",)).place, Scope(1).place
    (True, False, 'level/0/eu/', '')
    """

    level: int
    path: tuple[str, ...] = ()
    staged: bool = False

    @property
    def outermost(self) -> bool:
        """Whether it is for all."""
        return not self.path

    @property
    def place(self) -> str:
        """What the keys of the circle begin with."""
        return f"level/{self.level}/{'/'.join(self.path)}/" if self.path else ""

    def holds(self, site: str) -> bool:
        """Tell whether a worker at a site may be in it."""
        return tuple(site.split("/"))[: len(self.path)] == self.path

    def cut(self, sites: Mapping[int, str]) -> tuple[tuple[int, ...], ...]:
        """Return the members by the sites inside, if values can go by stages: there are several, of one size above 1.

        >>> scope = Scope(1, staged=True)
        >>> scope.cut({0: "eu", 1: "us", 2: "eu", 3: "us"}), scope.cut({0: "eu", 1: "us", 2: "eu"})
        (((0, 2), (1, 3)), ())
        """
        groups: dict[tuple[str, ...], list[int]] = {}
        for worker, site in sorted(sites.items()):
            groups.setdefault(tuple(site.split("/"))[: len(self.path) + 1], []).append(worker)
        sizes = {len(group) for group in groups.values()}
        if not self.staged or len(groups) < 2 or len(sizes) > 1 or sizes == {1}:
            return ()
        return tuple(map(tuple, groups.values()))


def scopes_of(levels: Sequence[LevelPlan], site: str) -> tuple[str, list[Scope]]:
    """Return a worker's whole site, and the scope of its circle at each level.

    A level of the "host" takes the name of the machine for the last part of the site, if that is not given.

    >>> from cadenza.strategy import LevelPlan
    >>> [scope.path for scope in scopes_of((LevelPlan(2, groups="site"), LevelPlan(8)), "eu")[1]]
    [('eu',), ()]
    """
    inner = len(levels) - 1
    path = tuple(site.split("/")) if site else ()
    if len(path) == inner - 1 and levels[0].groups == "host":
        path = (*path, re.sub(r"[^\w.:-]", "-", host_name()))
    if len(path) != inner:
        raise TopologyError(
            f"The strategy has {inner} level{'s' * (inner != 1)} inside the outermost one, so a worker's site has as "
            f"many parts, from the largest place to the smallest; got {site!r}. Say where this worker is: "
            f'cadenza.join(site="{"/".join(["eu", "rack3", "host7", "gpu0"][:inner])}"), or CADENZA_SITE.'
            if inner
            else f"The strategy has one level, for all, so workers have no site; got {site!r}. Leave it out."
        )
    staged = [number > 0 and not plan.codec.shaped for number, plan in enumerate(levels)]
    return "/".join(path), [Scope(number, path[: inner - number], staged[number]) for number in range(inner + 1)]
