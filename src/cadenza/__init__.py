"""Cadenza trains one PyTorch model on many workers that talk seldom.

A *strategy* is seven choices; a *synchronizer*, made by `attach`, runs it; every round is *launched*, then *landed*.
The drop-in for torch's model averaging is in `cadenza.model_averaging`, `cadenza.ddp_comm_hooks` and `cadenza.optim`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cadenza.public_names import *  # noqa: F403
    from cadenza.public_names import __all__ as __all__
    from cadenza.public_names import __version__ as __version__
else:
    # Found when first used, so that the command line can answer before torch is imported.
    def __getattr__(name: str) -> Any:
        from importlib import import_module
        from importlib.util import find_spec

        if not name.startswith("_") and find_spec(f"cadenza.{name}") is not None:
            return import_module(f"cadenza.{name}")
        names = import_module("cadenza.public_names")
        if name not in ("__all__", *names.__all__):
            raise AttributeError(f"module 'cadenza' has no attribute {name!r}")
        value = globals()[name] = getattr(names, name)
        return value

    def __dir__() -> list[str]:
        from cadenza.public_names import __all__ as names

        return sorted({*globals(), *names})
