"""A program moves over by changing the module names in its imports: every name is there and is called the same way."""

import inspect
from importlib import import_module
from typing import Any

import pytest

from support.sides import MODULES, OURS, TORCH

CALLABLES = [
    "ModelAverager",
    "PeriodicModelAverager",
    "HierarchicalModelAverager",
    "average_parameters",
    "get_params_to_average",
    "average_parameters_or_parameter_groups",
    "PostLocalSGDState",
    "post_localSGD_hook",
    "PostLocalSGDOptimizer",
]
METHODS = [
    ("ModelAverager", "average_parameters"),
    ("PeriodicModelAverager", "average_parameters"),
    ("HierarchicalModelAverager", "average_parameters"),
    ("HierarchicalModelAverager", "_find_process_group"),
    ("PostLocalSGDState", "maybe_increase_iter"),
    ("PostLocalSGDOptimizer", "state_dict"),
    ("PostLocalSGDOptimizer", "load_state_dict"),
    ("PostLocalSGDOptimizer", "zero_grad"),
    ("PostLocalSGDOptimizer", "add_param_group"),
]

Shape = list[tuple[str, Any, Any]]


def shapes(function: Any) -> tuple[Shape, Shape]:
    """What torch's callers can pass, and what is keyword-only: (name, kind, default) each."""
    parameters = inspect.signature(function).parameters.values()
    told = [(p.name, p.kind, p.default) for p in parameters]
    added = [shape for shape in told if shape[1] is inspect.Parameter.KEYWORD_ONLY]
    return [shape for shape in told if shape not in added], added


def assert_called_alike(theirs: Any, ours: Any) -> None:
    kept, added = shapes(ours)
    torchs, torchs_keyword_only = shapes(theirs)
    assert kept == torchs
    assert torchs_keyword_only == []
    for name, _, default in added:
        assert default is not inspect.Parameter.empty, f"the added {name} must be optional"


@pytest.mark.parametrize("name", CALLABLES)
def test_names_are_called_with_the_same_arguments(name: str) -> None:
    assert_called_alike(getattr(TORCH, name), getattr(OURS, name))


@pytest.mark.parametrize(("owner", "name"), METHODS)
def test_methods_are_called_with_the_same_arguments(owner: str, name: str) -> None:
    assert_called_alike(getattr(getattr(TORCH, owner), name), getattr(getattr(OURS, owner), name))


def test_the_optimizers_step_takes_what_every_torch_optimizer_takes() -> None:
    kept, _ = shapes(OURS.PostLocalSGDOptimizer.step)
    assert [(name, default) for name, _, default in kept][1:] == [("closure", None)]


@pytest.mark.parametrize(
    "name",
    [
        "PeriodicModelAverager",
        "HierarchicalModelAverager",
        "average_parameters",
        "average_parameters_or_parameter_groups",
    ],
)
def test_atomic_is_the_optional_addition_and_off_by_default(name: str) -> None:
    _, added = shapes(getattr(OURS, name))
    assert ("atomic", inspect.Parameter.KEYWORD_ONLY, False) in added


@pytest.mark.parametrize(("theirs", "ours"), list(MODULES.items()))
def test_every_public_name_of_a_replaced_module_is_in_ours(theirs: str, ours: str) -> None:
    if theirs == "torch.distributed.optim":  # the table names one class there; the others stay torch's
        names = ["PostLocalSGDOptimizer"]
    else:
        defined = inspect.getmembers(import_module(theirs), lambda x: getattr(x, "__module__", None) == theirs)
        names = [name for name, _ in defined if not name.startswith("_")]
    assert names
    for name in names:
        assert hasattr(import_module(ours), name), f"{ours}.{name} is missing"


def test_classes_stand_in_the_same_places_of_the_hierarchy() -> None:
    assert issubclass(OURS.PeriodicModelAverager, OURS.ModelAverager)
    assert issubclass(OURS.HierarchicalModelAverager, OURS.ModelAverager)
    assert OURS.PostLocalSGDOptimizer.__mro__[1:] == TORCH.PostLocalSGDOptimizer.__mro__
    assert inspect.isabstract(OURS.ModelAverager)
    assert set(TORCH.PostLocalSGDState.__slots__) <= set(OURS.PostLocalSGDState.__slots__)
