"""The program that starts the workers of one node that live and fail together.

`cadenza train` starts it as ``python -m cadenza.cli.agent rendezvous PLAN``, for torch's elastic agent, the engine
under torchrun; or, where all hosts are known, as ``python -m cadenza.cli.agent hosts PLAN``. PLAN is JSON. A process of
its own, so that Ctrl-C reaches the front alone, which asks the workers to stop while the agent watches them end as if
they had finished; and so that what torch logs goes to a file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cadenza.cli.parent_death import PARENT, SAVING_S, end_with_parent
from cadenza.cli.plans import HostsPlan, RendezvousPlan, WorkerCommand
from cadenza.cli.worker_processes import WorkerLogs, report_failures, report_problem, start_workers

_POLL_S = 0.3


def launch_by_rendezvous(plan: RendezvousPlan) -> None:
    """Run the workers of this node until all have finished, or one has failed too often."""
    options: dict[str, Any] = {"shutdown_timeout": SAVING_S}
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    config = LaunchConfig(
        min_nodes=plan.min_nodes,
        max_nodes=plan.max_nodes,
        nproc_per_node=plan.workers,
        logs_specs=WorkerLogs(Path(plan.logs)),
        run_id=plan.rdzv_id,
        rdzv_backend=plan.rdzv_backend,
        rdzv_endpoint=plan.rdzv_endpoint,
        rdzv_configs=plan.rdzv_configs,
        local_addr=plan.local_addr,
        max_restarts=plan.max_restarts,
        monitor_interval=_POLL_S,
        **{name: value for name, value in options.items() if name in known},  # older torch has fewer
    )
    elastic_launch(config, plan.command[0])(*plan.command[1:])


def launch_on_hosts(plan: HostsPlan) -> None:
    """Run the workers of all hosts until all have finished, or one has failed."""
    context = start_workers("workers", plan.commands, Path(plan.logs))
    try:
        result = context.wait(period=_POLL_S)
    except SignalException as error:
        context.close(error.sigval, SAVING_S)
        raise
    if result is not None and result.is_failed():
        raise ChildFailedError("workers", result.failures)


def _launch(kind: str, plan: dict[str, Any]) -> None:
    if kind == "rendezvous":
        launch_by_rendezvous(RendezvousPlan(**plan))
    else:
        launch_on_hosts(HostsPlan([WorkerCommand(**one) for one in plan["commands"]], plan["logs"]))


def main() -> int:
    """Launch, and report how it ended; the exit code is 0 if all workers finished."""
    end_with_parent(signal.SIGTERM)  # the launcher passes it on, and the workers save
    os.environ[PARENT] = str(os.getpid())
    kind, plan = sys.argv[1:]
    try:
        _launch(kind, json.loads(plan))
    except ChildFailedError as error:
        report_failures({rank: failure.exitcode for rank, failure in error.failures.items()})
        return 1
    except RendezvousError as error:
        report_problem(f"{error.__cause__ or error}")
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
