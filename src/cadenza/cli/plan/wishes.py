"""From flags and measurements to what is planned; nonsense is refused by the flag's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cadenza.cli.amounts import parse_count, parse_rate, parse_seconds, parse_size
from cadenza.cli.plan.candidates import POLICIES, build
from cadenza.cli.plan.sources import Found, from_path, from_task
from cadenza.errors import UsageError
from cadenza.planning.choices import Place
from cadenza.planning.inputs import Cluster, Faults, Link, Model, Work
from cadenza.planning.search import Calibration, Seen, calibrate
from cadenza.training.strategies import build_strategy

__all__ = ["Wishes", "gather"]


@dataclass(frozen=True)
class Wishes:
    """What is to be planned."""

    place: Place
    idealised: bool
    strategies: list[str]
    codecs: list[str]
    delays: list[int]
    periods: list[int]
    policy: str
    tokens: int
    tokens_per_step: float | None
    calibration: Calibration | None
    sources: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """Return what was asked for, as JSON can hold it."""
        place = self.place
        return {
            "parameters": place.model.parameters,
            "layers": place.model.layer_count,
            "cluster": asdict(place.cluster),
            "work": place.work.plain(),
            "target_utilisation": place.target,
            "memory": place.memory,
            "tokens": self.tokens,
            "tokens_per_step": self.tokens_per_step,
            "faults": self.policy,
            "sources": self.sources,
        }

    def calibration_plain(self) -> dict[str, float] | None:
        return None if self.calibration is None else asdict(self.calibration)

    def duration_of(self, step_s: float, sent: float) -> dict[str, float | None]:
        """Return how long all tokens take, and what a worker sends for them; None where a step's tokens are unknown."""
        if self.tokens_per_step is None:
            return {"steps": None, "seconds": None, "bytes_sent": None}
        steps = self.tokens / (self.tokens_per_step * self.place.cluster.workers)
        return {"steps": steps, "seconds": steps * step_s, "bytes_sent": steps * sent}


def gather(flags: Mapping[str, Any]) -> Wishes:
    """Return the wishes that flags, by name, and the sources that they name make."""
    found = [from_path(path) for path in flags["source"] or []]
    if flags["task"] is not None:
        found.append(from_task(flags["task"]))
    _check_words(flags)
    model = Model(_parameters(flags, found), layers=_at_least("--layers", flags["layers"], 0))
    cluster, work = _cluster(flags, found), _work(found)
    seen = _seen(flags, found, model)
    calibration = calibrate(seen, cluster, model, work) if seen else None
    if calibration is not None:
        cluster, work = calibration.apply(cluster, work)
    memory = None if flags["memory"] is None else parse_size("--memory", flags["memory"])
    per_step = flags["tokens_per_step"]
    measured = next((one.samples for one in found if one.samples and one.unit == "tokens"), None)
    return Wishes(
        Place(cluster, model, work, flags["target_utilisation"], memory),
        flags["model"] == "idealised",
        _words(flags["strategy"]),
        _words(flags["codec"]),
        list(flags["delay"] or []),
        sorted({_at_least("--period", period, 1) for period in flags["period"] or []}),
        flags["faults"],
        20 * model.parameters if flags["tokens"] is None else parse_count("--tokens", flags["tokens"]),
        measured if per_step is None else parse_count("--tokens-per-step", per_step),
        calibration,
        [one.where for one in found],
    )


def _check_words(flags: Mapping[str, Any]) -> None:
    if not 0 < flags["target_utilisation"] < 1:
        raise UsageError(
            f"--target-utilisation is a share of the time, above 0 and below 1, such as 0.95; got "
            f"{flags['target_utilisation']:g}."
        )
    if flags["model"] not in ("ours", "idealised"):
        raise UsageError(f'--model is ours or idealised; got "{flags["model"]}".')
    if flags["faults"] not in POLICIES:
        raise UsageError(f'--faults is {", ".join(POLICIES)}; got "{flags["faults"]}".')
    _at_least("--rounds", flags["rounds"], 1)


def _at_least(option: str, value: int, least: int) -> int:
    if value < least:
        raise UsageError(f"{option} is a whole number of {least} or more; got {value}.")
    return value


def _words(given: list[str] | None) -> list[str]:
    return [word for part in given or [] for word in part.split(",") if word]


def _parameters(flags: Mapping[str, Any], found: list[Found]) -> int:
    if flags["parameters"] is not None:
        return parse_count("--parameters", flags["parameters"])
    return int(_needed("--parameters", "1.3B", [one.parameters for one in found]))


def _needed(option: str, example: str, found: list[Any]) -> Any:
    """Return the first thing that was found, or say which flag is missing."""
    known = [one for one in found if one is not None]
    if not known:
        raise UsageError(
            f"{option} is missing: give it, for instance {option} {example}, or --from a run, doctor.json or "
            "bench.json that has it."
        )
    return known[0]


def _link(flags: Mapping[str, Any], found: list[Found]) -> Link:
    latency = flags["latency"]
    known = next((one.latency_s for one in found if one.latency_s is not None), 0.0)
    latency_s = known if latency is None else parse_seconds("--latency", latency)
    down = 0.0 if flags["down"] is None else parse_rate("--down", flags["down"])
    if flags["bandwidth"] is not None:
        return Link(parse_rate("--bandwidth", flags["bandwidth"]), down, latency_s)
    rate = _needed("--bandwidth", "200mbit", [one.bandwidth for one in found])
    return Link(rate, down, latency_s, efficiency=1.0)  # what was measured was values


def _cluster(flags: Mapping[str, Any], found: list[Found]) -> Cluster:
    step = flags["step_s"]
    known = [one.step_s for one in found]
    step_s = _needed("--step-s", "0.8", known) if step is None else parse_seconds("--step-s", step)
    workers = flags["workers"]
    if workers is None:
        workers = _needed("--workers", "8", [one.workers for one in found])
    uplink = None
    if flags["between"] is not None:
        latency_s = parse_seconds("--between-latency", flags["between_latency"])
        uplink = Link(parse_rate("--between", flags["between"]), latency_s=latency_s)
        if flags["sites"] < 2:
            raise UsageError("--between is the link between sites, and there is one; give --sites 2, for instance.")
    elif flags["sites"] > 1:
        raise UsageError(f"--sites {flags['sites']} needs the link between them: --between 100mbit, for instance.")
    straggle, straggle_s = _straggle(flags["straggle"])
    mean = flags["fails_every"]
    return Cluster(
        _at_least("--workers", workers, 1),
        _link(flags, found),
        step_s,
        _at_least("--sites", flags["sites"], 1),
        uplink,
        slowest=flags["slowest"],
        jitter=flags["jitter"],
        straggle=straggle,
        straggle_s=straggle_s,
        faults=Faults(
            0.0 if mean is None else parse_seconds("--fails-every", mean),
            parse_seconds("--restart", flags["restart"]),
            parse_seconds("--checkpoint-every", flags["checkpoint_every"]),
        ),
    )


def _straggle(text: str | None) -> tuple[float, float]:
    if text is None:
        return 0.0, 0.0
    share, colon, seconds = text.partition(":")
    try:
        often = float(share) if colon else -1.0
    except ValueError:
        often = -1.0
    if not 0 <= often <= 1:
        raise UsageError(f"--straggle is SHARE:TIME, such as 0.001:2s for one step in a thousand; got {text!r}.")
    return often, parse_seconds("--straggle", seconds)


def _work(found: list[Found]) -> Work:
    speeds = next((one.codec_s for one in found if one.codec_s), None)
    return Work() if speeds is None else Work(codec_s=speeds)


def _seen(flags: Mapping[str, Any], found: list[Found], model: Model) -> list[Seen]:
    """Return what was seen to run, by flags or by a run that is planned from."""
    seen = [_parse_seen(text) for text in flags["measured"] or []]
    for one in found:
        if one.seen is not None and not seen:
            settings, utilisation = one.seen
            seen.append(Seen(build_strategy(**settings), utilisation))
    return seen


def _parse_seen(text: str) -> Seen:
    *what, period, utilisation = text.split(":") if text.count(":") else ["", "", ""]
    try:
        steps, share = int(period), float(utilisation)
    except ValueError:
        steps, share = 0, 0.0
    if steps < 1 or len(what) > 1:
        raise UsageError(
            f"--measured is PERIOD:UTILISATION, such as 100:0.93, or STRATEGY/CODEC:PERIOD:UTILISATION; got {text!r}."
        )
    name, _, codec = (what[0] if what else "diloco/fp32").partition("/")
    return Seen(build(name, codec or "fp32", 0 if name != "streaming_diloco" else 5, steps), share)
