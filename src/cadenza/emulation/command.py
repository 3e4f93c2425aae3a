"""``python -m cadenza.emulation``: run a command as one rank on every host of a new network."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cadenza.emulation.network import Network

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command as one rank on every host of a new network, and print what rank 0 wrote."""
    parser = argparse.ArgumentParser(prog="python -m cadenza.emulation", description=main.__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2], help="how many, for each site")
    parser.add_argument("--rate", help='what a link carries, such as "100mbit"')
    parser.add_argument("--between", help="what a link between sites carries")
    parser.add_argument("--rtt-ms", type=float, default=0.0, help="the round trip between hosts, in milliseconds")
    parser.add_argument("--between-rtt-ms", type=float, default=0.0, help="what is added to it between sites")
    parser.add_argument("command", nargs="+", help="after --, what to run")
    given = parser.parse_args(arguments)
    links = {"rate": given.rate, "between": given.between}
    with Network(given.hosts, **links, rtt_ms=given.rtt_ms, between_rtt_ms=given.between_rtt_ms) as network:
        sys.stdout.write(network.run(given.command)[0])
        for host in network.hosts:
            sys.stderr.write(f"{host.address} sent {host.bytes_sent() / 1e6:.1f} MB\n")
