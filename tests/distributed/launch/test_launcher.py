"""The launchers' command lines, judged by MLX's own parser of them, and how workers here share the machine."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from mlx._distributed_utils import launch

from cortexmlx.distributed.launch import mlx_launch
from cortexmlx.distributed.launch import processes as launcher
from cortexmlx.distributed.launch.processes import core_limits, launch_command, usable_cores
from cortexmlx.distributed.spec import Host, Hosts
from cortexmlx.errors import HostRefused

MESH = (
    Host("a", ("10.0.0.1",), (None, "rdma_en2")),
    Host("b", ("10.0.0.2", "10.0.1.2"), (("rdma_en2", "rdma_en3"), None)),
)


@pytest.mark.parametrize("backend", ["ring", "jaccl", "jaccl-ring"])
def test_mlx_launch_understands_the_command(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it hands to its own starting function is what was meant."""
    seen: list[Any] = []
    name = f"launch_{backend.partition('-')[0]}"
    monkeypatch.setattr(launch, name, lambda parser, hosts, args, command: seen.extend([hosts, args, command]))
    variable = 'A={"b": 1}'
    command = launch_command(Hosts(MESH, backend, ("C=d e",)), tmp_path, [variable], ["python", "-m", "worker", "--x"])
    assert command[:3] == [sys.executable, "-P", mlx_launch.__file__]
    monkeypatch.setattr(sys, "argv", ["mlx.launch", *command[3:]])
    monkeypatch.setattr(launch, "select", launch.select)
    assert mlx_launch.main() is None
    hosts, args, worker = seen
    assert [(h.ssh_hostname, h.ips) for h in hosts] == [("a", ["10.0.0.1"]), ("b", ["10.0.0.2", "10.0.1.2"])]
    assert [h.rdma for h in hosts] == [[None, "rdma_en2"], [["rdma_en2", "rdma_en3"], None]]
    assert args.backend == backend and worker == ["python", "-m", "worker", "--x"]
    assert [e for e in args.env if not e.startswith(("COLUMNS", "LINES"))] == ["C=d e", variable]


def test_ports_are_free_and_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = socket.socket()
    taken.bind(("", 0))
    taken.listen()
    port = taken.getsockname()[1]
    monkeypatch.setattr(launcher, "_PORTS", range(port - 1, port + 5))
    monkeypatch.setattr(launcher, "_TRIES", 3)
    monkeypatch.setattr(launcher.random, "sample", lambda ports, tries: [port - 1, port, port + 1])
    first = launcher._find_free_ports(2)
    assert first == port + 1
    monkeypatch.setattr(launcher.random, "sample", lambda ports, tries: [port - 1, port])
    with pytest.raises(HostRefused, match="no 2 ports in a row are free"):
        launcher._find_free_ports(2)
    taken.close()


def test_mpirun_gets_each_host_with_its_slots_and_the_key_by_name_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "mpirun"
    tool.parent.mkdir()
    tool.touch(0o755)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so.40").touch()
    monkeypatch.setenv("PATH", str(tool.parent))
    monkeypatch.delenv("MLX_MPI_LIBNAME", raising=False)
    hosts = Hosts((Host("a"), Host("a"), Host("b")), "mpi", ("C=d",))
    command = launch_command(hosts, tmp_path, ["A=b"], ["worker"])
    assert (tmp_path / "hosts").read_text() == "a slots=2\nb slots=1\n"
    assert command[0] == str(tool) and command[-1] == "worker" and "3" in command
    exported = [command[i + 1] for i, word in enumerate(command) if word == "-x"]
    assert exported == [f"MLX_MPI_LIBNAME={tmp_path}/lib/libmpi.so.40", "C=d", "A=b", "CORTEXMLX_WORKER_KEY"]
    monkeypatch.setenv("MLX_MPI_LIBNAME", "libmpi.so.12")
    assert "MLX_MPI_LIBNAME" in launch_command(hosts, tmp_path, [], ["worker"])


def test_without_mpirun_mpi_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostRefused, match="needs mpirun, which is not on the PATH: install Open MPI"):
        launch_command(Hosts.parse("2:mpi"), tmp_path, [], ["worker"])


@pytest.mark.parametrize(
    ("text", "environment", "cores", "shared"),
    [
        ("2", {}, 8, {"OPENBLAS_NUM_THREADS": "4"}),
        ("3", {}, 2, {"OPENBLAS_NUM_THREADS": "1"}),
        ("1", {}, 8, {}),
        ("2", {"OPENBLAS_NUM_THREADS": "7"}, 8, {}),
        ("2", {"OMP_NUM_THREADS": "7"}, 8, {}),
        ("2:mpi", {}, 2, {"OPENBLAS_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}),
        ("2:mpi", {}, 4, {"OPENBLAS_NUM_THREADS": "2"}),
        ("2:mpi", {"OMPI_MCA_mpi_yield_when_idle": "0"}, 2, {"OPENBLAS_NUM_THREADS": "1"}),
    ],
)
def test_workers_here_share_the_cores(
    text: str, environment: dict[str, str], cores: int, shared: dict[str, str]
) -> None:
    assert core_limits(Hosts.parse(text), environment, cores) == shared


def test_workers_elsewhere_have_their_own_cores() -> None:
    assert core_limits(Hosts(MESH, "ring"), {}, 8) == {}


def test_cores_are_those_that_this_process_may_use() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_the_host_file_has_nothing_that_mlx_does_not_know(tmp_path: Path) -> None:
    launch_command(Hosts(MESH, "ring"), tmp_path, [], ["worker"])
    written = json.loads((tmp_path / "hosts").read_text())
    assert set(written) == {"backend", "envs", "hosts"} and set(written["hosts"][0]) == {"ssh", "ips", "rdma"}
