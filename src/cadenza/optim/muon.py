"""Muon for a model's hidden matrices and AdamW for everything else, as MuLoCo trains inside its periods."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection

import torch
from torch import nn

from cadenza.common.checks import as_fraction, as_number, as_positive
from cadenza.errors import CadenzaError

__all__ = ["muon_and_adamw"]

_EMBEDDING = re.compile(r"embed|(^|[._])pos(ition)?(al|s)?([._]|$)")


def muon_and_adamw(
    model: nn.Module,
    *,
    lr: float = 0.02,
    adamw_lr: float | None = None,
    momentum: float = 0.95,
    nesterov: bool = False,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    use_muon: Callable[[str, nn.Parameter], bool] | None = None,
) -> list[torch.optim.Optimizer]:
    """Return `torch.optim.Muon` for the hidden matrices and AdamW for the rest, as MuLoCo has them (arXiv 2505.23725).

    Hidden matrices are all parameters of two dimensions but embeddings (of an `nn.Embedding`, or with a name such as
    "embedding" or "positions") and the output layer: the last one with a matrix, unless it stands in one of several
    like blocks, as where the output is tied to the embedding. The defaults are the authors'.

    Args:
        model: The model; parameters without `requires_grad` are left out.
        lr: Muon's learning rate.
        adamw_lr: AdamW's; None: the same.
        momentum: Muon's.
        nesterov: Whether Muon looks ahead.
        betas: AdamW's.
        eps: AdamW's.
        weight_decay: Of both.
        use_muon: Says of a parameter's name and value whether Muon takes it, instead of the rule above.

    >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    >>> muon, adamw = muon_and_adamw(model, lr=0.02, adamw_lr=0.001)
    >>> [tuple(p.shape) for p in muon.param_groups[0]["params"]]
    [(4, 4)]
    >>> len(adamw.param_groups[0]["params"]), adamw.param_groups[0]["lr"]
    (4, 0.001)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"muon_and_adamw() takes a torch.nn.Module; got {type(model).__name__}.")
    if use_muon is not None and not callable(use_muon):
        raise TypeError(f"use_muon is a function of a name and a parameter; got {use_muon!r}.")
    lr, adamw_lr = as_positive("lr", lr), as_positive("adamw_lr", lr if adamw_lr is None else adamw_lr)
    momentum, betas = as_fraction("momentum", momentum), _checked_betas(betas)
    eps, decay = as_positive("eps", eps), _checked_decay(weight_decay)
    if not hasattr(torch.optim, "Muon"):
        raise CadenzaError(
            f"muon_and_adamw() needs torch.optim.Muon, which torch has from 2.9 on; this is torch {torch.__version__}. "
            "Install a newer one, or train with torch.optim.AdamW alone."
        )
    matrices, others = _split(model, use_muon or _HiddenMatrices(model))
    muon = torch.optim.Muon(matrices, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=decay)
    if not others:
        return [muon]
    return [muon, torch.optim.AdamW(others, lr=adamw_lr, betas=betas, eps=eps, weight_decay=decay)]


class _HiddenMatrices:
    """The rule that says which parameters are hidden matrices: by their owners, so that ties do not matter."""

    def __init__(self, model: nn.Module) -> None:
        embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        owners = {n: m for n, m in model.named_modules() if any(p.ndim == 2 for p in m.parameters(recurse=False))}
        last = [m for n, m in list(owners.items())[-1:] if not _is_in_like_blocks(n, owners)]
        self._left_out = {id(p) for m in [*embeddings, *last] for p in m.parameters(recurse=False)}

    def __call__(self, name: str, parameter: nn.Parameter) -> bool:
        return parameter.ndim == 2 and id(parameter) not in self._left_out and not _EMBEDDING.search(name.lower())


def _is_in_like_blocks(owner: str, owners: Collection[str]) -> bool:
    """Say whether a module is a part of a numbered block that has another one like it: so it is no output layer."""
    parts = owner.split(".")
    numbers = [i for i, part in enumerate(parts[:-1]) if part.isdecimal()]
    likes = ([*parts[:i], "\\d+", *parts[i + 1 :]] for i in numbers)
    return any(re.fullmatch("\\.".join(like), other) for like in likes for other in owners if other != owner)


def _split(
    model: nn.Module, use_muon: Callable[[str, nn.Parameter], bool]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        chosen = use_muon(name, parameter)
        if chosen and parameter.ndim != 2:
            raise ValueError(
                f"Muon takes matrices, and {name} has the shape {tuple(parameter.shape)}: let use_muon say False of it."
            )
        (matrices if chosen else others).append(parameter)
    if not matrices:
        raise ValueError(
            "The model has no hidden matrix for Muon among its trained parameters. Name some with use_muon=, or train "
            "it with torch.optim.AdamW alone."
        )
    return matrices, others


def _checked_betas(betas: object) -> tuple[float, float]:
    message = f"betas is a pair of numbers, such as (0.9, 0.95); got {betas!r}."
    if not isinstance(betas, tuple | list):
        raise TypeError(message)
    if len(betas) != 2:
        raise ValueError(message)
    return as_fraction("betas", betas[0]), as_fraction("betas", betas[1])


def _checked_decay(decay: object) -> float:
    if not 0 <= as_number("weight_decay", decay) < math.inf:
        raise ValueError(f"weight_decay must be at least 0; got {decay!r}.")
    return as_number("weight_decay", decay)
