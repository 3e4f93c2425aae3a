"""Hugging Face's Trainer and trl's, with the real packages on real ranks."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback

import cadenza
from cadenza.integrations import transformers as integration
from cadenza.integrations.transformers import CadenzaCallback
from support.gradient_buckets import GradientBuckets
from support.hugging_face import (
    VOCABULARY,
    on_all_ranks,
    sentences,
    tiny_model,
    trained,
    trainer_for,
)
from support.rank_process import forget_accelerate
from support.ranks import RankPool, outcome

ROOM_S = 110
PERIOD, STEPS, SAVED_AT = 4, 10, 6  # saved in the middle of a period


def run(trainer: Any, strategy: cadenza.Strategy, resume: str | None = None, **options: Any) -> dict[str, Any]:
    """Train, and tell what can be seen of it."""
    callback = CadenzaCallback(strategy, **options)
    assert callback.bind(trainer) is trainer
    buckets, prepare = GradientBuckets(), trainer._prepare_for_training

    def prepare_and_count(*args: Any) -> Any:
        model, loader = prepare(*args)
        model.register_comm_hook(None, buckets.hook)
        return model, loader

    trainer._prepare_for_training = prepare_and_count
    loss = trainer.train(resume_from_checkpoint=resume).training_loss
    mine, *others = on_all_ranks(trained(trainer.model))
    logs = trainer.state.log_history
    return {
        "loss": loss,
        "equal": all(torch.equal(mine, other) for other in others),
        "values": trained(trainer.model),
        "gradient_bytes": buckets.bytes,
        "rounds": [(log["step"], log[key]) for log in logs for key in log if key.endswith("/bytes_sent")],
        "evaluations": [log["eval_loss"] for log in logs if "eval_loss" in log],
        "losses": [log["loss"] for log in logs if "loss" in log],
    }


SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": SAVED_AT,
}


def train_and_resume(folder: str) -> dict[str, Any]:
    strategy = cadenza.diloco(PERIOD, codec=cadenza.codecs.error_feedback(cadenza.codecs.int8()))
    whole = run(trainer_for(tiny_model(), folder, **SETTINGS), strategy)
    whole |= {"kept": checkpoint(Path(folder) / f"checkpoint-{SAVED_AT}")}
    again = run(trainer_for(tiny_model(), folder, **SETTINGS), strategy)
    same_folder = torch.equal(again["values"], whole["values"])
    resumed = run(trainer_for(tiny_model(1), folder, **SETTINGS), strategy, f"{folder}/checkpoint-{SAVED_AT}")
    last = run(trainer_for(tiny_model(1), folder, **{**SETTINGS, "max_steps": 12}), strategy, True)  # type: ignore[arg-type]
    return whole | {
        "second run": same_folder,
        "resumed": torch.equal(resumed["values"], whole["values"]),
        "later rounds": resumed["rounds"],
        "went on": last["rounds"],
    }


def checkpoint(folder: Path) -> dict[str, Any]:
    """How far Trainer's own file of the model is from the mean of the workers', and how far those are apart."""
    saved = load_file(folder / "model.safetensors")
    own = [load_file(folder / "cadenza" / f"worker-{worker:05}.safetensors") for worker in range(2)]
    models = [
        torch.cat([file[f"worker/{w}/model/{name}"].flatten() for name in sorted(saved)]) for w, file in enumerate(own)
    ]
    mean = torch.cat([saved[name].flatten() for name in sorted(saved)])
    return {
        "from mean": float((torch.stack(models).mean(0) - mean).abs().max()),
        "apart": float((models[0] - models[1]).abs().max()),
    }


@pytest.mark.timeout(240)
def test_trainer_trains_saves_the_mean_and_resumes_to_the_bit(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(2, train_and_resume, str(tmp_path), timeout_s=230)
    for result in results:
        assert result["equal"]
        assert result["losses"][-1] < result["losses"][0]
        assert result["gradient_bytes"] == 0, "DDP is silent"
        assert [step for step, _ in result["rounds"]] == [4, 8, 10]
        assert result["evaluations"] == results[0]["evaluations"]
        assert len(result["evaluations"]) == 4
        assert result["kept"]["from mean"] < 1e-6 < 1e-4 < result["kept"]["apart"]
        assert result["second run"], "into the folder of the first, with the same result"
        assert result["resumed"], "from the middle of a period"
        assert [step for step, _ in result["later rounds"]] == [4, 8, 10]
        assert [step for step, _ in result["went on"]] == [4, 8, 12], "the last checkpoint is of before finish()"


def load_best(folder: str) -> Any:
    settings = {**SETTINGS, "max_steps": 6, "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    trainer = trainer_for(tiny_model(), folder, **{**settings, "learning_rate": 1.0})  # it gets worse from step to step
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    seen = run(trainer, cadenza.diloco(PERIOD))
    best = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    now = trainer.model.state_dict()
    return seen["equal"], all(torch.equal(now[name], value) for name, value in best.items()), trainer.state.global_step


def test_the_best_model_is_loaded_as_it_was_saved(ranks: RankPool, tmp_path: Path) -> None:
    for equal, best, step in ranks.run(2, load_best, str(tmp_path), timeout_s=ROOM_S):
        assert (equal, best) == (True, True)
        assert step < 6, "stopped early"


def lora(folder: str) -> Any:
    model = tiny_model()
    whole = sum(p.nbytes for p in model.parameters())
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    settings = {"max_steps": 6, "activation_checkpointing": True, "save_strategy": "steps", "save_steps": 6}
    result = run(trainer_for(model, folder, **settings), cadenza.local_sgd(3))
    files = {path.name: path.stat().st_size for path in Path(folder, "checkpoint-6", "cadenza").glob("*.safetensors")}
    warm = run(trainer_for(tiny_model(), folder, max_steps=4), cadenza.post_local_sgd(2, warmup_steps=2))
    return {**result, "whole": whole, "files": files, "warm": warm}


def test_rounds_of_lora_with_checkpointing_are_small_and_a_warm_up_is_ddps(ranks: RankPool, tmp_path: Path) -> None:
    for result in ranks.run(2, lora, str(tmp_path), timeout_s=ROOM_S):
        assert result["equal"]
        adapters = result["values"].nbytes
        assert [step for step, _ in result["rounds"]] == [3, 6]
        assert all(0 < size < 2 * adapters + 20_000 for _, size in result["rounds"])
        assert adapters < result["whole"] / 20
        assert set(result["files"]) == {"shared.safetensors", "worker-00000.safetensors", "worker-00001.safetensors"}
        assert result["files"]["worker-00001.safetensors"] < result["whole"], "what is frozen is not written"
        warm = result["warm"]
        assert warm["gradient_bytes"] == 2 * warm["values"].nbytes, "of the two steps of the warm-up"
        assert [step for step, _ in warm["rounds"]] == [4]
        assert warm["equal"]


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(sentences(64))


def misuse(folder: str) -> dict[str, Any]:
    def train(*callbacks: Any, **settings: Any) -> Any:
        trainer = trainer_for(tiny_model(), folder, max_steps=1, **settings)
        trainer.train_dataset = Stream()
        for callback in callbacks:
            trainer.add_callback(callback)
        return trainer

    strategy = cadenza.local_sgd(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        talkative = {"average_tokens_across_devices": True, "include_num_input_tokens_seen": "all"}
        noisy = CadenzaCallback(strategy).bind(train(**talkative))
        noisy.train()
        integration.TESTED = ("1.0",)
        twice = CadenzaCallback(strategy)
        twice.bind(train())
    second = train()
    CadenzaCallback(strategy).bind(second)
    CadenzaCallback(cadenza.diloco(2)).bind(second)
    return {
        "warnings": " ".join(str(warning.message) for warning in caught),
        "unbound": outcome(train(CadenzaCallback(strategy)).train),
        "twice": outcome(twice.bind, train()),
        "no trainer": outcome(CadenzaCallback(strategy).bind, tiny_model()),
        "two synchronizers": outcome(second.train),
        "trains on": outcome(lambda: noisy.train().global_step),
    }


def test_hidden_traffic_and_misuse_are_named(ranks: RankPool, tmp_path: Path) -> None:
    for result in ranks.run(2, misuse, str(tmp_path), timeout_s=ROOM_S):
        for setting in ("average_tokens_across_devices=False", '{"dispatch_batches": False}', 'tokens_seen="no"'):
            assert setting in result["warnings"]
        assert "was never tested" in result["warnings"]
        assert ".bind(trainer) before trainer.train()" in result["unbound"][2]
        assert "bound already" in result["twice"][2]
        assert "transformers.Trainer is required" in result["no trainer"][2]
        assert "Another synchronizer is attached" in result["two synchronizers"][2]
        assert result["trains on"] == ("ok", 1), "train() can be called again"


def test_strategies_that_trainer_cannot_serve_are_refused() -> None:
    with pytest.raises(ValueError, match="first dead rank"):
        CadenzaCallback(cadenza.local_sgd(2, faults=cadenza.shrink()))
    with pytest.raises(ValueError, match="does not tell"):
        CadenzaCallback(cadenza.local_sgd(2, weight="samples"))
    with pytest.raises(TypeError, match=r"cadenza\.Strategy is required"):
        CadenzaCallback("diloco")  # type: ignore[arg-type]


def alone(folder: str) -> int:
    logging.getLogger("cadenza").setLevel(logging.ERROR)
    trainer = CadenzaCallback(cadenza.local_sgd(2)).bind(trainer_for(tiny_model(), folder, max_steps=2))
    return int(trainer.train().global_step)


def test_one_process_trains_as_without(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(1, alone, str(tmp_path), timeout_s=ROOM_S) == [2]


def with_trl(folder: str) -> dict[str, Any]:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    forget_accelerate()
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0", unk_token="w0")
    rows = Dataset.from_list([{"input_ids": row["input_ids"]} for row in sentences(64)])
    args = SFTConfig(folder, use_cpu=True, bf16=False, report_to=[], max_steps=4, save_strategy="no", disable_tqdm=True)
    return run(SFTTrainer(tiny_model(), args, train_dataset=rows, processing_class=tokenizer), cadenza.local_sgd(2))


def test_trl_trains(ranks: RankPool, tmp_path: Path) -> None:
    for result in ranks.run(2, with_trl, str(tmp_path), timeout_s=ROOM_S):
        assert result["equal"]
        assert result["gradient_bytes"] == 0
        assert [step for step, _ in result["rounds"]] == [2, 4]
