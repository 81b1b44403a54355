"""`--hosts`: a number, or MLX's own host file. MLX's own reader judges what is a host file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx._distributed_utils.common import Hostfile

from cortexmlx.distributed.spec import BACKENDS, Host, Hosts
from cortexmlx.errors import HostRefused

TWO = [{"ssh": "studio-1", "ips": ["10.0.0.1"]}, {"ssh": "me@studio-2.local", "ips": ["10.0.0.2", "10.0.1.2"]}]
MESH = [
    {"ssh": "a", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en2", ["rdma_en3", "rdma_en4"]]},
    {"ssh": "b", "ips": ["10.0.0.2"], "rdma": ["rdma_en2", None, "rdma_en3"]},
    {"ssh": "c", "ips": ["10.0.0.3"], "rdma": ["rdma_en2", "rdma_en3", None]},
]


def written(folder: Path, value: Any) -> str:
    file = folder / "hosts.json"
    file.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(file)


def test_a_number_is_so_many_processes_here_by_the_ring() -> None:
    hosts = Hosts.parse("3")
    assert hosts.hosts == (Host("127.0.0.1", ("127.0.0.1",)),) * 3
    assert (hosts.ranks, hosts.backend, hosts.is_local) == (3, "ring", True)
    assert hosts.names == ("this machine",) * 3


@pytest.mark.parametrize(("text", "backend"), [("2:mpi", None), ("2", "mpi"), ("2:ring", "mpi")])
def test_the_backend_is_named_behind_the_number_or_apart(text: str, backend: str | None) -> None:
    assert Hosts.parse(text, backend).backend == "mpi"


@pytest.mark.parametrize(
    "value",
    [
        TWO,
        {"hosts": TWO},
        {"backend": "", "envs": [], "hosts": TWO},
        {"backend": "jaccl", "envs": ["A=b c"], "hosts": MESH},
    ],
)
def test_a_host_file_means_what_it_means_to_mlx(tmp_path: Path, value: Any) -> None:
    path = written(tmp_path, value)
    ours, theirs = Hosts.parse(path), Hostfile.from_file(path)
    assert [host.ssh for host in ours.hosts] == [host.ssh_hostname for host in theirs.hosts]
    assert [list(host.ips) for host in ours.hosts] == [host.ips for host in theirs.hosts]
    assert json.dumps([host.rdma for host in ours.hosts]) == json.dumps([host.rdma for host in theirs.hosts])
    assert (ours.backend, list(ours.environment)) == (theirs.backend or "ring", theirs.envs)
    assert ours.names == tuple(host["ssh"] for host in (value if isinstance(value, list) else value["hosts"]))
    assert not ours.is_local and ours.file == Path(path)


def test_mpi_fills_one_host_after_the_other_and_so_do_the_ranks(tmp_path: Path) -> None:
    entries = [{"ssh": name} for name in ("b", "a", "b")]
    hosts = Hosts.parse(written(tmp_path, {"backend": "mpi", "hosts": entries}))
    assert hosts.names == ("b", "b", "a")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("not json", "is no host file: Expecting value"),
        ("[" * 100_000, "is no host file"),
        ("7", "it needs a list of hosts"),
        ({"hosts": "a,b"}, "it needs a list of hosts"),
        ([], "has 0 hosts: 1 to 64 are possible"),
        ([{"ssh": "a", "ips": ["10.0.0.1"]}] * 65, "has 65 hosts"),
        ([{"ips": ["10.0.0.1"]}], 'host 0: "ssh" must be the name that ssh connects to, not None'),
        ([{"ssh": "-oProxyCommand=rm", "ips": ["10.0.0.1"]}], "not '-oProxyCommand=rm'"),
        ([{"ssh": "a\nb", "ips": ["10.0.0.1"]}], "host 0"),
        (["a"], "host 0"),
        ([{"ssh": "a", "ips": "10.0.0.1"}], 'host 0: "ips" must be a list of strings'),
        ([{"ssh": "a", "ips": ["studio.local"]}], "'studio.local', which is no IP address"),
        ([{"ssh": "a"}], 'the ring needs "ips", the addresses of a'),
        ([{"ssh": "a", "ips": ["127.0.0.1"]}, TWO[0]], "the other hosts cannot reach a"),
        ({"backend": "nccl", "hosts": TWO}, "the backend 'nccl' is none of ring, mpi, jaccl, jaccl-ring"),
        ({"backend": ["ring"], "hosts": TWO}, "is none of"),
        ({"envs": ["A"], "hosts": TWO}, "'A', which is not NAME=VALUE"),
        ({"envs": ["A-B=c"], "hosts": TWO}, "which is not NAME=VALUE"),
        ({"backend": "jaccl", "hosts": TWO}, 'host 0: "rdma" needs 2 entries, one per host, and null for itself'),
        ({"backend": "jaccl", "hosts": [{**MESH[0], "ips": []}, *MESH[1:]]}, 'JACCL needs "ips"'),
        ({"backend": "jaccl", "hosts": [{**MESH[0], "rdma": 3}]}, '"rdma" must be a list'),
    ],
)
def test_what_is_no_host_file_is_refused_in_one_line(tmp_path: Path, value: Any, words: str) -> None:
    path = written(tmp_path, value)
    with pytest.raises(HostRefused) as refused:
        Hosts.parse(path)
    said = str(refused.value)
    assert words in said and path in said and "\n" not in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "from 1 to 64"),
        ("1000000000000", "from 1 to 64"),
        ("2:nccl", f"none of {', '.join(BACKENDS)}"),
        ("nowhere.json", "no such file. Give a number of processes on this machine, such as 2"),
        ("", "Is a directory"),
        ("-2", "no such file"),
    ],
)
def test_what_is_neither_a_number_nor_a_file_is_refused(
    tmp_path: Path, monkeypatch: Any, text: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HostRefused, match=r"hosts|directory") as refused:
        Hosts.parse(text)
    assert words in str(refused.value)


def test_a_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    with file.open("wb") as sparse:
        sparse.truncate(4 << 30)
    with pytest.raises(HostRefused, match="more than 1,000,000 bytes"):
        Hosts.parse(str(file))
