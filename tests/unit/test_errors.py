"""Errors say where the documentation explains them, without a change of their texts."""

from __future__ import annotations

import copy
import pickle
import traceback
from io import StringIO

import pytest
from rich.console import Console

from cadenza.cli.failures import TrainingFailedError, explain
from cadenza.errors import CheckpointError, RoundAbortedError, UsageError


def test_a_traceback_ends_with_the_address_and_the_text_stays() -> None:
    error = RoundAbortedError("worker 1 is gone")
    assert str(error) == "worker 1 is gone"
    assert traceback.format_exception(error)[-1] == "See docs/errors.md#roundabortederror\n"


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_that_comes_from_another_process_has_its_address_once(again: object) -> None:
    error = CheckpointError("it is damaged")
    error.add_note("on worker 2")
    assert callable(again)
    assert again(error).__notes__ == ["See docs/errors.md#checkpointerror", "on worker 2"]


def test_an_error_of_ones_own_has_the_address_of_the_one_that_it_is_made_of() -> None:
    class MyUsageError(UsageError):
        pass

    assert MyUsageError("?").address == "docs/errors.md#usageerror"
    assert TrainingFailedError("worker 1 died").address == "docs/errors.md#cadenzaerror"


def test_the_command_line_prints_the_address_below_the_message() -> None:
    console = Console(file=StringIO(), width=200)
    explain(UsageError("there is no such key"), console)
    explain(FileNotFoundError(2, "No such file", "run.toml"), console)
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue() == (
        "Error: there is no such key\nSee docs/errors.md#usageerror\nError: run.toml: No such file.\n"
    )
