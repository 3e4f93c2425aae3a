"""Accelerate's loop, with the real package on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

import cadenza
from cadenza.integrations.accelerate import Cadenza
from support.gradient_buckets import GradientBuckets
from support.hugging_face import on_all_ranks, trained
from support.rank_process import forget_accelerate
from support.ranks import RankPool, outcome

STEPS, SAVED_AT, PERIOD = 10, 6, 4  # saved in the middle of a period


class Loop:
    """A loop of Accelerate's: accumulation over two batches, clipping, a schedule."""

    def __init__(self, seed: int = 0) -> None:
        forget_accelerate()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS * 2)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        self.buckets = GradientBuckets()
        self.model.register_comm_hook(None, self.buckets.hook)

    def step(self, n: int, loop: Cadenza) -> float:
        loss = torch.zeros(())
        for batch in (2 * n, 2 * n + 1):
            torch.manual_seed(batch * 10 + dist.get_rank())
            inputs = torch.randn(8, 6)
            with self.accelerator.accumulate(self.model):
                loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                loop.step()
        return float(loss.detach())

    def cadenza(self, strategy: cadenza.Strategy, **options: Any) -> Cadenza:
        return Cadenza(self.accelerator, self.model, self.optimizer, strategy, **options)


STRATEGY = cadenza.diloco(PERIOD, codec=cadenza.codecs.error_feedback(cadenza.codecs.int8()))


def train(folder: str, until: int = STEPS) -> dict[str, Any]:
    here, reports, losses = Loop(), [], []
    with here.cadenza(STRATEGY, observers=[reports.append]) as loop:
        for n in range(until):
            losses.append(here.step(n, loop))
            if n + 1 == SAVED_AT:
                before = trained(here.model)
                here.accelerator.save_state(folder)
                untouched = torch.equal(trained(here.model), before)
    mine, *others = on_all_ranks(trained(here.model))
    dist.barrier()
    first = load_file(Path(folder) / "model.safetensors")["0.weight"].flatten()
    mean = torch.stack(on_all_ranks(before)).mean(0)[: first.numel()]
    return {
        "losses": losses,
        "equal": all(torch.equal(mine, other) for other in others),
        "values": trained(here.model),
        "rounds": [report.step for report in reports],
        "gradient_bytes": here.buckets.bytes,
        "from mean": float((first - mean).abs().max()),
        "untouched": untouched,
    }


def resume(folder: str, inside: bool) -> torch.Tensor:
    here = Loop(seed=1)
    loop = here.cadenza(STRATEGY)
    if not inside:
        here.accelerator.load_state(folder)
    with loop:
        if inside:
            here.step(0, loop)
            here.accelerator.load_state(folder)
        for n in range(SAVED_AT, STEPS):
            here.step(n, loop)
    return trained(here.model)


def train_and_resume(folder: str) -> dict[str, Any]:
    whole = train(folder)
    again = train(folder)  # into the same folder
    whole["second run"] = torch.equal(again["values"], whole["values"])
    whole["resumed"] = [torch.equal(resume(folder, inside), whole["values"]) for inside in (True, False)]
    return whole


def test_a_loop_trains_saves_the_mean_and_resumes_to_the_bit(ranks: RankPool, tmp_path: Path) -> None:
    for result in ranks.run(2, train_and_resume, str(tmp_path), timeout_s=110):
        assert result["equal"]
        assert sum(result["losses"][-3:]) < sum(result["losses"][:3])
        assert result["rounds"] == [4, 8, 10], "of steps of the optimizer, not of batches"
        assert result["gradient_bytes"] == 0, "DDP is silent"
        assert result["from mean"] < 1e-6
        assert result["untouched"]
        assert result["second run"]
        assert result["resumed"] == [True, True]


def misuse(folder: str) -> dict[str, Any]:
    here = Loop()
    bare, strategy = here.accelerator.unwrap_model(here.model), cadenza.local_sgd(2)

    def enter(*parts: Any, **options: Any) -> int:
        with Cadenza(here.accelerator, *parts, strategy, **options) as loop:
            return -1 if loop.sync is None else loop.sync.clock

    def twice() -> None:
        with here.cadenza(strategy), here.cadenza(strategy):
            pass

    def load_inside() -> None:
        with here.cadenza(strategy):
            here.accelerator.load_state(folder)

    def leave() -> None:
        with here.cadenza(strategy):
            raise KeyError("mine")

    here.accelerator.save_state(folder)
    dist.barrier()
    methods = {**vars(here.accelerator)}
    results = {
        "plain optimizer": outcome(enter, bare, here.optimizer.optimizer),
        "bare model": outcome(enter, bare, here.optimizer),
        "disabled": outcome(enter, here.model, here.optimizer, enabled=False),
        "twice": outcome(twice),
        "foreign checkpoint": outcome(load_inside),
        "exception": outcome(leave),
        "ok": outcome(enter, here.model, here.optimizer),
    }
    return results | {"left alone": methods.keys() == vars(here.accelerator).keys()}


def test_misuse_is_named(ranks: RankPool, tmp_path: Path) -> None:
    for result in ranks.run(2, misuse, str(tmp_path), timeout_s=110):
        assert "accelerator.prepare(model, optimizer) first" in result["plain optimizer"][2]
        assert "Pass the DistributedDataParallel itself" in result["bare model"][2]
        assert result["disabled"] == ("ok", -1)
        assert "Another synchronizer is attached" in result["twice"][2]
        assert "saved outside of a Cadenza block" in result["foreign checkpoint"][2]
        assert result["exception"] == ("error", "KeyError", "'mine'")
        assert result["ok"] == ("ok", 0)
        assert result["left alone"], "nothing is left of Cadenza in the accelerator"
