"""Cadenza's presets."""

from __future__ import annotations

import torch
from lab.race.jobs import Job
from lab.race.rivals import Ready

import cadenza
from cadenza import codecs

CODECS = {
    "fp32": codecs.fp32,
    "bf16": codecs.bf16,
    "int8": codecs.int8,
    "int8+feedback": lambda: codecs.error_feedback(codecs.int8()),
    "e3m0": codecs.e3m0,
    "e3m0+feedback": lambda: codecs.error_feedback(codecs.e3m0()),
}


def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Job, variant: str) -> Ready:
    sync = cadenza.attach(model, optimizer, strategy(job, variant))
    return Ready(model, optimizer, after_backward=sync.average_gradients, after_step=sync.step, close=sync.finish)


def strategy(job: Job, variant: str) -> cadenza.Strategy:
    """Return the preset with the job's settings; what they do not say is the preset's own."""
    settings = dict(job.settings)
    given = {"warmup_steps": settings.pop("gradient_steps", 0), "measure_drift": False}
    if "codec" in settings:
        given["codec"] = CODECS[settings.pop("codec")]()
    if variant == "hierarchical":
        levels = {settings.pop("inner_period"): tuple(map(tuple, settings.pop("inner", ((0, 1), (2, 3)))))}
        return cadenza.hierarchical({**levels, job.period: "all"}, **settings, **given)
    return getattr(cadenza, variant)(job.period, **settings, **given)
