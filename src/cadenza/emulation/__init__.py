"""A small network on one Linux machine: hosts with shaped links to a switch, links to cut, bytes counted.

Every host is a network namespace with one interface, `eth0`; its link ends at a bridge in a namespace of its own, so
that the machine's own network is never touched. ``tc … tbf`` limits the rate at both ends of a link. Hosts of several
sites have a bridge a site, and one slower link from each bridge to the first. Latency comes from ``tc … netem`` or,
where the kernel lacks it, from a process that carries the frames (`relay`). All is gone when the block ends::

    with Network(4, rate="100mbit") as network:
        outputs = network.run([sys.executable, "train.py"])      # one rank on each host, as torchrun would start it
        print([host.bytes_sent() for host in network.hosts])

From the shell: ``python -m cadenza.emulation --hosts 4 --rate 100mbit -- python train.py``.

It needs root, and iproute2's `ip` and `tc`; `available` tells what is missing. A small process stands by each network
and removes it also when the program that made it is killed.
"""

from cadenza.emulation.command import main
from cadenza.emulation.hosts import INTERFACE, Host
from cadenza.emulation.network import Network, available

__all__ = ["INTERFACE", "Host", "Network", "available", "main"]
