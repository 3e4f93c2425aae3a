"""What a run will cost before it runs: time, bytes, memory, and what is published of the loss. Without torch.

A strategy is planned as the very object that is run: its schedules, groups, fragments and codecs count here as they do
in the engine.

>>> import cadenza
>>> from cadenza.planning import Cluster, Link, Model, memory_of, predict
>>> cluster, model = Cluster(8, Link(200e6, latency_s=0.04), step_s=0.8), Model(1_300_000_000)
>>> for period in (100, 1000, 10_000):
...     strategy = cadenza.diloco(period, codec=cadenza.codecs.int8())
...     print(period, round(predict(strategy, cluster, model).utilisation, 2))
100 0.43
1000 0.88
10000 0.99
"""

from cadenza.planning.inputs import Cluster, Faults, Link, Model, Work, estimated_layers
from cadenza.planning.laws import Loss, loss_of, outer_settings
from cadenza.planning.memory import Memory, memory_of
from cadenza.planning.rounds import Costs, costs_of, fragment_sizes
from cadenza.planning.search import Calibration, Seen, calibrate, smallest_period
from cadenza.planning.timeline import Outcome, predict

__all__ = [
    "Calibration",
    "Cluster",
    "Costs",
    "Faults",
    "Link",
    "Loss",
    "Memory",
    "Model",
    "Outcome",
    "Seen",
    "Work",
    "calibrate",
    "costs_of",
    "estimated_layers",
    "fragment_sizes",
    "loss_of",
    "memory_of",
    "outer_settings",
    "predict",
    "smallest_period",
]
