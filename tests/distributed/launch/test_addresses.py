"""Where the controller listens, and who may come."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from cortexmlx.distributed.launch import processes as module
from cortexmlx.distributed.launch.processes import find_addresses
from cortexmlx.distributed.spec import Host, Hosts
from cortexmlx.errors import HostRefused

SSH = """#!{python}
import sys
assert sys.argv[1] == "-G"
print("user me")
print("hostname {name}")
"""


def ssh(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ssh whose configuration leads every name to `name`."""
    (folder / "ssh").write_text(SSH.format(python=sys.executable, name=name))
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_processes_here_come_from_here_only() -> None:
    found = find_addresses(Hosts.parse("3"))
    assert found.controller == found.workers == ("127.0.0.1",)


def test_a_name_of_ssh_leads_to_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh(tmp_path, "127.0.0.3", monkeypatch)
    found = find_addresses(Hosts((Host("me@studio"),), "mpi"))
    assert found.controller == ("127.0.0.1",) and set(found.workers) == {"127.0.0.3", "127.0.0.1"}


def test_the_host_files_addresses_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh(tmp_path, "no-such-host.invalid", monkeypatch)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: exec("raise OSError"))
    monkeypatch.setattr(module, "_local_address_for", {"10.0.0.2": "10.0.0.9", "10.0.1.2": "10.0.1.9"}.get)
    found = find_addresses(Hosts((Host("studio", ("10.0.0.2", "10.0.1.2", "10.0.2.2")),), "ring"))
    assert found.controller == ("10.0.0.9", "10.0.1.9")
    assert found.workers == ("10.0.0.2", "10.0.1.2", "10.0.2.2", "10.0.0.9", "10.0.1.9")


def test_addresses_that_need_an_interface_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [(0, 0, 0, "", (ip, 0)) for ip in ("fe80::1%en0", "fe80::1", "169.254.3.4", "127.0.0.4")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: told)
    found = find_addresses(Hosts((Host("studio"),), "mpi"))
    assert found.workers == ("127.0.0.4", "127.0.0.1")


def test_a_host_that_cannot_be_reached_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module, "_local_address_for", lambda address: None)
    with pytest.raises(HostRefused, match="studio-9 has no address that this machine can reach: check its name"):
        find_addresses(Hosts((Host("studio-9", ("10.9.9.9",)),), "ring"))
