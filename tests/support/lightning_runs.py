"""Runs of Lightning's Trainer for tests: a small module, its data, and a callback that looks on."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from support.traffic import bytes_sent

ENV = {"TORCHELASTIC_RUN_ID": "tests", "CADENZA_SHARED_MEMORY": "0"}  # so that all bytes go over TCP


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(96, 16, generator=generator)
    return TensorDataset(x, x @ torch.randn(16, 2, generator=generator))


def build(kind: str = "plain") -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        """A regression with dropout and BatchNorm; of kind "two", with an optimizer for each half."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))
            self.head = nn.Linear(64, 2)
            self.automatic_optimization = kind != "two"
            self.lr = 0.01
            self.validated: list[list[float]] = []
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.mse_loss(self.head(self.net(batch[0])), batch[1])
            self.losses.append(loss.item())
            if self.automatic_optimization:
                return loss
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            return None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                self.validated.append(flat(self))

        def configure_optimizers(self) -> Any:
            if kind == "two":
                return [torch.optim.Adam(self.net.parameters()), torch.optim.SGD(self.head.parameters(), lr=0.02)]
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    return Module()


def flat(model: nn.Module) -> list[float]:
    return torch.cat([t.detach().float().flatten() for t in model.state_dict().values()]).tolist()


def quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning|torch")


def fit(
    strategy: Any, folder: str, *, kind: str = "plain", callbacks: Any = (), resume: Any = None, **options: Any
) -> Any:
    """Train in epochs of 6 batches of 8; return the trainer and the module."""
    import lightning.pytorch as pl

    quiet()
    options = {"max_epochs": 2, "limit_val_batches": 0, "enable_checkpointing": False, **options}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=list(callbacks),
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = build(kind)
    loaders = DataLoader(points(), 8, shuffle=True), DataLoader(points(), 8)
    trainer.fit(module, *loaders, ckpt_path=resume)
    return trainer, module


def watch(seen: list[list[float]] | None = None) -> Any:
    """A callback that notes what was sent and this worker's own values: before the last round, and after each step."""
    import lightning.pytorch as pl

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.start = bytes_sent()

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if seen is not None:
                seen.append([value for p in module.parameters() for value in p.detach().flatten().tolist()])

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.sent = bytes_sent() - self.start
            self.own = flat(module)

    return Watch()
