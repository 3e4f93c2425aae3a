"""Lightning: `Trainer(strategy=CadenzaStrategy(…))` trains by a Cadenza strategy.

The module is not wrapped in DistributedDataParallel. Gradients of a warm-up are averaged after the closure's backward
and before unscaling and clipping; the clock ticks once for every optimizer step. With Fabric the loop is yours:
`cadenza.attach` takes what `fabric.setup()` returns.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

try:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
    from lightning.pytorch.utilities.data import extract_batch_size
except ImportError as error:
    raise ImportError(
        "cadenza.integrations.lightning needs the package lightning (import lightning.pytorch): pip install "
        "'cadenza[lightning]'."
    ) from error

from cadenza import checkpoint as worker_files
from cadenza.engine.attach import attach
from cadenza.engine.synchronizer import Synchronizer
from cadenza.errors import CheckpointError
from cadenza.integrations.lent_mean import LentMean
from cadenza.integrations.versions import warn_if_untested
from cadenza.observers import Observer
from cadenza.strategy import Strategy, check_is_strategy
from cadenza.topology import Topology

__all__ = ["CadenzaStrategy"]

_TESTED = ["2.6"]
_KEY = "cadenza"  # the entry of a Lightning checkpoint that says where the workers' own files are
_OF_ALL_WORKERS = ("state_dict", "optimizer_states")  # big, and in the workers' own files or the mean
_OPTIONS = {
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
}


class CadenzaStrategy(DDPStrategy):
    """Train by a Cadenza strategy under Lightning's Trainer.

    Validation and checkpoints see the mean of all workers' models. `fit(ckpt_path=…)` gives every worker its own state
    back, in the middle of a period as well: beside `NAME.ckpt`, every worker writes a file into `NAME.ckpt.workers`.
    After `fit` all workers hold the same model. With manual optimization a step of the clock is a `training_step` in
    which an optimizer stepped.

    Args:
        strategy: What to do, for instance `cadenza.diloco()`.
        observers: What gets a `RoundReport` for every round.
        topology: With whom, if the strategy's own `groups` do not say it.
        evaluate_mean: Whether validation during `fit` sees the mean of all workers' models, which is sent for it, or
            each worker's own.
        options: Those of Lightning's `DDPStrategy` that are not for DistributedDataParallel itself: `timeout`,
            `process_group_backend`, `start_method`, `checkpoint_io`, `cluster_environment` and others.

    Attributes:
        sync: The synchronizer, while `fit` trains.

    >>> import cadenza, lightning.pytorch as pl
    >>> strategy = CadenzaStrategy(cadenza.diloco(period=500))
    >>> trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        observers: Sequence[Observer] = (),
        topology: Topology | None = None,
        evaluate_mean: bool = True,
        **options: Any,
    ) -> None:
        _refuse(strategy, options)
        warn_if_untested("lightning", _TESTED)
        super().__init__(**options)
        self.sync: Synchronizer | None = None
        self._strategy, self._observers, self._topology = strategy, observers, topology
        self._evaluate_mean = evaluate_mean
        self._mean: LentMean | None = None
        self._samples = 0.0
        self._stepped = False
        self._run = ""
        self._resume_from: Path | None = None

    # ---- beginning and end -----------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up the model and its optimizers, then attach."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self._layer_sync:
            warnings.warn(
                "sync_batchnorm=True sends statistics in every forward pass, in local steps too. Leave it out: rounds "
                "average BatchNorm's running statistics.",
                UserWarning,
                stacklevel=2,
            )
        self.sync = attach(
            self._module, self.optimizers, self._strategy, observers=self._observers, topology=self._topology
        )
        self._run = self.broadcast(uuid4().hex[:8])
        self._samples, self._stepped = 0.0, False

    def configure_ddp(self) -> None:
        """Leave the module as it is: nothing may average its gradients in every step."""

    def teardown(self) -> None:
        """Bring all workers together for the last time; after an error let go of everything without any collective.

        Not in `on_train_end`, which the search for a learning rate calls before the training itself.
        """
        if self.sync is not None and not self._interrupted:
            self.sync.finish()
        self._close()
        super().teardown()

    def _close(self) -> None:
        self.on_validation_end()
        if self.sync is not None:
            self.sync.close()
        self.sync = self._resume_from = None

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _interrupted(self) -> bool:
        """Whether an error ends the run: other workers may have heard nothing of it, so nothing is sent."""
        return bool(self._module.trainer.state.status == TrainerStatus.INTERRUPTED)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Count samples, where the strategy weighs by them."""
        if self._strategy.weighting.needs_samples:
            self._samples += extract_batch_size(batch)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step; in the warm-up with gradients that are averaged after the closure, before they are unscaled."""
        assert self.sync is not None
        sync = self.sync

        def closure_then_average() -> Any:
            result = closure()
            sync.average_gradients()
            return result

        output = super().optimizer_step(optimizer, closure_then_average, model, **kwargs)
        self._stepped = True
        if self._module.automatic_optimization:
            self._tick()
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step, in which with manual optimization the optimizers step."""
        output = super().training_step(*args, **kwargs)
        if self._stepped:
            self._tick()
        return output

    def _tick(self) -> None:
        assert self.sync is not None
        self.sync.step(samples=self._samples if self._strategy.weighting.needs_samples else None)
        self._samples, self._stepped = 0.0, False

    # ---- the mean, for validation and checkpoints ------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Lend the model the mean of all workers' values."""
        if self.sync is not None and self._evaluate_mean and not self._module.trainer.sanity_checking:
            self._mean = LentMean(self.sync)
            self._mean.put_in()

    def on_validation_end(self) -> None:
        """Give the model this worker's own values back."""
        if self._mean is not None:
            self._mean.take_out()
            self._mean = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the mean of all workers' models; after an error, which others may not know of, this worker's own."""
        if self.sync is None or self._mean is not None or self._interrupted:
            return dict(super().lightning_module_state_dict())
        with self.sync.averaged():
            state = super().lightning_module_state_dict()
            return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write Lightning's file, with the mean, and beside it a folder with a file of each worker."""
        if self.sync is None or "optimizer_states" not in checkpoint:  # not training, or save_weights_only
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        folder = _workers_folder(filepath) / f"step-{self.sync.clock:08}-{self._run}"
        self._save_worker(folder, checkpoint)
        checkpoint[_KEY] = {"workers": f"{folder.parent.name}/{folder.name}"}
        if not self._interrupted:
            self.barrier()  # the file must not speak of a folder that is not whole
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if self.is_global_zero:
            for other in set(folder.parent.iterdir()) - {folder}:  # of an earlier file of this name
                shutil.rmtree(other, ignore_errors=True)

    def _save_worker(self, folder: Path, checkpoint: dict[str, Any]) -> None:
        assert self.sync is not None
        with self._own_values():
            worker_files.save(folder, model=self._module, optimizer=self.optimizers, sync=self.sync)
        own = {key: value for key, value in checkpoint.items() if key not in _OF_ALL_WORKERS}
        self.checkpoint_io.save_checkpoint(own, self._own_file(folder))

    def _own_file(self, folder: Path) -> Path:
        """Return where Lightning's own state of this worker is: loops, data loaders, schedulers, the loss scale."""
        return folder / f"lightning-{self.global_rank:05}.ckpt"

    @contextmanager
    def _own_values(self) -> Iterator[None]:
        """Give the model this worker's own values inside the block, should it have the mean."""
        if self._mean is None:
            yield
            return
        self._mean.take_out()
        try:
            yield
        finally:
            self._mean.put_in()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read Lightning's file; to go on training, with what this worker itself had saved."""
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if _KEY not in loaded or self._module.trainer.state.fn != TrainerFn.FITTING:
            return loaded
        folder = Path(os.path.realpath(checkpoint_path)).parent / loaded[_KEY]["workers"]
        if not folder.is_dir():
            raise CheckpointError(
                f"{checkpoint_path} was saved in the middle of a run, and the workers' own states, {folder}, are "
                "missing. Copy that folder beside the file; or start anew from its mean: load_from_checkpoint(), then "
                "fit() without ckpt_path."
            )
        if self._own_file(folder).is_file():  # otherwise there are more workers than there were
            loaded |= self.checkpoint_io.load_checkpoint(self._own_file(folder), weights_only=weights_only)
        self._resume_from = folder
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restore this worker: model, optimizers, synchronizer and random numbers; or what another strategy saved."""
        if self._resume_from is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        assert self.sync is not None
        worker_files.load(self._resume_from, model=self._module, optimizer=self.optimizers, sync=self.sync)
        self._resume_from = None

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove Lightning's file and the workers' folder."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_workers_folder(filepath), ignore_errors=True)


def _workers_folder(filepath: str | Path) -> Path:
    if "://" in str(filepath):
        raise ValueError(
            f"Checkpoints of CadenzaStrategy are a file and a folder, which every worker writes into; {filepath} is no "
            "path of a file system. Give ModelCheckpoint a dirpath that all machines share."
        )
    return Path(f"{filepath}.workers")


def _refuse(strategy: Strategy, options: dict[str, Any]) -> None:
    check_is_strategy(strategy)
    if strange := sorted(options.keys() - _OPTIONS):
        raise ValueError(
            f"{strange[0]} is no option of CadenzaStrategy: it is for DistributedDataParallel, which is not used here. "
            f"Leave it out; what may be given is {', '.join(sorted(_OPTIONS))}."
        )
    if strategy.faults.tolerant:
        raise ValueError(
            f"faults={strategy.faults.name} lets workers come and go, and Lightning's Trainer has collectives of its "
            "own, which end with the first that is gone. Use faults=raise_error(), or a loop of your own."
        )
    if strategy.balanced:
        raise ValueError(
            "balanced=True gives workers different numbers of steps, and Lightning's Trainer validates and saves at "
            "the same one on all. Use balanced=False, or a loop of your own."
        )
