"""Which parameters form a layer, told from the names and sizes alone.

A number in a name makes a *family*: `encoder.layers.3.attn.weight` is in the family `encoder.layers.*`, as its member
3; `block0.w` in `block*`; `0.2.weight` in `*` and in `0.*`. A family is a stack of layers if its members repeat each
other. The outermost such stack counts, so what is numbered inside a layer is a part of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from cadenza.fragments.base import Sized

__all__ = ["find_layers"]

_NUMBERED = re.compile(r"(.*?)(\d+)")


class _Family:
    """Modules of one parent whose names differ only in a number; what each holds, by the rest of the name."""

    def __init__(self, *, wordy: bool) -> None:
        self.wordy = wordy
        self.members: dict[int, dict[str, int]] = {}

    def repeats(self, *, sizes: bool) -> bool:
        """Say whether at least half of the parameters have a twin, of the same size too, in another member."""
        if self.wordy and not any("." in rest for member in self.members.values() for rest in member):
            return False  # conv1 and conv2, norm1 and norm2 are parts of a layer, not layers
        held = Counter((rest, size * sizes) for member in self.members.values() for rest, size in member.items())
        twins = sum(times for times in held.values() if times > 1)
        return 2 * twins >= held.total()

    @property
    def several(self) -> bool:
        return len(self.members) > 1


def find_layers(parameters: Sized) -> list[list[str]]:
    """Return the names of each layer, stack by stack, in the order of their numbers; what is in no layer is left out.

    Members repeat each other if most parameters of one are in another too, by name and size; where nothing does so, by
    name alone, as in a net whose layers widen; where nothing does even that, all that is numbered is a stack.

    >>> find_layers([("embed", 9), ("h.0.w", 4), ("h.0.mlp.0", 4), ("h.1.w", 4), ("h.1.mlp.0", 4), ("head", 9)])
    [['h.0.w', 'h.0.mlp.0'], ['h.1.w', 'h.1.mlp.0']]
    """
    families = _families(parameters)
    stacks: dict[str, str] = {}  # the family whose member each name's layer is
    rules: tuple[Callable[[_Family], bool], ...] = (
        lambda family: family.repeats(sizes=True),
        lambda family: family.repeats(sizes=False),
        lambda family: family.several,
    )
    for is_stack in rules:
        around = {family for name in stacks for family, _, _ in _numbers(name)}  # these hold layers already
        chosen = {key for key, family in families.items() if key not in around and is_stack(family)}
        for name, _ in parameters:
            outermost = next((family for family, _, _ in _numbers(name) if family in chosen), None)
            if name not in stacks and outermost is not None:
                stacks[name] = outermost
    return _in_order({name: stacks[name] for name, _ in parameters if name in stacks})


def _in_order(stacks: Mapping[str, str]) -> list[list[str]]:
    layers: dict[str, dict[int, list[str]]] = {}
    for name, stack in stacks.items():
        number = next(number for family, number, _ in _numbers(name) if family == stack)
        layers.setdefault(stack, {}).setdefault(number, []).append(name)
    return [members[number] for members in layers.values() for number in sorted(members)]


def _families(parameters: Sized) -> dict[str, _Family]:
    found: dict[str, _Family] = {}
    for name, size in parameters:
        for key, number, rest in _numbers(name):
            family = found.setdefault(key, _Family(wordy=not key.endswith(".*") and key != "*"))
            family.members.setdefault(number, {})[rest] = size
    return found


def _numbers(name: str) -> Iterator[tuple[str, int, str]]:
    """Yield the family, the number and the rest of the name for each number in it, from the outermost.

    A tensor's own name has none, unless it is a number: `weight_1` is no layer, `prompts.1` may be.
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        match = _NUMBERED.fullmatch(part)
        if match and (i + 1 < len(parts) or not match.group(1)):
            yield ".".join([*parts[:i], f"{match.group(1)}*"]), int(match.group(2)), ".".join(parts[i + 1 :])
