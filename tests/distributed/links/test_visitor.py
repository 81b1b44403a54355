"""Strangers are refused, whatever they say. They cost little, are logged once, and hold up nobody."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from cortexmlx.distributed.links.handshake import MAGIC, ConnectionPurpose, HandshakeFault, Hello, introduce_worker
from cortexmlx.distributed.links.listener import PENDING_CONNECTIONS
from support.hosts.links.peers import IDENTITY, Group
from support.hosts.links.strangers import is_closed, open_sockets, say
from support.patience import PATIENCE, soon

MEGABYTE = 1 << 20


def _go_away(group: Group) -> None:
    socket.create_connection(group.address).close()


def _announce(group: Group) -> None:
    """A stranger that speaks the protocol, up to a length that is too long."""
    with socket.create_connection(group.address) as connection:
        hello = Hello(ConnectionPurpose.MESSAGES, 0, group.epoch, bytes(16)).pack()
        connection.sendall(MAGIC + hello + bytes(32) + b"\xff\xff" + b"x" * 1000)
        assert is_closed(connection)


def _drip(group: Group) -> None:
    """A slow loris: a byte now and then keeps nothing open."""
    with socket.create_connection(group.address) as connection:
        connection.settimeout(0.02)
        for byte in MAGIC + bytes(10_000):
            try:
                connection.sendall(bytes([byte]))
                if not connection.recv(1):
                    return
            except TimeoutError:
                continue
            except ConnectionError:
                return
        raise AssertionError("it was never closed")


def _guess(group: Group) -> None:
    """A stranger that does all a worker does, without the key."""
    with socket.create_connection(group.address) as connection:
        talk = introduce_worker(group.key, Hello(ConnectionPurpose.MESSAGES, 0, group.epoch, bytes(16)), IDENTITY)
        connection.sendall(next(talk))  # type: ignore[arg-type]
        connection.recv(1000)
        connection.sendall(random.Random(3).randbytes(32) + b"\0\5hello")
        assert is_closed(connection)


def _crowd(group: Group) -> None:
    with contextlib.ExitStack() as opened:
        crowd = [opened.enter_context(socket.create_connection(group.address)) for _ in range(1000)]
        for connection in crowd[: 1000 - PENDING_CONNECTIONS]:
            assert is_closed(connection)


STRANGERS = {
    "noise": (say(random.Random(5).randbytes(300)), HandshakeFault.NOISE),
    "http": (say(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"), HandshakeFault.NOISE),
    "1 GB": (say(struct.pack(">Q", 1 << 30) + bytes(100)), HandshakeFault.NOISE),
    "old version": (say(MAGIC.replace(b"1", b"0") + bytes(100)), HandshakeFault.VERSION),
    "64 KB announced": (_announce, HandshakeFault.LENGTH),
    "goes away": (_go_away, HandshakeFault.LEFT),
    "slow loris": (_drip, HandshakeFault.SLOW),
    "guessed proof": (_guess, HandshakeFault.KEY),
    "1000 connections": (_crowd, HandshakeFault.CROWD),
}


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard) if hard != resource.RLIM_INFINITY else 4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_are_refused_cost_little_and_hold_up_nobody(
    name: str, caplog: pytest.LogCaptureFixture, many_files: None
) -> None:
    knock, kind = STRANGERS[name]
    slow = 0.3 if kind is HandshakeFault.SLOW else PATIENCE
    sockets = open_sockets()
    with Group(ranks=2, handshake_seconds=slow) as group:
        # A worker that is in already, and waits.
        first = group.join(0)
        first.result(PATIENCE)
        tracemalloc.start()
        times = 1 if kind is HandshakeFault.CROWD else 3
        strangers = [threading.Thread(target=knock, args=(group,)) for _ in range(times)]
        for stranger in strangers:
            stranger.start()
        if kind is not HandshakeFault.SLOW:
            for stranger in strangers:
                stranger.join()
        # Workers come in while a slow stranger still talks.
        second = group.join(1).result(PATIENCE)
        links = group.links()
        for stranger in strangers:
            stranger.join()
        assert tracemalloc.get_traced_memory()[1] < 4 * MEGABYTE
        tracemalloc.stop()
        links[1].send(b"hello")
        assert second.receive(PATIENCE) == b"hello"
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("cortexmlx.distributed")]
    if kind is HandshakeFault.CROWD:  # The last ones of the crowd go away by themselves.
        warnings = [warning for warning in warnings if HandshakeFault.LEFT.value not in warning]
    if kind is HandshakeFault.SLOW:  # Those who still talk when the last worker comes are sent away with the port.
        assert len(warnings) <= 1
    else:
        assert len(warnings) == 1
    assert all("127.0.0.1" in warning and kind.value in warning for warning in warnings)
    assert soon(lambda: open_sockets() <= sockets)


def test_a_process_that_may_open_no_more_files_serves_when_it_may_again() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Group() as group, socket.socket() as waiting:
        taken = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 10, before[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            waiting.connect(group.address)
            time.sleep(0.1)
            assert not group.accepted.done()
        finally:
            for file in taken:
                os.close(file)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        waiting.sendall(bytes(100))
        assert is_closed(waiting)
        group.join()
        group.links()


def test_a_slow_loris_is_sent_away_however_often_it_speaks(caplog: pytest.LogCaptureFixture) -> None:
    with Group(handshake_seconds=0.3) as group:
        for _ in range(2):
            _drip(group)
        group.join()
        group.links()
    assert [HandshakeFault.SLOW.value in record.getMessage() for record in caplog.records] == [True]
