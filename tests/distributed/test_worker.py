"""A worker by itself. With its group it is tested in `test_worker_group.py`, with a model in `tests/distributed`."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cortexmlx.distributed.launch.assignment import CONTROLLER_LOST, MEET, READY, WorkerAssignment, package_versions
from cortexmlx.distributed.links.handshake import new_key
from cortexmlx.distributed.links.link import LinkLimits, WorkerLink
from cortexmlx.distributed.links.listener import Address, Listener
from cortexmlx.distributed.worker import init_mlx_group, join_controller
from cortexmlx.errors import HostLost, HostRefused
from support.hosts.links.peers import IDENTITY, PATIENT, EchoProcess, Group
from support.patience import PATIENCE


def test_started_by_hand_it_says_who_starts_it() -> None:
    command = [sys.executable, "-m", "cortexmlx.distributed.worker"]
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert "workers are started by cortexmlx, with --hosts" in done.stderr and "Traceback" not in done.stderr


def ended_worker(end: Callable[[WorkerLink], None]) -> subprocess.Popen[str]:
    """A worker that ended after it had met the others, nobody, and `end` of its link."""
    key, versions_here = new_key(), package_versions()
    listener = Listener(key, 1, 1, versions_here, ["127.0.0.1"])
    task = WorkerAssignment(tuple(listener.addresses), 1, 1, "ring", PATIENCE)
    name, _, value = task.environment_entry().partition("=")
    with subprocess.Popen(
        [sys.executable, "-m", "cortexmlx.distributed.worker"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {name: value, "MLX_RANK": "0"},
    ) as process:
        assert process.stdin is not None
        process.stdin.write(f"{key.hex()}\n")
        process.stdin.flush()

        def check() -> None:
            assert process.poll() is None, process.stderr and process.stderr.read()

        (link,) = listener.accept(time.monotonic() + PATIENCE, check=check)
        listener.close()
        link.send(MEET)
        assert link.receive(PATIENCE) == READY
        end(link)
        process.wait(PATIENCE)
        link.close()
    return process


def test_the_exit_code_tells_a_lost_controller_from_a_failure() -> None:
    assert ended_worker(WorkerLink.close).returncode == CONTROLLER_LOST
    assert ended_worker(lambda link: link.send(b"no call")).returncode == 1


def test_one_rank_meets_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The launcher writes an empty host file for it."""
    (tmp_path / "empty").write_text("\n")
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "empty"))
    monkeypatch.setenv("MLX_RANK", "0")
    group = init_mlx_group(WorkerAssignment((), 1, 1, "ring", 1.0), 0)
    assert (group.rank(), group.size()) == (0, 1)


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac may have it")
def test_a_backend_that_this_mlx_has_not_is_refused_with_what_it_needs() -> None:
    with pytest.raises(HostRefused, match=r"this MLX cannot use jaccl-ring on this machine: it needs macOS 26\.2"):
        init_mlx_group(WorkerAssignment((), 1, 2, "jaccl-ring", 1.0), 0)


def test_ranks_that_cannot_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    with pytest.raises(HostRefused, match="the ranks cannot reach each other by ring"):
        init_mlx_group(WorkerAssignment((), 1, 2, "ring", 1.0), 0)


# -- A worker finds its controller, waits for it, and says why it cannot join -----------------------------------------


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _join(addresses: list[Address], seconds: float, key: bytes | None = None) -> None:
    join_controller(addresses, key or new_key(), 1, 0, IDENTITY, deadline=time.monotonic() + seconds).close()


def test_a_worker_tries_all_addresses_again_and_again_until_the_controller_listens() -> None:
    key = new_key()
    listener = Listener(key, 1, 1, IDENTITY, ["127.0.0.1"])
    with ThreadPoolExecutor() as threads:
        joining = threads.submit(
            join_controller,
            [("127.0.0.1", _free_port()), *listener.addresses],
            key,
            1,
            0,
            IDENTITY,
            deadline=time.monotonic() + PATIENCE,
        )
        (link,) = listener.accept(time.monotonic() + PATIENCE)
        link.send(b"hello")
        other = joining.result(PATIENCE)
        assert other.receive(PATIENCE) == b"hello"
        assert other.name == f"the controller at 127.0.0.1:{listener.addresses[0][1]}"
        other.close()
        link.close()


def test_a_controller_that_nobody_reaches_is_lost_with_the_last_problem() -> None:
    with pytest.raises(HostLost, match=r"rank 0 could not join .* 127.0.0.1:\d+: .*refused"):
        _join([("127.0.0.1", _free_port())], 0.3)
    with pytest.raises(HostLost, match="there is no address to try"):
        _join([], PATIENCE)


def test_one_who_takes_the_connection_and_is_silent_is_no_controller() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(HostLost, match="timed out"):
        _join([server.getsockname()], 0.3)


def test_one_who_closes_the_connection_may_not_know_the_address() -> None:
    with (
        Group(allowed_addresses=["10.9.8.7"]) as group,
        pytest.raises(HostLost, match="Does the host file name this machine"),
    ):
        _join([group.address], 0.5)


def test_another_program_on_the_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(100)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(HostRefused, match=r"rank 0 cannot join .*:\d+: it is no controller of cortexmlx"):
            _join([server.getsockname()], PATIENCE)
        thread.join()


def test_another_key_is_refused_and_no_key_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with Group() as group:
        key = new_key()
        with pytest.raises(HostRefused, match="does not know this group's key") as raised:
            _join([group.address], PATIENCE, key)
        group.join().result(PATIENCE)
        for secret in (key, group.key):
            for text in (caplog.text, str(raised.value), repr(raised.value)):
                assert secret.hex() not in text and repr(secret)[2:-1] not in text


def test_a_port_that_meets_itself_is_not_taken_for_a_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP lets a connection to a free port of this machine end at itself, if it begins at that port."""
    port = _free_port()

    def connect(address: Address, timeout: float) -> socket.socket:
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(address)
        own.settimeout(timeout)
        own.connect(address)
        return own

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(HostLost, match="nobody listens there"):
        _join([("127.0.0.1", port)], 0.2)


@pytest.mark.parametrize("how", [b"hang", b"hold"])
def test_a_worker_whose_controller_is_silent_ends_itself(how: bytes) -> None:
    """Also one that is inside a call that never ends, and one that holds Python's lock there."""
    beats_seldom = LinkLimits(silence_seconds=PATIENCE, beat_seconds=PATIENCE)
    with EchoProcess(beats_seldom, silence_of_worker=1.0) as worker:
        with contextlib.suppress(HostLost):  # On a slow machine it has ended already.
            worker.link.send(how)
        assert worker.process.wait(PATIENCE) == 1


@pytest.mark.parametrize("how", [b"hang", b"hold"])
def test_a_worker_whose_controller_is_gone_ends_itself(how: bytes) -> None:
    with EchoProcess(PATIENT, silence_of_worker=3.0) as worker:
        worker.link.send(how)
        time.sleep(0.2)
        worker.link.close()
        assert worker.process.wait(PATIENCE) == 1


def test_a_worker_whose_controller_is_there_does_not_end() -> None:
    with EchoProcess(LinkLimits(silence_seconds=PATIENCE, beat_seconds=0.1), silence_of_worker=2.0) as worker:
        time.sleep(2.5)
        worker.link.send(b"alive")
        assert worker.link.receive(PATIENCE) == b"alive"
