"""What `attach` warns of."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

import cadenza
from cadenza import Strategy
from cadenza.testing import workers


def warnings_of(model: nn.Module, strategy: Strategy, optimizer: Any = None) -> list[warnings.WarningMessage]:
    """Return what `attach` and two steps warn of, on one worker."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)

    def run(_: Any) -> None:
        sync = cadenza.attach(model, optimizer, strategy)
        for _ in range(2):
            sync.step()
        sync.finish()

    with warnings.catch_warnings(record=True) as caught, workers(1) as pool:
        warnings.simplefilter("always")
        pool.run(run)
    return caught
