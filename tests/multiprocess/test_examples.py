"""What users are shown runs: the examples under torchrun, the page that teaches everything, the README's program."""

from __future__ import annotations

import doctest
import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from support.ranks import RankPool

ROOT = Path(__file__).parents[2]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# The drop-in's example takes half a minute; `make train` runs it. Those of Ray run in tests/integrations.
ELSEWHERE = {"post_local_sgd_digits", "ray_train", "ray_core_shrink"}
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem not in ELSEWHERE)
WITH_LEVELS = {"hierarchical", "compose_your_own", "fsdp_diloco"}


def run_example(name: str, folder: str) -> str:
    """Run an example as a program of this rank, which has torchrun's environment; return what it printed."""
    os.chdir(folder)
    path = ROOT / "examples" / f"{name}.py"
    with mock.patch.object(sys, "argv", [str(path), "--steps", "100"]), redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(path), run_name="__main__")
    return output.getvalue()


def assert_trained(printed: str, ranks: int) -> None:
    [(loss, accuracy)] = re.findall(rf"{ranks} workers, 100 steps: loss ([\d.]+), accuracy ([\d.]+)%", printed)
    assert float(loss) < 1.0, printed  # 2.3 before the first step
    assert float(accuracy) > 80, printed
    sent = [float(before or after) for before, after in re.findall(r"([\d.]+) MB sent|sent ([\d.]+) MB", printed)]
    assert max(sent) > 0, printed


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains(ranks: RankPool, name: str, tmp_path: Path) -> None:
    count = 4 if name in WITH_LEVELS else 2
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "examples"}  # as torchrun has it
    printed = ranks.run(count, run_example, name, str(tmp_path), init=False, env=env, timeout_s=110)
    assert_trained("".join(printed), count)


@pytest.mark.timeout(300)
def test_an_example_trains_under_torchrun() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*launch, str(ROOT / "examples" / "diloco.py"), "--steps", "100"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert_trained(done.stdout, 2)


@dataclass(frozen=True)
class Block:
    """A block of code on a page, the line on which it begins, and what the page says that rank 0 prints."""

    line: int
    code: str
    printed: str


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    text = page.read_text()
    for fence in re.finditer(r"^```(python|text)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        kind, content = fence.groups()
        if kind == "python":
            found.append(Block(text.count("\n", 0, fence.start(2)), content, ""))
        else:
            found[-1] = Block(found[-1].line, found[-1].code, content)
    return found


def run_blocks(page: Path, folder: str, count: int | None = None) -> list[str]:
    """Run a page, or its first blocks, as one program; return what each of them printed."""
    os.chdir(folder)
    printed, names = [], {"__name__": "__main__"}
    for block in blocks(page)[:count]:
        with redirect_stdout(io.StringIO()) as output:
            exec(compile("\n" * block.line + block.code, str(page), "exec"), names)
        printed.append(output.getvalue())
    return printed


def run_page(ranks: RankPool, page: Path, folder: Path, count: int | None = None) -> list[list[str]]:
    # A page calls init_process_group itself. A store of its own keeps its keys apart from those of other tests.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_PORT": str(store.port)}
    return ranks.run(4, run_blocks, page, str(folder), count, init=False, env=env, timeout_s=110)


def assert_printed(page: Path, printed: list[str]) -> None:
    wrong = [
        f"{page.name}, line {block.line}: the page says\n{block.printed}\nbut it prints\n{shown}"
        for block, shown in zip(blocks(page), printed, strict=True)
        if not doctest.OutputChecker().check_output(block.printed, shown, FLAGS)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["all-of-cadenza", "gpus"])
def test_a_page_runs_as_it_stands(ranks: RankPool, name: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / f"{name}.md"
    first, *others = run_page(ranks, page, tmp_path)
    assert not any("".join(printed) for printed in others)
    assert_printed(page, first)


def test_pieces_of_ones_own_run_as_the_page_writes_them(ranks: RankPool, tmp_path: Path) -> None:
    page = ROOT / "docs" / "how-to" / "write-your-own.md"
    [printed] = ranks.run(1, run_blocks, page, str(tmp_path), init=False, timeout_s=110)
    assert_printed(page, printed)


def test_the_readme_s_program_trains(ranks: RankPool, tmp_path: Path) -> None:
    [printed], *_ = run_page(ranks, ROOT / "README.md", tmp_path, count=1)
    [loss] = re.findall(r"loss ([\d.]+)", printed)
    assert float(loss) < 1.0, printed  # 3.5 is the variance of what it learns
