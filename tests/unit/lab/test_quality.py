"""The lab of learning quality: the stacked model and optimizers, the search, and the file of runs."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.quality import report, studies
from lab.quality.bars import BARS
from lab.quality.figures import bytes_sent, final_of, trail
from lab.quality.inner import StackedMuon, is_hidden
from lab.quality.model import SHAPES, Stack, new_model
from lab.quality.records import Records
from lab.quality.search import Axis, search
from lab.quality.text import Text
from lab.quality.training import Setting, compiled_losses, train

from cadenza.optim import muon_and_adamw

SHAPE = SHAPES["35k"]


def windows(workers: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    both = torch.randint(256, (2, workers, 3, SHAPE.context), generator=generator)
    return both[0], both[1]


def test_the_stacked_model_is_the_librarys() -> None:
    stack = Stack(new_model(SHAPE, seed=1, qk_norm=False), SHAPE, 2)
    with torch.no_grad():
        stack.values[1].mul_(1.1)
    given, wanted = windows(2)
    losses = stack.losses(stack.leaves, given, wanted)
    stack.backward(losses)
    for i, module in enumerate(stack.modules):
        stacked = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        module.zero_grad()
        loss = module(given[i], wanted[i])
        loss.backward()
        assert float(losses[i].detach()) == pytest.approx(float(loss.detach()), rel=1e-6)
        for p, seen in zip(module.parameters(), stacked, strict=True):
            torch.testing.assert_close(seen, p.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch.compile imports it
@pytest.mark.timeout(600)  # the C++ compiler takes 15 s of a core, and that of a busy machine more
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_the_compiled_losses_and_gradients_are_the_eager_ones() -> None:
    shape = replace(SHAPE, layers=1)  # half the time of the compiler
    stack = Stack(new_model(shape, seed=1, qk_norm=True), shape, 2)
    with torch.no_grad():
        stack.values[1].mul_(1.1)
    given, wanted = windows(2)
    losses = stack.losses(stack.leaves, given, wanted)
    stack.backward(losses)
    eager = stack.gradients.clone()
    compiled = compiled_losses(shape, True)(stack.leaves, given, wanted)
    stack.gradients.zero_()
    stack.backward(compiled)
    torch.testing.assert_close(compiled, losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(stack.gradients, eager, rtol=1e-3, atol=1e-6)


def test_normalised_queries_do_not_care_for_the_size_of_their_weights() -> None:
    stack = Stack(new_model(SHAPE, seed=1, qk_norm=True), SHAPE, 1)
    given, wanted = windows(1)
    before = stack.losses(stack.leaves, given, wanted)
    with torch.no_grad():
        stack.modules[0].blocks[0].attention.weight[: 2 * SHAPE.width].mul_(3.0)
    torch.testing.assert_close(stack.losses(stack.leaves, given, wanted), before, rtol=1e-5, atol=0)


def muon_s_way(momentum: float, betas: tuple[float, float]) -> tuple[list[float], list[float]]:
    """Return how far stacked Muon ends from torch's, of a parameter's way: of Muon's matrices, and of AdamW's rest."""
    stack = Stack(new_model(SHAPE, seed=1, qk_norm=True), SHAPE, 2)
    inner = StackedMuon(stack, betas=betas, weight_decay=0.1, adamw_share=0.5, momentum=momentum)
    other = new_model(SHAPE, seed=1, qk_norm=True)
    plain = muon_and_adamw(other, lr=0.02, adamw_lr=0.01, momentum=0.95, weight_decay=0.1, use_muon=is_hidden)
    plain[1].param_groups[0]["weight_decay"] = 0.2  # so that both decay as fast
    start = [p.detach().clone() for p in other.parameters()]
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        stack.gradients.copy_(torch.randn(stack.gradients.shape, generator=generator))
        for p, module_p in zip(other.parameters(), stack.modules[1].parameters(), strict=True):
            assert module_p.grad is not None
            p.grad = module_p.grad.clone()
        inner.step(0.02)
        for optimizer in plain:
            optimizer.step()
    found: tuple[list[float], list[float]] = ([], [])
    for (name, p), first, ours in zip(other.named_parameters(), start, stack.modules[1].parameters(), strict=True):
        found[not is_hidden(name, p)].append(float((ours - p).detach().norm() / (p - first).detach().norm()))
    return found


def test_stacked_muon_follows_torchs_as_far_as_16_bits_go() -> None:
    matrices, rest = muon_s_way(0.95, (0.9, 0.95))
    assert max(matrices) < 0.02
    assert max(rest) < 1e-5


def test_another_momentum_or_other_betas_would_be_seen() -> None:
    matrices, rest = muon_s_way(0.9, (0.9, 0.99))
    assert min(matrices) > 0.03
    assert min(rest) > 2e-3


def test_a_search_ends_where_all_neighbours_are_worse() -> None:
    axes = {"lr": Axis((1, 2, 4, 8, 16, 32)), "momentum": Axis((0.0, 0.5, 0.9), closed_below=True)}
    tried: list[Any] = []

    def bowl(point: Any) -> float:
        return abs(math.log2(point["lr"]) - 3) + point["momentum"]

    known: dict[tuple[float, float], float] = {}
    while True:
        found = search(axes, {"lr": 2, "momentum": 0.5}, lambda p: known.get((p["lr"], p["momentum"])))
        if not found.wanted:
            break
        for point in found.wanted:
            tried.append(point)
            known[point["lr"], point["momentum"]] = bowl(point)
    assert found.best == {"lr": 8, "momentum": 0.0}
    assert not found.edges
    assert len(tried) == len(known) < 12


def test_a_search_says_that_its_best_lies_at_the_edge_and_shuns_what_diverged() -> None:
    losses = {1: 3.0, 2: 2.0, 4: 1.0}
    found = search({"lr": Axis((1, 2, 4))}, {"lr": 1}, lambda p: losses[p["lr"]])
    assert found.best == {"lr": 4}
    assert found.edges == ["lr"]
    found = search({"lr": Axis((1, 2, 4))}, {"lr": 4}, lambda p: {1: 3.0, 2: 2.0, 4: math.nan}[p["lr"]])
    assert found.best == {"lr": 2}
    assert not found.edges


def test_what_is_known_to_be_better_is_taken_before_another_neighbour_is_tried() -> None:
    losses = {1: 1.0, 2: 2.0, 4: 3.0}
    found = search({"lr": Axis((0.5, 1, 2, 4, 8))}, {"lr": 4}, lambda p: losses.get(p["lr"]))
    assert (found.best, found.wanted) == ({"lr": 1}, [{"lr": 0.5}])


def test_runs_survive_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    one = Setting({"name": "ddp"}, workers=1, batch=8, lr=1e-3, seed=1)
    two = Setting({"name": "ddp"}, workers=1, batch=8, lr=1e-3, seed=2)
    Records(tmp_path).add(one, {"validation": 1.0})
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"key": "half a li')
    records = Records(tmp_path)
    assert records.get(one) is not None
    records.add(two, {"validation": 2.0})
    assert [Records(tmp_path).get(each)["validation"] for each in (one, two)] == [1.0, 2.0]  # type: ignore[index]


def test_one_run_is_done_by_one_process_at_a_time(tmp_path: Path) -> None:
    setting = Setting({"name": "ddp"}, workers=1, batch=8, lr=1e-3, seed=1)
    with Records(tmp_path).claimed(setting) as mine, Records(tmp_path).claimed(setting) as theirs:
        assert mine
        assert not theirs
    with Records(tmp_path).claimed(setting) as again:
        assert again


def test_every_entry_of_the_queue_can_be_built() -> None:
    names = [entry.name for entry in studies.QUEUE]
    assert len(set(names)) == len(names)
    for entry in studies.QUEUE:
        if isinstance(entry, studies.Study):
            assert entry.setting(entry.start).build().levels
            assert entry.setting(entry.start).steps > 1000 or "default" in entry.name
            assert all(entry.start[name] in axis.values for name, axis in entry.axes.items())
        else:
            assert studies.find(entry.of)


def test_a_run_that_diverges_is_a_result_and_not_the_end_of_the_queue() -> None:
    words = torch.randint(97, 105, (3, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    strategy = {"name": "diloco", "period": 2, "outer_lr": 1e30, "outer_momentum": 0.9}
    setting = Setting(strategy, 2, 1, lr=1e-3, seed=1, size="35k", tokens=12 * 2 * 64)
    result = train(setting, compiled=False, text=Text(*words.repeat(1, 40)))
    assert math.isnan(result["validation"])


def fake_loss(setting: Setting) -> float:
    """A loss that is lowest at lr 4e-3 and momentum 0.6; four workers are 3 % worse than one, seeds differ a little."""
    off = abs(math.log2(setting.lr / 4e-3)) + abs(setting.strategy.get("outer_momentum", 0.6) - 0.6)
    off += abs(setting.strategy.get("outer_lr", 1.0) - 1.0)
    batch = abs(math.log2(setting.workers * setting.batch / 16))
    return (2 + 0.1 * off + 0.05 * batch) * (1 + 0.01 * (setting.workers - 1)) + 1e-3 * setting.seed


def add_fake(records: Records, setting: Setting) -> None:
    loss = fake_loss(setting)
    result = {"validation": loss, "test": loss, "bytes_sent": 10**6, "cpu_seconds": 1.0}
    records.runs[setting.key] = {"key": setting.key, **result}  # without a file: that is tested elsewhere


def test_a_bar_whose_final_runs_are_missing_tells_what_tuning_found(tmp_path: Path) -> None:
    records, wanted = Records(tmp_path), {"ddp 3.3M", "diloco 4 workers period 30 3.3M"}
    [bar] = [bar for bar in BARS if bar.name == "four workers, 3.3 M parameters"]
    tuning = studies.TUNING_SEED
    told = []
    while runs := [s for name, s in studies.missing(records) if name in wanted and s.seed == tuning]:
        told.append(bar.verdict(records))
        add_fake(records, runs[-1])
    assert told[0] == "not measured yet"
    assert told[-1].endswith("not all neighbours of the best settings tried")
    assert bar.verdict(records).startswith("not decided; +")
    assert bar.verdict(records).endswith("on its text")


def test_the_queue_comes_to_an_end_and_the_report_says_what_was_found(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = Records(tmp_path)
    wanted = {"ddp", "diloco 4 workers period 30", "diloco 2 workers period 30", "int8 with feedback"}
    wanted |= {"ddp 35k", "diloco 4 workers period 30 35k"}
    while runs := [setting for name, setting in studies.missing(records) if name in wanted]:
        add_fake(records, runs[0])
    four = studies.find("diloco 4 workers period 30")
    assert isinstance(four, studies.Study)
    assert four.found(records).best == {"lr": 4e-3, "outer_lr": 1.0, "outer_momentum": 0.6, "batch": 4}
    tried = trail(four, records)
    assert tried[0][0] == four.tuned(records)
    assert len(tried) < 18
    report.write(records, tmp_path, tmp_path)
    text = (tmp_path / "report.md").read_text()
    verdicts = {bar.name: bar.verdict(records) for bar in BARS}
    assert verdicts["one replica with an outer step"] == "not measured yet"
    assert verdicts["two workers"].startswith("+0.99 %")
    assert verdicts["two workers"].endswith("held")
    assert all(verdict in text for verdict in verdicts.values())
    assert "| int8 with feedback | diloco 4 workers period 30 | +0.00 % ± 0.00 | 3 |" in text
    assert "| 4 bits with feedback | diloco 4 workers period 30 | not measured yet | 0 |" in text
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "quality_batch.svg",
        "quality_bytes.svg",
        "quality_size.svg",
        "quality_workers.svg",
    }


def add_final(records: Records, name: str, losses: list[float], **more: Any) -> None:
    """Add final runs of what is tuned already."""
    tuned = studies.find(name).tuned(records)
    assert tuned is not None
    for seed, loss in zip(studies.SEEDS, losses, strict=True):
        setting = replace(tuned, seed=seed)
        records.runs[setting.key] = {"key": setting.key, "test": loss, "bytes_sent": 10**6, **more}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Four studies of the smallest model, tuned with losses that are made up, without final runs."""
    records = Records(tmp_path_factory.mktemp("runs"))
    wanted = set(SMALL)
    while runs := [s for name, s in studies.missing(records) if name in wanted and s.seed == studies.TUNING_SEED]:
        add_fake(records, runs[0])
    return records


SMALL = ("ddp 35k", "diloco 4 workers period 30 35k", "ddp muon 35k", "muloco 4 workers period 30 35k")


@pytest.mark.parametrize(
    ("theirs", "verdict"),
    [
        ([1.02, 1.02, 1.02], "-1.00 % ± 0.00 further (+1.00 % ± 0.00, the other +2.00 % ± 0.00): held"),
        ([1.00, 1.00, 1.00], "+1.00 % ± 0.00 further (+1.00 % ± 0.00, the other +0.00 % ± 0.00): missed"),
        ([1.00, 1.00, 1.06], "-1.00 % ± 2.00 further (+1.00 % ± 0.00, the other +2.00 % ± 2.00): not told apart"),
        ([0.96, 1.01, 1.02], "+1.33 % ± 1.86 further (+1.00 % ± 0.00, the other -0.33 % ± 1.86): not told apart"),
    ],
)
def test_which_of_two_is_nearer_its_ddp_is_said_only_beyond_a_standard_error(
    tuned: Records, theirs: list[float], verdict: str
) -> None:
    [bar] = [bar for bar in BARS if bar.name == "Muon inside, 35 k parameters"]
    for name, losses in zip(SMALL, ([1.0] * 3, theirs, [2.0] * 3, [2.02] * 3), strict=True):
        add_final(tuned, name, losses)
    assert bar.verdict(tuned) == verdict


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ([1.005, 1.005, 1.005], "+0.50 % ± 0.00: held"),
        ([1.006, 1.006, 1.006], "+0.60 % ± 0.00: missed"),
        ([1.000, 1.006, 1.018], "+0.80 % ± 0.53: held"),
    ],
)
def test_a_codec_misses_its_bound_only_beyond_a_standard_error(
    tuned: Records, losses: list[float], verdict: str
) -> None:
    [bar] = [bar for bar in BARS if bar.name == "int8 with feedback, 35 k parameters"]
    assert bar.bound == "at most +0.5 % against fp32 beyond one standard error"
    add_final(tuned, "diloco 4 workers period 30 35k", [1.0] * 3)
    add_final(tuned, "int8 with feedback 35k", losses)
    assert bar.verdict(tuned) == verdict


def test_ddp_is_told_what_a_ring_of_four_would_send(tuned: Records) -> None:
    add_final(tuned, "ddp 35k", [1.0] * 3)
    final = final_of(studies.find("ddp 35k"), tuned)
    assert final is not None
    model = 4 * sum(p.numel() for p in new_model(SHAPE, seed=1, qk_norm=True).parameters())
    assert bytes_sent(final) == pytest.approx(1.5 * model * final.setting.steps)
    add_final(tuned, "diloco 4 workers period 30 35k", [1.0] * 3)
    other = final_of(studies.find("diloco 4 workers period 30 35k"), tuned)
    assert other is not None
    assert bytes_sent(other) == 10**6


def test_averages_are_compared_with_the_averages_of_ddp(tuned: Records) -> None:
    add_final(tuned, "ddp 35k", [2.0] * 3, average_test=1.0)
    add_final(tuned, "diloco 4 workers period 30 35k", [1.5] * 3, average_test=1.1)
    assert "| diloco 4 workers period 30 35k | -26.67 % ± 0.00 | +10.00 % ± 0.00 |" in "\n".join(report.averages(tuned))


def test_what_is_not_measured_is_told_apart_from_what_is(tuned: Records) -> None:
    add_final(tuned, "ddp 35k", [2.0] * 3)
    add_final(tuned, "diloco 4 workers period 30 35k", [2.0] * 3)
    rows = {line.split(" | ")[0]: line for line in report.measured(tuned)}
    assert rows["| ddp"] == "| ddp | yes | yes (not yet) | yes (not yet) | yes (not yet) |"
    assert rows["| diloco"].startswith("| diloco | 4 × 30, 4 × 100 (not yet)")
    assert rows["| hierarchical"] == "| hierarchical | 4 × 8 and 30 (not yet) | – | – | – |"
