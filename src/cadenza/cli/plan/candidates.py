"""The strategies that are compared, built as `cadenza train` builds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from cadenza.errors import UsageError
from cadenza.faults import FaultPolicy, raise_error, shrink, skip_round
from cadenza.planning.choices import Candidate
from cadenza.planning.inputs import Cluster, Model
from cadenza.planning.rounds import fragment_sizes
from cadenza.strategy import Strategy
from cadenza.training.strategies import CODECS, STRATEGIES, build_strategy, keys_of, nearest

__all__ = ["POLICIES", "PRESETS", "as_python", "as_toml", "build", "candidates", "shown_codec"]

PRESETS = ("ddp", "local_sgd", "diloco", "streaming_diloco", "sparse_loco")
POLICIES: dict[str, Callable[[], FaultPolicy]] = {
    "raise_error": raise_error,
    "skip_round": skip_round,
    "shrink": shrink,
}
_DENSE = ("fp32", "bf16", "int8", "e3m0")
_OWN = {"streaming_diloco": "e3m0", "sparse_loco": "topk+feedback", "ddp": "fp32"}


def arguments_of(name: str, codec: str, delay: int, period: int, groups: int) -> dict[str, Any]:
    """Return the keys of a configuration's [strategy], without those that are the preset's own."""
    if name == "ddp":
        return {}
    if name == "hierarchical":
        found: dict[str, Any] = {"levels": {max(1, period // 8): groups, period: "all"}}
    else:
        found = {"period": period}
    if codec != _OWN.get(name, "fp32"):
        found["codec"] = codec
    if delay and not (name == "streaming_diloco" and delay == 5):
        found["delay"] = delay
    elif name == "streaming_diloco" and not delay:
        found |= {"delay": 0}
    return found


@cache
def build(name: str, codec: str, delay: int, period: int, groups: int = 1, policy: str = "raise_error") -> Strategy:
    """Return a strategy at a period; the same object for the same words."""
    faults = POLICIES[policy]() if policy != "raise_error" and name != "ddp" else None
    return build_strategy(name, faults=faults, **arguments_of(name, codec, delay, period, groups))


def candidates(
    names: Sequence[str], codecs: Sequence[str], delays: Sequence[int], cluster: Cluster, model: Model, policy: str
) -> list[Candidate]:
    """Return what is compared: every preset in every codec that it takes, without and with a delay."""
    names = names or [*PRESETS, *(["hierarchical"] if cluster.sites > 1 and policy == "raise_error" else [])]
    for name in names:
        if name not in STRATEGIES:
            raise UsageError(
                f'--strategy: there is no strategy "{name}".{nearest(name, STRATEGIES)} Allowed: '
                f"{', '.join(STRATEGIES)}."
            )
    for codec in codecs:
        if codec == "auto" or codec.removesuffix("+feedback") not in CODECS:
            raise UsageError(
                f'--codec: there is no codec "{codec}".{nearest(codec, CODECS)} Allowed: {", ".join(CODECS)}.'
            )
    if wrong := [delay for delay in delays if delay < 0]:
        raise UsageError(f"--delay is a number of steps, 0 or more; got {wrong[0]}.")
    found = []
    for name in names:
        own = [_OWN[name]] if name in _OWN and not (codecs and "codec" in keys_of(name)) else (codecs or _DENSE)
        for codec in own:
            for delay in _delays(name, delays):
                make = partial(build, name, codec, delay, groups=cluster.site_workers, policy=policy)
                found.append(_candidate(name, codec, delay, make, model))
    return found


def _delays(name: str, given: Sequence[int]) -> Sequence[int]:
    if name == "ddp":
        return (0,)
    if name == "streaming_diloco":
        return given or (5,)
    return given or ((0,) if name in ("sparse_loco", "hierarchical") else (0, 2))


def _candidate(name: str, codec: str, delay: int, make: Callable[[int], Strategy], model: Model) -> Candidate:
    if name == "ddp":
        return Candidate(name, codec, 0, make, 1, 1)
    strategy = make(2**16)
    fragments = len(fragment_sizes(strategy, model))
    return Candidate(name, codec, delay, make, max(1, fragments, delay + 1, 8 if name == "hierarchical" else 1))


def as_toml(name: str, codec: str, delay: int, period: int, groups: int) -> str:
    """Return the strategy as a table for `cadenza train --config`."""
    import tomli_w

    given = arguments_of(name, codec, delay, period, groups)
    if "levels" in given:
        given["levels"] = {str(step): size for step, size in given["levels"].items()}
    return tomli_w.dumps({"strategy": {"name": name, **given}})


def as_python(name: str, codec: str, delay: int, period: int, groups: int) -> str:
    """Return the strategy as an expression.

    >>> as_python("diloco", "int8", 2, 500, 1)
    'cadenza.diloco(500, codec=cadenza.codecs.int8(), delay=2)'
    """
    given = arguments_of(name, codec, delay, period, groups)
    if name == "ddp":
        return "torch.nn.parallel.DistributedDataParallel(model)"
    words = [str(given.pop("levels", None) or given.pop("period")).replace("'", '"')]
    if "codec" in given:
        plain, plus, _ = given.pop("codec").partition("+")
        text = f"cadenza.codecs.{plain}()"
        words.append(f"codec={f'cadenza.codecs.error_feedback({text})' if plus else text}")
    words += [f"{key}={value!r}" for key, value in given.items()]
    return f"cadenza.{name}({', '.join(words)})"


def shown_codec(name: str, codec: str) -> str:
    """Return how a codec is called in a table."""
    return "gradients" if name == "ddp" else codec
