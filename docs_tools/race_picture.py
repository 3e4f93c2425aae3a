"""The landing page's picture: how long each contender takes to the same loss on one link, from the results."""

from __future__ import annotations

from html import escape

from docs_tools.figures import CONTENDERS, quickest_on

__all__ = ["race"]

LINK = "100mbit"
_SHOWN = {
    "late": "Cadenza: late local SGD, int8",
    "streaming": "Cadenza: Streaming DiLoCo, 4 bits",
    "torchft-streaming": "torchft: Streaming DiLoCo",
    "torch": "torch: model averaging",
    "ddp": "torch: DDP",
}
_WIDTH, _ROW = 560, 52


def race() -> str:
    """Return a bar for each contender, the quickest first, as a drawing that says in words what it shows."""
    found = {name: quickest_on(LINK)[CONTENDERS[key]].seconds for key, name in _SHOWN.items()}
    longest = max(found.values())
    rows, told = [], []
    for number, (name, seconds) in enumerate(sorted(found.items(), key=lambda one: one[1])):
        y = number * _ROW
        ours = "ours" if name.startswith("Cadenza") else "theirs"
        width = (_WIDTH - 80) * seconds / longest
        rows.append(
            f'<text x="0" y="{y + 15}">{escape(name)}</text>'
            f'<rect class="{ours}" x="0" y="{y + 22}" width="{width:.1f}" height="18" rx="4"/>'
            f'<text x="{width + 8:.1f}" y="{y + 36}">{seconds:.1f} s</text>'
        )
        told.append(f"{name} {seconds:.1f} s")
    height = len(found) * _ROW
    return (
        f'<figure class="race"><svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="Seconds to the same loss: {escape("; ".join(told))}">{"".join(rows)}</svg>'
        "<figcaption>Seconds to the same held-out loss: a small GPT on four emulated hosts behind links of 100 Mbit/s, "
        'each contender by its own code. <a href="benchmarks.html">How it was measured</a></figcaption></figure>'
    )
