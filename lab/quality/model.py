"""The GPTs of all workers as one computation: their parameters are the rows of one tensor.

The model is `cadenza.training.gpt.GPT`, with queries and keys normalised if asked for (as arXiv 2503.09799 has it). A
worker has a module whose parameters are views of its row, so the library sees a model as any other.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from cadenza.training.gpt import GPT, VOCABULARY, Shape

__all__ = ["SHAPES", "Stack", "new_model"]

SHAPES = {
    "35k": Shape(layers=2, width=32, heads=2, context=64),
    "170k": Shape(layers=3, width=64, heads=4, context=64),
    "830k": Shape(layers=4, width=128, heads=4, context=64),
    "3.3M": Shape(layers=4, width=256, heads=8, context=64),
}


def new_model(shape: Shape, *, seed: int, qk_norm: bool) -> GPT:
    """Return the library's GPT, with a gain for queries and one for keys in every block if they are normalised."""
    torch.manual_seed(seed)
    model = GPT(shape)
    if qk_norm:
        for block in model.blocks:
            for name in ("query_gain", "key_gain"):
                block.register_parameter(name, nn.Parameter(torch.ones(shape.width // shape.heads)))
    return model


class Stack:
    """The workers' models: `values` has a row for each, `modules` are views of the rows, their gradients too.

    Losses are differentiated by `leaves`, the same values cut into parameters: the gradient of a cut would be one more
    pass over all rows for every piece.
    """

    def __init__(self, model: GPT, shape: Shape, workers: int) -> None:
        self.shape = shape
        self.names = [name for name, _ in model.named_parameters()]
        self._shapes = [p.shape for p in model.parameters()]
        self._sizes = [p.numel() for p in model.parameters()]
        row = torch.cat([p.detach().flatten() for p in model.parameters()])
        self.values = row.repeat(workers, 1).requires_grad_()
        self.gradients = self.values.grad = torch.zeros_like(self.values)
        self.modules = [self._view(model, worker) for worker in range(workers)]
        self.leaves = {name: part.requires_grad_() for name, part in self.parts(self.values.detach()).items()}

    def parts(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each parameter's part of a flat tensor (workers, values), in its shape."""
        cut = flat.split(self._sizes, dim=1)
        return {n: v.view(len(flat), *s) for n, s, v in zip(self.names, self._shapes, cut, strict=True)}

    def losses(self, parts: dict[str, torch.Tensor], given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of each worker, of (workers, batch, context) bytes."""
        return _losses(parts, given, wanted, self.shape)

    def backward(self, losses: torch.Tensor) -> None:
        """Put the gradients of the workers' losses into `gradients`."""
        found = torch.autograd.grad(losses.sum(), list(self.leaves.values()))
        torch._foreach_copy_(list(self.parts(self.gradients).values()), list(found))

    def _view(self, model: GPT, worker: int) -> GPT:
        module = copy.deepcopy(model)
        values, gradients = self.parts(self.values.detach()), self.parts(self.gradients)
        for name, parameter in module.named_parameters():
            parameter.data = values[name][worker]
            parameter.grad = gradients[name][worker]
        return module


def _losses(p: dict[str, torch.Tensor], given: torch.Tensor, wanted: torch.Tensor, shape: Shape) -> torch.Tensor:
    workers, batch, length = given.shape
    width, size = shape.width, shape.width // shape.heads
    embedding = p["embedding.weight"]
    first = (torch.arange(workers) * VOCABULARY).view(workers, 1, 1)  # of each worker in a common table
    x = F.embedding(given + first, embedding.reshape(workers * VOCABULARY, width))
    x = (x + p["positions"][:, None, :length]).view(workers, batch * length, width)
    above = torch.full((length, length), -torch.inf).triu(1)
    for i in range(shape.layers):
        block = f"blocks.{i}."
        heads = _linear(_normal(x, p, f"{block}norm_1"), p[f"{block}attention.weight"])
        query, key, value = heads.view(workers, batch, length, 3, shape.heads, size).unbind(3)
        if f"{block}query_gain" in p:
            query = F.rms_norm(query, (size,)) * p[f"{block}query_gain"].view(workers, 1, 1, 1, size)
            key = F.rms_norm(key, (size,)) * p[f"{block}key_gain"].view(workers, 1, 1, 1, size)
        query, key, value = (t.flatten(0, 1).transpose(1, 2) for t in (query, key, value))
        scores = query @ key.transpose(2, 3) * (1 / math.sqrt(size)) + above
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(workers, batch * length, width)
        x = x + _linear(mixed, p[f"{block}projection.weight"])
        hidden = _linear(_normal(x, p, f"{block}norm_2"), p[f"{block}widen.weight"])
        x = x + _linear(F.gelu(hidden, approximate="tanh"), p[f"{block}narrow.weight"])
    logits = _linear(_normal(x, p, "norm"), embedding)
    losses = F.cross_entropy(logits.view(-1, VOCABULARY), wanted.reshape(-1), reduction="none")
    return losses.view(workers, -1).mean(1)


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, weight.transpose(1, 2))


def _normal(x: torch.Tensor, p: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    normal = F.layer_norm(x, (x.shape[-1],))
    return normal * p[f"{name}.weight"].unsqueeze(1) + p[f"{name}.bias"].unsqueeze(1)
