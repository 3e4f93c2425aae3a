"""Layers are found by structure, in the names that real models have, and fragments of them are balanced by bytes."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

from cadenza.fragments import by_layers
from cadenza.fragments.layers import find_layers
from cadenza.training.gpt import GPT, Shape

Sizes = list[tuple[str, int]]


def sizes_of(model: nn.Module) -> Sizes:
    return [(name, p.numel() * p.element_size()) for name, p in model.named_parameters()]


def gpt2(prefix: str = "", *, layers: int = 12, width: int = 768) -> Sizes:
    """Return the names and sizes of Hugging Face's GPT-2."""
    square = 4 * width * width
    parts = [("ln_1.weight", 4 * width), ("attn.c_attn.weight", 3 * square), ("attn.c_proj.weight", square)]
    parts += [("ln_2.weight", 4 * width), ("mlp.c_fc.weight", 4 * square), ("mlp.c_proj.weight", 4 * square)]
    blocks = [(f"{prefix}h.{i}.{part}", size) for i in range(layers) for part, size in parts]
    around = [(f"{prefix}wte.weight", 50257 * 4 * width), (f"{prefix}wpe.weight", 1024 * 4 * width)]
    return [*around, *blocks, (f"{prefix}ln_f.weight", 4 * width)]


def llama(layers: int = 32) -> Sizes:
    width, hidden, vocabulary = 4096, 11008, 32000
    parts = [(f"self_attn.{x}_proj.weight", width * width) for x in "qkvo"]
    parts += [(f"mlp.{x}_proj.weight", width * hidden) for x in ("gate", "up", "down")]
    parts += [("input_layernorm.weight", width), ("post_attention_layernorm.weight", width)]
    inside = [(f"model.layers.{i}.{part}", 2 * size) for i in range(layers) for part, size in parts]
    around = 2 * width * vocabulary
    return [("model.embed_tokens.weight", around), *inside, ("model.norm.weight", 8192), ("lm_head.weight", around)]


def resnet18() -> Sizes:
    """Return the names and sizes of torchvision's ResNet-18."""
    found = [("conv1.weight", 3 * 64 * 49), ("bn1.weight", 64), ("bn1.bias", 64)]
    for stage, (before, width) in enumerate([(64, 64), (64, 128), (128, 256), (256, 512)], start=1):
        for block in (0, 1):
            given = width if block else before
            here = f"layer{stage}.{block}"
            for conv, planes in ((1, given), (2, width)):
                found.append((f"{here}.conv{conv}.weight", planes * width * 9))
                found += [(f"{here}.bn{conv}.{part}", width) for part in ("weight", "bias")]
            if given != width:
                found.append((f"{here}.downsample.0.weight", given * width))
                found += [(f"{here}.downsample.1.{part}", width) for part in ("weight", "bias")]
    return [(name, 4 * size) for name, size in [*found, ("fc.weight", 512000), ("fc.bias", 1000)]]


class Numbered(nn.Module):
    """Blocks that are attributes: block0, block1 and so on, each with a numbered part of its own."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(6):
            block = nn.Module()
            block.norm1, block.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
            block.mlp = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
            self.add_module(f"block{i}", block)


def prefixes(parameters: Sizes) -> list[str]:
    """Return what the names of each layer have in common."""
    found = []
    for layer in find_layers(parameters):
        parts = [name.split(".") for name in layer]
        common = [column[0] for column in zip(*parts, strict=False) if len(set(column)) == 1]
        found.append(".".join(common))
    return found


def linear_stack(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


CASES: dict[str, tuple[Sizes, list[str]]] = {
    "torch.nn.Transformer": (
        sizes_of(nn.Transformer(16, 2, 3, 2, dim_feedforward=32, batch_first=True)),
        [f"encoder.layers.{i}" for i in range(3)] + [f"decoder.layers.{i}" for i in range(2)],
    ),
    "Cadenza's GPT": (sizes_of(GPT(Shape(layers=4, width=32))), [f"blocks.{i}" for i in range(4)]),
    "GPT-2": (gpt2(), [f"h.{i}" for i in range(12)]),
    "GPT-2 with a head": (gpt2("transformer."), [f"transformer.h.{i}" for i in range(12)]),
    "Llama": (llama(), [f"model.layers.{i}" for i in range(32)]),
    "ResNet-18": (resnet18(), [f"layer{stage}.{block}" for stage in range(1, 5) for block in (0, 1)]),
    "block0": (sizes_of(Numbered()), [f"block{i}" for i in range(6)]),
    "a Sequential of unlike layers": (
        sizes_of(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))),
        ["0", "2", "4"],
    ),
    "a Sequential in a Sequential": (
        sizes_of(nn.Sequential(linear_stack(8, 8, 8, 8))),
        ["0.0", "0.1", "0.2"],
    ),
    "blocks between an embedding and a head": (
        sizes_of(nn.Sequential(nn.Embedding(90, 8), linear_stack(8, 8, 8, 8, 8), nn.Linear(8, 90))),
        [f"1.{i}" for i in range(4)],
    ),
    "Sequentials side by side": (
        sizes_of(nn.Sequential(*(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 4)) for _ in range(3)))),
        ["0", "1", "2"],
    ),
    "features and a classifier": (
        sizes_of(nn.ModuleDict({"features": linear_stack(8, 8, 8, 8), "classifier": linear_stack(8, 6, 2)})),
        ["features.0", "features.1", "features.2", "classifier.0", "classifier.1"],
    ),
    "fc1 and fc2": ([("fc1.weight", 4), ("fc1.bias", 1), ("fc2.weight", 9), ("fc2.bias", 2)], ["fc1", "fc2"]),
    "a list of parameters": ([("prompts.0", 4), ("prompts.1", 4), ("head", 4)], ["prompts.0", "prompts.1"]),
    "tensors with numbers": ([("lstm.weight_ih_l0", 4), ("lstm.weight_hh_l0", 4), ("lstm.weight_ih_l1", 4)], []),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_are_the_outermost_blocks_that_repeat(case: str) -> None:
    parameters, wanted = CASES[case]
    assert prefixes(parameters) == wanted


@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_never_cut(case: str) -> None:
    parameters, _ = CASES[case]
    for layers in (1, 2, 3):
        fragments = by_layers(layers).split(parameters)
        for layer in find_layers(parameters):
            assert sum(set(layer) <= set(fragment) for fragment in fragments) == 1


def bytes_of(parameters: Sizes, layers: int) -> list[int]:
    sizes = dict(parameters)
    return [sum(sizes[name] for name in fragment) for fragment in by_layers(layers).split(parameters)]


def test_an_embedding_has_a_fragment_of_its_own_where_it_is_large() -> None:
    """Once it made the first fragment 160 times as large as the others."""
    parameters = [("embed.weight", 160), *((f"h.{i}.w", 1) for i in range(6)), ("norm", 1), ("head.weight", 160)]
    fragments = by_layers(1).split(parameters)
    assert fragments == [
        *([f"h.{i}.w"] for i in range(5)),
        ["h.5.w", "norm"],
        ["embed.weight"],
        ["head.weight"],
    ]


def test_tensors_around_the_layers_go_where_there_is_room_or_share_fragments() -> None:
    parameters = [("a", 5), ("b", 3), ("c", 7), ("d", 5), ("e", 2), ("h.0.w", 8), ("h.1.w", 8)]
    assert by_layers(1).split(parameters) == [["a", "b", "h.0.w"], ["c", "h.1.w"], ["d", "e"]]


@pytest.mark.parametrize(("parameters", "layers"), [(gpt2(), 3), (llama(), 3), (resnet18(), 2), (resnet18(), 3)])
def test_fragments_of_layers_are_balanced_by_bytes(parameters: Sizes, layers: int) -> None:
    sizes = bytes_of(parameters, layers)
    largest_part = max(size for _, size in parameters)
    largest_layer = max(sum(dict(parameters)[name] for name in layer) for layer in find_layers(parameters))
    assert max(sizes) <= max(2 * sum(sizes) / len(sizes), largest_part, largest_layer)


def test_layers_of_unlike_sizes_are_dealt_out_by_size() -> None:
    parameters = [("0.w", 1), ("1.w", 8), ("2.w", 1), ("3.w", 8), ("4.w", 1), ("5.w", 1)]
    assert by_layers(3).split(parameters) == [["0.w", "1.w", "4.w"], ["2.w", "3.w", "5.w"]]


def test_layers_that_are_nearly_alike_stay_strided() -> None:
    parameters = [(f"h.{i}.w", 100 + (i == 0)) for i in range(8)]
    assert by_layers(2).split(parameters) == [[f"h.{i}.w", f"h.{i + 4}.w"] for i in range(4)]
