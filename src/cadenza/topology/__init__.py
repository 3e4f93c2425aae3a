"""WITH WHOM: levels of groups, from the innermost (a host) to the outermost (everyone).

A `Topology` is plain data about ranks; building one never communicates, except for `Topology.from_hosts` when it has
to ask every rank where it runs.

>>> topology = Topology.from_sizes([2, 4], ranks=range(4))
>>> [level.groups for level in topology.levels]
[((0, 1), (2, 3)), ((0, 1, 2, 3),)]
"""

from cadenza.topology.base import RoundTopology
from cadenza.topology.hosts import host_name, hosts_of
from cadenza.topology.level import Level
from cadenza.topology.pairs import RandomPairs, random_pairs
from cadenza.topology.topology import Topology, check_nesting

__all__ = [
    "Level",
    "RandomPairs",
    "RoundTopology",
    "Topology",
    "check_nesting",
    "host_name",
    "hosts_of",
    "random_pairs",
]
