"""Going on from a run's saved state, in two halves: `prepare` checks everything and changes nothing, `apply` takes it.

So whoever loads more than this can check all of it first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cadenza.common.identity import identity
from cadenza.engine.layout import Layout
from cadenza.engine.model_view import named
from cadenza.engine.pending import PendingRound
from cadenza.engine.place import Place
from cadenza.engine.replica import Replica
from cadenza.engine.saving import FORMAT, describe_parameters, local, name_of
from cadenza.engine.warm_up import resume_gradient_averaging
from cadenza.errors import CheckpointError
from cadenza.version import __version__

__all__ = ["Restoration", "prepare", "read_json"]

_EXPLICIT_GROUPS = re.compile(r"\.groups: \(\(.*")


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
    """A state that was found to fit a replica.

    Attributes:
        replica: What takes the state.
        worker: Whose entry this worker takes: its own, or that of position j mod N if the number of workers is another.
        own: Whether that is its own.
        first: Whether it is the first to take that entry, and not one more of a larger number of workers.
        shared: What all workers share.
        mine: The entry that this worker takes.
        common: For each level, the entry that has what its members hold in common.
        kept: For each level, whether it has the same members as when it was saved.
        present: The entries of all workers that are in the state.
    """

    replica: Replica
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
        """Give the replica the state."""
        state = self.replica.state
        state.wait_for_pending()
        self.replica.copies.wait()
        state.pending.clear()
        state.set_facts(self.mine.meta, own=self.own)
        state.known, state.fragment_count = set(self.shared.meta["known"]), self.shared.meta["fragments"]
        state.fragments = dict(self.shared.meta["fragment_of"])
        self.replica.view.take_part(state.fragments)
        resume_gradient_averaging(self.replica)
        self._restore_levels()
        self.replica.participants.resume(self.shared.meta.get("held", 0), self._begin_anew())
        self._restore_pending()
        self.replica.rewrites.forgive()

    def _restore_levels(self) -> None:
        """Give every level what it had, and the parameters that it knew: those unfrozen since join at the next round.

        During a warm-up there are none: anchors are taken when it ends.
        """
        told = self._levels()
        known = self.replica.state.levels
        for key in known.keys() - told.keys():
            del known[key]
        for (number, fragment), facts in told.items():
            state, group = self.replica.level_state(number, fragment), self.replica.participants.levels[number]
            state.set_facts(facts)
            where = f"level/{number}/fragment/{fragment}"
            tensors = self.common[number].part(where)
            layout = self.layout(_anchored(tensors))
            if layout.names:
                state.fit(layout, group)
            state.load(tensors, partial(self._lost, number, where))

    def _begin_anew(self) -> list[str]:
        """Let the state of a site begin at the outermost anchor where it is another worker's, of who knows which site.

        Returns:
            For each level, what tells this worker's state there from others'; empty where it begins anew.
        """
        levels = self.replica.state.levels
        outermost, anew = len(self.kept) - 1, not (self.own or self.replica.participants.always_together)
        for (number, fragment), state in levels.items():
            if anew and number < outermost:
                state.go_back_to(levels[outermost, fragment].anchors)
        marks = [
            " ".join(s.history for (level, _), s in sorted(levels.items()) if level == n) for n in range(outermost + 1)
        ]
        return ["" if anew and n < outermost else f"saved {mark}" for n, mark in enumerate(marks)]

    def _levels(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Return what is told of each level and fragment."""
        told = {}
        for number, entry in enumerate(self.common):
            for key, facts in entry.meta["levels"].items():
                level, fragment = map(int, key.split("/"))
                if level == number and fragment < self.shared.meta["fragments"]:
                    told[level, fragment] = facts
        return told

    def layout(self, names: Iterable[str]) -> Layout:
        """Return how the parameters of these names lie in flat tensors, whether or not they are trained now."""
        here = self.replica.view.everything()
        return self.replica.layout_of(named(here, [name for name in names if name in here]))

    def _restore_pending(self) -> None:
        for facts in self.mine.meta["pending"]:
            outermost = facts["level"] == len(self.kept) - 1
            if not self.kept[facts["level"]] and not outermost:
                continue  # it was the business of a group that is no more
            layout = self.layout(facts["names"])
            read = partial(self._flats, f"pending/{facts['fragment']}", layout)
            self.replica.state.pending[facts["fragment"]] = PendingRound.from_facts(facts, layout, read)

    def _flats(self, where: str, layout: Layout, kind: str) -> list[torch.Tensor]:
        """Return copies of saved flat tensors, where a round has them."""
        tensors = self.mine.part(f"{where}/{kind}")
        return [flat.copy_(tensors[str(i)]) for i, flat in enumerate(layout.empty())]

    def _lost(self, number: int, where: str, key: str) -> torch.Tensor | None:
        """Return a residual: this worker's own, or, where the members are others now, the mean of all."""
        key = f"{where}/{key}"
        if self.kept[number]:
            return self.mine.tensors.get(key)
        staged = self.replica.participants.levels[number].stage is not None or self.mine.meta["staged"][number]
        if staged or "share/" in key:
            return None  # it belongs to a part of the values that is another's now
        found = [entry.tensors[key] for entry in self.present if key in entry.tensors]
        return torch.stack(found).mean(0) if found else None


def prepare(replica: Replica, state: Mapping[str, torch.Tensor | str], *, worker: int | None = None) -> Restoration:
    """Check that a state belongs to this strategy and model, and that nothing of it is missing.

    `worker` says whose entry is taken, where workers are known by their numbers; otherwise positions decide.
    """
    try:
        return _prepare(replica, state, worker)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"This state is not what was saved: {error!r}. Nothing was changed.") from error


def _prepare(replica: Replica, state: Mapping[str, torch.Tensor | str], worker: int | None) -> Restoration:
    place = replica.place()
    shared = _saved(state, place.shared_root)
    _check_terms(replica, shared.meta, place)
    workers = shared.meta["workers"]
    numbers = workers if worker is None else {*workers, worker}
    entries = {w: _saved(state, f"worker/{w}") for w in numbers if f"worker/{w}/meta" in state}
    _check_steps(shared, entries)
    own = len(workers) == len(place.workers) if worker is None else worker == place.worker
    first = place.position < len(workers) if worker is None else own
    worker = workers[place.position % len(workers)] if worker is None else worker
    mine = _entry_of(worker, entries)
    kept, common = [], []
    for number, group in enumerate(replica.participants.levels):
        kept.append(own and mine.meta["groups"][number] == place.positions(group))
        if any(key.startswith(f"{number}/") for key in shared.meta["levels"]):
            common.append(shared)
        elif kept[number] or not group.plan.anchored or not group.agrees or not replica.participants.always_together:
            common.append(mine)
        else:  # all members of a group must hold the same, so all of them ask the first
            asked = place.workers.index(group.ranks[0])
            common.append(_entry_of(workers[asked % len(workers)], entries))
    restoration = Restoration(replica, worker, own, first, shared, mine, common, kept, list(entries.values()))
    _check_sizes(restoration)
    return restoration


def read_json(key: str, text: object) -> dict[str, Any]:
    """Return what a JSON text of a state says.

    >>> read_json("worker/0/meta", '{"clock": 8}')
    {'clock': 8}
    """
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
            f"{__version__} and reads format {FORMAT}. Finish that run with the version that began it, or start anew "
            "from its exported model."
        )
    tensors = {}
    for key, (numel, dtype) in meta["tensors"].items():
        found = state.get(f"{root}/{key}")
        if not isinstance(found, torch.Tensor) or found.numel() != numel or name_of(found.dtype) != dtype:
            what = "nothing" if found is None else getattr(found, "shape", type(found).__name__)
            raise CheckpointError(f"{root}/{key} must hold {numel} values of {dtype}; the state has {what} there.")
        tensors[key] = found
    return _Saved(root, meta, tensors)


def _entry_of(worker: int, entries: Mapping[int, _Saved]) -> _Saved:
    if worker not in entries:
        raise CheckpointError(
            f"This worker goes on from what worker {worker} saved, which is not in this state: it has the entries of "
            f"workers {sorted(entries)}. Merge the dicts of all workers, or load the one that was saved by {worker}. "
            "One rank's dict in torch.save() is not the run: save by cadenza.checkpoint.save() on every rank."
        )
    return entries[worker]


def _check_terms(replica: Replica, meta: Mapping[str, Any], place: Place) -> None:
    then, now = meta["strategy"], identity(replica.strategy)
    if len(meta["workers"]) != len(place.workers):  # explicit groups cannot be the same
        then, now = ([_EXPLICIT_GROUPS.sub(".groups: explicit", line) for line in lines] for lines in (then, now))
    _compare("strategy", then, now, mend="Attach the strategy of that run")
    parameters = describe_parameters(replica.view, meta["fragment_of"])
    _compare("model", meta["parameters"], parameters, mend="Build, freeze and shard the model as it was")


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
    here = found.replica.view.everything()
    for number, entry in enumerate(found.common):
        for key, tensor in entry.part(f"level/{number}").items():
            _, kind, name = key.partition("/anchor/")
            if kind and name in here and tensor.numel() != _numel(here[name]):
                raise CheckpointError(
                    f"This state was saved with another model: {name} had {tensor.numel()} values, and has "
                    f"{_numel(here[name])} here. Nothing was changed."
                )
    for facts in found.mine.meta["pending"]:
        if "value" not in facts["kept"]:
            continue  # the anchors, which are the result, were compared above
        then = [flat.numel() for flat in found.mine.part(f"pending/{facts['fragment']}/value").values()]
        sizes = [strip.numel for strip in found.layout(facts["names"]).strips]
        if then != sizes:
            raise CheckpointError(
                f"The round that was in flight carries {', '.join(facts['names'])}, {then} values; here they have "
                f"{sizes}. Build the model as it was. Nothing was changed."
            )


def _anchored(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the parameters that have an anchor."""
    return [key.removeprefix("anchor/") for key in tensors if key.startswith("anchor/")]


def _numel(tensor: torch.Tensor) -> int:
    return local(tensor).numel() * (2 if tensor.is_complex() else 1)
