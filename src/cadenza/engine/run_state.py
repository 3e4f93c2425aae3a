"""A synchronizer's state as one flat dict of tensors and JSON, and back.

| key | what |
| --- | --- |
| `shared/meta` | step, workers, strategy, parameters, schedules: JSON, the same on all workers |
| `shared/level/L/fragment/F/…` | anchors and outer state of a level at which all workers meet |
| `worker/ID/meta` | counts, weights, rounds in flight: JSON of one worker; ID is its global rank |
| `worker/ID/level/L/fragment/F/…` | residuals; anchors and outer state of a level of several groups |
| `worker/ID/flight/F/…` | the result of a round in flight, which lands when it was due, unless it is the anchor |

Where a model is sharded, every shard has its own `shared/shard/S/…`. `shared/meta` and `worker/ID/meta` list the
tensors that belong to them, so that a loss is found before anything is changed.

Saving is local: it waits for what is in flight, but lands nothing, so it never changes the trajectory. Loading has two
halves, `prepare`, which checks everything and changes nothing, and `Restoration.apply`, so that whoever loads more than
this can check all of it first.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from cadenza.engine.balance import Balance
from cadenza.engine.exchange import Exchanged
from cadenza.engine.header import Header
from cadenza.engine.in_place_mean import Passage
from cadenza.engine.level_group import LevelGroup
from cadenza.engine.level_state import Layout, Track
from cadenza.engine.model_view import ModelView, named
from cadenza.engine.pending import Flight
from cadenza.engine.warm_up import covers, fall_silent
from cadenza.errors import CheckpointError
from cadenza.strategy import Strategy
from cadenza.version import __version__

__all__ = [
    "Held",
    "Place",
    "Restoration",
    "State",
    "checksum",
    "collect",
    "fingerprint",
    "load_state_dict",
    "place_of",
    "prepare",
    "read_json",
    "state_dict",
]

State: TypeAlias = dict[str, torch.Tensor | str]

_Number = TypeVar("_Number", int, float)

FORMAT = 1


class Held(Protocol):
    """What of a synchronizer is saved and restored."""

    strategy: Strategy
    clock: int
    _view: ModelView
    _levels: list[LevelGroup]
    _tracks: dict[tuple[int, int], Track]
    _flights: dict[int, Flight]
    _home: torch.device | None
    _known: set[str]
    _count: int
    _samples: float
    _counted: dict[int, float]
    _level_at: dict[int, int]
    _exhausted: bool
    _all_exhausted: bool
    _gradients_averaged: bool
    _balance: Balance

    def _track(self, level: int, fragment: int) -> Track: ...
    def _layout(self, fragment: int) -> Layout: ...
    def _wait_for_courier(self) -> None: ...
    def _land_all(self) -> None: ...
    def _reseat(self) -> None: ...
    def _check_open(self) -> None: ...


@dataclass(frozen=True)
class Place:
    """Where a rank stands: among which workers (global ranks), and with which shard of the model."""

    workers: tuple[int, ...]
    position: int
    shard: int
    shards: int

    @property
    def worker(self) -> int:
        return self.workers[self.position]

    @property
    def shared_root(self) -> str:
        return "shared" if self.shards == 1 else f"shared/shard/{self.shard}"

    @property
    def worker_root(self) -> str:
        return f"worker/{self.worker}"


def place_of(sync: Held) -> Place:
    """Return where this rank stands."""
    sync._view.settle()
    transport = sync._levels[-1].transport
    for parameter in sync._view.parameters().values():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            ranks = mesh.mesh.flatten().tolist()
            return Place(tuple(transport.members), transport.position, ranks.index(dist.get_rank()), len(ranks))
    return Place(tuple(transport.members), transport.position, 0, 1)


# ---- saving ----------------------------------------------------------------------------------------------------------


def state_dict(sync: Held) -> State:
    """Return copies of everything that a synchronizer needs to go on where it is; local, never a collective."""
    return {key: value if isinstance(value, str) else value.clone() for key, value in collect(sync).items()}


def collect(sync: Held) -> State:
    """Return the state like `state_dict`, but the tensors themselves, to be written before training goes on."""
    passages = {fragment: flight.passage.result() for fragment, flight in sync._flights.items()}
    passages = {fragment: passage for fragment, passage in passages.items() if isinstance(passage, Passage)}
    place = place_of(sync)
    shared, own = _Entry(place.shared_root), _Entry(place.worker_root)
    for (number, fragment), track in sorted(sync._tracks.items()):
        where = f"level/{number}/fragment/{fragment}"
        common = shared if tuple(sync._levels[number].transport.members) == place.workers else own
        common.tracks[f"{number}/{fragment}"] = {"schedule": track.schedule_state, "rounds": track.rounds}
        common.add(where, dict(track.shared_state()))
        own.add(where, dict(track.worker_state()))
    for fragment in passages:
        flight = sync._flights[fragment]
        own.add(f"flight/{fragment}/value", {str(i): flat for i, flat in enumerate(flight.values)})
        own.add(f"flight/{fragment}/origin", {str(i): flat for i, flat in enumerate(flight.origins or ())})
    flights = [_told(sync._flights[fragment], passage) for fragment, passage in passages.items()]
    return shared.state(**_shared_facts(sync, place)) | own.state(**_own_facts(sync, place), flights=flights)


class _Entry:
    """A part of the state under one root: tensors, and a `meta` that lists them."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.tracks: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def add(self, where: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors |= {f"{where}/{key}": tensor for key, tensor in tensors.items() if tensor.numel()}

    def state(self, **facts: Any) -> State:
        kinds = {key: [tensor.numel(), _name(tensor.dtype)] for key, tensor in self.tensors.items()}
        meta = json.dumps({**facts, "tracks": self.tracks, "tensors": kinds})
        return {f"{self.root}/meta": meta, **{f"{self.root}/{key}": tensor for key, tensor in self.tensors.items()}}


def _shared_facts(sync: Held, place: Place) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": __version__,
        "workers": place.workers,
        "shards": place.shards,
        # Balanced workers take steps of their own number, so there the clock is not the same on all.
        "clock": None if sync.strategy.balanced else sync.clock,
        "strategy": sync.strategy.identity,
        "groups": _own_groups(sync.strategy),
        "parameters": _parameters(sync._view),
        "known": sorted(sync._known),
        "fragments": sync._count,
    }


def _own_facts(sync: Held, place: Place) -> dict[str, Any]:
    balance = sync._balance
    return {
        "clock": sync.clock,
        "groups": [_positions(level, place) for level in sync._levels],
        "staged": [level.stage is not None for level in sync._levels],
        "samples": sync._samples,
        "counted": sync._counted,
        "level_at": sync._level_at,
        "exhausted": sync._exhausted,
        "all_exhausted": sync._all_exhausted,
        "balance": {
            "quota": balance.quota,
            "steps": balance.steps,
            "periods": balance.periods,
            "elapsed_s": time.perf_counter() - balance._started,
        },
    }


def _told(flight: Flight, passage: Passage) -> dict[str, Any]:
    """Return what a flight is besides its tensors."""
    return {
        "level": flight.level,
        "fragment": flight.fragment,
        "step": flight.step,
        "land_at": flight.land_at,
        "alpha": flight.alpha,
        "inner_lrs": flight.inner_lrs,
        "names": flight.layout.names,
        "samples": flight.samples,
        "stall_s": flight.stall_s,
        "drift": flight.drift,
        "values": bool(flight.values),
        "origins": flight.origins is not None,
        "headers": [header.pack().hex() for header in passage.headers],
        "weights": passage.weights,
        "exchanged": asdict(passage.exchanged),
        "wire_s": passage.wire_s,
        "spread2": passage.spread2,
    }


def _positions(level: LevelGroup, place: Place) -> list[int]:
    """Return which workers meet at a level, as positions: ranks may be others after a restart."""
    return [place.workers.index(rank) for rank in level.transport.members if rank in place.workers]


def _own_groups(strategy: Strategy) -> list[str]:
    return [str(plan.groups) for plan in strategy.levels if isinstance(plan.groups, tuple)]


def _parameters(view: ModelView) -> list[str]:
    found = {name: _local(parameter) for name, parameter in view.parameters().items()}
    return [f"{name}: {tuple(local.shape)} {_name(local.dtype)}" for name, local in found.items()]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- comparing -------------------------------------------------------------------------------------------------------


def fingerprint(state: State, root: str) -> str:
    """Return a few characters that are the same on all workers that saved together: a digest of what they share.

    It tells states of different steps or runs apart, at the speed of memory; it is no protection against forgery.
    """
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(key for key in state if key.startswith(f"{root}/")):
        value = state[key]
        digest.update(f"{key} {value if isinstance(value, str) else checksum(value)}\n".encode())
    return digest.hexdigest()


def checksum(tensor: torch.Tensor) -> int:
    """Return a number that tells tensors apart, at the speed of memory."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.reshape(-1).view(whole).sum(dtype=torch.int64))


# ---- loading ---------------------------------------------------------------------------------------------------------


def load_state_dict(sync: Held, state: Mapping[str, torch.Tensor | str]) -> None:
    """Go on from a saved state; a state of something else is refused before anything is changed."""
    prepare(sync, state).apply()


@dataclass(frozen=True)
class _Saved:
    """An entry of a saved state, its list of tensors checked."""

    root: str
    meta: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def part(self, where: str) -> dict[str, torch.Tensor]:
        """Return the tensors below a key."""
        return {key.removeprefix(f"{where}/"): t for key, t in self.tensors.items() if key.startswith(f"{where}/")}


@dataclass(frozen=True)
class Restoration:
    """A state that was found to fit a synchronizer.

    Attributes:
        worker: Whose entry this worker takes: its own, or that of position j mod N if the number of workers is another.
        own: Whether that is its own.
        first: Whether it is the first to take that entry, and not one more of a larger number of workers.
        shared: What all workers share.
        mine: The entry that this worker takes.
        common: For each level, the entry that has what its members hold in common.
        kept: For each level, whether it has the same members as when it was saved.
        present: The entries of all workers that are in the state.
    """

    sync: Held
    worker: int
    own: bool
    first: bool
    shared: _Saved
    mine: _Saved
    common: list[_Saved]
    kept: list[bool]
    present: list[_Saved]

    @torch.no_grad()
    def apply(self) -> None:
        """Give the synchronizer the state."""
        sync = self.sync
        sync._wait_for_courier()
        sync._flights.clear()
        sync.clock = self.mine.meta["clock"]
        sync._known, sync._count = set(self.shared.meta["known"]), self.shared.meta["fragments"]
        ddp = sync._view.ddp
        if ddp is not None and covers(ddp, sync._levels[-1].transport.members):
            if sync.clock < sync.strategy.warmup_steps:
                ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
            else:
                fall_silent(ddp)
        self._restore_tracks()
        self._restore_flights()
        self._restore_counts()

    def _restore_tracks(self) -> None:
        """Give every track what it had, and the parameters that it knew: those unfrozen since join at the next round.

        During a warm-up there are none: anchors are taken when it ends.
        """
        told = self._tracks()
        for key in self.sync._tracks.keys() - told.keys():
            del self.sync._tracks[key]
        for (number, fragment), facts in told.items():
            track, level = self.sync._track(number, fragment), self.sync._levels[number]
            track.schedule_state, track.rounds = dict(facts["schedule"]), facts["rounds"]
            where = f"level/{number}/fragment/{fragment}"
            tensors = self.common[number].part(where)
            layout = self.layout(_anchored(tensors))
            if layout.names:
                track.fit(layout, level.transport, level.stage)
            track.load(tensors, partial(self._lost, number, where))

    def _tracks(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Return what is told of each track, by level and fragment."""
        told = {}
        for number, entry in enumerate(self.common):
            for key, facts in entry.meta["tracks"].items():
                level, fragment = map(int, key.split("/"))
                if level == number and fragment < self.shared.meta["fragments"]:
                    told[level, fragment] = facts
        return told

    def layout(self, names: Iterable[str]) -> Layout:
        """Return how the parameters of these names lie in flat tensors, whether or not they are trained now."""
        here = self.sync._view.everything()
        return Layout(named(here, [name for name in names if name in here]), home=self.sync._home)

    def _restore_flights(self) -> None:
        for told in self.mine.meta["flights"]:
            number, fragment = told["level"], told["fragment"]
            outermost = number == len(self.sync._levels) - 1
            if not self.kept[number] and not outermost:
                continue  # it was the business of a group that is no more
            self.sync._flights[fragment] = self._flight(told)

    def _flight(self, told: Mapping[str, Any]) -> Flight:
        where, layout = f"flight/{told['fragment']}", self.layout(told["names"])
        flight = Flight(
            told["level"],
            told["fragment"],
            step=told["step"],
            land_at=told["land_at"],
            layout=layout,
            values=_flats(self.mine.part(f"{where}/value"), layout) if told["values"] else (),
            origins=_flats(self.mine.part(f"{where}/origin"), layout) if told["origins"] else None,
            alpha=told["alpha"],
            inner_lrs=told["inner_lrs"],
            samples=told["samples"],
            stall_s=told["stall_s"],
            drift=told["drift"],
        )
        flight.passage.set_result(
            Passage(
                [Header.unpack(bytes.fromhex(header)) for header in told["headers"]],
                told["weights"],
                Exchanged(**told["exchanged"]),
                wire_s=told["wire_s"],
                spread2=told["spread2"],
            )
        )
        return flight

    def _lost(self, number: int, where: str, key: str) -> torch.Tensor | None:
        """Return a residual: this worker's own, or, where the members are others now, the mean of all."""
        key = f"{where}/{key}"
        if self.kept[number]:
            return self.mine.tensors.get(key)
        staged = self.sync._levels[number].stage is not None or self.mine.meta["staged"][number]
        if staged or "share/" in key:
            return None  # it belongs to a part of the values that is another's now
        found = [entry.tensors[key] for entry in self.present if key in entry.tensors]
        return torch.stack(found).mean(0) if found else None

    def _restore_counts(self) -> None:
        sync, meta = self.sync, self.mine.meta
        sync._samples = meta["samples"]
        sync._counted = _by_number(meta["counted"])
        sync._level_at = _by_number(meta["level_at"])
        # Another number of workers shares the data out anew.
        sync._exhausted = self.own and meta["exhausted"]
        sync._all_exhausted = self.own and meta["all_exhausted"]
        sync._gradients_averaged = False
        balance = meta["balance"]
        sync._balance.quota, sync._balance.steps = balance["quota"], balance["steps"]
        sync._balance.periods = balance["periods"]
        sync._balance._started = time.perf_counter() - balance["elapsed_s"]


def prepare(sync: Held, state: Mapping[str, torch.Tensor | str], *, worker: int | None = None) -> Restoration:
    """Check that a state belongs to this strategy and model, and that nothing of it is missing.

    `worker` says whose entry is taken, where workers are known by their numbers; otherwise positions decide.
    """
    sync._check_open()
    place = place_of(sync)
    shared = _saved(state, place.shared_root)
    _check_terms(sync, shared.meta, place)
    workers = shared.meta["workers"]
    numbers = workers if worker is None else {*workers, worker}
    entries = {w: _saved(state, f"worker/{w}") for w in numbers if f"worker/{w}/meta" in state}
    _check_steps(shared, entries)
    own = len(workers) == len(place.workers) if worker is None else worker == place.worker
    first = place.position < len(workers) if worker is None else own
    worker = workers[place.position % len(workers)] if worker is None else worker
    mine = _entry_of(worker, entries)
    kept, common = [], []
    for number, level in enumerate(sync._levels):
        kept.append(own and mine.meta["groups"][number] == _positions(level, place))
        if any(key.startswith(f"{number}/") for key in shared.meta["tracks"]):
            common.append(shared)
        elif kept[number] or not level.plan.anchored:
            common.append(mine)
        else:  # all members of a group must hold the same, so all of them ask the first
            asked = place.workers.index(level.transport.members[0])
            common.append(_entry_of(workers[asked % len(workers)], entries))
    restoration = Restoration(sync, worker, own, first, shared, mine, common, kept, list(entries.values()))
    _check_sizes(restoration)
    return restoration


def read_json(key: str, text: object) -> dict[str, Any]:
    """Return what a JSON text of a state says."""
    try:
        told = json.loads(text)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{key} is not the JSON that was saved: {error}") from error
    if not isinstance(told, dict):
        raise CheckpointError(f"{key} is not what was saved: it must be a JSON object.")
    return told


def _saved(state: Mapping[str, torch.Tensor | str], root: str) -> _Saved:
    """Return an entry, all of it."""
    if f"{root}/meta" not in state:
        there = sorted(key.removesuffix("/meta") for key in state if key.endswith("/meta"))
        raise CheckpointError(
            f"This state has no {root}/meta; it has {', '.join(there) or 'nothing that Cadenza saved'}. Pass what "
            "sync.state_dict() gave, and shard the model as it was sharded then."
        )
    meta = read_json(f"{root}/meta", state[f"{root}/meta"])
    if meta.get("format", FORMAT) != FORMAT:
        raise CheckpointError(
            f"This state has format {meta['format']}, written by Cadenza {meta.get('version')}; this is Cadenza "
            f"{__version__} and reads format {FORMAT}."
        )
    tensors = {}
    for key, (numel, dtype) in meta["tensors"].items():
        found = state.get(f"{root}/{key}")
        if not isinstance(found, torch.Tensor) or found.numel() != numel or _name(found.dtype) != dtype:
            what = "nothing" if found is None else getattr(found, "shape", type(found).__name__)
            raise CheckpointError(f"{root}/{key} must hold {numel} values of {dtype}; the state has {what} there.")
        tensors[key] = found
    return _Saved(root, meta, tensors)


def _entry_of(worker: int, entries: Mapping[int, _Saved]) -> _Saved:
    if worker not in entries:
        raise CheckpointError(
            f"This worker goes on from what worker {worker} saved, which is not in this state: it has the entries of "
            f"workers {sorted(entries)}. Merge the dicts of all workers, or load the one that was saved by {worker}."
        )
    return entries[worker]


def _check_terms(sync: Held, meta: Mapping[str, Any], place: Place) -> None:
    then, now = list(meta["strategy"]), sync.strategy.identity
    if len(meta["workers"]) != len(place.workers):  # explicit groups cannot be the same
        for groups in (*meta["groups"], *_own_groups(sync.strategy)):
            then, now = (
                [line.replace(f"groups: {groups}", "groups: its own") for line in told] for told in (then, now)
            )
    _compare("strategy", then, now, mend="Attach the strategy of that run")
    _compare("model", meta["parameters"], _parameters(sync._view), mend="Build, freeze and shard the model as it was")


def _compare(what: str, then: Sequence[str], now: Sequence[str], *, mend: str) -> None:
    for position in range(max(len(then), len(now))):
        one, other = (lines[position] if position < len(lines) else "nothing more" for lines in (then, now))
        if one != other:
            raise CheckpointError(
                f"This state was saved with another {what}: {one} in the state, {other} here. {mend}, or start anew. "
                "Nothing was changed."
            )


def _check_steps(shared: _Saved, entries: Mapping[int, _Saved]) -> None:
    for entry in entries.values():
        if shared.meta["clock"] not in (None, entry.meta["clock"]):
            raise CheckpointError(
                f"{entry.root} was saved at step {entry.meta['clock']} and {shared.root} at step "
                f"{shared.meta['clock']}; load what all workers saved at one step."
            )


def _check_sizes(found: Restoration) -> None:
    """Refuse tensors that do not fit the parameters, also those that are not trained any more."""
    here = found.sync._view.everything()
    for number, entry in enumerate(found.common):
        for key, tensor in entry.part(f"level/{number}").items():
            _, kind, name = key.partition("/anchor/")
            if kind and name in here and tensor.numel() != _numel(here[name]):
                raise CheckpointError(
                    f"This state was saved with another model: {name} had {tensor.numel()} values, and has "
                    f"{_numel(here[name])} here. Nothing was changed."
                )
    for told in found.mine.meta["flights"]:
        if not told["values"]:
            continue  # the anchors, which are the result, were compared above
        then = [flat.numel() for flat in found.mine.part(f"flight/{told['fragment']}/value").values()]
        sizes = [strip.numel for strip in found.layout(told["names"]).strips]
        if then != sizes:
            raise CheckpointError(
                f"The round that was in flight carries {', '.join(told['names'])}, {then} values; here they have "
                f"{sizes}. Build the model as it was. Nothing was changed."
            )


def _anchored(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the parameters that have an anchor."""
    return [key.removeprefix("anchor/") for key in tensors if key.startswith("anchor/")]


def _numel(tensor: torch.Tensor) -> int:
    return _local(tensor).numel() * (2 if tensor.is_complex() else 1)


def _flats(tensors: Mapping[str, torch.Tensor], layout: Layout) -> list[torch.Tensor]:
    """Return copies of saved flat tensors, where a round has them."""
    return [tensors[str(i)].to(strip.device, copy=True) for i, strip in enumerate(layout.strips)]


def _by_number(told: Mapping[str, _Number]) -> dict[int, _Number]:
    """Return a dict as it was before JSON made texts of its keys."""
    return {int(key): value for key, value in told.items()}
