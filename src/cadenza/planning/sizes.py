"""The bytes of a round, counted as the engine cuts and sends them, and the links that they cross."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cadenza.common.messages import HEADER_BYTES, cut_plain_rows, cut_rows, cut_sparse, row_bytes_between
from cadenza.planning.inputs import Cluster

if TYPE_CHECKING:
    from cadenza.codecs import Codec

__all__ = ["Traffic", "exchange_traffic", "staged_traffic"]


@dataclass(frozen=True)
class Traffic:
    """What a round sends.

    Attributes:
        sent: Bytes that a worker hands to the transport, headers included.
        uplink: Bytes that leave a site over its shared link.
        turns: Messages that must wait for each other, so that each takes a latency.
        slow_turns: Those of them that cross between sites.
    """

    sent: int
    uplink: int = 0
    turns: int = 0
    slow_turns: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent + other.sent,
            self.uplink + other.uplink,
            self.turns + other.turns,
            self.slow_turns + other.slow_turns,
        )


def exchange_traffic(numel: int, members: int, codec: Codec, cluster: Cluster, *, itemsize: int = 4) -> Traffic:
    """Return what an exchange among members sends, the header included; members of one site are neighbours.

    Exact values go round a ring: two of a site's members send to another site, or none if all are in one. Others go
    straight to the owners of their shares, and come straight back.

    >>> from cadenza.codecs import fp32
    >>> from cadenza.planning import Cluster, Link
    >>> exchange_traffic(1000, 4, fp32(), Cluster(4, Link(1e9), 0.1)).sent
    6288
    """
    if members < 2 or not numel:
        return Traffic(0)
    sent, turns = _sent(numel, members, codec, itemsize), 4
    here = min(members, cluster.site_workers)
    outside = members - here
    if codec.exact:
        uplink, turns = (sent if outside else 0), 2 * (members - 1)
    else:
        uplink = here * sent * outside // (members - 1)
    headers = (members - 1) * HEADER_BYTES
    return Traffic(sent + headers, uplink, turns + 1, turns + 1 if outside else 0)


def _sent(numel: int, members: int, codec: Codec, itemsize: int) -> int:
    row_bytes = row_bytes_between(members)
    if codec.exact:
        return 2 * (members - 1) * numel * itemsize // members
    if codec.sparse:
        if codec.shaped:  # its messages depend on the tensors' shapes; about so much of large matrices
            return (members - 1) * round(0.012 * 4 * numel)
        return (members - 1) * sum(codec.encoded_bytes(size) for size in cut_sparse(numel, row_bytes, codec))
    rows = (row for _, row in cut_rows(numel, members, row_bytes, codec))
    return (members - 1) * sum(codec.encoded_bytes(row) + codec.back.encoded_bytes(row) for row in rows)


def staged_traffic(
    numel: int, inside: int, across: int, codec: Codec, cluster: Cluster, *, itemsize: int = 4
) -> tuple[Traffic, Traffic]:
    """Return what a staged level sends inside its inner groups, and between them.

    Each member reduces its part inside, exchanges it with the equal positions of the other groups, and gathers inside.
    """
    rows = [row for _, row in cut_plain_rows(numel, inside, row_bytes_between(inside), itemsize, codec)]
    part, header = sum(rows), (inside * across - 1) * HEADER_BYTES
    within = Traffic(2 * (inside - 1) * part * itemsize + header, 0, 5)
    sent = _sent(part, across, codec, itemsize)
    leaves = across > 1 and cluster.sites > 1
    positions = min(inside, cluster.site_workers)
    between = Traffic(sent, positions * sent if leaves else 0, 4, 4 if leaves else 0)
    return within, between
