"""What importing Cadenza brings in, and that its public names are documented."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import cadenza

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(cadenza.__path__, "cadenza.")
    if not module.name.startswith(
        ("cadenza.integrations", "cadenza.cli", "cadenza.training", "cadenza.codecs.triton_kernels")
    )  # optional imports live there
)

# The names that a program moves over to, by replacing torch's modules in its imports.
DROP_IN = {
    "cadenza.model_averaging.averagers": ["ModelAverager", "PeriodicModelAverager"],
    "cadenza.model_averaging.hierarchical_model_averager": ["HierarchicalModelAverager"],
    "cadenza.model_averaging.utils": [
        "average_parameters",
        "get_params_to_average",
        "average_parameters_or_parameter_groups",
    ],
    "cadenza.ddp_comm_hooks.post_localSGD_hook": ["PostLocalSGDState", "post_localSGD_hook"],
    "cadenza.optim.post_localSGD_optimizer": ["PostLocalSGDOptimizer"],
}
DROP_IN_NAMES = [(module, name) for module, names in DROP_IN.items() for name in names]

# Derives from torch's class, whose package imports what only FSDP needs.
HEAVY = "cadenza.optim.post_localSGD_optimizer"


def imported_by(code: str) -> set[str]:
    """The modules in a fresh interpreter after the code has run."""
    script = f"{code}\nimport sys\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def packages(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_importing_everything_brings_in_nothing_but_torch_and_the_standard_library() -> None:
    torch_alone = imported_by("import torch, torch.distributed")
    everything = imported_by("\n".join(f"import {module}" for module in MODULES if module != HEAVY))
    new = packages(everything) - packages(torch_alone) - sys.stdlib_module_names
    assert new == {"cadenza"}


def test_the_optimizer_brings_in_nothing_but_what_torchs_brings() -> None:
    theirs = imported_by("import torch.distributed.optim")
    assert packages(imported_by(f"import {HEAVY}")) - packages(theirs) - sys.stdlib_module_names == {"cadenza"}


def test_importing_everything_leaves_dtensor_alone() -> None:
    everything = imported_by("\n".join(f"import {module}" for module in MODULES if module != HEAVY))
    assert not {module for module in everything if module.startswith("torch.distributed.tensor")}


def test_the_package_itself_is_imported_without_warnings() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", "import cadenza"], check=True)


@pytest.mark.parametrize("module", MODULES)
def test_modules_list_public_names_that_exist(module: str) -> None:
    loaded = importlib.import_module(module)
    assert loaded.__doc__, "its first lines say which idea a file holds"
    for name in getattr(loaded, "__all__", []):
        assert hasattr(loaded, name), name
        assert not name.startswith("_") or name == "__version__", name


PUBLIC = sorted(
    {(module, name) for module in MODULES for name in getattr(importlib.import_module(module), "__all__", [])}
)


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_a_public_name_has_a_docstring(module: str, name: str) -> None:
    thing = getattr(importlib.import_module(module), name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert "__doc__" in vars(thing) or inspect.isfunction(thing), "a docstring of its own, not of its base"
        assert thing.__doc__


@pytest.mark.parametrize(("module", "name"), DROP_IN_NAMES)
def test_a_drop_in_name_has_an_example_that_runs(module: str, name: str) -> None:
    loaded = importlib.import_module(module)
    thing = getattr(loaded, name)
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", vars(loaded).copy(), name, module, 0)
    assert test.examples
    assert not any(example.options.get(doctest.SKIP) for example in test.examples)
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).run(test)
    assert result.failed == 0


def test_every_error_is_drawn_in_the_tree_and_can_be_caught_as_a_built_in_one() -> None:
    from cadenza import errors

    for name in errors.__all__:
        error = getattr(errors, name)
        assert f"{name} " in errors.__doc__ or f"{name}\n" in errors.__doc__
        assert issubclass(error, errors.CadenzaError)
        if error is not errors.CadenzaError:
            assert issubclass(error, (RuntimeError, TypeError, ValueError))


def test_the_optimizer_is_found_where_torch_keeps_it() -> None:
    from cadenza.optim import PostLocalSGDOptimizer
    from cadenza.optim.post_localSGD_optimizer import PostLocalSGDOptimizer as by_its_module

    assert PostLocalSGDOptimizer is by_its_module


def test_the_package_is_typed_and_says_its_version() -> None:
    assert (Path(cadenza.__file__).parent / "py.typed").exists()
    assert f"version: {cadenza.__version__}\n" in (ROOT / "CITATION.cff").read_text()
