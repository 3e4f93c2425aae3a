"""Every strategy on an accelerator that is none: no misuse of streams or host memory, and the bits of the CPU."""

from __future__ import annotations

import pytest
import torch.utils.backend_registration

if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch has no Python backends", allow_module_level=True)

from support.device_mutants import MUTANTS
from support.device_runs import cases, run_all

pytestmark = pytest.mark.timeout(300)  # one process runs all of it
PRESETS = "local_sgd post_local_sgd hierarchical slowmo snoo diloco eager_diloco edit muloco noloco streaming_diloco "
PRESETS += "sparse_loco demo des_loc"


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return run_all([*cases(), *MUTANTS])


@pytest.mark.parametrize("name", cases())
def test_it_runs_as_on_the_cpu(found: dict[str, str], name: str) -> None:
    assert found[name] == ""


@pytest.mark.parametrize("name", MUTANTS)
def test_mistakes_are_found(found: dict[str, str], name: str) -> None:
    assert MUTANTS[name][2] in found[name]


def test_every_preset_is_run() -> None:
    import cadenza.presets

    assert set(PRESETS.split()) == set(cadenza.presets.__all__) <= set(cases())
