"""Who is told about rounds: an observer is any callable that takes a `RoundReport`.

>>> from cadenza.reports import RoundReport
>>> reports = []
>>> notify([reports.append, log()], RoundReport.example(step=16))
>>> reports[0].step
16
"""

from cadenza.observers.json_lines import Jsonl, jsonl, read_jsonl
from cadenza.observers.loggers import MLflow, TensorBoard, WandB, mlflow, tensorboard, wandb
from cadenza.observers.telling import Observer, log, notify

__all__ = [
    "Jsonl",
    "MLflow",
    "Observer",
    "TensorBoard",
    "WandB",
    "jsonl",
    "log",
    "mlflow",
    "notify",
    "read_jsonl",
    "tensorboard",
    "wandb",
]
