"""Measure what choices inside codecs cost and bring: E3M0's way back, top-k's mean, blocks that end with a tensor.

    python lab/bench_codec_choices.py error      # of the mean, by codec and number of workers; seconds
    python lab/bench_codec_choices.py padding    # bytes and time, on a GPT and on a thousand tiny tensors; seconds
    python lab/bench_codec_choices.py training   # held-out loss of a very small GPT on four workers; minutes

Workers are threads of this process. The tables are those of docs/decisions/0004-codecs.md.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from gpt import GPT, Corpus, Shape, batches, held_out_loss, rate_at
from torch import nn

import cadenza
from cadenza.codecs import Codec, bf16, e3m0, error_feedback, fp32, int8
from cadenza.engine.exchange import exchange_mean
from cadenza.engine.layout import Layout
from cadenza.testing import Worker, workers

SHAPE = Shape(layers=2, width=48, heads=4)
CONTEXT, BATCH, PERIOD, WORKERS = 64, 4, 16, 4

WAYS: dict[str, Codec] = {
    "int8": int8(),
    "e3m0": e3m0(),
    "e3m0, back in int8": e3m0(back=int8()),
    "e3m0, back in bf16": e3m0(back=bf16()),
    "e3m0, back in fp32": e3m0(back=fp32()),
}


def diloco(codec: Codec) -> Callable[[], cadenza.Strategy]:
    return lambda: cadenza.diloco(PERIOD, outer_lr=1.0, outer_momentum=0.8, codec=codec, measure_drift=False)


def streaming(codec: Codec) -> cadenza.Strategy:
    return cadenza.streaming_diloco(
        PERIOD, outer_lr=1.0, outer_momentum=0.8, layers=1, delay=2, codec=codec, measure_drift=False
    )


METHODS: dict[str, Callable[[], cadenza.Strategy]] = {
    "diloco fp32": diloco(fp32()),
    "diloco e3m0": diloco(e3m0()),
    "diloco e3m0, back in int8": diloco(e3m0(back=int8())),
    "diloco e3m0 with feedback": diloco(error_feedback(e3m0())),
    "diloco e3m0, back in int8, with feedback": diloco(error_feedback(e3m0(back=int8()))),
    "streaming e3m0": lambda: streaming(e3m0()),
    "streaming e3m0, back in int8": lambda: streaming(e3m0(back=int8())),
    "sparse_loco, mean of all": lambda: cadenza.sparse_loco(PERIOD, mean_of="all", measure_drift=False),
    "sparse_loco, mean of senders": lambda: cadenza.sparse_loco(PERIOD, mean_of="senders", measure_drift=False),
}


# ---- the error of a mean --------------------------------------------------------------------------------------------


def error(count: int, codec: Codec) -> tuple[float, float]:
    """Return the error of the mean, by its norm, and the bytes that a worker sends, by the model's.

    What the workers have is normal, half of it in common.
    """
    numel = 1 << 18
    common, *own = (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) for seed in range(1 + count))
    drawn = [common + part for part in own]

    def meet(worker: Worker) -> tuple[torch.Tensor, int]:
        values = drawn[worker.rank].clone()
        done = exchange_mean(values, worker.group.connect(range(count)), codec, weights=[1 / count] * count)
        return values, done.bytes_sent

    with workers(count) as pool:
        mean, sent = pool.run(meet)[0]
    exact = torch.stack(drawn).double().mean(0)
    return float((mean - exact).norm() / exact.norm()), sent / (4 * numel)


def errors() -> None:
    counts = (2, 4, 8)
    print("| codec | " + " | ".join(f"{count} workers | bytes of the model's" for count in counts) + " |")
    print("| --- |" + " ---: |" * (2 * len(counts)))
    for name, codec in WAYS.items():
        found = [error(count, codec) for count in counts]
        print(f"| {name} | " + " | ".join(f"{lost:.3f} | {sent:.3f}" for lost, sent in found) + " |")


# ---- padding --------------------------------------------------------------------------------------------------------


def gpt(layers: int, width: int) -> dict[str, torch.Tensor]:
    return dict(GPT(Shape(layers=layers, width=width, heads=4)).named_parameters())


MODELS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "GPT, 12 layers of 768": lambda: gpt(12, 768),
    "GPT, 3 layers of 64": lambda: gpt(3, 64),
    "a thousand tensors of 16": lambda: {f"t{i}": torch.randn(16) for i in range(1000)},
    "a thousand tensors of 300": lambda: {f"t{i}": torch.randn(300) for i in range(1000)},
}


def padding() -> None:
    print("| model | values | block | longer by | packing, ms | padded, ms |")
    print("| --- |" + " ---: |" * 5)
    for name, make in MODELS.items():
        tensors = make()
        plain = Layout(tensors, home=None)
        for block in (256, 512, 4096):
            layout = Layout(tensors, home=None, align=block)
            before, after = (sum(strip.numel for strip in found.strips) for found in (plain, layout))
            took = " | ".join(f"{1000 * packing_s(found):.3f}" for found in (plain, layout))
            print(f"| {name} | {before} | {block} | {100 * (after / before - 1):.2f} % | {took} |")


def packing_s(layout: Layout) -> float:
    flats, seconds = layout.empty(), []
    for _ in range(9):
        start = time.process_time()
        layout.pack(flats)
        layout.unpack(flats)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


# ---- training -------------------------------------------------------------------------------------------------------


def train(worker: Worker, start: nn.Module, corpus: Corpus, method: str, steps: int, seed: int) -> tuple[float, int]:
    """Return the held-out loss of all together, and what a worker has sent."""
    model, reports = copy.deepcopy(start), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    sync = cadenza.attach(model, optimizer, METHODS[method](), observers=[reports.append])
    data = batches(corpus.training, batch=BATCH, context=CONTEXT, seed=1000 * seed + worker.rank)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, peak=3e-3, warmup=32)
        model(*next(data)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
    sync.finish()
    if worker.rank:
        return 0.0, 0
    loss = held_out_loss(model, corpus.held_out, windows=512, context=CONTEXT, part=0, parts=1) / 512
    return loss, sum(report.bytes_sent for report in reports)


def training(names: list[str], steps: int, seeds: int) -> None:
    corpus = Corpus.standard_library()
    print(f"| method, {steps} steps | MB sent | " + " | ".join(f"seed {seed}" for seed in range(seeds)) + " | mean |")
    print("| --- |" + " ---: |" * (2 + seeds))
    for name in names:
        losses, sent = [], 0
        for seed in range(seeds):
            torch.manual_seed(seed)
            with workers(WORKERS, timeout_s=600) as pool:
                loss, sent = pool.run(train, GPT(SHAPE), corpus, name, steps, seed)[0]
            losses.append(loss)
        cells = [f"{sent / 1e6:.2f}", *(f"{loss:.4f}" for loss in losses), f"{statistics.fmean(losses):.4f}"]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["error", "padding", "training"])
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.table == "training":
        training(arguments.only, arguments.steps, arguments.seeds)
    else:
        {"error": errors, "padding": padding}[arguments.table]()


if __name__ == "__main__":
    main()
