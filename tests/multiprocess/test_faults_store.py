"""The store goes away and comes back empty: training goes on, rounds are skipped, and a majority seeds it again."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import cadenza
from cadenza.participants.store import serve
from support.faults import QUICK, train
from support.ranks import RankPool


def through_an_outage(port: int, folder: str, secret: str | None) -> dict[str, Any]:
    def mark(name: str) -> Any:
        return lambda _: open(f"{folder}/{name}", "w").close()

    strategy = cadenza.diloco(period=5, outer_lr=0.5, faults=cadenza.shrink(**QUICK))
    return train(port, 3, strategy, 200, at={12: mark("trained")}, step_s=0.04, secret=secret)


@pytest.mark.parametrize("secret", [None, "our word"])
def test_training_goes_on_while_the_store_is_away(ranks: RankPool, tmp_path: Path, secret: str | None) -> None:
    stores = [serve(host="127.0.0.1", secret=secret)]
    port = stores[0].port

    def interrupt() -> None:
        while not (tmp_path / "trained").exists():
            time.sleep(0.02)
        stores.clear()
        gc.collect()
        time.sleep(1.0)
        stores.append(serve(port, host="127.0.0.1", secret=secret))

    accident = threading.Thread(target=interrupt)
    accident.start()
    results = ranks.run(3, through_an_outage, port, str(tmp_path), secret, init=False)
    accident.join()
    assert all(torch.equal(results[0]["values"], other["values"]) for other in results)
    assert all(result["clock"] == 200 for result in results)
    assert results[0]["failed"]
    assert results[0]["rounds"][0] == 5
    assert results[0]["rounds"][-1] == 200
    assert results[0]["participants"][-1] == (0, 1, 2)
