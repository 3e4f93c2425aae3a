"""The flags of `cadenza plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

WHAT, LINKS, FAULTS, COMPARED, OUTPUT = "What is trained", "Links and workers", "Faults", "What is compared", "Output"


def _option(help: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **more)


Task: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="TASK", help="package.module:build, of which some steps are measured here.", show_default=False
    ),
]
Parameters: TypeAlias = Annotated[str | None, _option("Size of the model: 25M, 1.3B.", WHAT, "--parameters")]
Layers: TypeAlias = Annotated[int, _option("Its layers; estimated from its size without this.", WHAT)]
StepS: TypeAlias = Annotated[str | None, _option("What one step takes: 0.8, 350ms.", WHAT, "--step-s", metavar="TIME")]
Tokens: TypeAlias = Annotated[str | None, _option("Tokens in all: 26B; 20 a parameter without this.", WHAT)]
TokensPerStep: TypeAlias = Annotated[str | None, _option("Tokens that a worker takes in a step.", WHAT)]
Memory: TypeAlias = Annotated[str | None, _option("What a device holds: 24GB.", WHAT, metavar="SIZE")]
From: TypeAlias = Annotated[
    list[Path] | None,
    _option("A run's folder, or doctor's or bench's JSON: what was measured is taken from there.", WHAT, "--from"),
]

Workers: TypeAlias = Annotated[int | None, _option("How many workers train.", LINKS)]
Bandwidth: TypeAlias = Annotated[str | None, _option("Each worker's link: 200mbit, 1gbit.", LINKS, metavar="RATE")]
Down: TypeAlias = Annotated[str | None, _option("The same towards it, where that is another.", LINKS, metavar="RATE")]
Latency: TypeAlias = Annotated[str | None, _option("A small message, one way: 40ms.", LINKS, metavar="TIME")]
Sites: TypeAlias = Annotated[int, _option("Sites into which the workers are cut.", LINKS)]
Between: TypeAlias = Annotated[
    str | None, _option("The link of a site to the others, shared by its workers.", LINKS, metavar="RATE")
]
BetweenLatency: TypeAlias = Annotated[str, _option("What it adds, one way.", LINKS, metavar="TIME")]
Slowest: TypeAlias = Annotated[float, _option("How many times a usual step the slowest worker takes.", LINKS)]
Jitter: TypeAlias = Annotated[float, _option("Standard deviation of a step, as a share of it.", LINKS)]
Straggle: TypeAlias = Annotated[
    str | None, _option("How often a step is held up, and for how long: 0.001:2s.", LINKS, metavar="SHARE:TIME")
]

FailsEvery: TypeAlias = Annotated[
    str | None, _option("Mean time between failures of a worker.", FAULTS, metavar="TIME")
]
Policy: TypeAlias = Annotated[str, _option("raise_error, skip_round or shrink.", FAULTS, "--faults", metavar="POLICY")]
Restart: TypeAlias = Annotated[str, _option("Until a failed worker is back.", FAULTS, metavar="TIME")]
CheckpointEvery: TypeAlias = Annotated[str, _option("Between checkpoints.", FAULTS, metavar="TIME")]

Target: TypeAlias = Annotated[float, _option("Share of the time that is to be compute.", COMPARED)]
Strategies: TypeAlias = Annotated[list[str] | None, _option("Presets; repeat, or use commas.", COMPARED, "--strategy")]
Codecs: TypeAlias = Annotated[list[str] | None, _option("Codecs; repeat, or use commas.", COMPARED, "--codec")]
Delays: TypeAlias = Annotated[list[int] | None, _option("Delays, in steps; repeat.", COMPARED, "--delay")]
Periods: TypeAlias = Annotated[
    list[int] | None, _option("Periods; repeat. Without: the shortest that is enough.", COMPARED, "--period")
]
Measured: TypeAlias = Annotated[
    list[str] | None,
    _option(
        "What you saw, to calibrate on: PERIOD:UTILISATION of diloco in fp32, or "
        "STRATEGY/CODEC:PERIOD:UTILISATION; repeat.",
        COMPARED,
        "--measured",
    ),
]
ModelName: TypeAlias = Annotated[str, _option("ours, or idealised: the papers' own model.", COMPARED, "--model")]

AsJson: TypeAlias = Annotated[bool, _option("Print one JSON object instead of tables.", OUTPUT, "--json")]
Html: TypeAlias = Annotated[
    Path | None, _option("Write a page with curves and sliders, one file.", OUTPUT, "--html", metavar="FILE")
]
Simulate: TypeAlias = Annotated[
    Path | None,
    _option(
        "Play the recommended strategy, round by round, into a run's folder with a report.", OUTPUT, metavar="FOLDER"
    ),
]
Rounds: TypeAlias = Annotated[int, _option("Rounds that are played.", OUTPUT)]
Seed: TypeAlias = Annotated[int, _option("What its random numbers begin with.", OUTPUT)]
