"""`CadenzaStrategy` under Lightning's real Trainer: loss, equal bits, bytes, resuming, warm-up, what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import cadenza
from support.lightning_runs import ENV, fit, flat, watch
from support.ranks import RankPool, outcome


def ours(strategy: Any, **options: Any) -> Any:
    from cadenza.integrations.lightning import CadenzaStrategy

    return CadenzaStrategy(strategy, **options)


# ---- loss, bits and bytes --------------------------------------------------------------------------------------------


def train_both(folder: str) -> dict[str, Any]:
    reports: list[Any] = []
    watched = [watch(), watch()]
    strategy = ours(cadenza.diloco(period=5, outer_momentum=0.5), observers=[reports.append])
    _, module = fit(strategy, folder, callbacks=watched[:1], max_epochs=4, limit_val_batches=1, val_check_interval=4)
    _, other = fit("ddp", folder, callbacks=watched[1:], max_epochs=4)
    return {
        "end": flat(module),
        "own": watched[0].own,
        "validated": module.validated,
        "rounds": [report.step for report in reports],
        "losses": (sum(module.losses[-4:]) / 4, sum(other.losses[-4:]) / 4, module.losses[0]),
        "sent": (watched[0].sent, watched[1].sent),
        "closed": strategy.sync is None,
    }


def test_a_run_learns_as_ddp_does_with_fewer_bytes_and_equal_bits(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(2, train_both, str(tmp_path), env=ENV, timeout_s=110)
    assert one["rounds"] == [5, 10, 15, 20, 24]  # the last one is finish()
    assert one["end"] == other["end"]
    assert one["own"] != other["own"]
    assert len(one["validated"]) == 5  # one before training, which needs no mean
    assert one["validated"][1:] == other["validated"][1:]  # of the mean, also between rounds
    cadenza_loss, ddp_loss, first = one["losses"]
    assert cadenza_loss < first / 2
    assert cadenza_loss < 1.5 * ddp_loss
    ours, ddp = one["sent"]
    assert ours < 0.6 * ddp  # four rounds and four means for validation, against 24 gradients
    assert one["closed"]


# ---- warm-up, accumulation and clipping ------------------------------------------------------------------------------


def warm_up(folder: str) -> Any:
    kept = []
    for strategy in (ours(cadenza.post_local_sgd(period=4, warmup_steps=6)), "ddp"):
        _, module = fit(strategy, folder, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.1)
        kept.append((flat(module), module.losses))
    return kept


def test_a_warm_up_is_ddp_s_training_with_accumulation_and_clipping(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(2, warm_up, str(tmp_path), env=ENV, timeout_s=110)
    (mine, losses), (ddp, expected) = results[0]
    assert len(losses) == 12  # six optimizer steps
    torch.testing.assert_close(losses, expected)
    parameters = len(mine) - 64 * 2 - 1  # DDP leaves running statistics to the first rank; here they are averaged
    close = torch.isclose(torch.tensor(mine), torch.tensor(ddp), rtol=1e-4, atol=1e-6)
    assert close.sum() >= parameters
    assert results[1][0][0] == mine


def several_optimizers(folder: str) -> Any:
    reports: list[Any] = []
    strategy = ours(cadenza.post_local_sgd(period=3, warmup_steps=2), observers=[reports.append])
    _, module = fit(strategy, folder, kind="two")
    return flat(module), [report.step for report in reports], module.losses


def test_with_manual_optimization_a_step_is_a_training_step_of_all_optimizers(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(2, several_optimizers, str(tmp_path), env=ENV, timeout_s=110)
    assert one[0] == other[0]
    assert one[1] == [5, 8, 11, 12]
    assert one[2][-1] < one[2][0]


def search_a_learning_rate(folder: str) -> Any:
    from lightning.pytorch.callbacks import LearningRateFinder

    reports: list[Any] = []
    strategy = ours(cadenza.diloco(period=5), observers=[reports.append])
    _, module = fit(strategy, folder, callbacks=[LearningRateFinder(num_training_steps=6)], enable_checkpointing=True)
    return flat(module), [report.step for report in reports], len(list(Path(folder).glob("*.ckpt*")))


def test_the_run_begins_anew_after_a_search_for_a_learning_rate(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(2, search_a_learning_rate, str(tmp_path), env=ENV, timeout_s=110)
    assert one[0] == other[0]
    assert one[1] == [5, 5, 10, 12]
    assert one[2] == 0  # the checkpoint of the search is gone


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def interrupted(folder: str) -> dict[str, Any]:
    """Train 3 epochs at once; and again from the checkpoint of the second, after step 12 of periods of 5."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    rank = torch.distributed.get_rank()
    strategy = cadenza.diloco(period=5, delay=1, codec=cadenza.codecs.int8(), outer_momentum=0.5)
    saving = ModelCheckpoint(folder, filename="{step}", save_top_k=2, monitor="step", mode="max", save_last=True)
    options = {"max_epochs": 3, "enable_checkpointing": True, "limit_val_batches": 1}
    _, through = fit(ours(strategy), folder, callbacks=[saving], **options)
    torch.distributed.barrier()
    listed = sorted(path.name for path in Path(folder).iterdir())
    path = f"{folder}/step=12.ckpt"
    saved = torch.load(path, weights_only=False)
    parts = sorted(p.name for p in (Path(folder) / saved["cadenza"]["workers"]).iterdir())
    _, again = fit(ours(strategy), folder, resume=path, **(options | {"enable_checkpointing": False}))
    torch.distributed.barrier()
    last = outcome(fit, ours(strategy), folder, resume=f"{folder}/last.ckpt", **options)
    (Path(folder) / saved["cadenza"]["workers"]).rename(f"{folder}/elsewhere-{rank}") if rank == 0 else None
    torch.distributed.barrier()
    lost = outcome(fit, ours(strategy), folder, resume=path, **options)
    return {
        "listed": listed,
        "parts": parts,
        "mean": torch.cat([t.float().flatten() for t in saved["state_dict"].values()]).tolist(),
        "validated": through.validated,
        "ends": (flat(through), flat(again)),
        "losses": (through.losses[-6:], again.losses),
        "last": flat(last[1][1]) if last[0] == "ok" else last,
        "lost": lost,
    }


def test_every_worker_resumes_bit_for_bit_in_the_middle_of_a_period(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(2, interrupted, str(tmp_path), env=ENV, timeout_s=110)
    assert one["listed"] == [
        f"{name}.ckpt{more}" for name in ("last", "step=12", "step=18") for more in ("", ".workers")
    ]  # that of step 6 is removed, with its folder
    assert one["parts"] == [
        "lightning-00000.ckpt",
        "lightning-00001.ckpt",
        "shared.json",
        "shared.safetensors",
        *(f"worker-0000{rank}.{kind}" for rank in (0, 1) for kind in ("json", "safetensors")),
    ]
    assert one["mean"] == one["validated"][2]  # that after the second epoch
    for rank in (one, other):
        assert rank["losses"][0] == rank["losses"][1]
        assert rank["ends"][0] == rank["ends"][1]
    assert one["losses"] != other["losses"]
    assert one["last"] == one["ends"][0]  # nothing is left to train, and yet all come together
    for rank in (one, other):
        assert rank["lost"][1] == "CheckpointError"
        assert "Copy that folder beside the file" in rank["lost"][2]


# ---- errors ----------------------------------------------------------------------------------------------------------


def raise_at_step_three(folder: str) -> tuple[Any, ...]:
    import lightning.pytorch as pl

    class Break(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.module = module
            if trainer.global_step == 3:
                raise RuntimeError("out of luck")

    strategy, breaking = ours(cadenza.local_sgd(period=100)), Break()
    told = outcome(fit, strategy, folder, callbacks=[breaking])
    return (*told, strategy.sync is None), flat(breaking.module)


def test_an_error_leaves_without_a_last_round(ranks: RankPool, tmp_path: Path) -> None:
    (one, own), (other, its_own) = ranks.run(2, raise_at_step_three, str(tmp_path), env=ENV)
    assert one == other == ("error", "RuntimeError", "out of luck", True)
    assert own != its_own


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings.simplefilter("ignore")
    from cadenza.integrations import versions
    from cadenza.integrations.lightning import CadenzaStrategy

    warnings.simplefilter("error")
    with pytest.raises(TypeError, match=r"cadenza.Strategy is required, .*; got str"):
        CadenzaStrategy("ddp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="find_unused_parameters is no option of CadenzaStrategy"):
        CadenzaStrategy(cadenza.local_sgd(period=4), find_unused_parameters=True)
    with pytest.raises(ValueError, match=r"Use faults=raise_error\(\)"):
        CadenzaStrategy(cadenza.local_sgd(period=4, faults=cadenza.shrink()))
    with pytest.raises(ValueError, match="Use balanced=False"):
        CadenzaStrategy(cadenza.local_sgd(period=4, balanced=True))
    monkeypatch.setattr(versions, "version", lambda _: "3.1.0")
    with pytest.warns(UserWarning, match=r"never tested with lightning 3.1.0, only with 2.6"):
        CadenzaStrategy(cadenza.local_sgd(period=4))
