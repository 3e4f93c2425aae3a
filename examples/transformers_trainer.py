"""Hugging Face's Trainer by DiLoCo: one line, `CadenzaCallback(strategy).bind(trainer)`.

    torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py

A vision transformer of a few thousand parameters learns scikit-learn's digits; nothing is downloaded.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

import cadenza
from cadenza.integrations.transformers import CadenzaCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=320)
steps = parser.parse_args().steps

torch.set_num_threads(1)  # the workers share this machine's cores
set_seed(0)
digits, labels = load_digits(return_X_y=True)
shuffled = torch.randperm(len(digits)).tolist()
rows = [{"pixel_values": torch.tensor(digits[i] / 8 - 1).float().view(1, 8, 8), "labels": labels[i]} for i in shuffled]

sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
images = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
model = ViTForImageClassification(ViTConfig(**images, **sizes, initializer_range=0.1))

args = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=steps,
    learning_rate=1e-2,
    warmup_steps=10,
    per_device_train_batch_size=32,
    average_tokens_across_devices=False,  # otherwise every step waits for all ranks
    logging_steps=50,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


trainer = Trainer(model, args, train_dataset=rows[360:], eval_dataset=rows[:360], compute_metrics=accuracy)
reports = []
CadenzaCallback(cadenza.diloco(period=10, outer_lr=0.4), observers=[reports.append]).bind(trainer)
trainer.train()

seen = trainer.evaluate()
if trainer.is_world_process_zero():
    world = dist.get_world_size()
    sent = sum(report.bytes_sent for report in reports)
    gradients = steps * 2 * (world - 1) / world * sum(4 * p.numel() for p in model.parameters())
    print(f"{world} workers, {steps} steps: loss {seen['eval_loss']:.3f}, accuracy {seen['eval_accuracy']:.1%}")
    print(f"each worker sent {sent / 1e6:.2f} MB; averaging every step's gradients sends {gradients / 1e6:.2f} MB")
dist.destroy_process_group()
