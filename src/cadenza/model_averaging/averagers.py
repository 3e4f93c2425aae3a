"""Averagers that decide by a step counter, as in `torch.distributed.algorithms.model_averaging.averagers`."""

from __future__ import annotations

import operator
import warnings
from abc import abstractmethod
from typing import Any

import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers as torch_averagers

from cadenza.common.process_groups import find_groups, name_groups, resolve
from cadenza.model_averaging.utils import Params, average_at_step

__all__ = ["ModelAverager", "PeriodicModelAverager"]


class ModelAverager(torch_averagers.ModelAverager):
    """The base of all averagers: a process group and a step counter.

    Cadenza's classes derive from torch's of the same name, so that programs which ask `isinstance` of those work.

    >>> import torch.distributed as dist
    >>> from cadenza.model_averaging.averagers import ModelAverager
    >>> class Never(ModelAverager):
    ...     def average_parameters(self, params):
    ...         self.step += 1
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> Never().step
    0
    >>> dist.destroy_process_group()
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = resolve(process_group)
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Params) -> None:
        """Count a step and average if it is time to."""
        raise NotImplementedError

    # A process group cannot be copied or pickled, but it has a name by which the copy finds it again.
    def __getstate__(self) -> dict[str, Any]:
        return {key: name_groups(value) for key, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({key: find_groups(value) for key, value in state.items()})


class PeriodicModelAverager(ModelAverager, torch_averagers.PeriodicModelAverager):
    """Averages every `period` steps once `warmup_steps` are over: at step `warmup_steps`, then every `period` after it.

    During the warm-up, average gradients instead (DDP with `post_localSGD_hook`). With `atomic=True` a failed averaging
    leaves the parameters of every rank as they were, at the price of one scratch copy.

    >>> import torch, torch.distributed as dist
    >>> from cadenza.model_averaging.averagers import PeriodicModelAverager
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> averager = PeriodicModelAverager(period=4, warmup_steps=8)
    >>> for _ in range(16):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(2)).backward()
    ...     optimizer.step()
    ...     averager.average_parameters(model.parameters())  # steps 8 and 12
    >>> averager.step
    16
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        *,
        atomic: bool = False,
    ) -> None:
        super().__init__(process_group)
        check_warmup(warmup_steps)
        check_whole("period", period)
        if period < 1:
            raise ValueError("Arg ``period`` must be a positive value.")
        if period == 1:
            warnings.warn(f"When period is 1, {NO_NEED}", stacklevel=2)
        self.warmup_steps = warmup_steps
        self.period = period
        self.atomic = atomic

    def average_parameters(self, params: Params) -> None:
        """Average the parameters (or parameter groups) if it is time to, then count the step."""
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            average_at_step(params, self.process_group, step=self.step, atomic=self.atomic)
        self.step += 1


NO_NEED = (
    "no need to use model averaging because the communication cost of all-reducing parameters will be no less than "
    "the cost of all-reducing gradients by DistributedDataParallel in the backward pass. Therefore, only "
    "DistributedDataParallel should be used for this case."
)


def check_warmup(warmup_steps: int) -> None:
    """Refuse a warm-up that is not a whole number of steps."""
    check_whole("warmup_steps", warmup_steps)
    if warmup_steps < 0:
        raise ValueError("Arg ``warmup_steps`` must be a non-negative number.")


def check_whole(name: str, value: Any) -> None:
    """Refuse numbers of steps that are not whole: ranks would round them, or never meet."""
    try:
        operator.index(value)  # also the integers of other libraries, such as numpy's
    except TypeError:
        raise TypeError(f"Arg ``{name}`` must be a whole number of steps; got {value!r}.") from None
    if isinstance(value, bool):
        raise TypeError(f"Arg ``{name}`` must be a whole number of steps; got {value!r}.")
