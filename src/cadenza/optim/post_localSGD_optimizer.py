"""An optimizer that averages the model after its steps, as in `torch.distributed.optim.post_localSGD_optimizer`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, overload

import torch
import torch.distributed.algorithms.model_averaging.averagers as torch_averagers

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own code, while that package is imported
    import torch.distributed.optim.post_localSGD_optimizer as torch_optimizer

__all__ = ["PostLocalSGDOptimizer"]

# Where the averager's step is kept in the parameter groups. torch.distributed.checkpoint saves those and the
# optimizer's state, and drops every other entry of a state dict.
_STEP_KEY = "averager_step"
_CHECKPOINT = "torch.distributed.checkpoint.state_dict"


class PostLocalSGDOptimizer(torch_optimizer.PostLocalSGDOptimizer):
    """Wraps an optimizer: `step()` runs it, then gives the averager its turn.

    It is the inner optimizer in all else: `param_groups`, `state` and `defaults` are the inner one's own objects, so
    learning rate schedulers, hooks and checkpoints work on either. Under a `GradScaler` the averager gets its turn
    also when the scaler skips the inner step, so that ranks stay together.

    >>> import torch, torch.distributed as dist
    >>> from cadenza.model_averaging.averagers import PeriodicModelAverager
    >>> from cadenza.optim import PostLocalSGDOptimizer
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(2, 1)
    >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = PostLocalSGDOptimizer(optim=inner, averager=PeriodicModelAverager(period=4, warmup_steps=8))
    >>> for _ in range(16):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(2)).backward()
    ...     optimizer.step()
    >>> optimizer.state_dict()["step"]
    16
    >>> dist.destroy_process_group()
    """

    optim: torch.optim.Optimizer
    averager: torch_averagers.ModelAverager

    # A GradScaler calls step() of such optimizers always, and leaves unscaling and skipping to them.
    _step_supports_amp_scaling = True

    def __init__(self, optim: torch.optim.Optimizer, averager: torch_averagers.ModelAverager) -> None:
        if not isinstance(optim, torch.optim.Optimizer):
            raise TypeError(f"Arg ``optim`` must be a torch.optim.Optimizer; got {type(optim).__name__}.")
        if not hasattr(averager, "average_parameters") or not hasattr(averager, "step"):
            raise TypeError(f"Arg ``averager`` must be a ModelAverager; got {type(averager).__name__}.")
        self.__setstate__({"optim": optim, "averager": averager})

    def __getstate__(self) -> dict[str, Any]:
        return {"optim": self.optim, "averager": self.averager}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # makes the hooks' tables, which the base's initialiser would make, too
        self._note_step()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups, always its current ones."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optim.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.optim.defaults

    def __repr__(self) -> str:
        return repr(self.optim)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict with the averager's `step` beside it."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._note_step()
        state_dict = self.optim.state_dict()
        state_dict["step"] = self.averager.step
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = after(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the inner optimizer and the averager's step; without a step, warn and set it to 0."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self.optim.load_state_dict(state_dict)
        step = state_dict.get("step")
        if step is None and _is_within("_load_optim_state_dict"):
            step = _noted_step(state_dict)
        if step is None:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.",
                stacklevel=2,
            )
            step = 0
        self.averager.step = int(step)
        self._note_step()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Run the inner optimizer's step, then the averager's, and return the closure's loss."""
        loss = self._inner_step(closure)
        if not self._is_building_state():
            self.averager.average_parameters(params=self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optim.add_param_group(param_group)
        self._note_step()

    def _inner_step(self, closure: Callable[[], float] | None) -> float | None:
        """Take the inner step as a GradScaler would have it: unscaled, or not at all if a gradient is not finite."""
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        if found_inf is None:
            return self._call_inner(closure)
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        if getattr(self.optim, "_step_supports_amp_scaling", False):
            self.optim.grad_scale, self.optim.found_inf = grad_scale, found_inf  # type: ignore[attr-defined]
            try:
                return self._call_inner(closure)
            finally:
                del self.optim.grad_scale, self.optim.found_inf  # type: ignore[attr-defined]
        if grad_scale is not None:
            self._unscale(grad_scale)
        return None if found_inf.item() else self._call_inner(closure)

    def _call_inner(self, closure: Callable[[], float] | None) -> float | None:
        return self.optim.step() if closure is None else self.optim.step(closure)

    @torch.no_grad()
    def _unscale(self, grad_scale: torch.Tensor) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.div_(grad_scale.to(param.grad.device, non_blocking=True))

    def _is_building_state(self) -> bool:
        """Tell the empty step by which torch.distributed.checkpoint makes a fresh optimizer build its state.

        Nobody trains in it, so the averager must not count it.
        """
        return not any(group.get("lr") for group in self.param_groups) and _is_within("_init_optim_state")

    def _note_step(self) -> None:
        for group in self.param_groups:
            group[_STEP_KEY] = self.averager.step


def _noted_step(state_dict: dict[str, Any]) -> Any:
    """Return the step that the parameter groups of a state dict carry, or None."""
    noted = [group[_STEP_KEY] for group in state_dict.get("param_groups", ()) if _STEP_KEY in group]
    return max(noted, default=None)


def _is_within(function: str) -> bool:
    """Tell whether a function of torch.distributed.checkpoint is at work: it drops the step that others keep."""
    frame: FrameType | None = inspect.currentframe()
    while frame:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False
