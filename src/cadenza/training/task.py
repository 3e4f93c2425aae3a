"""A task is what is trained: a model, its optimizer, batches for each worker, a loss; `build(config)` returns one.

>>> import torch
>>> def build(config):
...     model = torch.nn.Linear(2, 1)
...     return Task(
...         model=model,
...         optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
...         batches=lambda worker, workers: [torch.full((4, 2), float(worker + 1))],
...         loss=lambda model, batch: model(batch).square().mean(),
...     )
>>> built = check_task(build(config=None), source="build")
>>> [len(batch) for batch in built.batches(0, 4)]
[4]
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from cadenza.common.later import torch
from cadenza.errors import UsageError
from cadenza.training.task_source import has_no, refuse_misspelt

if TYPE_CHECKING:
    from cadenza.training.config import Config

__all__ = ["Build", "Evaluated", "Moment", "Scheduler", "Task", "check_task", "load_build"]


class Scheduler(Protocol):
    """What the loop wants of a learning rate schedule: torch's have it."""

    def step(self) -> None:
        """Go on by one optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint shall hold."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on from what a checkpoint held."""


Number: TypeAlias = "float | torch.Tensor"
Pair: TypeAlias = "tuple[Number, Number]"
Evaluated: TypeAlias = "Pair | Mapping[str, Pair]"


@dataclass(frozen=True)
class Moment:
    """What a task's callbacks are told of.

    Args:
        kind: "start", "step", "evaluation", "checkpoint" or "end".
        step: The steps that this worker has taken.
        worker: This worker's number.
        workers: How many there are.
        model: The model: after a step this worker's own, at the end the average of all.
        figures: Of a step its loss, learning rate ("lr"), "samples" and what `loss` returned beside the loss; of an
            evaluation its metrics (elastic workers: on the one that puts the shares together); of a checkpoint its
            "bytes"; of the end nothing.
        log: Adds numbers to this worker's metrics and the loggers' curves: `moment.log(norm=2.5)`.

    >>> heard = []
    >>> callback = lambda moment: heard.append((moment.kind, moment.step))
    >>> callback(Moment("step", 7, 0, 4, torch.nn.Linear(1, 1), {"loss": 0.5}, log=print))
    >>> heard
    [('step', 7)]
    """

    kind: str
    step: int
    worker: int
    workers: int
    model: torch.nn.Module
    figures: Mapping[str, float]
    log: Callable[..., None]


@dataclass(frozen=True)
class Task:
    """What is trained, and on what.

    Args:
        model: The model, with the same initial values on every worker (torch's seed is set before `build` is called).
        optimizer: The inner optimizer, or several.
        batches: From (worker, workers), the batches of that worker: a list, a DataLoader, or anything else that can be
            iterated. It is iterated anew when it ends (after `set_epoch(epoch)`, if it has that method). A resumed run
            skips the batches it had taken, so their order must be the same every time; if the object has `state_dict`
            and `load_state_dict` (as torchdata's StatefulDataLoader), these are used instead.
        loss: From (model, batch), the loss to minimise: a tensor with one value; or that and a dict of numbers to log,
            such as `(loss, {"accuracy": 0.5})`. Call the model itself, not its parts: under DDP it is a wrapper around
            yours.
        evaluate: From (model, worker, workers), the sum of the losses over that worker's share of the held-out data,
            and how many there are; or a dict of several such pairs, one of them named "loss". The shares of all workers
            are added. Called without gradients, in `eval()` mode.
        higher_is_better: Which of the metrics that `evaluate` returns are the better the higher they are.
        scheduler: A learning rate schedule, or several; stepped once after every optimizer step.
        samples: From a batch, how many samples it has; without it, the length of its first tensor.
        unit: What `samples` counts, such as "tokens".
        clip_gradients: The largest norm of the gradients, None for any.
        accumulate: Of how many batches an optimizer step takes the mean gradient.
        scaler: A GradScaler, for losses in float16: gradients are scaled by it, and a step with infinite ones is left
            out. Put `torch.autocast` into `loss`.
        callbacks: Functions that are told of the beginning, each step, each evaluation, each checkpoint and the end:
            see `Moment`. They are called on every worker; an exception in one ends the training.

    >>> model = torch.nn.Linear(2, 1)
    >>> task = Task(
    ...     model=model,
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     batches=lambda worker, workers: [torch.ones(4, 2)],
    ...     loss=lambda model, batch: model(batch).square().mean(),
    ...     evaluate=lambda model, worker, workers: (float(model(torch.ones(2))), 1),
    ... )
    >>> task.unit
    'samples'
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    batches: Callable[[int, int], Iterable[Any]]
    loss: Callable[[torch.nn.Module, Any], torch.Tensor | tuple[torch.Tensor, Mapping[str, Number]]]
    evaluate: Callable[[torch.nn.Module, int, int], Evaluated] | None = None
    higher_is_better: Collection[str] = ()
    scheduler: Scheduler | Sequence[Scheduler] = field(default=())
    samples: Callable[[Any], int] | None = None
    unit: str = "samples"
    clip_gradients: float | None = None
    accumulate: int = 1
    scaler: torch.amp.GradScaler | None = None
    callbacks: Sequence[Callable[[Moment], object]] = ()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """One optimizer or several, as a list."""
        return [self.optimizer] if isinstance(self.optimizer, torch.optim.Optimizer) else list(self.optimizer)

    def loss_alone(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of a batch, without what is to be logged with it."""
        returned = self.loss(model, batch)
        return returned[0] if isinstance(returned, tuple) else returned

    @property
    def schedulers(self) -> list[Scheduler]:
        """The schedules, as a list."""
        return list(self.scheduler) if isinstance(self.scheduler, Sequence) else [self.scheduler]


Build: TypeAlias = "Callable[[Config], Task]"


def load_build(name: str) -> Build:
    """Return the function that "package.module:function" names; the current folder is searched as well.

    >>> load_build("cadenza.training.standard_library_gpt:build").__name__
    'build'
    >>> load_build("cadenza.training.standard_library_gpt:biuld")
    Traceback (most recent call last):
      ...
    cadenza.errors.UsageError: The task "cadenza.training.standard_library_gpt:biuld": its module has no "biuld"; \
did you mean "build"?
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise UsageError(
            f'A task is named "package.module:function", for instance "mypackage.task:build"; got "{name}".'
        )
    here = os.getcwd()
    if here not in sys.path:  # `cadenza` is a script: unlike `python -m`, it has not put the current folder there
        sys.path.insert(0, here)
    try:
        refuse_misspelt(module_name, function_name)
        module = importlib.import_module(module_name)
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        raise UsageError(_not_found(name, module_name, error)) from error
    except SyntaxError as error:
        raise UsageError(f'The task "{name}": its module cannot be read: {error}') from error
    except (Exception, SystemExit) as error:
        raise UsageError(_not_imported(name, error)) from error
    function = getattr(module, function_name, None)
    if function is None:
        raise UsageError(has_no(module_name, function_name, [n for n, v in vars(module).items() if callable(v)]))
    if not callable(function):
        raise UsageError(f'The task "{name}" must be a function build(config) that returns a Task; it is {function!r}.')
    build: Build = function
    return build


def check_task(task: object, *, source: str) -> Task:
    """Return what a `build` returned if it is a task that can be trained; say what is wrong with it if not.

    >>> check_task(None, source="mypackage.task:build")
    Traceback (most recent call last):
      ...
    cadenza.errors.UsageError: mypackage.task:build must return a cadenza.training.Task; it returned None (NoneType). \
Is its return statement missing?
    """
    if not isinstance(task, Task):
        hint = " Is its return statement missing?" if task is None else ""
        raise UsageError(
            f"{source} must return a cadenza.training.Task; it returned {_short(task)} ({type(task).__name__}).{hint}"
        )
    for name, value, wanted, fits in _rules(task):
        if not fits:
            raise UsageError(
                f"{source} returned a Task whose {name} is {_short(value)} ({type(value).__name__}); "
                f"{wanted} is required."
            )
    _check_parameters(task, source)
    return task


def _rules(task: Task) -> list[tuple[str, Any, str, bool]]:
    """Return (field, value, what is required, whether it is that) for each field."""
    model: Any = task.model
    optimizers: Any = task.optimizer if isinstance(task.optimizer, Sequence) else [task.optimizer]
    return [
        ("model", model, "a torch.nn.Module", isinstance(model, torch.nn.Module)),
        (
            "optimizer",
            task.optimizer,
            "a torch.optim.Optimizer, or several in a list,",
            bool(optimizers) and all(isinstance(one, torch.optim.Optimizer) for one in optimizers),
        ),
        ("batches", task.batches, "a function of (worker, workers)", _takes(task.batches, 2)),
        ("loss", task.loss, "a function of (model, batch)", _takes(task.loss, 2)),
        (
            "evaluate",
            task.evaluate,
            "a function of (model, worker, workers), or None,",
            task.evaluate is None or _takes(task.evaluate, 3),
        ),
        (
            "scheduler",
            task.scheduler,
            "a schedule with step(), state_dict() and load_state_dict(), or several in a list,",
            all(all(hasattr(one, name) for name in _SCHEDULER) for one in task.schedulers),
        ),
        ("samples", task.samples, "a function of a batch, or None,", task.samples is None or _takes(task.samples, 1)),
        *_rules_of_options(task),
    ]


def _rules_of_options(task: Task) -> list[tuple[str, Any, str, bool]]:
    given: dict[str, Any] = vars(task)
    unit, clip, accumulate, scaler = (given[name] for name in ("unit", "clip_gradients", "accumulate", "scaler"))
    higher, callbacks = given["higher_is_better"], given["callbacks"]
    counts = isinstance(accumulate, int) and not isinstance(accumulate, bool) and accumulate >= 1
    limits = isinstance(clip, int | float) and not isinstance(clip, bool) and clip > 0
    names = isinstance(higher, Collection) and not isinstance(higher, str) and all(isinstance(n, str) for n in higher)
    scales = all(hasattr(scaler, name) for name in _SCALER)
    called = isinstance(callbacks, Sequence) and all(_takes(callback, 1) for callback in callbacks)
    return [
        ("unit", unit, "a word", isinstance(unit, str)),
        ("clip_gradients", clip, "a number above 0, or None,", clip is None or limits),
        ("accumulate", accumulate, "a number of batches, at least 1,", counts),
        ("scaler", scaler, "a torch.amp.GradScaler, or None,", scaler is None or scales),
        ("higher_is_better", higher, 'a list of names of metrics, such as ["accuracy"],', names),
        ("callbacks", callbacks, "a list of functions of a Moment", called),
    ]


_SCHEDULER = ("step", "state_dict", "load_state_dict")
_SCALER = ("scale", "unscale_", "step", "update", "state_dict", "load_state_dict")


def _check_parameters(task: Task, source: str) -> None:
    """Refuse an optimizer of other parameters than the model's: it would train nothing, in silence."""
    held = {id(p) for optimizer in task.optimizers for group in optimizer.param_groups for p in group["params"]}
    trained = [name for name, p in task.model.named_parameters() if p.requires_grad]
    if not trained:
        raise UsageError(f"{source} returned a Task whose model has no parameter to train.")
    if not any(id(p) in held for p in task.model.parameters() if p.requires_grad):
        raise UsageError(
            f"{source} returned a Task whose optimizer holds none of the model's parameters ({trained[0]}, …): make it "
            "of model.parameters(), after the model has its final form."
        )


def _takes(function: object, count: int) -> bool:
    """Say whether something can be called with so many arguments, as far as it tells."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a built-in function without a signature
        return True
    return True


def _not_found(name: str, module: str, error: ModuleNotFoundError) -> str:
    if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
        return (
            f'The task "{name}": there is no module "{error.name}" here ({os.getcwd()}) nor among the installed '
            "packages. Give the name as in an import statement, without .py, and start from the folder that holds it."
        )
    return f'The task "{name}" needs the module "{error.name}", which is not installed.'


def _not_imported(name: str, error: BaseException) -> str:
    """Return what went wrong while the task's module was imported, and where."""
    if isinstance(error, SystemExit):
        return (
            f'The task "{name}": its module ends the program when it is imported (exit code {error.code}). What a '
            'script does when it is started belongs below `if __name__ == "__main__":`.'
        )
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f'The task "{name}": its module cannot be imported: {type(error).__name__}: {error} ({last.filename}, line '
        f"{last.lineno}). `--debug` shows how it came there."
    )


def _short(value: object) -> str:
    if isinstance(value, Mapping | list | tuple | set):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
