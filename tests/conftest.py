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
from cadenza.codecs.kernels import using
from cadenza.participants.name_lookup import use_hosts_file_only
from cadenza.participants.store import serve
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


@pytest.fixture
def store() -> Iterator[int]:
    """The port of a store that outlives the workers."""
    server = serve(host="127.0.0.1")
    yield server.port
    del server


@pytest.fixture(params=["native", "torch"])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """The codecs' kernels, compiled, and in torch's operations; test_triton.py has Triton's."""
    if request.param == "native" and native.kernels() is None:
        pytest.skip("needs a C compiler")
    with using(request.param):
        yield
