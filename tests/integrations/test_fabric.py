"""Fabric's wrappers given to `attach`; torch's post-local SGD in Lightning's DDPStrategy with the drop-in's state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import cadenza
from cadenza import checkpoint
from support.lightning_runs import ENV, fit, flat, quiet, watch
from support.ranks import RankPool
from support.traffic import bytes_sent


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, x[:, :2] * 2


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def with_fabric(steps: int, strategy: Any, *, folder: str = "", save_at: int = 0, resume: bool = False) -> Any:
    from lightning.fabric import Fabric

    quiet()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(*build())
    sync = cadenza.attach(model, optimizer, strategy) if strategy else None
    parts = {"model": model, "optimizer": optimizer, "sync": sync}
    if resume:
        checkpoint.load(folder, **parts)
    start, loss = bytes_sent(), torch.zeros(())
    for step in range(sync.clock if sync else 0, steps):
        for half in (0, 1):  # gradients are accumulated over two batches
            x, y = batch(fabric.global_rank, 2 * step + half)
            with fabric.no_backward_sync(model, enabled=half == 0):
                loss = F.mse_loss(model(x), y)
                fabric.backward(loss / 2)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        if sync:
            sync.step()
            if sync.clock == save_at:
                checkpoint.save(folder, **parts)
    sent = bytes_sent() - start
    if sync:
        sync.finish()
    return flat(model), loss.item(), sent


def run_fabric(folder: str) -> dict[str, Any]:
    strategy = cadenza.diloco(period=5, outer_momentum=0.5)
    return {
        "ours": with_fabric(18, strategy, folder=folder, save_at=7),
        "resumed": with_fabric(18, strategy, folder=folder, resume=True),
        "ddp": with_fabric(18, None),
        "warm-up": with_fabric(6, cadenza.post_local_sgd(period=4, warmup_steps=6)),
        "ddp for six steps": with_fabric(6, None),
    }


def test_what_fabric_sets_up_is_attached_as_it_is(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(2, run_fabric, str(tmp_path), env=ENV, timeout_s=110)
    values, loss, sent = one["ours"]
    assert values == other["ours"][0]
    assert [rank["resumed"][:2] for rank in (one, other)] == [rank["ours"][:2] for rank in (one, other)]
    assert loss < 0.5 * 4  # the variance of what it learns
    assert loss < 1.5 * one["ddp"][1]
    assert sent < 0.4 * one["ddp"][2]  # three rounds against 18 gradients
    torch.testing.assert_close(one["warm-up"][0], one["ddp for six steps"][0])


def post_local_sgd(folder: str) -> dict[str, Any]:
    from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
    from lightning.pytorch.strategies import DDPStrategy

    from cadenza.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

    class AsOnCuda(DDPStrategy):
        """Lightning registers hooks on CUDA alone; this does the same on a CPU."""

        def _register_ddp_hooks(self) -> None:
            _register_ddp_comm_hook(
                model=self.model, ddp_comm_state=self._ddp_comm_state, ddp_comm_hook=self._ddp_comm_hook
            )

    state = PostLocalSGDState(
        process_group=None, subgroup=None, start_localSGD_iter=4, post_local_gradient_allreduce=False
    )
    strategy = AsOnCuda(ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=4)
    seen: list[list[float]] = []
    _, module = fit(strategy, folder, callbacks=[watch(seen)])
    return {"seen": seen, "iter": state.iter, "losses": module.losses, "rank": os.environ["RANK"]}


def test_the_drop_in_s_state_works_in_lightning_s_ddp_strategy(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(2, post_local_sgd, str(tmp_path), env=ENV, timeout_s=110)
    assert one["iter"] == other["iter"] == 4
    equal = [step for step, (mine, its) in enumerate(zip(one["seen"], other["seen"], strict=True), 1) if mine == its]
    assert equal == [1, 2, 3, 4, 5, 9]  # gradients are averaged for four steps, then parameters at every fourth
    assert one["losses"][-1] < one["losses"][0]
