"""What a call of a private store costs beside one of torch's, by turns: one client alone, and many at once.

    python -m lab.bench_store --clients 1 8 32

Both stores are processes of `python -m cadenza.membership`, both clients sign what they write, as elastic workers do. A
turn is some rounds of what a worker asks most: writing an entry, reading two, taking a place by compare_set, appending.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier

from lab.crew import start_store

from cadenza.participants.signed_store import SignedStore
from cadenza.participants.signing import Signer
from cadenza.participants.store import StoreConnection

SECRET = "known to the workers alone"
STORES = {"private": SECRET, "torch's": None}
ROUNDS, CALLS = 200, 5


def ask(store: SignedStore, client: int) -> float:
    """Return the seconds of one call."""
    began = time.perf_counter()
    for number in range(ROUNDS):
        place = f"{client}/{number % 10}"
        store.set(f"{place}/beat", "a beat, with an address and a number")
        store.read_all([f"{place}/beat", f"{place}/arrival"])
        store.compare_set(f"{place}/verdict", "", "commit")
        store.append(f"{place}/ready", "me")
        store.delete_key(f"{place}/ready")
    return (time.perf_counter() - began) / (CALLS * ROUNDS)


def work(client: int, ports: dict[str, int], repeats: int, together: Barrier, results: multiprocessing.Queue) -> None:
    """Ask one store after the other, at the same time as the other clients."""
    signer = Signer("bench", secret=SECRET)
    connections = {kind: StoreConnection(f"127.0.0.1:{port}", signer) for kind, port in ports.items()}
    for _ in range(repeats + 1):  # the first does not count
        for kind, connection in connections.items():
            together.wait()
            results.put((kind, connection.call(lambda store: ask(store, client), timeout_s=120)))


def measure(clients: int, repeats: int) -> dict[str, float]:
    """Return the median microseconds of a call at each store."""
    context = multiprocessing.get_context("spawn")
    together, results = context.Barrier(clients), context.Queue()
    stores = {kind: start_store(secret=secret) for kind, secret in STORES.items()}
    ports = {kind: port for kind, (_, port) in stores.items()}
    processes = [
        context.Process(target=work, args=(client, ports, repeats, together, results)) for client in range(clients)
    ]
    for process in processes:
        process.start()
    try:
        found = [results.get(timeout=300) for _ in range(clients * (repeats + 1) * len(STORES))]
    finally:
        for process in (*processes, *(process for process, _ in stores.values())):
            process.kill()
    counted = {kind: [seconds for one, seconds in found if one == kind][clients:] for kind in STORES}
    return {kind: 1e6 * statistics.median(seconds) for kind, seconds in counted.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args(arguments)
    print("clients  private  torch's  ratio   (microseconds of a call, median)")
    for clients in given.clients:
        found = measure(clients, given.repeats)
        private, torchs = found["private"], found["torch's"]
        print(f"{clients:7}  {private:7.0f}  {torchs:7.0f}  {private / torchs:5.2f}", flush=True)


if __name__ == "__main__":
    main()
