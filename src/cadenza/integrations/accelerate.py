"""Hugging Face's Accelerate: a context manager in the place of `accelerate.local_sgd.LocalSGD`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType

from cadenza.engine.attach import attach
from cadenza.engine.synchronizer import Synchronizer
from cadenza.errors import CadenzaError
from cadenza.integrations.versions import warn_if_untested
from cadenza.integrations.worker_files import has_workers, load_worker, save_worker
from cadenza.observers import Observer
from cadenza.strategy import Strategy

__all__ = ["TESTED", "Cadenza"]

TESTED = ("1.15",)


class Cadenza:
    """Runs a strategy in a loop of Accelerate's, where `LocalSGD` would average every few steps.

    At the end of the block all ranks hold the same values; leaving it by an exception starts no collective. Inside,
    `accelerator.save_state` writes the mean as the model, and every rank's own state beside it; `load_state` gives each
    rank its own back, inside the block, or between the making of this and the block. With one process it does nothing,
    as `LocalSGD`.

    Args:
        accelerator: The Accelerator.
        model: The model, as `accelerator.prepare` gave it back.
        optimizer: The optimizer or optimizers, as `accelerator.prepare` gave them back.
        strategy: What to do, for instance `cadenza.diloco(period=500)`.
        observers: What gets a `RoundReport` for every round.
        enabled: False leaves the loop as it is, under DistributedDataParallel.

    Attributes:
        sync: The synchronizer, inside the block.

    >>> import cadenza, torch
    >>> from accelerate import Accelerator
    >>> accelerator = Accelerator(cpu=True)
    >>> model = torch.nn.Linear(2, 1)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> with Cadenza(accelerator, model, optimizer, cadenza.diloco(period=4)) as loop:
    ...     for _ in range(8):
    ...         accelerator.backward(model(torch.ones(2)).sum())
    ...         optimizer.step(); optimizer.zero_grad()
    ...         loop.step()
    """

    def __init__(
        self,
        accelerator: Any,
        model: torch.nn.Module,
        optimizer: Any,
        strategy: Strategy,
        *,
        observers: Sequence[Observer] = (),
        enabled: bool = True,
    ) -> None:
        warn_if_untested("accelerate", TESTED)
        _refuse_what_cannot_work(accelerator, optimizer)
        self.sync: Synchronizer | None = None
        self._accelerator = accelerator
        self._parts = (model, optimizer, strategy)
        self._observers = observers
        self._enabled = enabled and accelerator.num_processes > 1
        self._samples = 0.0
        self._folder: str | None = None  # of a checkpoint that Accelerate has loaded, and this rank's part not yet
        self._undo: list[Callable[[], None]] = []
        if self._enabled:
            self._undo.append(accelerator.register_load_state_pre_hook(self._before_loading).remove)
            self._undo.append(_call_after(accelerator, "load_state", self._after_loading))

    def __enter__(self) -> Self:
        if self._enabled:
            self.sync = attach(*self._parts, observers=self._observers)
            self._undo.append(self._accelerator.register_save_state_pre_hook(self._save).remove)
            self._after_loading()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()
        if self.sync is not None:
            self.sync.__exit__(kind, error, traceback)
            self.sync = None

    def step(self, *, samples: float | None = None) -> None:
        """Count a step, if the optimizer made one: inside `accelerator.accumulate` not every batch ends with one.

        Args:
            samples: How many samples this batch has; required where the strategy weighs by samples.
        """
        if self.sync is None:
            return
        if samples is not None:
            self._samples += samples
        if self._accelerator.sync_gradients:
            self.sync.step(samples=self._samples or None)
            self._samples = 0.0

    # ---- checkpoints: save_state and load_state ----------------------------------------------------------------------

    def _save(self, models: list[torch.nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
        """Write this rank's state, and let Accelerate write the mean as the model."""
        assert self.sync is not None
        scaler = self._accelerator.scaler
        save_worker(folder, self.sync, {} if scaler is None else {"scaler": scaler.state_dict()})
        inner = self.sync.replica.view.inner
        with self.sync.averaged():
            for number, model in enumerate(models):  # with or without its wrapper
                if any(part is inner for part in model.modules()):
                    state = self._accelerator.get_state_dict(model, unwrap=False)
                    weights[number] = {name: value.clone() for name, value in state.items()}

    def _before_loading(self, _: list[torch.nn.Module], folder: str) -> None:
        if has_workers(folder):
            self._folder = folder
        elif self.sync is not None:
            raise CadenzaError(
                f"{folder} was saved outside of a Cadenza block, so it lacks every rank's own state. Call load_state() "
                "before the block: all ranks go on from its model, and the strategy begins anew."
            )

    def _after_loading(self) -> None:
        """Give this rank its own state, once Accelerate has given all of them the first one's."""
        if self.sync is None or self._folder is None:
            return
        scaler = load_worker(self._folder, self.sync).get("scaler")
        self._folder = None
        if scaler is not None and self._accelerator.scaler is not None:
            self._accelerator.scaler.load_state_dict(scaler)


def _call_after(owner: Any, name: str, then: Callable[[], None]) -> Callable[[], None]:
    """Call `then` after every call of a method of one object; return what undoes it."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def both(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        then()
        return result

    setattr(owner, name, both)
    return lambda: delattr(owner, name)


def _refuse_what_cannot_work(accelerator: Any, optimizer: Any) -> None:
    kind = accelerator.distributed_type
    if kind is not DistributedType.NO and not kind.value.startswith("MULTI_"):
        raise CadenzaError(
            f"This Accelerator uses {kind.value}, and Cadenza works with one whole model in each process: configure "
            "it for several CPUs or GPUs without it."
        )
    several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    for given in several:
        if not isinstance(given, AcceleratedOptimizer):
            raise CadenzaError(
                f"An optimizer from accelerator.prepare() is required, and the model that it gave back with it; got "
                f"{type(given).__name__}. Call model, optimizer = accelerator.prepare(model, optimizer) first."
            )
