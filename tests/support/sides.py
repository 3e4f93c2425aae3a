"""Torch's names and ours, so that one test can run both side by side."""

from functools import cache
from importlib import import_module
from typing import Any

# The table of module names that a program changes in its imports to move over.
MODULES = {
    "torch.distributed.algorithms.model_averaging.averagers": "cadenza.model_averaging.averagers",
    "torch.distributed.algorithms.model_averaging.hierarchical_model_averager": (
        "cadenza.model_averaging.hierarchical_model_averager"
    ),
    "torch.distributed.algorithms.model_averaging.utils": "cadenza.model_averaging.utils",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook": ("cadenza.ddp_comm_hooks.post_localSGD_hook"),
    "torch.distributed.optim.post_localSGD_optimizer": "cadenza.optim.post_localSGD_optimizer",
    "torch.distributed.optim": "cadenza.optim",
}

_HOME = {
    "ModelAverager": "model_averaging.averagers",
    "PeriodicModelAverager": "model_averaging.averagers",
    "HierarchicalModelAverager": "model_averaging.hierarchical_model_averager",
    "average_parameters": "model_averaging.utils",
    "get_params_to_average": "model_averaging.utils",
    "average_parameters_or_parameter_groups": "model_averaging.utils",
    "PostLocalSGDState": "ddp_comm_hooks.post_localSGD_hook",
    "post_localSGD_hook": "ddp_comm_hooks.post_localSGD_hook",
    "PostLocalSGDOptimizer": "optim.post_localSGD_optimizer",
}


class Side:
    """One implementation's public names: ``TORCH.PeriodicModelAverager``, ``OURS.PeriodicModelAverager``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(name)
        return getattr(import_module(_module_of(self.name, name)), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Side, (self.name,))

    def __repr__(self) -> str:
        return self.name


@cache
def _module_of(side: str, name: str) -> str:
    [(theirs, ours)] = [pair for pair in MODULES.items() if pair[1] == f"cadenza.{_HOME[name]}"]
    return theirs if side == "torch" else ours


TORCH = Side("torch")
OURS = Side("cadenza")
