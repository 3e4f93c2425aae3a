"""The flags of `cadenza train`: their help, and which keys of the configuration they set."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from cadenza.errors import UsageError

__all__ = ["CONFIG_KEYS", "overrides_of"]

RUN, STRATEGY, TRAINING = "The run", "The strategy", "The training"
NODES, RACE = "Many machines, in torchrun's words", "Comparing"

LOGGERS = ("tensorboard", "wandb", "mlflow")

# The flags that set a key of the configuration, by their names as parameters.
CONFIG_KEYS = {
    "task": "task",
    "steps": "steps",
    "seed": "seed",
    "strategy": "strategy.name",
    "period": "strategy.period",
    "levels": "strategy.levels",
    "codec": "strategy.codec",
    "outer_lr": "strategy.outer_lr",
    "delay": "strategy.delay",
    "warmup_steps": "strategy.warmup_steps",
    "faults": "faults.policy",
    "accept_rollback": "faults.accept_rollback",
    "workers": "launch.workers",
    "nnodes": "launch.nnodes",
    "node_rank": "launch.node_rank",
    "rdzv_backend": "launch.rdzv_backend",
    "rdzv_endpoint": "launch.rdzv_endpoint",
    "rdzv_id": "launch.rdzv_id",
    "max_restarts": "launch.max_restarts",
}


def overrides_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the configuration that flags set, given all flags by name, None for those not given.

    >>> overrides_of({"period": 8, "codec": None, "plain": True})
    {'strategy.period': 8}
    """
    given = {key: flags[name] for name, key in CONFIG_KEYS.items() if flags.get(name) is not None}
    period = given.get("strategy.period")
    if isinstance(period, str) and period != "auto":
        given["strategy.period"] = _steps(period)
    if "strategy.levels" in given:
        given["strategy.levels"] = _groups_by_period(given["strategy.levels"])
    return given if flags.get("log") is None else given | _logs(flags["log"])


def _steps(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f'--period is a whole number of steps, or auto; got "{text}".') from None


def _groups_by_period(text: str) -> dict[str, int | str]:
    """Return the levels that a text describes.

    >>> _groups_by_period("4=2,16=all")
    {'4': 2, '16': 'all'}
    """
    levels: dict[str, int | str] = {}
    for part in text.split(","):
        period, _, groups = (word.strip() for word in part.partition("="))
        if not period.isdecimal() or not (groups in ("host", "site", "all") or groups.isdecimal()) or period in levels:
            raise UsageError(
                f'--levels is PERIOD=GROUPS for each level, from the innermost, such as 4=host,32=all; got "{text}". '
                "Groups are a number of workers, host, site or all."
            )
        levels[period] = int(groups) if groups.isdecimal() else groups
    return levels


def _logs(names: str) -> dict[str, bool]:
    """Return the keys that `--log` sets: these loggers and no others.

    >>> _logs("wandb")
    {'log.tensorboard': False, 'log.wandb': True, 'log.mlflow': False}
    """
    asked = [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in LOGGERS:
            raise UsageError(f'--log: there is no logger "{name}"; there are {", ".join(LOGGERS)}.')
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"--log {name}: the package is not installed; install it with: pip install {name}.")
    return {f"log.{name}": name in asked for name in LOGGERS}


def _option(help: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


def _complete_strategy(incomplete: str) -> list[str]:
    from cadenza.training.strategies import STRATEGIES

    return [name for name in STRATEGIES if name.startswith(incomplete)]


def _complete_codec(incomplete: str) -> list[str]:
    from cadenza.training.strategies import CODECS

    return [name for name in CODECS if name.startswith(incomplete)]


def _complete_policy(incomplete: str) -> list[str]:
    return [name for name in ("raise_error", "skip_round", "shrink") if name.startswith(incomplete)]


Task: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="TASK",
        help="Your own training: package.module:build, a function that returns a Task.",
        show_default=False,
    ),
]
ConfigFile: TypeAlias = Annotated[
    Path | None, _option("A TOML file; flags override it.", RUN, "--config", metavar="FILE")
]
PrintConfig: TypeAlias = Annotated[
    bool, _option("Print the whole configuration as TOML, and end.", RUN, "--print-config")
]
RunFolder: TypeAlias = Annotated[
    Path | None, _option("The run's folder; runs/TIME-STRATEGY if not given.", RUN, "--run", metavar="FOLDER")
]
Resume: TypeAlias = Annotated[
    Path | None, _option("Go on with a run, from its newest whole checkpoint.", RUN, "--resume", metavar="RUN")
]
Force: TypeAlias = Annotated[bool, _option("Resume with another task than the run's.", RUN, "--force")]
FromScratch: TypeAlias = Annotated[
    bool, _option("Resume at step 0, with the run's checkpoints set aside.", RUN, "--from-scratch")
]
Plain: TypeAlias = Annotated[bool, _option("Plain lines, also on a terminal.", RUN, "--plain")]
Log: TypeAlias = Annotated[
    str | None,
    _option(
        "Loggers, of tensorboard (the default), wandb and mlflow; their environment variables count.",
        RUN,
        "--log",
        metavar="NAME,…",
    ),
]
NoReport: TypeAlias = Annotated[bool, _option("Draw no report at the end.", RUN, "--no-report")]

StrategyName: TypeAlias = Annotated[
    str | None,
    _option(
        "ddp, local_sgd, post_local_sgd, hierarchical, slowmo, diloco (the default), streaming_diloco, sparse_loco, "
        "des_loc, eager_diloco, edit or muloco.",
        STRATEGY,
        autocompletion=_complete_strategy,
    ),
]
Period: TypeAlias = Annotated[
    str | None,
    _option("Steps from one round to the next; auto: as few as the link allows.", STRATEGY, metavar="STEPS"),
]
Levels: TypeAlias = Annotated[
    str | None,
    _option(
        "hierarchical: which groups meet after how many steps, the innermost first, such as 4=2,16=all.",
        STRATEGY,
        metavar="STEPS=GROUPS,…",
    ),
]
Codec: TypeAlias = Annotated[
    str | None,
    _option(
        "How differences are written: fp32, bf16, fp16, int8, e3m0, topk or auto; +feedback behind it sends later what "
        "was lost.",
        STRATEGY,
        autocompletion=_complete_codec,
    ),
]
OuterLr: TypeAlias = Annotated[float | None, _option("Learning rate of the outer step.", STRATEGY)]
Delay: TypeAlias = Annotated[int | None, _option("Steps for which a round may be on its way.", STRATEGY)]
Faults: TypeAlias = Annotated[
    str | None,
    _option(
        "What is done when a worker dies: raise_error (the default), skip_round or shrink, which go on.",
        STRATEGY,
        metavar="POLICY",
        autocompletion=_complete_policy,
    ),
]
AcceptRollback: TypeAlias = Annotated[
    bool | None,
    _option("Go on from an older state if all that have seen the last rounds are gone.", STRATEGY, "--accept-rollback"),
]
WarmupSteps: TypeAlias = Annotated[int | None, _option("Steps with averaged gradients, at first.", STRATEGY)]

Steps: TypeAlias = Annotated[int | None, _option("Optimizer steps of each worker.", TRAINING)]
Workers: TypeAlias = Annotated[int | None, _option("Workers on this node (torchrun: --nproc-per-node).", TRAINING)]
Seed: TypeAlias = Annotated[int | None, _option("What random numbers begin with.", TRAINING)]
Settings: TypeAlias = Annotated[
    list[str] | None,
    _option(
        "Any key of the configuration, such as options.width=64; may be repeated.",
        TRAINING,
        "--set",
        metavar="KEY=VALUE",
    ),
]

Nodes: TypeAlias = Annotated[str | None, _option("Nodes, or a range such as 2:4.", NODES, metavar="N")]
NodeRank: TypeAlias = Annotated[int | None, _option("This node's number, for a static rendezvous.", NODES)]
RdzvBackend: TypeAlias = Annotated[str | None, _option("How nodes find each other: c10d, static, ….", NODES)]
RdzvEndpoint: TypeAlias = Annotated[
    str | None, _option("Where they do, the same on all nodes.", NODES, metavar="HOST:PORT")
]
RdzvId: TypeAlias = Annotated[str | None, _option("The job's name, the same on all nodes.", NODES)]
MaxRestarts: TypeAlias = Annotated[
    int | None, _option("How often workers are started anew, from the last checkpoint, if one fails.", NODES)
]

Compare: TypeAlias = Annotated[
    str | None, _option("Train by several strategies, one after the other.", RACE, metavar="NAME,NAME,…")
]
Link: TypeAlias = Annotated[
    str | None, _option("Put each worker behind an emulated link, such as 100mbit; needs root.", RACE, metavar="RATE")
]
