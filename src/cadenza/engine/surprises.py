"""What works, but not as its user may expect: said once, when a strategy is attached to a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

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
