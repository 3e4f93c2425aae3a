"""One check of what is about to be sent: can it be averaged, and is all of it finite?"""

from __future__ import annotations

import math
from collections.abc import Callable

from cadenza.engine.packing import Fragment

__all__ = ["problem_of"]


def problem_of(fragment: Fragment, norm2: float, step: int, culprit: Callable[[], str | None]) -> str | None:
    """Say what keeps a fragment from being averaged, or None.

    Args:
        fragment: What is about to be sent.
        norm2: The squared norm of the values, infinite or not a number exactly if one of them is.
        step: The clock's step.
        culprit: Finds out which parameter is not finite; asked only if one is.

    >>> import torch
    >>> problem_of(Fragment([torch.ones(1)]), math.nan, 7, lambda: "parameter weight")
    'parameter weight is not finite (NaN or infinity) at step 7.'
    """
    if fragment.problem is not None or math.isfinite(norm2):
        return fragment.problem
    return f"{culprit() or 'the norm of the values'} is not finite (NaN or infinity) at step {step}."
