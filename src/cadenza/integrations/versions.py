"""Which versions of a framework an integration was tried with."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from importlib.metadata import version

__all__ = ["warn_if_untested"]


def warn_if_untested(package: str, tested: Collection[str]) -> None:
    """Warn if the installed version of a package is none of those that were tested, given as "major.minor".

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn_if_untested("torch", ["0.1"])
    >>> "was never tested" in str(caught[0].message)
    True
    """
    found = version(package)
    if ".".join(found.split(".")[:2]) not in tested:
        warnings.warn(
            f"Cadenza was never tested with {package} {found}, only with {', '.join(sorted(tested))}. It may work: "
            "check that the bytes sent are what you expect, or install a tested version.",
            UserWarning,
            stacklevel=3,
        )
