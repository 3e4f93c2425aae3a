"""Checksums tell what differs in few bits, and are the same whatever adds them up."""

from __future__ import annotations

import pytest
import torch

from cadenza.common.checksums import checksum


@pytest.mark.parametrize("numel", [1, 7, 1023, 1024, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
def test_one_value_more_or_less_is_seen(numel: int, dtype: torch.dtype) -> None:
    values = torch.ones(numel, dtype=dtype)
    other = values.clone()
    other[numel // 2] = 0
    assert checksum(values) == checksum(values.clone()) != checksum(other)


def test_roundings_up_and_down_do_not_cancel_out() -> None:
    values = torch.ones(20_000)
    for place in range(128, 20_000, 151):
        other = values.clone()
        other.view(torch.int32)[0] += 1
        other.view(torch.int32)[place] -= 1
        assert checksum(values) != checksum(other)


def test_parts_of_larger_tensors_and_matrices_turned_round_count_as_their_values_do() -> None:
    whole = torch.arange(100.0)
    assert checksum(whole[3:17]) == checksum(whole[3:17].clone())
    assert checksum(whole.view(10, 10).T) == checksum(whole.view(10, 10).T.contiguous())


def test_the_number_of_threads_changes_nothing() -> None:
    values, threads = torch.randn(1_000_000), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = checksum(values)
        torch.set_num_threads(3)
        assert checksum(values) == one
    finally:
        torch.set_num_threads(threads)


def test_a_header_has_room_for_any_checksum() -> None:
    assert all(0 <= checksum(torch.randn(1000)) < 2**64 for _ in range(20))
