"""Ray Train and Ray Core with a real local Ray: a worker dies, and the run ends as it should have."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from support.ranks import RankPool

ROOT = Path(__file__).parents[2]
TRAIN, CORE = (ROOT / "examples" / f"{name}.py" for name in ("ray_train", "ray_core_shrink"))
STEPS = 60
# By default Ray's workers give way to whatever else runs, here to all other tests.
ENVIRONMENT = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}

pytestmark = [pytest.mark.timeout(560), pytest.mark.filterwarnings("ignore")]  # Ray warns of its own future


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray of this test's own, which ends with it."""
    with warnings.catch_warnings(), mock.patch.dict(os.environ, ENVIRONMENT):
        warnings.simplefilter("ignore")
        import ray

        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets must be short
        path = os.pathsep.join(filter(None, sys.path))
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100_000_000,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
            log_to_driver=False,
        )
        yield
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def run_example(path: Path) -> Any:
    """What an example's main() returns; it finds Ray initialised."""
    with mock.patch.object(sys, "argv", [str(path), "--steps", str(STEPS)]):
        return runpy.run_path(str(path), run_name="example")["main"]()


def uninterrupted() -> dict[str, float]:
    """What the example's loop reports at its end, on a rank without Ray and without a failure."""
    import ray.train

    names = runpy.run_path(str(TRAIN), run_name="example")
    names["train"].__globals__.update(resume=lambda **_: {}, report=lambda *_, **__: None)
    with mock.patch.object(ray.train, "report") as reported:
        names["train"]({"steps": STEPS})
    return dict(reported.call_args.args[0])


def test_ray_train_goes_on_from_all_workers_own_states_bit_for_bit(local_ray: None, ranks: RankPool) -> None:
    metrics = run_example(TRAIN)
    assert metrics.pop("first") == 25  # in the middle of a period of 16
    assert metrics["accuracy"] > 0.8
    for expected in ranks.run(2, uninterrupted, timeout_s=110):
        assert expected.pop("first") == 0
        assert metrics == expected


def test_ray_core_starts_only_the_dead_worker_again(local_ray: None) -> None:
    (loss, accuracy, starts), (*result, others_starts) = run_example(CORE)
    assert starts == ["0"]
    assert others_starts[0] == "0"
    assert int(others_starts[1]) > 20  # with the others' state
    assert len(others_starts) == 2
    assert accuracy > 0.8
    assert [loss, accuracy] == result  # they end together
