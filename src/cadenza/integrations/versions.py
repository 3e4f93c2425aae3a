"""A word about versions of other frameworks that Cadenza was never tested with."""

from __future__ import annotations

import warnings
from importlib.metadata import version

__all__ = ["warn_if_untested"]

_CALLER_OF_CALLER = 3


def warn_if_untested(package: str, *, tested: str) -> None:
    """Warn if a package is another than the tested `major.minor`.

    >>> warn_if_untested("torch", tested=".".join(version("torch").split(".")[:2]))
    """
    found = version(package)
    if found.split(".")[:2] != tested.split("."):
        warnings.warn(
            f"Cadenza's integration was tested with {package} {tested}; this is {package} {found}. If it does not work "
            f"as documented, install {package}=={tested}.*.",
            UserWarning,
            stacklevel=_CALLER_OF_CALLER,
        )
