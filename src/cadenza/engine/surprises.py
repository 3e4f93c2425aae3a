"""What works, but not as its user may expect: said once, when a strategy is attached to a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch

from cadenza.engine.model_view import ModelView
from cadenza.strategy import Strategy

__all__ = ["warn_of_surprises"]

_CALLER_OF_ATTACH = 3


def warn_of_surprises(view: ModelView, strategy: Strategy) -> None:
    """Warn of what a strategy does not do on this model though its user may think so."""
    for surprise in _surprises(view, strategy):
        warnings.warn(surprise, UserWarning, stacklevel=_CALLER_OF_ATTACH)


def _surprises(view: ModelView, strategy: Strategy) -> Iterator[str]:
    sizes = [(name, p.numel() * p.element_size()) for name, p in view.parameters().items()]
    if not strategy.fragments.single and len(strategy.fragments.split(sizes)) == 1:
        yield (
            f"{strategy.fragments!r} makes one fragment of this model, so all parameters travel at once. For several, "
            "use fewer layers a fragment (by_layers(1), streaming_diloco(layers=1)) or by_bytes(…); if one is what you "
            "want, use fragments=whole()."
        )
    for optimizer in view.optimizers:
        if strategy.optimizer_state == "leave" and _is_schedule_free(optimizer):
            yield (
                f"{type(optimizer).__name__} trains at one point and is judged at another, which it makes of its own "
                "state in eval(): rounds make the workers' parameters equal, but not those after optimizer.eval(). Use "
                'optimizer_state="average", which averages that state too, or "reset" where rounds land late.'
            )


def _is_schedule_free(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer swaps the weights for others in `eval()`; no other kind has such a method."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
