"""Where nodes meet, where logs go, and what is known before anything is started."""

from __future__ import annotations

import os
import socket
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from cadenza.cli import rendezvous
from cadenza.cli.app import main
from cadenza.cli.launching import log_folder
from cadenza.cli.rendezvous import StorePlace, arrange, store_place
from cadenza.errors import UsageError
from cadenza.training.config import Config, LaunchSettings
from support.commands import free_port


def test_one_node_meets_itself_under_a_name_of_its_own() -> None:
    first, second = (arrange(LaunchSettings(), name="run") for _ in range(2))
    assert (first.backend, first.endpoint, first.local_addr, first.interface) == (
        "c10d",
        "localhost:0",
        "127.0.0.1",
        "lo",
    )
    assert first.name != second.name


def test_the_node_whose_address_it_is_listens_and_leads() -> None:
    port = free_port()
    meeting = arrange(LaunchSettings(nnodes="2", rdzv_endpoint=f"127.0.0.1:{port}"), name="run")
    assert meeting.configs == {"is_host": True}
    assert meeting.leads
    assert (meeting.endpoint, meeting.name, meeting.local_addr) == (f"127.0.0.1:{port}", "run", "127.0.0.1")


def test_a_node_elsewhere_is_known_by_the_address_that_leads_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_route_to", lambda address: "127.0.0.1")
    meeting = arrange(LaunchSettings(nnodes="2", rdzv_endpoint="198.51.100.7", rdzv_id="job"), name="run")
    assert (meeting.endpoint, meeting.name, meeting.configs) == ("198.51.100.7:29400", "job", {"is_host": False})
    assert (meeting.local_addr, meeting.interface, meeting.leads) == ("127.0.0.1", "lo", False)


def test_a_place_to_which_there_is_no_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_route_to", lambda address: None)
    with pytest.raises(UsageError, match=r"no way from here to 198\.51\.100\.7"):
        arrange(LaunchSettings(nnodes="2", rdzv_endpoint="198.51.100.7:1"), name="run")


def test_a_second_node_on_the_same_machine_is_the_guest_of_the_first() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = arrange(LaunchSettings(nnodes="2", rdzv_endpoint=f"127.0.0.1:{store.port}"), name="run")
    assert meeting.configs == {"is_host": False}
    assert not meeting.leads


def test_a_port_that_answers_in_another_language_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(UsageError, match="is in use"):
        arrange(LaunchSettings(nnodes="2", rdzv_endpoint=f"127.0.0.1:{other.getsockname()[1]}"), name="run")


def test_a_static_meeting_goes_by_the_nodes_number() -> None:
    launch = LaunchSettings(nnodes="2", rdzv_backend="static", rdzv_endpoint="198.51.100.7:29500", node_rank=1)
    meeting = arrange(launch, name="run")
    assert (meeting.backend, meeting.configs, meeting.leads) == ("static", {"rank": 1}, False)


def place_of(**dotted: object) -> StorePlace:
    return store_place(Config().with_(**{"faults.policy": "shrink", "launch.workers": 2, **dotted}))


def test_workers_that_may_die_meet_in_a_store_of_the_first_node() -> None:
    alone = place_of()
    assert (alone.host, alone.port, alone.serves, alone.workers, alone.interface) == ("127.0.0.1", 0, True, 2, "lo")
    meeting = {"launch.nnodes": "3", "launch.rdzv_endpoint": f"127.0.0.1:{free_port()}"}
    first, second = (place_of(**meeting, **{"launch.node_rank": node}) for node in (0, 1))
    assert (first.serves, first.leads, first.workers) == (True, True, 6)
    assert (second.serves, second.leads, second.port) == (False, False, first.port)
    elsewhere = place_of(**meeting, **{"faults.store": "127.0.0.1:1234"})
    assert (elsewhere.serves, elsewhere.leads, elsewhere.port) == (False, True, 1234)


@pytest.mark.parametrize(
    ("dotted", "said"),
    [
        ({"launch.nnodes": "2"}, "need a store to meet in"),
        ({"launch.nnodes": "2", "launch.node_rank": 2}, "numbered from 0 to 1"),
        ({"launch.nnodes": "2", "launch.rdzv_endpoint": "198.51.100.7:1"}, "not an address of this machine"),
        ({"launch.nnodes": "2", "launch.rdzv_endpoint": "nowhere:port"}, "HOST:PORT is required"),
        ({"launch.nnodes": "2", "launch.rdzv_endpoint": "x" * 64 + ":29400"}, "HOST:PORT is required"),
    ],
)
def test_a_place_without_a_store_is_refused(
    dotted: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_route_to", lambda address: "127.0.0.1")
    with pytest.raises(UsageError, match=said):
        place_of(**dotted)


def test_a_port_that_is_taken_is_refused_for_a_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(UsageError, match="is in use"):
        place_of(**{"launch.nnodes": "2", "launch.rdzv_endpoint": f"127.0.0.1:{other.getsockname()[1]}"})


def test_every_launch_has_its_own_logs(tmp_path: Path) -> None:
    log_folder(tmp_path).mkdir(parents=True)
    assert log_folder(tmp_path).name == "launch-002"


# ---- the templates ---------------------------------------------------------------------------------------------------

LAUNCH = Path(__file__).parents[3] / "examples" / "launch"
STUBS = {
    "cadenza": 'printf "%s\\n" "$@"',
    "srun": 'shift; exec "$@"',
    "scontrol": "printf 'first\\nsecond\\n'",
    "getent": "true",
}


TEMPLATES = ["two_machines.sh", "slurm.sbatch", "kubernetes.yaml", "kubeflow.yaml", "skypilot.yaml"]


def script_of(template: str) -> str:
    """The shell script in a template, after a look at how its parts belong together."""
    text = (LAUNCH / template).read_text()
    if template == "kubernetes.yaml":
        service, claim, job = yaml.safe_load_all(text)
        pod = job["spec"]["template"]["spec"]
        assert service["metadata"]["name"] == pod["subdomain"]
        assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
        assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
        check_volume(claim, pod)
        shell, option, script = pod["containers"][0]["command"]
    elif template == "kubeflow.yaml":
        claim, runtime, job = yaml.safe_load_all(text)
        assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
        assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
        [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        check_volume(claim, node["template"]["spec"]["template"]["spec"])
        shell, option, script = job["spec"]["trainer"]["command"]
    else:
        return str(yaml.safe_load(text)["run"]) if template == "skypilot.yaml" else text
    assert (shell, option) == ("sh", "-c")
    return str(script)


def check_volume(claim: dict[str, Any], pod: dict[str, Any]) -> None:
    """The volume that is claimed is the one that the pods mount where the run's folder is."""
    [volume] = pod["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert pod["containers"][0]["volumeMounts"] == [{"name": volume["name"], "mountPath": "/runs"}]


def given_to_cadenza(script: str, folder: Path, *arguments: str, resumed: bool) -> list[str]:
    """What a template's script gives to `cadenza`, on a machine whose commands are stubs."""
    for name, does in STUBS.items():
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    run = folder / "run"
    run.mkdir()
    if resumed:
        (run / "config.toml").write_text("")
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_SUBMIT_DIR": "."}
    sky = {"SKYPILOT_NODE_IPS": "first\nsecond", "SKYPILOT_NUM_NODES": "2", "WORKERS": "4"}
    kubeflow = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "4",
        "PET_MASTER_ADDR": "cadenza-node-0-0.cadenza",
        "PET_MASTER_PORT": "29400",
    }
    variables = {**slurm, **sky, **kubeflow, "PATH": f"{folder}:{os.environ['PATH']}", "RUN": str(run)}
    done = subprocess.run(
        ["bash", "-c", script, "bash", *arguments], env=variables, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_starts_and_resumes_a_run_on_two_nodes(
    template: str, resumed: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command, *flags = given_to_cadenza(script_of(template), tmp_path, "first", resumed=resumed)
    assert command == "train"
    with pytest.raises(SystemExit, match="0"):
        main([command, *flags, "--print-config"])
    launch = tomllib.loads(capfd.readouterr().out)["launch"]
    assert launch["nnodes"] == "2"
    host, port = launch["rdzv_endpoint"].split(":")
    assert (host in ("first", "cadenza-0.cadenza", "cadenza-node-0-0.cadenza"), int(port) >= 29400) == (True, True)
    assert flags[:2] == ["--resume" if resumed else "--run", str(tmp_path / "run")]
