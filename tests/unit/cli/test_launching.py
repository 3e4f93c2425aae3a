"""Where nodes meet, where logs go, and what is known before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from cadenza.cli import rendezvous
from cadenza.cli.launching import log_folder
from cadenza.cli.rendezvous import arrange
from cadenza.errors import UsageError
from cadenza.training.config import LaunchSettings


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


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


def test_every_launch_has_its_own_logs(tmp_path: Path) -> None:
    log_folder(tmp_path).mkdir(parents=True)
    assert log_folder(tmp_path).name == "launch-002"
