"""Run races, and write what they gave into docs/benchmarks.md.

    python -m lab.race headline              # the table of `make race`
    python -m lab.race training timing       # time, bytes and steps to the same loss, on three links
    python -m lab.race utilisation sites syncs losses
    python -m lab.race gradients --repeats 5 # DDP and its hooks against the quantised one
    python -m lab.race report                # tables and charts from lab/results/race*.json
    python -m lab.race timing --quick        # every method on a tiny model: does it run here?

What has been run is kept in lab/results and not run again; an interrupted race goes on where it was. It needs root.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from lab.race import plans, report
from lab.race.runner import Results

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.race", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("races", nargs="+", choices=[*plans.RACES, "report"], metavar="RACE")
    parser.add_argument("--only", nargs="+", metavar="LABEL", help="these contenders, as the tables name them")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps; figures mean nothing")
    parser.add_argument("--repeats", type=int, default=1, help="of all that is timed; all contenders take turns")
    parser.add_argument("--list", action="store_true", help="print what would run")
    arguments = parser.parse_args()
    scale = plans.QUICK if arguments.quick else plans.FULL
    for race in arguments.races:
        if race == "report":
            report.write(RESULTS)
            continue
        folder = Path(tempfile.mkdtemp()) if arguments.quick else RESULTS
        results = Results(folder / f"race_{race}.json")
        for repeat in range(arguments.repeats):
            for job, link in plans.RACES[race](scale, arguments.only):
                if repeat and job.evaluate_every:
                    continue  # a loss does not depend on the minute
                if arguments.list:
                    print(link, job.to_json())
                else:
                    results.get(job, link, repeat)
        if not arguments.list:
            print(report.told(race, results, scale))
