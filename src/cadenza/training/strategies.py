"""From the words of a configuration to a strategy: names of presets and codecs, and the keys that each preset takes.

`ddp` is no preset: it is a warm-up that never ends, on a model in DistributedDataParallel.

>>> build_strategy("diloco", codec="int8+feedback", period=16, outer_lr=0.4).levels[0].codec.name
'error_feedback(int8)'
>>> build_strategy("ddp").warmup_steps == ALWAYS
True
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from cadenza import codecs, presets
from cadenza.errors import CadenzaError, UsageError
from cadenza.faults import FaultPolicy
from cadenza.schedules import changing
from cadenza.strategy import Strategy

__all__ = [
    "ALWAYS",
    "CODECS",
    "KEYS",
    "STRATEGIES",
    "build_codec",
    "build_strategy",
    "defaults_of",
    "keys_of",
    "nearest",
]

ALWAYS = 2**62  # steps of a warm-up that never ends

_PRESETS: dict[str, Callable[..., Strategy]] = {
    "local_sgd": presets.local_sgd,
    "post_local_sgd": presets.post_local_sgd,
    "hierarchical": presets.hierarchical,
    "slowmo": presets.slowmo,
    "diloco": presets.diloco,
    "streaming_diloco": presets.streaming_diloco,
    "sparse_loco": presets.sparse_loco,
    "des_loc": presets.des_loc,
    "eager_diloco": presets.eager_diloco,
    "edit": presets.edit,
    "muloco": presets.muloco,
}
STRATEGIES = ("ddp", *_PRESETS)

_CODECS: dict[str, Callable[[], codecs.Codec]] = {
    "fp32": codecs.fp32,
    "bf16": codecs.bf16,
    "fp16": codecs.fp16,
    "int8": codecs.int8,
    "e3m0": codecs.e3m0,
    "topk": codecs.topk,
    "auto": codecs.auto,
}
CODECS = tuple(_CODECS)
_FEEDBACK = "+feedback"

# Choices of a Strategy that a table of TOML can hold; levels and fragments are the preset's business.
_NOT_IN_TOML = ("levels", "fragments", "balanced", "faults", "average_gradients")
_CHOICES = tuple(f.name for f in fields(Strategy) if f.name not in _NOT_IN_TOML)

# What the strategies' keys mean; `keys_of` says which of them a strategy takes.
KEYS = {
    "alpha": "How much of the local value a late landing keeps; for slowmo, the step on the slow momentum.",
    "beta": "The slow momentum.",
    "buffers": 'Which buffers are averaged: "statistics" (BatchNorm\'s and the like), true for all, false for none.',
    "clip": "The largest norm of the mean difference; any without it.",
    "decay": "How much of what was not sent is kept for the next round.",
    "defaults": 'Outer values that are not given: "measured", which suit the period, or the "paper"\'s.',
    "delay": "Steps from a round's launch to its landing, in which training goes on.",
    "density": "The share of the values that is sent.",
    "keep_progress": "Whether a late landing keeps what was learned since the launch, instead of a share (alpha).",
    "layers": "Layers that are sent together, as one fragment.",
    "levels": 'Groups by period, from the innermost: {4 = "host", 32 = "all"}.',
    "mean_of": 'A value\'s mean is over those who sent it ("senders"), or over "all", the others counting as 0.',
    "measure_drift": "Whether rounds tell how far the workers have moved apart.",
    "momentum_period": "Steps between the averages of Adam's first moment; 3 periods without it.",
    "offload": "Whether anchors and outer state are in the CPU's memory.",
    "optimizer_state": 'What a round does with the inner optimizer\'s state: "leave", "average" or "reset" it.',
    "outer_lr": "The outer step's learning rate; what suits the period without it.",
    "outer_momentum": "The outer step's Nesterov momentum; what suits the period without it.",
    "period": 'Steps from one round to the next: a number, "auto", or a table of periods by the step they hold from.',
    "variance_period": "Steps between the averages of Adam's second moment; 6 periods without it.",
    "warmup_steps": "Steps at the beginning in which gradients are averaged.",
    "weight": 'How much a worker counts: "uniform", or "samples", by how many it has seen.',
}


def nearest(given: str, allowed: Sequence[str]) -> str:
    """Return a hint at the name that was meant, or nothing.

    >>> nearest("dilocco", STRATEGIES)
    ' Did you mean "diloco"?'
    >>> nearest("adam", STRATEGIES)
    ''
    """
    near = difflib.get_close_matches(given, allowed, n=1)
    return f' Did you mean "{near[0]}"?' if near else ""


def keys_of(name: str) -> tuple[str, ...]:
    """Return the keys that a strategy takes beside its name.

    >>> keys_of("sparse_loco")[:4]
    ('period', 'outer_lr', 'density', 'decay')
    >>> keys_of("ddp")
    ()
    """
    if name == "ddp":
        return ()
    parameters = inspect.signature(_PRESETS[name]).parameters.values()
    own = [p.name for p in parameters if p.kind != p.VAR_KEYWORD and p.name != "outer"]  # TOML cannot hold pieces
    return tuple(dict.fromkeys([*own, *_CHOICES]))


def defaults_of(name: str) -> dict[str, Any]:
    """Return a preset's own values, those that TOML can hold; what suits other values is left to the preset.

    >>> defaults_of("slowmo")
    {'period': 12, 'alpha': 1.0, 'beta': 0.6}
    >>> defaults_of("diloco")
    {'period': 500, 'defaults': 'measured'}
    """
    if name == "ddp":
        return {}
    parameters = inspect.signature(_PRESETS[name]).parameters.values()
    return {p.name: p.default for p in parameters if isinstance(p.default, bool | int | float | str)}


def build_codec(text: str) -> codecs.Codec:
    """Return the codec of a name, with error feedback if "+feedback" follows it.

    >>> build_codec("int8").name
    'int8'
    """
    name = text.removesuffix(_FEEDBACK)
    if name not in _CODECS:
        raise UsageError(
            f'strategy.codec = "{text}": there is no codec of this name.{nearest(name, CODECS)} Allowed: '
            f'{", ".join(CODECS)}, and each but fp32 with "{_FEEDBACK}" behind it.'
        )
    codec = _CODECS[name]()
    if name == text:
        return codec
    try:
        return codecs.error_feedback(codec)
    except ValueError as error:
        raise UsageError(f'strategy.codec = "{text}": {error}') from error


def build_strategy(name: str, *, codec: str = "", faults: FaultPolicy | None = None, **given: Any) -> Strategy:
    """Return the strategy that a configuration's [strategy] describes; the keys are the preset's own arguments.

    >>> build_strategy("dilocco", period=16)
    Traceback (most recent call last):
      ...
    cadenza.errors.UsageError: strategy.name = "dilocco": there is no strategy of this name. Did you mean "diloco"? \
Allowed: ddp, local_sgd, post_local_sgd, hierarchical, slowmo, diloco, streaming_diloco, sparse_loco, des_loc, \
eager_diloco, edit, muloco.
    """
    if name not in STRATEGIES:
        raise UsageError(
            f'strategy.name = "{name}": there is no strategy of this name.{nearest(name, STRATEGIES)} Allowed: '
            f"{', '.join(STRATEGIES)}."
        )
    _check_keys(name, [*given, *(["codec"] if codec else [])])
    if name == "ddp":
        if faults is not None:
            raise UsageError(
                f'faults.policy = "{_policy(faults)}" does not go with strategy.name = "ddp", whose process group '
                "ends with its first dead rank. Choose another strategy (in its warm-up, post_local_sgd averages the "
                "gradients of those who are there), or raise_error."
            )
        return presets.local_sgd(period=1, warmup_steps=ALWAYS, measure_drift=False)
    arguments = {key: _value(key, value) for key, value in given.items()}
    if faults is not None:
        arguments["faults"] = faults
    if codec:
        arguments["codec"] = build_codec(codec)
    try:
        return _PRESETS[name](**arguments)
    except CadenzaError:
        raise
    except (TypeError, ValueError) as error:
        under = "" if faults is None else f' under faults.policy = "{_policy(faults)}"'
        raise UsageError(f'The strategy "{name}" ({_told(given)}) cannot be{under}: {error}') from error


def _policy(faults: FaultPolicy) -> str:
    return faults.name


def _check_keys(name: str, given: Sequence[str]) -> None:
    allowed = keys_of(name)
    for key in given:
        if key not in allowed:
            raise UsageError(_unknown(name, key, allowed))
    signature = inspect.signature(_PRESETS[name]).parameters.values() if name != "ddp" else []
    for parameter in signature:
        wanted = parameter.default is parameter.empty and parameter.kind != parameter.VAR_KEYWORD
        if wanted and parameter.name not in given:
            example = '{4 = 2, 16 = "all"}' if parameter.name == "levels" else "100"
            raise UsageError(
                f'strategy.{parameter.name} is missing: the strategy "{name}" requires it, for instance '
                f"{parameter.name} = {example}."
            )


def _unknown(name: str, key: str, allowed: Sequence[str]) -> str:
    if key == "balanced":
        return (
            "strategy.balanced is not for `cadenza train`: its workers evaluate, stop and save at the same step, and "
            "balanced workers take unequal numbers of steps. It works in a loop of your own."
        )
    if not allowed:
        return f'strategy.{key}: the strategy "{name}" takes no keys but its name.'
    return (
        f'strategy.{key}: the strategy "{name}" does not take this key.{nearest(key, allowed)} Allowed: '
        f"{', '.join(allowed)}."
    )


def _value(key: str, value: Any) -> Any:
    """Return a value as presets want it: the keys of a TOML table are texts, its arrays are lists."""
    if key == "levels":
        if not isinstance(value, Mapping):
            raise UsageError(
                f'strategy.levels = {value!r}: a table of groups by period is required, such as {{4 = 2, 16 = "all"}}.'
            )
        return {_steps(key, period): _groups(groups) for period, groups in value.items()}
    if key == "period" and isinstance(value, Mapping):
        return changing({_steps(key, step): period for step, period in value.items()})
    if key == "period" and value == "auto":
        return value
    if key == "period" and (isinstance(value, bool) or not isinstance(value, int)):
        raise UsageError(
            f'strategy.period = {value!r}: a whole number of steps is required, "auto", or a table of periods by the '
            "step from which they hold, such as {1 = 16, 1000 = 64}."
        )
    return value


def _groups(groups: Any) -> Any:
    return tuple(tuple(group) for group in groups) if isinstance(groups, list) else groups


def _steps(key: str, text: Any) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f'strategy.{key} = {{"{text}" = …}}: the keys are numbers of steps.') from None


def _told(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value!r}" for key, value in given.items()) or "its own values"
