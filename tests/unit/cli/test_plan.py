"""`cadenza plan`: what it prints, where its figures come from, and what it says to what cannot be."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import cadenza
from cadenza.cli.app import main
from cadenza.training.config import read_config
from support.runs import MadeUpRun

COMMON = ["--parameters", "1.3B", "--step-s", "0.8", "--workers", "8", "--bandwidth", "200mbit", "--latency", "40ms"]
Capture = pytest.CaptureFixture[str]


def plan(capsys: Capture, *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["plan", *words])
    printed = capsys.readouterr()
    assert left.value.code == 0, printed.err
    return printed.out


def told(capsys: Capture, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(capsys, *words, "--json"))
    return found


def refused(capsys: Capture, *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["plan", *words])
    assert left.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_the_recommendation_reaches_the_target_at_the_smallest_period_and_can_be_run(
    capsys: Capture, tmp_path: Path
) -> None:
    found = told(capsys, *COMMON)
    chosen = found["recommendation"]
    assert chosen["possible"]
    assert chosen["utilisation"] >= 0.95
    shorter = told(
        capsys,
        *COMMON,
        "--strategy",
        chosen["strategy"],
        "--codec",
        chosen["codec"],
        "--period",
        str(chosen["period"] - 1),
    )
    assert all(row["utilisation"] < 0.95 for row in shorter["rows"] if row["delay"] == chosen["delay"])
    (tmp_path / "run.toml").write_text(chosen["toml"])
    built = read_config(tmp_path / "run.toml").build_strategy()
    written = eval(chosen["python"], {"cadenza": cadenza})
    assert built == written
    assert tomllib.loads(chosen["toml"])["strategy"]["name"] == chosen["strategy"]
    assert all(0 < row["utilisation"] < 1 for row in found["rows"])


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "streaming_diloco", "sparse_loco"])
def test_python_and_toml_say_the_same_strategy(capsys: Capture, tmp_path: Path, name: str) -> None:
    chosen = told(capsys, *COMMON, "--strategy", name)["recommendation"]
    (tmp_path / "run.toml").write_text(chosen["toml"])
    built = read_config(tmp_path / "run.toml").build_strategy()
    assert built == eval(chosen["python"], {"cadenza": cadenza})


def test_the_table_fits_a_narrow_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = plan(capsys, *COMMON, "--tokens-per-step", "16k")
    assert "…" not in printed
    assert "Begin with: cadenza." in printed
    assert "[strategy]" in printed
    assert "outside the range in which it was measured" in printed


def test_data_parallel_is_recommended_where_the_link_allows_it(capsys: Capture) -> None:
    words = ["--parameters", "100M", "--step-s", "5", "--workers", "4", "--bandwidth", "100gbit"]
    assert told(capsys, *words)["recommendation"]["strategy"] == "ddp"


def test_measured_utilisations_calibrate(capsys: Capture) -> None:
    words = [*COMMON, "--strategy", "diloco", "--codec", "fp32", "--delay", "0"]
    before = told(capsys, *words, "--period", "500")["rows"][0]["utilisation"]
    after = told(capsys, *words, "--period", "500", "--period", "2000", "--measured", f"500:{before / 2}")
    assert after["calibration"]["factor"] > 1.5
    by_period = {row["period"]: row["utilisation"] for row in after["rows"]}
    assert by_period[500] == pytest.approx(before / 2, rel=5e-3)
    assert by_period[2000] > by_period[500]


def test_sites_share_their_link_and_faults_cost(capsys: Capture) -> None:
    words = [*COMMON, "--strategy", "diloco", "--codec", "int8", "--delay", "0", "--period", "1000"]
    flat = told(capsys, *words)["rows"][0]["utilisation"]
    sites = told(capsys, *words, "--sites", "2", "--between", "200mbit")["rows"][0]["utilisation"]
    failing = told(capsys, *words, "--fails-every", "6h")["rows"][0]["utilisation"]
    shrinking = told(capsys, *words, "--fails-every", "6h", "--faults", "shrink")["rows"][0]["utilisation"]
    assert sites < flat
    assert failing < shrinking < flat
    assert "hierarchical" in {
        r["strategy"] for r in told(capsys, *COMMON, "--sites", "2", "--between", "50mbit")["rows"]
    }


def test_impossible_wishes_get_the_nearest_that_works(capsys: Capture) -> None:
    never = told(capsys, *COMMON, "--fails-every", "1h", "--target-utilisation", "0.99")["recommendation"]
    assert not never["possible"]
    assert f"The nearest is {never['utilisation']:.1%}" in never["why"]
    small = told(capsys, *COMMON, "--memory", "8GB")["recommendation"]
    assert not small["possible"]
    assert "Nothing fits 8 GB: the least is 20.9 GB" in small["why"]
    fitting = told(capsys, *COMMON, "--memory", "33GB")["recommendation"]
    assert fitting["possible"]
    assert fitting["memory"]["device"] <= 33e9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parameters", "many"], "--parameters is a number of parameters such as 25M, 1.3G or 100k; got 'many'."),
        (["--bandwidth", "fast"], "--bandwidth is a number and a unit of bits a second"),
        (["--bandwidth", "0mbit"], "--bandwidth is a number"),
        (["--latency", "-3ms"], "--latency is a time such as"),
        (["--step-s", "0"], "step must be a number above 0"),
        (["--workers", "0"], "--workers is a whole number of 1 or more; got 0"),
        (["--target-utilisation", "95"], "--target-utilisation is a share of the time"),
        (["--strategy", "dilocco"], 'there is no strategy "dilocco". Did you mean "diloco"?'),
        (["--codec", "int9"], 'there is no codec "int9". Did you mean "int8"?'),
        (["--period", "0"], "--period is a whole number of 1 or more; got 0"),
        (["--delay", "-1"], "--delay is a number of steps, 0 or more; got -1"),
        (["--measured", "half"], "--measured is PERIOD:UTILISATION"),
        (["--measured", "100:1.7"], "above 0 and up to 1"),
        (["--sites", "3", "--between", "1gbit"], "sites must divide the workers"),
        (["--sites", "2"], "--between 100mbit"),
        (["--between", "1gbit"], "give --sites 2"),
        (["--straggle", "often"], "--straggle is SHARE:TIME"),
        (["--memory", "big"], "--memory is a number of bytes such as 24GB"),
        (["--model", "best"], "--model is ours or idealised"),
        (["--faults", "pray"], "--faults is raise_error"),
        (["--from", "no/such/file.json"], "--from no/such/file.json: it cannot be read"),
        (["--jitter", "nan"], "jitter must be a number of 0 or more"),
        (["--rounds", "0"], "--rounds is a whole number of 1 or more"),
    ],
)
def test_nonsense_is_refused_by_name(capsys: Capture, words: list[str], message: str) -> None:
    assert message in refused(capsys, *COMMON, *words)


def test_what_is_missing_is_named(capsys: Capture) -> None:
    assert "--step-s is missing" in refused(capsys, *COMMON[:2], *COMMON[4:])
    assert "--bandwidth is missing" in refused(capsys, *COMMON[:6])


def test_the_idealised_model_is_the_papers(capsys: Capture) -> None:
    words = ["--parameters", "10B", "--layers", "48", "--step-s", "0.8", "--workers", "2", "--bandwidth", "16gbit"]
    found = told(capsys, *words, "--model", "idealised", "--period", "100")
    by_kind = {row["strategy"]: row for row in found["rows"]}
    assert by_kind["diloco"]["bandwidth_for"]["0.9"] / 1e9 == pytest.approx(16, rel=0.21)
    assert by_kind["4 bits"]["utilisation"] > by_kind["diloco"]["utilisation"] > by_kind["data parallel"]["utilisation"]
    assert "papers' own model" in plan(capsys, *words, "--model", "idealised")


def test_a_run_gives_its_step_its_link_and_its_utilisation(capsys: Capture, tmp_path: Path) -> None:
    run = MadeUpRun(steps=60, period=6, step_s=0.1, stall_s=0.05, wire_s=0.04, workers=2).write(tmp_path / "run")
    found = told(capsys, "--from", str(run), "--strategy", "diloco", "--codec", "int8", "--delay", "0", "--period", "6")
    inputs = found["inputs"]
    assert inputs["parameters"] == 800_000
    assert inputs["cluster"]["workers"] == 2
    assert inputs["cluster"]["step_s"] == pytest.approx(0.1, rel=0.15)
    row = found["rows"][0]
    whole = row["step_s"]
    assert whole == pytest.approx(inputs["cluster"]["step_s"] + 0.05 / 6, rel=0.05)


def test_a_run_that_decided_itself_is_taken_as_it_ran(capsys: Capture, tmp_path: Path) -> None:
    run = MadeUpRun(steps=60, period=6, workers=2).write(tmp_path / "run")
    config = (run / "config.toml").read_text().replace("period = 6", 'period = "auto"')
    (run / "config.toml").write_text(config.replace('codec = "int8"', 'codec = "auto"'))
    words = ["--from", str(run), "--strategy", "diloco", "--codec", "int8", "--delay", "0", "--period", "6"]
    auto = told(capsys, *words)["rows"][0]["utilisation"]
    (run / "config.toml").write_text(config.replace('"auto"', "6"))
    assert auto == told(capsys, *words)["rows"][0]["utilisation"]


def test_doctor_and_bench_give_what_they_measured(capsys: Capture, tmp_path: Path) -> None:
    doctor = {
        "ranks": [{"rank": i, "host": "ada"} for i in range(4)],
        "links": [{"a": 0, "b": 1, "latency_s": 0.002, "bytes_per_s_to_b": 1e7, "bytes_per_s_to_a": 1e7}],
        "all_at_once": {"bytes_per_s": 1.25e7},
        "plan": {"parameters": 124_000_000, "step_s": 0.5},
    }
    (tmp_path / "doctor.json").write_text(json.dumps(doctor))
    bench = {"case": {"parameters": 25_000_000}, "ranks": 4, "codec_s": {"fp32": 0.0, "int8": 9e-9}}
    bench["results"] = [{"bytes_sent": 150_000_000, "seconds": 1.0}]
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    found = told(capsys, "--from", str(tmp_path / "doctor.json"), "--from", str(tmp_path / "bench.json"))
    inputs = found["inputs"]
    assert (inputs["parameters"], inputs["cluster"]["step_s"], inputs["cluster"]["workers"]) == (124_000_000, 0.5, 4)
    assert inputs["cluster"]["link"]["up"] == 1e8
    assert inputs["cluster"]["link"]["latency_s"] == 0.002
    assert inputs["work"]["codec_s"]["int8"] == 9e-9
    (tmp_path / "other.json").write_text("{}")
    assert "not what `cadenza doctor --json`" in refused(capsys, "--from", str(tmp_path / "other.json"))


def test_a_task_is_measured_here(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")  # which the task asks for
    found = told(capsys, "support.tiny_task:build", "--workers", "4", "--bandwidth", "100mbit")
    assert found["inputs"]["parameters"] > 0
    assert 0 < found["inputs"]["cluster"]["step_s"] < 10
    assert set(found["inputs"]["work"]["codec_s"]) >= {"int8", "e3m0"}


def test_a_simulated_run_has_a_report_like_a_real_one(capsys: Capture, tmp_path: Path) -> None:
    words = [*COMMON, "--jitter", "0.1", "--fails-every", "6h", "--faults", "shrink", "--rounds", "30"]
    found = told(capsys, *words, "--simulate", str(tmp_path / "run"))["simulation"]
    assert found["rounds"] == 30
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Worker" in page
    again = told(capsys, *words, "--simulate", str(tmp_path / "again"))["simulation"]
    assert {**again, "report": "", "text": ""} == {**found, "report": "", "text": ""}
    assert "give another one" in refused(capsys, *words, "--simulate", str(tmp_path / "run"))
