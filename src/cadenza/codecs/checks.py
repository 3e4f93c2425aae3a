"""Saying what is wrong with the options of a codec, or with the tensors it is given."""

from __future__ import annotations

import torch

from cadenza.codecs.base import Codec

__all__ = ["check_decode", "check_encode", "check_share", "check_whole_number"]


def check_whole_number(what: str, given: object, *, least: int, most: int, multiple: int = 1) -> None:
    """Refuse an option that is not a whole number in its range.

    >>> check_whole_number("block", 0, least=16, most=65536)
    Traceback (most recent call last):
    ValueError: block is 0; give a whole number from 16 to 65536.
    """
    kind = "a whole number" if multiple == 1 else f"a multiple of {multiple}"
    message = f"{what} is {given!r}; give {kind} from {least} to {most}."
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(message)
    if not least <= given <= most or given % multiple:
        raise ValueError(message)


def check_share(what: str, given: object, *, of: str) -> None:
    """Refuse an option that is not a number above 0 and up to 1.

    >>> check_share("decay", 2, of="the loss to keep")
    Traceback (most recent call last):
    ValueError: decay is 2; give the share of the loss to keep, above 0 and up to 1.
    """
    message = f"{what} is {given!r}; give the share of {of}, above 0 and up to 1."
    if not isinstance(given, int | float) or isinstance(given, bool):
        raise TypeError(message)
    if not 0 < given <= 1:
        raise ValueError(message)


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
