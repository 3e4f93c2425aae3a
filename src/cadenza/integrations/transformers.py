"""Hugging Face's Trainer, and all that is built on it, such as trl's trainers.

Trainer wraps the model in DistributedDataParallel where a callback does not see it, writes the first rank's state
alone, and evaluates and saves whatever that rank holds. `CadenzaCallback.bind` puts each of these right.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.data_loader import DataLoaderDispatcher
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from cadenza.engine.attach import attach
from cadenza.engine.synchronizer import Synchronizer
from cadenza.errors import CadenzaError
from cadenza.integrations.versions import warn_if_untested
from cadenza.integrations.worker_files import has_workers, load_worker, save_worker
from cadenza.observers import Observer
from cadenza.reports import RoundReport
from cadenza.strategy import Strategy, check_is_strategy

__all__ = ["TESTED", "CadenzaCallback"]

TESTED = ("5.23",)

_logger = logging.getLogger("cadenza")


class CadenzaCallback(TrainerCallback):
    """Runs a strategy in Hugging Face's Trainer: `CadenzaCallback(strategy).bind(trainer)`, then `trainer.train()`.

    Accumulation, schedulers, `max_grad_norm`, `resume_from_checkpoint` and `load_best_model_at_end` work as they do
    without it. Each round's figures go to `trainer.log` as `cadenza/…`. With one process it does nothing.

    Args:
        strategy: What to do, for instance `cadenza.diloco(period=500)`.
        observers: What gets a `RoundReport` for every round, besides `trainer.log`.
        evaluate_mean: Whether `evaluate` and `predict`, when called during training, see the mean of all workers; if
            not, each worker evaluates its own values on its own part of the data.

    Attributes:
        sync: The synchronizer, while `train` runs.

    >>> import cadenza
    >>> callback = CadenzaCallback(cadenza.diloco(period=500, codec=cadenza.codecs.int8()))
    >>> callback.sync is None
    True
    """

    def __init__(self, strategy: Strategy, *, observers: Sequence[Observer] = (), evaluate_mean: bool = True) -> None:
        check_is_strategy(strategy)
        if strategy.faults.tolerant:
            raise ValueError(
                f"Trainer's own collectives end with the first dead rank, so {strategy.faults.name} cannot go on: use "
                "faults=raise_error(), and resume_from_checkpoint after a fault."
            )
        if strategy.weighting.needs_samples:
            raise ValueError(
                'weight="samples" needs the number of samples of every step, which Trainer does not tell its '
                "callbacks: use another weight, or a function that says how much this worker counts."
            )
        self.strategy = strategy
        self.observers = tuple(observers)
        self.evaluate_mean = evaluate_mean
        self.sync: Synchronizer | None = None
        self._trainer: Any = None
        self._checkpoint: str | None = None
        self._figures: list[dict[str, float]] = []

    def bind(self, trainer: Any) -> Any:
        """Let a trainer train by this strategy, and return it; call this once, before `train`."""
        if not isinstance(trainer, Trainer):
            raise TypeError(f"A transformers.Trainer is required; got {type(trainer).__name__}.")
        if self._trainer is not None:
            raise CadenzaError("This callback is bound already; make a new one for each trainer.")
        warn_if_untested("transformers", TESTED)
        _refuse_what_cannot_work(trainer)
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        trainer.train = self._closing(trainer.train)
        trainer.save_model = self._with_mean(trainer.save_model)
        if self.evaluate_mean:
            trainer.evaluate = self._with_mean(trainer.evaluate)
            trainer.predict = self._with_mean(trainer.predict)
        trainer._load_best_model = self._finishing(trainer._load_best_model)  # noqa: SLF001 - runs before on_train_end
        return trainer

    # ---- what Trainer calls ----------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Attach to what Trainer has prepared, and go on from a checkpoint if there is one."""
        trainer = self._trainer
        if trainer is None:
            raise CadenzaError(
                "A callback does not see the DistributedDataParallel that Trainer makes: call "
                "CadenzaCallback(strategy).bind(trainer) before trainer.train()."
            )
        self._close()
        if not dist.is_initialized() or args.world_size == 1:
            _logger.warning("There is one process, and nobody to hold rounds with: training goes on without Cadenza.")
            return
        for traffic in _hidden_traffic(trainer, parts.get("train_dataloader")):
            warnings.warn(traffic, UserWarning, stacklevel=2)
        observers = [*self.observers, self._note]
        self.sync = attach(trainer.model_wrapped, trainer.optimizer, self.strategy, observers=observers)
        if self._checkpoint is not None:
            self._resume(self._checkpoint)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step; rounds read the learning rate with which it was made."""
        if self.sync is not None:
            self.sync.step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the rounds of this step, now that Trainer has counted it."""
        figures, self._figures = self._figures, []
        due = control.should_log  # of Trainer's own figures; log() takes itself for them
        for logs in figures:
            self._trainer.log(logs)
        control.should_log = due

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write this worker's own state into the checkpoint that Trainer has just made."""
        if self.sync is not None and not args.save_only_model:
            scaler = self._trainer.accelerator.scaler
            extra = {} if scaler is None else {"scaler": scaler.state_dict()}
            save_worker(Path(args.output_dir) / f"checkpoint-{state.global_step}", self.sync, extra)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let all workers end with the same parameters, unless the best model was loaded, which they share."""
        self._finish()
        self.on_step_end(args, state, control)

    # ---- the trainer's methods -------------------------------------------------------------------------------------

    def _closing(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `train`: see from which checkpoint it goes on, and start no collective when an exception leaves it."""

        @functools.wraps(train)
        def closing(resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
            folder = resume_from_checkpoint
            self._checkpoint = get_last_checkpoint(self._trainer.args.output_dir) if folder is True else folder or None
            try:
                return train(resume_from_checkpoint, *args, **options)
            finally:
                self._close()

        return closing

    def _with_mean(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that all ranks call: during training it sees the mean of all workers."""

        @functools.wraps(method)
        def with_mean(*args: Any, **options: Any) -> Any:
            with self._mean():
                return method(*args, **options)

        return with_mean

    def _finishing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what replaces the model's values at the end: the last round is held on those that were trained."""

        @functools.wraps(method)
        def finishing(*args: Any, **options: Any) -> Any:
            self._finish()
            return method(*args, **options)

        return finishing

    def _mean(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.sync is None else self.sync.averaged()

    # ---- the synchronizer ------------------------------------------------------------------------------------------

    def _resume(self, folder: str) -> None:
        assert self.sync is not None
        if not has_workers(folder):
            warnings.warn(
                f"{folder} was saved without Cadenza, or with save_only_model: all workers go on from its model, and "
                "the strategy, its warm-up included, begins anew.",
                UserWarning,
                stacklevel=2,
            )
            return
        scaler = load_worker(folder, self.sync).get("scaler")
        if scaler is not None and self._trainer.accelerator.scaler is not None:
            self._trainer.accelerator.scaler.load_state_dict(scaler)

    def _note(self, report: RoundReport) -> None:
        self._figures.append(report.figures(prefix="cadenza"))

    def _finish(self) -> None:
        if self.sync is not None:
            self.sync.finish()
            self.sync = None

    def _close(self) -> None:
        if self.sync is not None:
            self.sync.close()
            self.sync = None


def _refuse_what_cannot_work(trainer: Any) -> None:
    """Raise if Trainer shards or splits the model by means of its own."""
    found = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
        "DataParallel (several devices in one process)": trainer.args.n_gpu > 1,
    }
    for name, used in found.items():
        if used:
            raise CadenzaError(
                f"This Trainer uses {name}, and CadenzaCallback works with one whole model in each process: leave it "
                "out of TrainingArguments and start one process a device, for instance with torchrun."
            )


def _hidden_traffic(trainer: Any, dataloader: Any) -> Iterator[str]:
    """Yield what Trainer sends in every step by itself, and the setting that ends it."""
    args = trainer.args
    counts_tokens = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if args.average_tokens_across_devices and counts_tokens:
        yield (
            "Trainer gathers the number of tokens from all ranks in every step, so every step waits for the slowest "
            "rank: set TrainingArguments(average_tokens_across_devices=False)."
        )
    if isinstance(dataloader, DataLoaderDispatcher):
        yield (
            "The first rank reads all batches and sends the others theirs in every step: set "
            'TrainingArguments(accelerator_config={"dispatch_batches": False}), and each rank reads its own part.'
        )
    if args.include_num_input_tokens_seen != "no":
        yield (
            "Trainer gathers the number of input tokens from all ranks in every step: set "
            'TrainingArguments(include_num_input_tokens_seen="no").'
        )
