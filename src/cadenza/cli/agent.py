"""The elastic agent of one node, in a process of its own: torch's launcher, the engine under torchrun.

`cadenza train` starts it as ``python -m cadenza.cli.agent PLAN`` with a `Plan` as JSON, and reads from its standard
output one line of JSON for what went wrong: workers that failed, nodes that did not meet. A process of its own, so that
Ctrl-C reaches the front alone, which asks the workers to stop while the agent watches them end as if they had
finished; and so that what torch logs goes to a file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cadenza.cli.leash import PARENT, SAVING_S, follow_parent

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """What an agent is to launch; the names are torchrun's."""

    command: list[str]
    logs: str
    workers: int
    min_nodes: int
    max_nodes: int
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_id: str
    rdzv_configs: dict[str, Any]
    local_addr: str | None
    max_restarts: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class WorkerLogs(LogsSpecs):
    """One file a worker and stream, by the worker's rank, not by its place on the node."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._folder.mkdir(parents=True, exist_ok=True)
        destination = LogsDest()
        for local_rank, env in envs.items():
            attempt = int(env["TORCHELASTIC_RESTART_COUNT"])
            name = f"worker-{int(env['RANK']):05d}" + (f".attempt-{attempt}" if attempt else "")
            destination.stdouts[local_rank] = str(self._folder / f"{name}.out")
            destination.stderrs[local_rank] = str(self._folder / f"{name}.err")
            destination.error_files[local_rank] = str(self._folder / f"{name}.error.json")
            env["TORCHELASTIC_ERROR_FILE"] = destination.error_files[local_rank]
        return destination


def tell(**what: Any) -> None:
    """Tell the front."""
    print(json.dumps(what), flush=True)


def launch(plan: Plan) -> None:
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
        monitor_interval=0.3,
        **{name: value for name, value in options.items() if name in known},  # older torch has fewer
    )
    elastic_launch(config, plan.command[0])(*plan.command[1:])


def main() -> int:
    """Launch, and tell how it ended; the exit code is 0 if all workers finished."""
    follow_parent(signal.SIGTERM)  # the launcher passes it on, and the workers save
    os.environ[PARENT] = str(os.getpid())
    try:
        launch(Plan(**json.loads(sys.argv[1])))
    except ChildFailedError as error:
        failures = [
            {"worker": rank, "exitcode": failure.exitcode, "pid": failure.pid, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        tell(event="failed", failures=failures)
        return 1
    except RendezvousError as error:
        tell(event="apart", error=f"{error.__cause__ or error}")
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
