"""What a task returns is checked where it is returned, and an error says what was wanted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza.errors import UsageError
from cadenza.training import Task
from cadenza.training.task import check_task, load_build


def task(**changes: Any) -> Task:
    model = torch.nn.Linear(2, 1)
    good = Task(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        batches=lambda worker, workers: [torch.ones(4, 2)],
        loss=lambda model, batch: model(batch).mean(),
    )
    return replace(good, **changes)


def test_a_task_that_is_right_is_returned() -> None:
    good = task()
    assert check_task(good, source="build") is good
    assert good.schedulers == []
    assert len(good.optimizers) == 1


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, ["returned None (NoneType)", "return statement"]),
        ({"model": 1}, ["a dict of 1", "cadenza.training.Task"]),
        (task(model="gpt"), ["model is 'gpt' (str)", "torch.nn.Module"]),
        (task(optimizer="adam"), ["optimizer is 'adam' (str)", "torch.optim.Optimizer"]),
        (task(optimizer=[]), ["optimizer is a list of 0", "torch.optim.Optimizer"]),
        (task(batches=[1, 2]), ["batches is a list of 2", "(worker, workers)"]),
        (task(batches=lambda worker: []), ["batches", "(worker, workers)"]),
        (task(loss=lambda model: 0), ["loss", "(model, batch)"]),
        (task(evaluate=lambda model: 0), ["evaluate", "(model, worker, workers)"]),
        (task(scheduler="cosine"), ["scheduler is 'cosine'", "step(), state_dict()"]),
        (task(samples=4), ["samples is 4 (int)", "function of a batch"]),
        (task(unit=3), ["unit is 3", "a word"]),
        (task(clip_gradients=0), ["clip_gradients is 0", "above 0"]),
        (task(model=torch.nn.Linear(2, 1)), ["none of the model's parameters", "model.parameters()"]),
        (task(model=torch.nn.Flatten()), ["no parameter to train"]),
    ],
)
def test_a_task_that_is_wrong_is_refused(returned: Any, said: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        check_task(returned, source="mine:build")
    assert [part for part in ["mine:build", *said] if part not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine", '"package.module:function"'),
        ("mine.py:build", 'no module "mine"'),
        ("no_such_module:build", 'no module "no_such_module"'),
        ("cadenza.training.no_such_module:build", 'no module "cadenza.training.no_such_module"'),
        ("cadenza.training.standard_library_gpt:biuld", 'did you mean "build"'),
        ("cadenza.training.gpt:VOCABULARY", "must be a function"),
    ],
)
def test_a_name_that_leads_nowhere_is_said_to(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=r"task") as raised:
        load_build(name)
    assert said in str(raised.value)


def test_a_task_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "found_here.py").write_text("def build(config): return 1\n")
    (tmp_path / "wants_more.py").write_text("import no_such_package_at_all\ndef build(config): ...\n")
    (tmp_path / "wrong_inside.py").write_text("def build(config:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # which is undone, unlike what load_build does
    assert load_build("found_here:build")(None) == 1
    with pytest.raises(UsageError, match='needs the module "no_such_package_at_all"'):
        load_build("wants_more:build")
    with pytest.raises(UsageError, match="cannot be read"):
        load_build("wrong_inside:build")
