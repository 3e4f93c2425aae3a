"""What the ranks of one replica tell all others alike, though each of them knows its own part only.

Every rank exchanges values with the ranks in its own place in the other replicas. What decides anything there, the
weight of a contribution, whether it is poison, the drift, must be the same in all these columns, or a replica would be
torn: its ranks would follow different rounds.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, replace

from cadenza.engine.header import Header
from cadenza.engine.measuring import Measured
from cadenza.participants.island import Island

__all__ = ["header_of_replica", "measured_of_replica", "values_of_replica"]


def header_of_replica(header: Header, problem: str | None, island: Island) -> tuple[Header, str | None]:
    """Return the header that all ranks of a replica send, and what keeps it from taking part, if that holds for one.

    Of a model in shards the squared norms add up. Each shard has an anchor of its own; of whole copies the anchors are
    one, and must be the same on all ranks.

    >>> header_of_replica(Header(step=7, digest=bytes(16), able=True, norm2=4.0), None, Island())[0].norm2
    4.0
    """
    if island.size == 1:
        return header, problem
    figures = [header.norm2, header.weight, header.exhausted, header.step_s, header.stall_s, header.anchor]
    mine = [*figures, header.fed_back, problem]
    told = [json.loads(word) for word in island.rounds.exchange(json.dumps(mine))]
    norms, weights, exhausted, steps_s, stalls_s, anchors, fed_back, problems = zip(*told, strict=True)
    header = replace(
        header,
        norm2=math.fsum(norms) if island.sharded else norms[0],
        weight=math.fsum(weights) / len(weights),
        exhausted=all(exhausted),
        step_s=max(steps_s),
        stall_s=max(stalls_s),
        anchor=header.anchor if island.sharded else _one_mark(anchors),
        fed_back=math.fsum(fed_back),
    )
    return header, next((one for one in problems if one is not None), None)


def measured_of_replica(own: Measured, island: Island) -> Measured:
    """Return what was measured of the whole model by the ranks of a replica: each has measured its own column.

    >>> measured_of_replica(Measured(size2=4.0), Island()).size2
    4.0
    """
    if island.size == 1:
        return own
    told = [Measured(**json.loads(word)) for word in island.rounds.exchange(json.dumps(asdict(own)))]
    if not island.sharded:
        return told[0]
    return Measured(*(math.fsum(getattr(one, name) for one in told) for name in ("spread2", "mean2", "size2")))


def values_of_replica(mark: int, finite: bool, island: Island) -> tuple[int, bool]:
    """Return a mark of the values that all ranks of a replica hold together, and whether all of them are finite.

    >>> values_of_replica(7, True, Island())
    (7, True)
    """
    told = [json.loads(word) for word in island.rounds.exchange(json.dumps([mark, finite]))]
    marks, sound = zip(*told, strict=True)
    return _one_mark(marks), all(sound)


def _one_mark(marks: tuple[int, ...]) -> int:
    """Return the mark of anchors that are the same on all ranks; another one than any of them, if they are not."""
    if len(set(marks)) == 1:
        return marks[0]
    return int.from_bytes(hashlib.blake2b(repr(marks).encode(), digest_size=8).digest(), "little")
