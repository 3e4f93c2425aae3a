"""Which synchronizers are at work in this process, so that none is attached to a model that has one."""

from __future__ import annotations

import gc
import threading
from weakref import WeakSet

from cadenza.engine.model_view import ModelView
from cadenza.engine.synchronizer import Synchronizer
from cadenza.errors import CadenzaError

__all__ = ["refuse_second", "remember"]

_attached: WeakSet[Synchronizer] = WeakSet()
_lock = threading.Lock()  # workers may be threads


def remember(sync: Synchronizer) -> None:
    """Note that a synchronizer was attached; nothing here keeps it alive."""
    with _lock:
        _attached.add(sync)


def refuse_second(view: ModelView) -> None:
    """Raise if another synchronizer moves some of these parameters."""
    if not _is_attached(view):
        return
    gc.collect()  # one that nobody uses any more does no harm
    if _is_attached(view):
        raise CadenzaError(
            "Another synchronizer is attached to this model, or to a part of it, and the two would undo each other's "
            "rounds. Call finish() or close() on the first one, then attach again; several levels or schedules belong "
            "into one strategy."
        )


def _is_attached(view: ModelView) -> bool:
    own = {id(parameter) for parameter in view.model.parameters()}
    with _lock:
        others = [sync for sync in _attached if not sync.closed]
    return any(id(p) in own for sync in others for p in sync.replica.view.model.parameters())
