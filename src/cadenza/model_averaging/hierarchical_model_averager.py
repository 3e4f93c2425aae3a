"""Averaging in nested groups, as in `torch.distributed.algorithms.model_averaging.hierarchical_model_averager`."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise

import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.hierarchical_model_averager as torch_averager

from cadenza.errors import TopologyError
from cadenza.model_averaging.averagers import NO_NEED, ModelAverager, check_warmup, check_whole
from cadenza.model_averaging.utils import Params, average_at_step
from cadenza.topology import check_nesting

__all__ = ["HierarchicalModelAverager"]

logger = logging.getLogger(__name__)


class HierarchicalModelAverager(ModelAverager, torch_averager.HierarchicalModelAverager):
    """Averages small groups often and large ones seldom: `period_group_size_dict` maps periods to group sizes.

    At a step that several periods divide, only the largest group averages. Periods and sizes ascend, each size
    divides the next, and the last is the size of `process_group`. Steps count from 0, not from the end of the
    warm-up: with a period of 4 and a warm-up of 13 steps, steps 16, 20, 24 average. `atomic` is as in
    `PeriodicModelAverager`.

    >>> import torch.distributed as dist
    >>> from cadenza.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> averager = HierarchicalModelAverager({4: 1}, warmup_steps=100)
    >>> list(averager.period_process_group_dict)
    [4]
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        *,
        atomic: bool = False,
    ) -> None:
        super().__init__(process_group)
        overall = dist.get_world_size(self.process_group)
        levels = dict(period_group_size_dict or {})
        _check_levels(levels, overall)
        check_warmup(warmup_steps)
        if max(levels) == 1:
            warnings.warn(f"When the maximum period in arg ``period_group_size_dict`` is 1, {NO_NEED}", stacklevel=2)
        self.warmup_steps = warmup_steps
        self.atomic = atomic
        self.period_process_group_dict: OrderedDict[int, dist.ProcessGroup] = OrderedDict()
        logger.info("Model averaging hierarchy:")
        for period, size in levels.items():
            logger.info(
                "\tEach group that has %s processes average parameters every %s iterations, "
                "if no higher-level averaging.",
                size,
                period,
            )
            self.period_process_group_dict[period] = (
                self.process_group
                if size == overall
                else dist.new_subgroups(group_size=size, group=self.process_group)[0]
            )

    def _find_process_group(self) -> dist.ProcessGroup | None:
        """Return the group of the largest period that divides the step, or None."""
        for period, group in reversed(self.period_process_group_dict.items()):
            if self.step % period == 0:
                return group
        return None

    def average_parameters(self, params: Params) -> None:
        """Average the parameters (or parameter groups) in the group whose turn it is, if any, then count the step."""
        if self.step >= self.warmup_steps:
            group = self._find_process_group()
            if group is not None:
                average_at_step(params, group, step=self.step, atomic=self.atomic)
        self.step += 1


def _check_levels(levels: Mapping[int, int], overall: int) -> None:
    """Refuse a hierarchy that cannot be averaged, before any group is made."""
    if not levels:
        raise ValueError("Arg ``period_group_size_dict`` must not be empty.")
    periods, sizes = list(levels), list(levels.values())
    for period in periods:
        check_whole("period_group_size_dict", period)
    if periods[0] <= 0:
        raise ValueError("The minimum period in arg ``period_group_size_dict`` must be a positive value.")
    for inner, outer in pairwise(periods):
        if inner >= outer:
            raise TopologyError(
                f"The periods in arg ``period_group_size_dict`` must ascend, but {inner} comes before {outer}: the "
                "larger a group, the more seldom it averages."
            )
    if sizes[-1] != overall:
        raise ValueError(
            f"The last value in arg ``period_group_size_dict`` {sizes[-1]} must be equal to the size of arg "
            f"``process_group`` {overall}."
        )
    check_nesting(sizes, within=overall)
