"""What runs inside a rank process: wait for a job, run it in a fresh process group, clean up, wait for the next.

The parent speaks to it over one pipe: ``Job`` in, ``Result`` or ``Failure`` out, then ``RELEASE`` in (all ranks have
answered, so nobody needs this one's connections any more) and ``IDLE`` out (cleaned up, ready for another job).
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from cadenza.participants.name_lookup import use_hosts_file_only

RELEASE = b"release"
IDLE = b"idle"


@dataclass(frozen=True)
class Job:
    """One call of a function on one rank."""

    call: int
    rank: int
    world_size: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    store_port: int
    group_timeout_s: float
    init: bool
    env: dict[str, str]


@dataclass(frozen=True)
class Result:
    """What the function returned, pickled a second time so that reading the envelope never runs its code."""

    payload: bytes


@dataclass(frozen=True)
class Failure:
    """What the function raised, as text: exceptions themselves may not survive pickling."""

    type_name: str
    text: str


def serve(connection: Connection, stack_path: str, store_port: int) -> None:
    """Run jobs until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the ranks
    use_hosts_file_only()
    with open(stack_path, "w") as stack_file:
        faulthandler.enable(stack_file)
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        threading.Thread(target=_die_with_parent, daemon=True).start()
        torch.set_num_threads(1)
        torch.empty(1).sum()  # whatever torch starts at its first operation is started before the first job
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
        connection.send_bytes(IDLE)
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)
            _serve_one(message, connection, store)


def _serve_one(message: bytes, connection: Connection, store: dist.Store) -> None:
    with ExitStack() as cleanup:
        for restoring in (_environment, _warnings, _loggers, _torch_settings, _signals):
            cleanup.enter_context(restoring())
        connection.send_bytes(pickle.dumps(_answer(message, store)))
        connection.recv_bytes()  # RELEASE
        _leave_groups()
    gc.collect()
    connection.send_bytes(IDLE)


def _answer(message: bytes, store: dist.Store) -> Result | Failure:
    try:
        sys.path[:] = (paths_and_job := pickle.loads(message))[0]
        job: Job = pickle.loads(paths_and_job[1])
        _enter_group(job, store)
        return Result(pickle.dumps(job.function(*job.args, **job.kwargs)))
    except BaseException as error:  # a test may raise anything, and the parent must hear of all of it
        return Failure(type(error).__name__, "".join(traceback.format_exception(error)))


def _enter_group(job: Job, store: dist.Store) -> None:
    os.environ.update(
        RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_RANK=str(job.rank),
        LOCAL_WORLD_SIZE=str(job.world_size),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.store_port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the parent hosts the store: init_process_group("gloo") just works
        TORCHELASTIC_RESTART_COUNT=str(job.call),  # which keeps its keys apart from those of other calls
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(job.env)
    if job.init:
        timeout = timedelta(seconds=job.group_timeout_s)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"call {job.call}", store),
            rank=job.rank,
            world_size=job.world_size,
            timeout=timeout,
        )


def forget_accelerate() -> None:
    """Let Accelerate, if it is loaded, begin anew: it keeps one state a process, and groups come and go."""
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
        state.PartialState._reset_state()


def _leave_groups() -> None:
    forget_accelerate()
    gc.collect()  # a group closes its sockets only when the last reference to it is gone
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _environment() -> Iterator[None]:
    environment, directory = dict(os.environ), os.getcwd()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)


@contextmanager
def _warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        yield


@contextmanager
def _loggers() -> Iterator[None]:
    def named() -> dict[str, logging.Logger]:
        loggers = {n: x for n, x in logging.Logger.manager.loggerDict.items() if isinstance(x, logging.Logger)}
        return {"": logging.getLogger(), **loggers}

    fresh = (logging.NOTSET, [], [], True, False)
    before = {n: (x.level, x.handlers[:], x.filters[:], x.propagate, x.disabled) for n, x in named().items()}
    disabled_below = logging.root.manager.disable
    try:
        yield
    finally:
        logging.disable(disabled_below)
        for name, logger in named().items():
            level, handlers, filters, logger.propagate, logger.disabled = before.get(name, fresh)
            logger.setLevel(level)
            logger.handlers[:], logger.filters[:] = handlers, filters


@contextmanager
def _torch_settings() -> Iterator[None]:
    torch.manual_seed(0)
    random.seed(0)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic, grad = torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_grad_enabled(grad)


@contextmanager
def _signals() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
