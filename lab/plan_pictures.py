"""The pictures of docs/choose-a-period.md: `python -m lab.plan_pictures`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cadenza.cli.plan.candidates import build
from cadenza.planning import Cluster, Link, Model, predict, smallest_period

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "img"
MODEL, WORKERS, STEP_S = Model(1_300_000_000), 8, 0.8
RATES = [10.0 ** (7 + power / 12) for power in range(49)]
KINDS = {
    "ddp": ("ddp", "fp32", 0, "#94a3b8"),
    "diloco fp32": ("diloco", "fp32", 0, "#0b57b7"),
    "diloco int8": ("diloco", "int8", 0, "#b0480b"),
    "diloco e3m0": ("diloco", "e3m0", 0, "#0f7a4f"),
    "streaming_diloco": ("streaming_diloco", "e3m0", 5, "#7c3aaf"),
}


def used(words: tuple[str, str, int], period: int, rate: float) -> float:
    return predict(build(*words, period), Cluster(WORKERS, Link(rate), STEP_S), MODEL).utilisation


def draw_utilisation(axes: Any) -> None:
    for label, (*words, colour) in KINDS.items():
        axes.plot(RATES, [used(tuple(words), 100, rate) for rate in RATES], label=label, color=colour)
    axes.axhline(0.95, color="#64748b", linestyle=":", linewidth=1)
    axes.set(xscale="log", xlabel="bits a second", ylabel="utilisation", title="with a period of 100 steps")
    axes.legend(frameon=False)


def draw_frontier(axes: Any) -> None:
    for label, (name, codec, delay, colour) in KINDS.items():
        if name == "ddp":
            continue
        words = (name, codec, delay)
        least = 18 if name == "streaming_diloco" else 1
        found = [
            smallest_period(lambda period, rate=rate, words=words: used(words, period, rate) >= 0.95, least=least)
            for rate in RATES
        ]
        axes.plot(RATES, found, label=label, color=colour)
    axes.set(xscale="log", yscale="log", xlabel="bits a second", ylabel="steps", title="smallest period for 95 %")


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "cadenza", "font.size": 9, "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    draw_utilisation(left)
    draw_frontier(right)
    figure.savefig(PICTURES / "plan.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
