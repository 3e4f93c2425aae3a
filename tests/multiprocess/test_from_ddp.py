"""The two scripts of the page on moving a DDP script run, and what the page says is refused is refused."""

from __future__ import annotations

import io
import os
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import cadenza
from cadenza.errors import CheckpointError
from support.ranks import RankPool

SCRIPTS = Path(__file__).parents[2] / "examples" / "from_ddp"
KEPT: list[object] = []


def run_script(name: str, folder: str, epochs: int) -> str:
    os.chdir(folder)
    path = str(SCRIPTS / name)
    argv = [path, "--epochs", str(epochs), "--period", "8"][: 3 if name == "before.py" else None]
    with mock.patch.object(sys, "argv", argv), redirect_stdout(io.StringIO()) as output:
        # What is left of torch's DDP is not freed here: its group's destructor was seen to wait for a thread that waits
        # for Python's lock. A script of its own ends with its process.
        KEPT.append(runpy.run_path(path, run_name="__main__"))
    return output.getvalue()


def start(ranks: RankPool, count: int, name: str, folder: Path, epochs: int) -> dict[int, float]:
    """Run a script on so many ranks; return the accuracy after each epoch."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_PORT": str(store.port)}
    printed = ranks.run(count, run_script, name, str(folder), epochs, init=False, env=env, timeout_s=110, discard=True)
    return {int(epoch): float(share) for epoch, share in re.findall(r"epoch (\d+): accuracy ([\d.]+)%", printed[0])}


@pytest.mark.parametrize("name", ["before.py", "after.py"])
def test_a_script_trains_stops_and_goes_on_with_more_workers(ranks: RankPool, tmp_path: Path, name: str) -> None:
    first = start(ranks, 2, name, tmp_path, epochs=2)
    assert list(first) == [0, 1]
    assert first[1] > 80  # ten kinds of digits
    resumed = start(ranks, 3, name, tmp_path, epochs=3)
    assert list(resumed) == [2]  # it did not begin again
    assert resumed[2] > 80


def load_what_one_rank_saved(path: str) -> str:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = cadenza.attach(model, optimizer, cadenza.diloco(period=2))
    if dist.get_rank() == 0:
        torch.save(sync.state_dict(), path)
    dist.barrier()
    try:
        sync.load_state_dict(torch.load(path))
    except CheckpointError as error:
        return str(error)
    finally:
        sync.close()
    return ""


def test_one_ranks_dict_in_torch_save_is_refused_by_name_on_the_others(ranks: RankPool, tmp_path: Path) -> None:
    _, *others = ranks.run(2, load_what_one_rank_saved, str(tmp_path / "state.pt"))
    for said in others:
        assert "torch.save()" in said
        assert "cadenza.checkpoint.save() on every rank" in said
