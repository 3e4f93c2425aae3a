"""Every strategy on an accelerator that is none: no misuse of streams or host memory, and the bits of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch.utils.backend_registration

if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch has no Python backends", allow_module_level=True)

from cadenza import presets
from support.device_mutants import MUTANTS
from support.device_runs import cases, run_all

pytestmark = pytest.mark.timeout(300)  # the first test of a part runs all of it
NAMES = [*cases(), *MUTANTS]
PART = 16


@pytest.fixture(scope="module")
def found() -> Callable[[str], str]:
    """What was found wrong with a case or a mutant; a process runs several of them."""
    run_part = cache(lambda part: run_all(NAMES[part * PART : (part + 1) * PART]))
    return lambda name: run_part(NAMES.index(name) // PART)[name]


@pytest.mark.parametrize("name", cases())
def test_it_runs_as_on_the_cpu(found: Callable[[str], str], name: str) -> None:
    assert found(name) == ""


@pytest.mark.parametrize("name", MUTANTS)
def test_mistakes_are_found(found: Callable[[str], str], name: str) -> None:
    assert MUTANTS[name][2] in found(name)


def test_every_preset_is_run() -> None:
    assert set(presets.__all__) <= set(cases())
