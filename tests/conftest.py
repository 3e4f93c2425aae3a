"""Fixtures of the whole suite."""

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # `support` is importable whatever the configuration

from cadenza.codecs import native
from cadenza.participants.name_lookup import use_hosts_file_only
from support.ranks import RankPool

use_hosts_file_only()  # the stores of tests are in this process: docs/reliability.md

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script: programs would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ranks, workers and pytest's own processes share the cores: several threads each would mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns, as this is imported, of its own use of deprecated names
    import_module("torch.distributed.optim")


def pytest_xdist_auto_num_workers() -> int:
    """Return how many tests run at once: one more than there are cores, for much of their time is waiting."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that share what a fixture has made, such as a finished run, in one process: it is made once."""
    for item in items:
        info = getattr(item, "_fixtureinfo", None)
        found = info.name2fixturedefs.values() if info is not None else ()
        if any(fixtures[-1].scope in ("module", "class") for fixtures in found):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The rank processes of this session."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def ranks(rank_pool: RankPool) -> RankPool:
    """``ranks.run(4, function, *args)``: the results of a function on four real Gloo ranks."""
    return rank_pool


@pytest.fixture(params=["machine code", "torch"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The codecs' kernels, compiled, and in torch's operations."""
    if request.param == "torch":
        monkeypatch.setattr(native, "kernels", lambda: None)
    elif native.kernels() is None:
        pytest.skip("needs a C compiler")
