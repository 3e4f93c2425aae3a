"""The configuration of a run: a TOML file, overridden by flags, checked before anything is started.

Every key has a default, so an empty file is a configuration; `to_toml` writes a complete one.

>>> config = read_config(None, {"strategy.period": 32, "launch.workers": 2})
>>> config.strategy.build().period
32
>>> read_config(None, {"lunch.workers": 2})
Traceback (most recent call last):
  ...
cadenza.errors.UsageError: lunch: there is no such key. Did you mean "launch"? Allowed: task, steps, seed, options, \
strategy, launch, faults, evaluate, checkpoint, log.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cadenza.errors import CadenzaError, UsageError
from cadenza.faults import FaultPolicy, raise_error, shrink, skip_round
from cadenza.participants.addresses import parse_address
from cadenza.strategy import Strategy
from cadenza.training.config_errors import explain
from cadenza.training.strategies import build_strategy, defaults_of

__all__ = [
    "CheckpointSettings",
    "Config",
    "EvaluateSettings",
    "FaultSettings",
    "LaunchSettings",
    "LogSettings",
    "Settings",
    "StrategySettings",
    "check_settings",
    "read_config",
]

# The default run's strategy; its outer step is what suits the period, also another one than this.
DEFAULT_STRATEGY: dict[str, Any] = {"name": "diloco", "codec": "int8", "period": 16}

_Count = Annotated[int, Field(ge=0)]
_Number = Annotated[int, Field(ge=1)]
_Positive = Annotated[float, Field(gt=0)]


class Settings(BaseModel):
    """A table of a configuration: types are taken at their word, and a key that is not known is an error.

    A task can describe its own [options] by a class of this kind: see `Config.options_as`.

    >>> class Options(Settings):
    ...     width: int = Field(default=128, ge=1, description="Size of the hidden layer.")
    >>> Options(width=64).width
    64
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


SomeSettings = TypeVar("SomeSettings", bound=BaseModel)


class StrategySettings(Settings):
    """When workers average and what they send: a strategy's name, its codec, and the preset's own arguments.

    >>> StrategySettings(name="diloco", period=16).complete()
    {'name': 'diloco', 'codec': '', 'period': 16, 'defaults': 'measured'}
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    name: str = Field(default="diloco", description="ddp, or one of Cadenza's presets, such as diloco.")
    codec: str = Field(default="", description='How differences are written, such as "int8"; "": as the preset does.')

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        self.build()
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """The preset's arguments that were given."""
        return dict(self.model_extra or {})

    def build(self, faults: FaultPolicy | None = None) -> Strategy:
        """Return the strategy, under a fault policy; `ddp` is a warm-up that never ends."""
        return build_strategy(self.name, codec=self.codec, faults=faults, **self.arguments)

    def complete(self) -> dict[str, Any]:
        """Return all keys, also those that were left to the preset."""
        return {"name": self.name, "codec": self.codec, **defaults_of(self.name), **self.arguments}


class LaunchSettings(Settings):
    """Where workers run; the words mean what they mean to torchrun.

    >>> LaunchSettings(workers=2).nnodes
    '1'
    """

    workers: _Number = Field(default=4, description="Workers on each node (torchrun: --nproc-per-node).")
    nnodes: str = Field(default="1", description='Nodes, or a range such as "2:4".', pattern=r"^\d+(:\d+)?$")
    node_rank: _Count = Field(default=0, description="This node's number, for a static rendezvous.")
    rdzv_backend: str = Field(default="c10d", description="How nodes find each other.")
    rdzv_endpoint: str = Field(default="", description='Where nodes find each other: "host:port"; "" on one node.')
    rdzv_id: str = Field(default="", description="The name of the job, the same on all nodes.")
    max_restarts: _Count = Field(
        default=0, description="How often the workers of all nodes are started anew if one fails."
    )
    threads: _Number = Field(default=1, description="Threads of each worker (OMP_NUM_THREADS).")
    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", description="auto: nccl where there is CUDA, else gloo."
    )


class FaultSettings(Settings):
    """What happens when a worker dies, hangs or lies: the arguments of `cadenza.skip_round` and `cadenza.shrink`.

    The shared secret, if there is to be one, is in the environment (``CADENZA_SECRET``), never in a file.

    >>> FaultSettings(policy="shrink", quorum=0.0).build().quorum
    0.0
    """

    policy: Literal["raise_error", "skip_round", "shrink"] = Field(
        default="raise_error", description="What is done when a worker is gone, late or wrong."
    )
    min_workers: _Number = Field(default=1, description="shrink: with fewer workers, rounds are skipped.")
    quorum: float = Field(
        default=0.5, ge=0, lt=1, description="shrink: more than this share of the last round's workers must be there."
    )
    commit_at: float = Field(
        default=0.0,
        ge=0,
        description="shrink: the share (below 1) or number of workers after which a round does not wait for others; 0: "
        "it waits for all.",
    )
    grace_s: _Positive = Field(
        default=10.0, description="How long a round waits, at most, for a worker that is alive but late."
    )
    factor: _Positive = Field(default=4.0, description="How many times a transfer's usual time is not yet a failure.")
    first_s: _Positive = Field(default=60.0, description="How long the start and the first round may take.")
    poison: Literal["leave_out", "skip"] = Field(
        default="leave_out", description="A contribution that is not finite, or explodes: leave_out, or skip the round."
    )
    explosion: float = Field(
        default=10.0, ge=0, description="How many times the median norm is too much; 0: any finite norm will do."
    )
    lease_s: _Positive = Field(default=1.0, description="After so long without a heart-beat a worker counts as gone.")
    restarts: _Count = Field(default=3, description="How often each worker is started again, alone, after it died.")
    optimizer_from: Literal["own", "peer", "nobody"] = Field(
        default="own",
        description="Whose optimizer state a worker that comes back takes up: that of its last own checkpoint (a "
        "peer's if it has none), a peer's, or nobody's.",
    )
    accept_rollback: bool = Field(
        default=False, description="Go on from an older state if all that have seen the last rounds are gone."
    )
    store: str = Field(
        default="", description='The store\'s "host:port" (python -m cadenza.membership); "": the launcher starts one.'
    )

    @property
    def tolerant(self) -> bool:
        """Whether training goes on when a worker is gone."""
        return self.policy != "raise_error"

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        self.build()
        if self.store:
            try:
                parse_address(self.store)
            except ValueError as error:
                raise UsageError(f'faults.store = "{self.store}": {error}') from None
        return self

    def build(self) -> FaultPolicy:
        """Return the policy."""
        common: dict[str, Any] = {
            "grace_s": self.grace_s,
            "factor": self.factor,
            "first_s": self.first_s,
            "poison": self.poison,
            "explosion": self.explosion or None,
        }
        try:
            if self.policy == "shrink":
                commit_at = int(self.commit_at) if self.commit_at.is_integer() else self.commit_at
                return shrink(min_workers=self.min_workers, quorum=self.quorum, commit_at=commit_at or None, **common)
            return skip_round(**common) if self.tolerant else raise_error()
        except ValueError as error:
            raise UsageError(f"faults: {error}") from None


class EvaluateSettings(Settings):
    """When the held-out loss of the workers' average is measured; always at the end.

    >>> EvaluateSettings(every=0).every
    0
    """

    every: _Count = Field(default=200, description="Steps between evaluations; 0: only at the end.")


class CheckpointSettings(Settings):
    """When all workers save what they need to go on; always at the end and when they are interrupted.

    >>> CheckpointSettings().keep
    3
    """

    every: _Count = Field(default=500, description="Steps between checkpoints; 0: only at the end.")
    keep: _Number = Field(default=3, description="How many whole checkpoints are kept.")
    keep_best: str = Field(
        default="",
        description='The metric by which the best averaged model is kept, such as "loss"; "": none is.',
    )


class LogSettings(Settings):
    """What is written beside the metrics.

    >>> LogSettings().tensorboard
    True
    """

    tensorboard: bool = Field(default=True, description="Write TensorBoard events.")
    wandb: bool = Field(default=False, description="Log to Weights & Biases; its environment variables count.")
    mlflow: bool = Field(default=False, description="Log to MLflow; its environment variables count.")


class Config(Settings):
    """All of a run's settings; made by `read_config`.

    >>> Config(steps=10).with_(**{"checkpoint.every": 5}).checkpoint.every
    5
    """

    task: str = Field(
        default="cadenza.training.standard_library_gpt:build",
        description='What is trained: "package.module:function", which returns a Task.',
    )
    steps: _Number = Field(default=2000, description="Optimizer steps of each worker.")
    seed: int = Field(default=1, ge=0, lt=2**31, description="What random numbers begin with.")
    options: dict[str, Any] = Field(default_factory=dict, description="The task's own settings.")
    strategy: StrategySettings = Field(default_factory=lambda: StrategySettings(**DEFAULT_STRATEGY))
    launch: LaunchSettings = Field(default_factory=LaunchSettings)
    faults: FaultSettings = Field(default_factory=FaultSettings)
    evaluate: EvaluateSettings = Field(default_factory=EvaluateSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    log: LogSettings = Field(default_factory=LogSettings)

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if not self.faults.tolerant:
            return self
        if self.launch.max_restarts:
            raise UsageError(
                f"launch.max_restarts = {self.launch.max_restarts} starts the workers of all nodes anew if one fails; "
                f'under faults.policy = "{self.faults.policy}" each is started again alone, up to faults.restarts '
                f"times ({self.faults.restarts}). Leave launch.max_restarts at 0."
            )
        self.build_strategy()
        return self

    def build_strategy(self) -> Strategy:
        """Return the strategy under the fault policy; say so if one does not go with the other.

        >>> Config().with_(**{"faults.policy": "shrink"}).build_strategy().faults.tolerant
        True
        """
        return self.strategy.build(self.faults.build() if self.faults.tolerant else None)

    def options_as(self, kind: type[SomeSettings]) -> SomeSettings:
        """Return the task's options, checked against a pydantic model such as a subclass of `Settings`.

        >>> class Options(Settings):
        ...     width: int = 128
        >>> Config(options={"width": 64}).options_as(Options).width
        64
        >>> Config(options={"widht": 64}).options_as(Options)
        Traceback (most recent call last):
          ...
        cadenza.errors.UsageError: options.widht: there is no such key. Did you mean "options.width"? Allowed: width.
        """
        return check_settings(kind, self.options, prefix="options.")

    def with_(self, **dotted: Any) -> Config:
        """Return the configuration with some keys changed, named as in `read_config`."""
        return _checked(self._given(), dotted)

    def to_toml(self) -> str:
        """Return the complete configuration as TOML.

        >>> print(Config(steps=10).to_toml())
        task = "cadenza.training.standard_library_gpt:build"
        steps = 10
        ...
        """
        return tomli_w.dumps({**self.model_dump(), "strategy": self.strategy.complete()})

    def _given(self) -> dict[str, Any]:
        given = self.model_dump()
        given["strategy"] = {key: value for key, value in given["strategy"].items() if key != "codec" or value}
        return given


def read_config(path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Return the configuration in a TOML file, if one is given, with the overrides in place.

    Args:
        path: The file; None for the defaults.
        overrides: Values by dotted keys, such as {"strategy.period": 32}. Another `strategy.name` than the file's (or
            the default one) has its own values for all keys that are not given beside it.

    >>> read_config(None, {"strategy.name": "slowmo", "strategy.beta": 0.5}).strategy.complete()
    {'name': 'slowmo', 'codec': '', 'period': 12, 'alpha': 1.0, 'beta': 0.5}
    """
    return _checked({} if path is None else _read(Path(path)), overrides or {}, source=path)


def check_settings(
    kind: type[SomeSettings], given: Mapping[str, Any], *, prefix: str = "", source: str | Path | None = None
) -> SomeSettings:
    """Return the settings that a table holds; an error names the key, what was given and what is allowed."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        where = f"In {source}: " if source is not None else ""
        raise UsageError(where + " ".join(explain(kind, one, prefix) for one in error.errors())) from None
    except CadenzaError as error:
        raise UsageError(f"In {source}: {error}") if source is not None else error from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"There is no configuration file {path}. `cadenza train --print-config` writes one.") from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder; the path of a TOML file is required.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file; a TOML file is required.") from None
    except (ValueError, RecursionError) as error:  # tomllib has errors of its own, and lets others through
        raise UsageError(f"{path} is not TOML: {error}.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None


def _checked(given: Mapping[str, Any], overrides: Mapping[str, Any], *, source: str | Path | None = None) -> Config:
    """Return the configuration that a table with overrides in it makes."""
    if source is not None:
        check_settings(Config, given, source=source)  # what is wrong in the file is said to be in the file
    table = deepcopy(dict(given))
    name = overrides.get("strategy.name")
    if any(key.startswith("strategy.") for key in overrides):
        base = table.get("strategy", DEFAULT_STRATEGY)
        table["strategy"] = base if name in (None, base.get("name", "diloco")) else {}
    for key, value in overrides.items():
        _put(table, key, value)
    return check_settings(Config, table)


def _put(table: dict[str, Any], dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    for part in path:
        inner = table.get(part, {})
        if not isinstance(inner, dict):
            raise UsageError(f'{dotted}: "{part}" is a value, not a table of keys.')
        table[part] = inner = dict(inner)
        table = inner
    table[last] = value
