"""Rounds that were held are not given up in silence, whoever is left and whatever the store remembers."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import cadenza
from cadenza.errors import NobodyLeftError
from cadenza.participants.latest_round import Latest
from cadenza.participants.membership import Membership, join
from cadenza.participants.round_id import RoundId
from cadenza.participants.store import serve
from support.faults import Told, build, take_step

STRATEGY = cadenza.diloco(period=2, faults=cadenza.shrink(grace_s=4.0, first_s=4.0))


class Job:
    """Workers as threads, each with a synchronizer that the test drives."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.memberships: dict[int, Membership] = {}
        self.syncs: dict[int, cadenza.Synchronizer] = {}
        self.parts: dict[int, Any] = {}
        self.told: dict[int, Told] = {}
        self.errors: dict[int, BaseException] = {}

    def attach(self, *numbers: int, workers: int, **options: Any) -> None:
        self.each(numbers, lambda worker: self._attach(worker, workers, options))

    def step(self, *numbers: int, steps: int) -> None:
        self.each(numbers, lambda worker: self.step_one(worker, steps))

    def leave(self, *numbers: int) -> None:
        for worker in numbers:
            self.syncs.pop(worker).replica.participants.close()

    def _attach(self, worker: int, workers: int, options: dict[str, Any]) -> None:
        self.parts[worker] = model, optimizer = build(worker)
        self.told[worker] = Told()
        membership = join(f"127.0.0.1:{self.port}", worker=worker, workers=workers, lease_s=1.5, **options)
        self.memberships[worker] = membership
        self.syncs[worker] = cadenza.attach(
            model, optimizer, STRATEGY, membership=membership, observers=[self.told[worker]]
        )

    def step_one(self, worker: int, steps: int) -> None:
        sync = self.syncs[worker]
        until = sync.clock + steps
        while sync.clock < until:
            take_step(*self.parts[worker], worker, sync.clock)
            sync.step()

    def each(self, numbers: tuple[int, ...], act: Any) -> None:
        def run(worker: int) -> None:
            try:
                act(worker)
            except BaseException as error:
                self.errors[worker] = error

        threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)


def keep_on(sync: cadenza.Synchronizer, steps: int) -> None:
    for _ in range(steps):
        sync.step()
        time.sleep(0.02)


@pytest.fixture
def job() -> Any:
    server = serve(host="127.0.0.1")
    made = Job(server.port)
    yield made
    made.leave(*made.syncs)
    del server


def test_a_majority_that_comes_back_empty_does_not_undo_the_rounds_it_has_held(job: Job) -> None:
    job.attach(0, 1, 2, workers=3)
    job.step(0, 1, 2, steps=4)
    old = job.memberships[2].heartbeat
    old._ended.set()  # worker 2 is cut off: it hears of nothing
    time.sleep(2 * old.tick_s)
    job.memberships[2].heartbeat.connected = False
    job.step(0, 1, steps=6)
    held = job.memberships[0].heartbeat.progress().held
    assert held == 5, "rounds at steps 2 to 10, the last ones without worker 2"
    job.leave(0, 1)
    old._ended.clear()
    old._thread = threading.Thread(target=old._beat_on, daemon=True)
    old._thread.start()  # connected again
    while not old.connected or old.progress().held < held:
        time.sleep(0.02)
    before = torch.cat([p.detach().flatten() for p in job.parts[2][0].parameters()])
    comers = threading.Thread(target=job.attach, args=(0, 1), kwargs={"workers": 3}, daemon=True)
    comers.start()
    while not {0, 1} <= old.alive().keys():
        time.sleep(0.02)
    sync = job.syncs[2]
    with pytest.raises(NobodyLeftError, match="CADENZA_ACCEPT_ROLLBACK=1"):
        keep_on(sync, 400)
    reasons = [told.reason for told in job.told[2]]
    assert any("5 rounds were held, and of those who are here nobody has seen more than 2" in one for one in reasons)
    after = torch.cat([p.detach().flatten() for p in job.parts[2][0].parameters()])
    assert torch.equal(before, after), "nothing was given up"
    job.memberships[2].accepts_rollback = True
    for _ in range(100):
        sync.step()
        if job.told[2][-1].kind == "round":
            break
        time.sleep(0.02)
    comers.join(20)
    assert job.told[2][-1].kind == "round"
    assert old.progress().held == held + 1, "whoever comes back with the lost rounds does not lead"


def test_a_store_that_has_forgotten_is_noticed_until_the_next_round(job: Job) -> None:
    membership = join(f"127.0.0.1:{job.port}", worker=0, workers=1)
    progress = membership.heartbeat.progress()
    progress.note(Latest(RoundId(4), held=2))
    assert not progress.forgetful
    progress.note(None)
    assert (progress.forgetful, progress.held) == (True, 2)
    membership.close()


def anchor_of(sync: cadenza.Synchronizer) -> torch.Tensor:
    with sync.averaged() as model:
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def save(job: Job, *numbers: int, folder: Path) -> torch.Tensor:
    """Let workers save; return their anchor."""

    def save_one(worker: int) -> None:
        model, optimizer = job.parts[worker]
        cadenza.checkpoint.save(folder, model=model, optimizer=optimizer, sync=job.syncs[worker])

    job.each(numbers, save_one)
    return anchor_of(job.syncs[numbers[0]])


def train_until(job: Job, *numbers: int, clock: int) -> None:
    def train(worker: int) -> None:
        while job.syncs[worker].clock < clock:
            job.step_one(worker, 1)

    job.each(numbers, train)


def load(job: Job, *numbers: int, folder: Path) -> None:
    def load_one(worker: int) -> None:
        model, optimizer = job.parts[worker]
        cadenza.checkpoint.load(folder, model=model, optimizer=optimizer, sync=job.syncs[worker])

    job.each(numbers, load_one)


def test_one_who_comes_back_and_loads_an_old_checkpoint_takes_nobody_back(job: Job, tmp_path: Path) -> None:
    job.attach(0, 1, workers=2)
    job.step(0, 1, steps=4)
    saved = save(job, 0, 1, folder=tmp_path)
    job.step(0, 1, steps=26)
    distances = []

    def go_on(worker: int) -> None:
        if worker == 0:
            job.leave(0)
            job.attach(0, workers=2)
            load(job, 0, folder=tmp_path)
        while job.syncs[worker].clock < 60:
            job.step_one(worker, 1)
            time.sleep(0.01)
            if worker == 1:
                distances.append(float((anchor_of(job.syncs[1]) - saved).norm()))

    job.each((0, 1), go_on)
    assert not job.errors
    assert (0, 1) in {report.participants for report in job.told[1] if report.step > 40}
    assert min(distances) > 0.5 * distances[0], "it never went back to what was saved"


def test_who_has_the_checkpoint_leads_those_who_start_with_nothing(job: Job, tmp_path: Path) -> None:
    job.attach(0, 1, 2, workers=3)
    job.step(0, 1, 2, steps=40)
    saved = save(job, 0, 1, 2, folder=tmp_path)
    job.leave(0, 1, 2)
    job.port = (second := serve(host="127.0.0.1")).port
    job.attach(0, 1, 2, workers=3)
    blank = (anchor_of(job.syncs[1]) - saved).norm()
    load(job, 2, folder=tmp_path)
    train_until(job, 0, 1, 2, clock=42)
    assert not job.errors
    found = [anchor_of(job.syncs[worker]) for worker in range(3)]
    assert all(torch.equal(found[0], one) for one in found)
    assert (found[0] - saved).norm() < 0.2 * blank
    job.leave(0, 1, 2)
    del second


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 1, 2), (1, 2, 0)])
def test_who_was_left_out_of_a_round_spoils_no_checkpoint(job: Job, tmp_path: Path, order: tuple[int, ...]) -> None:
    job.attach(0, 1, 2, workers=3)
    job.step(0, 1, 2, steps=4)
    job.step(0, steps=1)
    job.step(1, 2, steps=2)
    saved = anchor_of(job.syncs[1])
    for worker in order:
        save(job, worker, folder=tmp_path / "step-6")
    assert not job.errors
    assert cadenza.checkpoint.latest(tmp_path) == tmp_path / "step-6"
    load(job, 1, 2, folder=tmp_path / "step-6")
    assert not job.errors
    assert torch.equal(anchor_of(job.syncs[1]), saved)
