"""Draw what `cadenza train` showed at some moment of a run, as an SVG picture, from the run's own metrics.

cadenza train --run runs/picture
python lab/display_picture.py runs/picture docs/img/train.svg --at 0.6
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console, Group
from rich.text import Text

from cadenza.cli.display import draw
from cadenza.cli.following import Progress
from cadenza.cli.results import results
from cadenza.cli.running import title_of
from cadenza.training.runs import Run, open_run, read_metrics


def progress_at(run: Run, part: float) -> Progress:
    """Return what the display knew when this part of the time had passed."""
    metrics = read_metrics(run.folder)
    until = part * max(line["elapsed"] for lines in metrics.lines.values() for line in lines)
    progress = Progress()
    for worker in metrics.workers:
        for line in metrics.lines[worker]:
            if line["elapsed"] <= until:
                progress.take(worker, line)
    return progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--at", type=float, default=0.6, help="the part of the run's time that has passed")
    parser.add_argument("--width", type=int, default=88)
    parser.add_argument("--end", action="store_true", help="draw the table at the end instead")
    given = parser.parse_args()
    run = open_run(given.run)
    console = Console(record=True, width=given.width, file=io.StringIO(), force_terminal=True)
    if given.end:
        picture = Group(results([run.folder]), Text(f"Report: {run.report_file}"))
    else:
        picture = draw(progress_at(run, given.at), title_of(run, run.config()), width=given.width)
    console.print(Group(Text("$ cadenza train", "green"), picture))
    svg = console.export_svg(title="cadenza train")
    given.picture.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))  # no fonts from elsewhere


if __name__ == "__main__":
    main()
