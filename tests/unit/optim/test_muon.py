"""Which parameters Muon takes, and with which options; what cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cadenza.errors import CadenzaError
from cadenza.optim import muon_and_adamw
from cadenza.training.gpt import GPT, Shape
from support.models import CASES, TiedTransformer


def taken(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def test_hidden_matrices_go_to_muon_and_the_rest_to_adamw() -> None:
    model = CASES["mlp"].build()
    muon, adamw = muon_and_adamw(model)
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    assert taken(model, muon) == {"0.weight", "2.weight"}
    assert taken(model, adamw) == {"0.bias", "2.bias", "4.weight", "4.bias"}


def test_embeddings_and_an_output_layer_tied_to_them_go_to_adamw() -> None:
    model = TiedTransformer()
    muon, adamw = muon_and_adamw(model)
    assert taken(model, muon) == {
        "layer.self_attn.in_proj_weight",
        "layer.self_attn.out_proj.weight",
        "layer.linear1.weight",
        "layer.linear2.weight",
    }
    assert "embedding.weight" in taken(model, adamw)


def test_an_embedding_is_known_by_its_name_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_parameter("position_Embedding", nn.Parameter(torch.zeros(3, 4)))
    muon, _ = muon_and_adamw(model)
    assert taken(model, muon) == {"0.weight"}


def test_filters_and_frozen_parameters() -> None:
    model = CASES["conv_channels_last"].build()
    model.append(nn.Linear(3, 3))
    muon, adamw = muon_and_adamw(model)
    assert taken(model, muon) == {"7.weight"}  # the layer before the last; filters have four dimensions
    assert {"0.weight", "3.weight", "8.weight"} <= taken(model, adamw)
    frozen = CASES["frozen"].build()
    both = muon_and_adamw(frozen)
    assert set.union(*(taken(frozen, one) for one in both)) == {"2.weight", "2.bias", "4.weight"}


def test_a_rule_of_the_users_own() -> None:
    model = CASES["mlp"].build()
    muon, _ = muon_and_adamw(model, use_muon=lambda name, _: name == "4.weight")
    assert taken(model, muon) == {"4.weight"}
    matrices = nn.Linear(3, 3, bias=False)
    assert len(muon_and_adamw(matrices, use_muon=lambda *_: True)) == 1


def test_options_reach_the_optimizers() -> None:
    muon, adamw = (one.param_groups[0] for one in muon_and_adamw(CASES["mlp"].build()))
    assert (muon["lr"], muon["momentum"], muon["nesterov"], muon["weight_decay"]) == (0.02, 0.95, False, 0.01)
    assert (adamw["lr"], adamw["betas"], adamw["eps"], adamw["weight_decay"]) == (0.02, (0.9, 0.95), 1e-8, 0.01)
    given: dict[str, Any] = {"lr": 0.06, "adamw_lr": 0.003, "momentum": 0.9, "nesterov": True, "betas": (0.9, 0.99)}
    muon, adamw = (one.param_groups[0] for one in muon_and_adamw(CASES["mlp"].build(), **given, weight_decay=0))
    assert (muon["lr"], muon["momentum"], muon["nesterov"], muon["weight_decay"]) == (0.06, 0.9, True, 0)
    assert (adamw["lr"], adamw["betas"], adamw["weight_decay"]) == (0.003, (0.9, 0.99), 0)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"lr": 0}, ValueError, "^lr must be a number above 0; got 0"),
        ({"lr": "0.02"}, TypeError, "^lr must be a number; got '0.02'"),
        ({"adamw_lr": -1.0}, ValueError, "^adamw_lr must be a number above 0"),
        ({"momentum": 1.0}, ValueError, "^momentum must be at least 0 and below 1"),
        ({"betas": (0.9, 1.0)}, ValueError, "^betas must be at least 0 and below 1"),
        ({"betas": 0.9}, TypeError, r"^betas is a pair of numbers, such as \(0\.9, 0\.95\); got 0\.9"),
        ({"betas": (0.9, 0.95, 0.99)}, ValueError, r"^betas is a pair of numbers, such as \(0\.9, 0\.95\); got"),
        ({"eps": 0.0}, ValueError, "^eps must be a number above 0"),
        ({"weight_decay": -0.1}, ValueError, r"^weight_decay must be at least 0; got -0\.1"),
        ({"use_muon": lambda name, _: "bias" in name}, ValueError, r"0\.bias has the shape \(16,\): let use_muon"),
        ({"use_muon": lambda *_: False}, ValueError, "no hidden matrix for Muon .* use_muon="),
        ({"use_muon": ["0.weight"]}, TypeError, "use_muon is a function of a name and a parameter; got"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        muon_and_adamw(CASES["mlp"].build(), **options)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module; got list"):
        muon_and_adamw(list(CASES["mlp"].build().parameters()))  # type: ignore[arg-type]


def test_a_torch_without_muon_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(CadenzaError, match=r"from 2\.9 on; this is torch"):
        muon_and_adamw(CASES["mlp"].build())


def test_a_gpt_whose_output_is_its_embedding_gives_muon_all_matrices_of_its_blocks() -> None:
    model = GPT(Shape(layers=2, width=16, heads=2, context=8))
    matrices = taken(model, muon_and_adamw(model)[0])
    assert matrices == {name for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2}


def test_the_last_of_plain_layers_is_the_output_also_if_it_is_like_the_others() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert taken(model, muon_and_adamw(model)[0]) == {"0.weight", "1.weight"}
