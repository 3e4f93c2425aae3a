"""The inner optimizers of all workers as one: AdamW on the rows of a tensor, or Muon for the hidden matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lab.quality.model import Stack

from cadenza.optim import muon_and_adamw

__all__ = ["StackedAdamW", "StackedMuon"]

_STEPS = ((3.4445, -4.775, 2.0315),) * 5  # Newton-Schulz, the coefficients of torch.optim.Muon


class StackedAdamW:
    """AdamW for all rows at once; `optimizers` are those that the library is given, with views of the same moments."""

    def __init__(self, stack: Stack, *, betas: tuple[float, float], weight_decay: float) -> None:
        self._rows = torch.optim.AdamW([stack.values], lr=0.0, betas=betas, weight_decay=weight_decay, fused=True)
        moments = {name: torch.zeros_like(stack.values) for name in ("exp_avg", "exp_avg_sq")}
        self._rows.state[stack.values] = {"step": torch.tensor(0.0), **moments}
        parts = {name: stack.parts(flat) for name, flat in moments.items()}
        self.optimizers = [torch.optim.AdamW(module.parameters(), lr=0.0) for module in stack.modules]
        for worker, (module, optimizer) in enumerate(zip(stack.modules, self.optimizers, strict=True)):
            for name, p in module.named_parameters():
                own = {moment: part[name][worker] for moment, part in parts.items()}
                optimizer.state[p] = {"step": torch.tensor(0.0), **own}

    def of(self, worker: int) -> Sequence[torch.optim.Optimizer]:
        return [self.optimizers[worker]]

    def step(self, lr: float) -> None:
        """Take a step of `values.grad`."""
        for optimizer in (self._rows, *self.optimizers):
            optimizer.param_groups[0]["lr"] = lr
        self._rows.step()

    def forget(self, first: float, second: float) -> None:
        """Keep so much of the moments of all workers; of neither: begin to count steps anew, as a new AdamW would."""
        (state,) = self._rows.state.values()
        state["exp_avg"].mul_(first)
        state["exp_avg_sq"].mul_(second)
        if first == second == 0:
            state["step"].zero_()


class StackedMuon:
    """Muon for the blocks' matrices, AdamW for the rest; orthogonalised in fp32, where torch.optim.Muon takes bf16.

    The learning rate is Muon's; AdamW's is `adamw_share` of it.
    """

    def __init__(
        self, stack: Stack, *, betas: tuple[float, float], weight_decay: float, adamw_share: float, momentum: float
    ) -> None:
        self._momentum, self._weight_decay = momentum, weight_decay
        self._share = adamw_share
        self._plain = [muon_and_adamw(module, use_muon=is_hidden) for module in stack.modules]
        names = [name for name, p in stack.modules[0].named_parameters() if is_hidden(name, p)]
        values = stack.parts(stack.values.detach())
        buffers = stack.parts(torch.zeros_like(stack.values))
        # Matrices of one shape are orthogonalised together, those of all layers and workers.
        shapes = sorted({tuple(values[name].shape[1:]) for name in names})
        self._groups = [[n for n in names if tuple(values[n].shape[1:]) == shape] for shape in shapes]
        self._stack, self._values, self._buffers = stack, values, buffers
        self._rest = [n for n in stack.names if n not in names]
        self._others = {n: torch.nn.Parameter(values[n]) for n in self._rest}
        self._adamw = torch.optim.AdamW(self._others.values(), lr=0.0, betas=betas, weight_decay=weight_decay)

    def of(self, worker: int) -> Sequence[torch.optim.Optimizer]:
        return self._plain[worker]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Take a step of `values.grad`."""
        gradients = self._stack.parts(self._stack.gradients)
        for name, other in self._others.items():
            other.grad = gradients[name]
        self._adamw.param_groups[0].update(lr=lr * self._share, weight_decay=self._weight_decay / self._share)
        self._adamw.step()
        for names in self._groups:
            for name in names:
                self._buffers[name].lerp_(gradients[name], 1 - self._momentum)
            updates = orthogonal(torch.stack([self._buffers[name] for name in names]))
            rows, columns = updates.shape[-2:]
            factor = lr * max(1.0, rows / columns) ** 0.5
            for name, update in zip(names, updates, strict=True):
                self._values[name].mul_(1 - lr * self._weight_decay).sub_(update, alpha=factor)


def is_hidden(name: str, parameter: torch.nn.Parameter) -> bool:
    """Say whether Muon takes a parameter: the blocks' matrices, not the embedding, which is the output as well."""
    return name.startswith("blocks.") and parameter.ndim == 2


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices (…, rows, columns) with their singular values brought near to 1, as Muon does."""
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.transpose(-2, -1)
    x = (wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).flatten(0, -3)
    for a, b, c in _STEPS:
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.view(wide.shape)
    return x if wide is matrices else x.transpose(-2, -1)
