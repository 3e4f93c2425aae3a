"""Which fragment a parameter belongs to: cut once, and kept by name, whatever joins later.

State belongs to names. If a parameter that joins in mid-run moved others to another fragment, their anchors, momentum
and turns would go astray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cadenza.fragments import Fragmentation

__all__ = ["assign"]


def assign(
    fragmentation: Fragmentation, sizes: Sequence[tuple[str, int]], known: Mapping[str, int], count: int
) -> tuple[dict[str, int], int]:
    """Return the fragment of every parameter, and how many fragments there are.

    Args:
        fragmentation: How a model is cut.
        sizes: The parameters that take part now, and how many bytes each has.
        known: The fragments of those that had one before; they keep it.
        count: How many fragments there were; 0 before the first cut.

    What joins later goes where the cut puts one of its companions, or else to the smallest fragment.

    >>> from cadenza.fragments import by_layers
    >>> first, count = assign(by_layers(1), [("0.w", 4), ("1.w", 4)], {}, 0)
    >>> assign(by_layers(1), [("0.w", 4), ("1.w", 4), ("1.b", 1), ("2.w", 4)], first, count)[0]
    {'0.w': 0, '1.w': 1, '1.b': 1, '2.w': 0}
    """
    cut = fragmentation.split(sizes)
    if not count:
        return {name: number for number, names in enumerate(cut) for name in names}, len(cut)
    found = dict(known)
    loads = [0] * count
    for name, size in sizes:
        if name in found:
            loads[found[name]] += size
    bytes_of = dict(sizes)
    for names in cut:
        companions = [known[name] for name in names if name in known]
        for name in (name for name in names if name not in found):
            found[name] = companions[0] if companions else loads.index(min(loads))
            loads[found[name]] += bytes_of[name]
    return {name: found[name] for name, _ in sizes} | found, count
