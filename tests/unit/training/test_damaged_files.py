"""Files that are not what was written: a clear error, or what can be mended is; never a traceback."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza.checkpoint.files import Manifest, read_manifest
from cadenza.checkpoint.layout import workers_of
from cadenza.cli.following import Follower
from cadenza.cli.launching import log_folder
from cadenza.codecs import native, topk
from cadenza.codecs.kernels import using
from cadenza.errors import CheckpointError, UsageError
from cadenza.reports import RoundReport
from cadenza.training.config import read_config
from cadenza.training.exit_records import last_record, write_event
from cadenza.training.metric_lines import is_readable
from cadenza.training.metrics import MetricsWriter, read_lines
from cadenza.training.saved import set_aside

WRONG: list[Any] = [None, "x", [], {}, -1, 1e400, True, [1, "a"], {"a": 1}]


def test_many_workers_may_set_one_checkpoint_aside(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def put() -> None:
        start.wait(10)
        try:
            set_aside(folder)
        except BaseException as error:
            errors.append(error)

    for number in range(8):
        folder = tmp_path / "step-00000010"
        folder.mkdir()
        (folder / "shared.json").write_text(str(number))
        start = threading.Barrier(4)
        threads = [threading.Thread(target=put) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    kept = sorted(path.read_text() for path in (tmp_path / "set-aside").glob("*/shared.json"))
    assert kept == [str(number) for number in range(8)], "what was set aside before is not lost"


@pytest.mark.parametrize("key", ["format", "bytes", "blake2b", "step", "fingerprint", "workers"])
def test_a_manifest_of_another_shape_is_called_damaged(tmp_path: Path, key: str) -> None:
    path = tmp_path / "shared.safetensors"
    fields = {"format": 3, "bytes": 1, "blake2b": "ab", "step": 2, "fingerprint": "cd", "workers": [0]}
    allowed = {"blake2b": ("x",), "fingerprint": ("x",), "workers": (None, [])}.get(key, ())
    for value in WRONG:
        path.with_suffix(".json").write_text(Manifest(**{**fields, key: value}).to_json())
        if value in allowed:
            read_manifest(path)
            continue
        with pytest.raises(CheckpointError, match="is damaged"):
            read_manifest(path)


def test_a_report_of_wrong_types_is_a_value_error() -> None:
    told = json.loads(RoundReport.example().to_json())
    refused = 0
    for key in told:
        for value in WRONG:
            try:
                report = RoundReport.from_json(json.dumps({**told, key: value}))
            except ValueError:
                refused += 1
            else:
                assert type(getattr(report, key)).__name__.removesuffix("Type") in str(RoundReport.__annotations__[key])
    assert refused > 90


@pytest.mark.parametrize("text", ["a = " + "9" * 5000, "a = " + "[" * 5000, "a = 1979-13-45", "= 3"])
def test_toml_that_cannot_be_read_is_a_usage_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match="is not TOML"):
        read_config(path)


def test_lines_of_metrics_of_wrong_types_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "worker-00000.jsonl"
    with MetricsWriter(path) as writer:
        for step in (1, 2):
            writer.write("step", step, loss=2.5, samples=8)
    good = path.read_text().splitlines()
    line = json.loads(good[0])
    bad = [json.dumps({**line, key: value}) for key in ("step", "elapsed", "samples", "kind") for value in WRONG[:4]]
    path.write_text("\n".join([good[0], *bad, "[" * 100_000, good[1]]) + "\n")
    assert [line["step"] for line in read_lines(tmp_path).of("step")] == [1, 2]


@pytest.mark.parametrize("key", ["step", "time", "elapsed", "samples"])
def test_what_a_worker_did_last_is_read_from_the_last_line_that_is_whole(tmp_path: Path, key: str) -> None:
    path = tmp_path / "worker-00000.jsonl"
    with MetricsWriter(path) as writer:
        for step in (1, 2):
            writer.write("step", step, samples=8 * step)
    good = path.read_text().splitlines()
    line = json.loads(good[1])
    bad = [json.dumps({**line, key: value}) for value in (str(line[key]), *WRONG[:4])]
    path.write_text("\n".join([*good, *bad]) + "\n")
    write_event(path, "Worker 0 was ended by SIGKILL.")
    last = last_record(path)
    assert (last.step, last.counts["samples"]) == (2, 16)
    assert json.loads(path.read_text().splitlines()[-1])["text"] == "Worker 0 was ended by SIGKILL."


@pytest.mark.parametrize("key", ["gradient_bytes", "steps", "parameters", "workers"])
def test_a_start_of_which_no_figure_could_be_shown_is_left_out(key: str) -> None:
    start = {"kind": "start", "step": 0, "gradient_bytes": 8, "steps": 10, "parameters": 2, "workers": 1}
    assert is_readable(start)
    assert not any(is_readable({**start, key: value}) for value in ("é", "nan", None, 1e400, [1]))


@pytest.mark.skipif(native.compiler() is None, reason="there is no C compiler")
def test_compiled_codecs_that_were_cut_short_are_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = native.compiler()
    assert command is not None
    native._load(command)
    (library,) = (tmp_path / "cadenza").glob("*.so")
    whole = library.read_bytes()
    library.unlink()  # loaded code stays
    library.write_bytes(whole[: len(whole) // 2])
    assert native._load(command)
    assert any(native._is_whole(path) for path in (tmp_path / "cadenza").glob("*.so"))


@pytest.mark.skipif(native.compiler() is None, reason="there is no C compiler")
def test_what_cannot_be_read_in_the_cache_is_no_compiled_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = native.compiler()
    assert command is not None
    key = native._key(command)
    (tmp_path / "cadenza" / f"kernels-{key}-0.so").mkdir(parents=True)
    (tmp_path / "cadenza" / f"kernels-{key}-1.so").symlink_to(tmp_path / "gone")
    (tmp_path / "cadenza").chmod(0o700)
    assert native._load(command)


def test_a_file_beside_the_workers_of_a_checkpoint_is_none_of_them(tmp_path: Path) -> None:
    for name in ("worker-00003.json", "worker-00003 (1).json", "worker-notes.json", "worker-00004.json.partial"):
        (tmp_path / name).write_text("{}")
    assert workers_of(tmp_path) == [3]


@pytest.mark.parametrize("bad", [b'{"kind": "phase", "st', b"\xff\xfe", b"[" * 100_000, b'{"kind": "end", "step": 1}'])
def test_who_follows_a_run_leaves_out_what_cannot_be_read(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "worker-00000.jsonl"
    with MetricsWriter(path) as writer:
        writer.write("phase", 0, text="building the task")
    good = path.read_bytes()
    follower = Follower(tmp_path)
    path.write_bytes(good + bad + b"\n" + b'{"kind": "step", "step": 1}\n' + good)
    assert [line["text"] for _, line in follower.read()] == ["building the task"] * 2


def test_a_file_beside_those_of_a_run_is_none_of_them(tmp_path: Path) -> None:
    for name in ("worker-00000.jsonl", "worker-00000 (1).jsonl", "worker-old.jsonl"):
        with MetricsWriter(tmp_path / name) as writer:
            writer.write("step", 1, loss=2.5, samples=8)
    assert read_lines(tmp_path).workers == [0]
    assert Follower(tmp_path).read() == []
    (tmp_path / "logs" / "launch-002").mkdir(parents=True)
    (tmp_path / "logs" / "launch-of-monday").mkdir()
    assert log_folder(tmp_path).name == "launch-003"


def test_places_beyond_a_short_chunk_touch_nothing_or_are_damage() -> None:
    codec = topk(density=0.1, chunk=64)
    values, room = torch.randn(40), torch.full((128,), 7.0)
    data = torch.zeros(codec.encoded_bytes(40), dtype=torch.uint8)
    codec.encode(values, data)
    data[:3] = 255
    with using("torch"), pytest.raises(RuntimeError, match="out of bounds"):  # a failed round
        codec.decode(data, torch.empty(40))
    codec.decode(data, room[:40])
    assert (room[40:] == 7.0).all()
