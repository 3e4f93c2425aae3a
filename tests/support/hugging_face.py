"""A tiny language model and data for Hugging Face's loops; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from support.rank_process import forget_accelerate

VOCABULARY = 32
LENGTH = 12


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """About twenty thousand parameters."""
    set_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))


def sentences(count: int) -> list[dict[str, list[int]]]:
    """Rows that count upwards in steps of one to three: there is something to learn."""
    rows = [[(i * 7 + n * (1 + i % 3)) % VOCABULARY for n in range(LENGTH)] for i in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def trainer_for(model: Any, folder: str, kind: type[Trainer] = Trainer, **settings: Any) -> Any:
    forget_accelerate()
    args = TrainingArguments(
        folder,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=4,
        per_device_train_batch_size=2,
        **{"learning_rate": 1e-2, "average_tokens_across_devices": False, "save_strategy": "no", **settings},
    )
    return kind(model, args, data_collator=collate, train_dataset=sentences(64), eval_dataset=sentences(8))


def trained(model: torch.nn.Module) -> torch.Tensor:
    """All parameters that are trained, as one tensor."""
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def on_all_ranks(value: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value)
    return found
