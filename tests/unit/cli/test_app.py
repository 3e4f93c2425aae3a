"""The program `cadenza`: its story, its exit codes, and errors without tracebacks."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from cadenza.cli import app as program
from cadenza.cli.app import main
from cadenza.cli.failures import TrainingFailedError, exit_code, last_lines
from cadenza.errors import UsageError
from cadenza.version import __version__


def said(capfd: pytest.CaptureFixture[str], *arguments: object, code: int) -> str:
    """What the program says on standard error before it exits with this code, as one line."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    printed = capfd.readouterr()
    assert end.value.code == code, printed
    return " ".join((printed.err if code else printed.out).replace("│", " ").split())


def test_help_tells_the_whole_story(capfd: pytest.CaptureFixture[str]) -> None:
    told = said(capfd, "--help", code=0)
    for words in ("train", "report", "doctor", "bench", "--resume RUN", "--compare", "--nnodes 2", "130 interrupted"):
        assert words in told


def test_the_flags_of_train_are_in_groups(capfd: pytest.CaptureFixture[str]) -> None:
    told = said(capfd, "train", "--help", code=0)
    for group in ("The run", "The strategy", "The training", "Many machines", "Comparing"):
        assert f"─ {group}" in told


def test_the_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert said(capfd, "--version", code=0) == f"cadenza {__version__}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["train", "--strategy", "dilocco"], 'no strategy of this name. Did you mean "diloco"?'),
        (["train", "--codec", "int9"], 'strategy.codec = "int9": there is no codec of this name. Did you mean "int8"?'),
        (["train", "--config", "no.toml"], "There is no configuration file no.toml"),
        (["train", "--resume", "nowhere"], "There is no folder nowhere"),
        (["train", "--resume", "."], "is not a run: it has no config.toml"),
        (["train", "--resume", ".", "--config", "x.toml"], "--config cannot be given with it"),
        (["train", "--steps", "0"], "steps = 0: input should be greater than or equal to 1"),
        (["train", "--set", "lunch.workers=2"], 'lunch: there is no such key. Did you mean "launch"?'),
        (["train", "--set", "nonsense"], "KEY=VALUE is required"),
        (["train", "--set", "steps=[1,"], "the value is not TOML"),
        (["train", "--nnodes", "2"], "give all of them the same --run FOLDER"),
        (["train", "--nnodes", "2", "--run", "r"], "need a place to meet"),
        (["train", "--nnodes", "3:2", "--run", "r"], "a range such as 2:4"),
        (["train", "--rdzv-endpoint", "here:port"], "HOST:PORT is required"),
        (["train", "--rdzv-endpoint", "no.such.host.invalid:1"], "the host no.such.host.invalid is not known here"),
        (["train", "--compare", "ddp,ddp"], "names ddp twice"),
        (["train", "--compare", "ddp,diloc"], 'Did you mean "diloco"?'),
        (["train", "--compare", "ddp,diloco", "--nnodes", "2"], "--compare trains on one node"),
        (["train", "--link", "100mbit", "--nnodes", "2", "--run", "r", "--rdzv-endpoint", "here"], "one node only"),
        (["report", "."], "is not a run"),
    ],
)  # fmt: skip
def test_bad_input_is_told_in_a_paragraph(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    told = said(capfd, *arguments, code=2)
    assert words in told
    assert "Traceback" not in told
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_told_before_a_folder_is_made(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told = said(capfd, "train", "--rdzv-endpoint", f"127.0.0.1:{port}", "--run", tmp_path / "run", code=2)
    assert f"Port {port} of 127.0.0.1 is in use by another program" in told
    assert not (tmp_path / "run").exists()


def test_a_link_without_root_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cadenza.emulation.available", lambda: "Emulating a network needs root.")
    told = said(capfd, "train", "--link", "100mbit", "--run", tmp_path / "run", code=2)
    assert "--link 100mbit: Emulating a network needs root." in told


def test_a_folder_that_cannot_be_written_to_is_told_in_a_paragraph(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be made: Not a directory" in said(capfd, "train", "--run", tmp_path / "file" / "run", code=2)


def test_debug_shows_where_an_error_comes_from_wherever_it_stands() -> None:
    with pytest.raises(UsageError):
        main(["train", "--debug", "--strategy", "dilocco"])
    with pytest.raises(UsageError):
        main(["--debug", "train", "--strategy", "dilocco"])


def test_a_file_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", "runs/secret")

    monkeypatch.setattr(program, "app", fail)
    assert said(capfd, "train", code=2) == "Error: runs/secret: Permission denied."


def test_a_training_that_failed_is_told_apart_from_bad_input() -> None:
    assert (exit_code(TrainingFailedError("")), exit_code(UsageError(""))) == (1, 2)


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(5000)))
    assert last_lines(log, 2) == "line 4998\nline 4999"


def test_the_configuration_that_is_printed_can_be_read_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main_prints(["train", "--print-config", "--period", "8", "--set", "options.width=64"])
    first = capfd.readouterr().out
    assert re.search(r"^period = 8$", first, re.MULTILINE)
    (tmp_path / "run.toml").write_text(first)
    main_prints(["train", "--print-config", "--config", str(tmp_path / "run.toml")])
    assert capfd.readouterr().out == first
    main_prints(["train", "--print-config", "--config", str(tmp_path / "run.toml"), "--strategy", "ddp"])
    assert 'name = "ddp"' in capfd.readouterr().out


def main_prints(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(arguments)


@pytest.mark.parametrize(("line", "words"), [("cadenza train --strategy di", "diloco"), ("cadenza tr", "train")])
def test_shells_can_complete_it(
    line: str, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_CADENZA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    main_prints([])
    assert capfd.readouterr().out.split() == [words]
