"""WHICH parameters travel together: all at once, by layers, or by bytes.

A fragmentation is a pure function of names and sizes, so all ranks cut alike.

>>> by_layers(2).split([("embed", 4), ("layers.0.w", 4), ("layers.1.w", 4), ("layers.2.w", 4), ("head", 4)])
[['embed', 'layers.0.w', 'layers.2.w'], ['layers.1.w', 'head']]
"""

from cadenza.fragments.base import Fragmentation
from cadenza.fragments.by_bytes import ByBytes, by_bytes
from cadenza.fragments.by_layers import ByLayers, by_layers
from cadenza.fragments.whole import Whole, whole

__all__ = ["ByBytes", "ByLayers", "Fragmentation", "Whole", "by_bytes", "by_layers", "whole"]
