"""Saying what is wrong with the tensors that a codec is given."""

from __future__ import annotations

from cadenza.codecs.base import Codec
from cadenza.common.later import torch

__all__ = ["check_decode", "check_encode"]


def check_encode(codec: Codec, values: torch.Tensor, out: torch.Tensor) -> None:
    """Refuse to encode what does not fit."""
    _check(codec, values, "values", out, "out")


def check_decode(codec: Codec, data: torch.Tensor, out: torch.Tensor) -> None:
    """Refuse to decode what does not fit."""
    _check(codec, out, "out", data, "data")


def _check(codec: Codec, values: torch.Tensor, values_name: str, data: torch.Tensor, data_name: str) -> None:
    if values.dtype != torch.float32 or values.ndim != 1 or not values.is_contiguous():
        raise TypeError(
            f"{codec.name}: `{values_name}` is {_facts(values)}; give a contiguous 1-D float32 tensor, such as "
            ".float().contiguous().view(-1) returns."
        )
    if data.dtype != torch.uint8 or data.ndim != 1 or not data.is_contiguous():
        raise TypeError(f"{codec.name}: `{data_name}` is {_facts(data)}; give a contiguous 1-D uint8 tensor.")
    needed = codec.encoded_bytes(values.numel())
    if data.numel() != needed:
        raise ValueError(
            f"{codec.name}: `{data_name}` has {data.numel()} bytes, but {values.numel()} values take exactly {needed}; "
            f"give encoded_bytes({values.numel()}) of them."
        )


def _facts(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}"
