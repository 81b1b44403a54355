"""The workers of a group come in, and nobody else, whatever strangers do at the door."""

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
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from cortexmlx.errors import CortexError, HostLost, HostRefused
from cortexmlx.hosts.handshake import MAGIC, Hello, Purpose, StrangerKind, introduce, new_key
from cortexmlx.hosts.link import Link, LinkLimits
from cortexmlx.hosts.listener import VISITORS, Listener
from support.hosts.links import IDENTITY, PATIENT, Group
from support.patience import PATIENCE, soon

MEGABYTE = 1 << 20


def _open_files() -> int:
    return len(os.listdir("/dev/fd"))


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it."""
    connection.settimeout(PATIENCE)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def _say(what: bytes) -> Callable[[Group], None]:
    def knock(group: Group) -> None:
        with socket.create_connection(group.address) as connection:
            connection.sendall(what)
            assert _is_closed(connection)

    return knock


def _shake_hands(connection: socket.socket, group: Group, purpose: Purpose, session: bytes = bytes(16)) -> bytes:
    """Do as a worker of rank 0 does, and return what it said."""
    talk = introduce(group.key, Hello(purpose, 0, group.epoch, session), IDENTITY)
    connection.settimeout(PATIENCE)
    said = b""
    with contextlib.suppress(StopIteration):
        wish = next(talk)
        while True:
            if isinstance(wish, bytes):
                said += wish
                connection.sendall(wish)
                wish = next(talk)
            else:
                wish = talk.send(connection.recv(wish, socket.MSG_WAITALL))
    return said


def _go_away(group: Group) -> None:
    socket.create_connection(group.address).close()


def _announce(group: Group) -> None:
    """A stranger that speaks the protocol, up to a length that is too long."""
    with socket.create_connection(group.address) as connection:
        hello = Hello(Purpose.MESSAGES, 0, group.epoch, bytes(16)).pack()
        connection.sendall(MAGIC + hello + bytes(32) + b"\xff\xff" + b"x" * 1000)
        assert _is_closed(connection)


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
        talk = introduce(group.key, Hello(Purpose.MESSAGES, 0, group.epoch, bytes(16)), IDENTITY)
        connection.sendall(next(talk))  # type: ignore[arg-type]
        connection.recv(1000)
        connection.sendall(random.Random(3).randbytes(32) + b"\0\5hello")
        assert _is_closed(connection)


def _crowd(group: Group) -> None:
    with contextlib.ExitStack() as opened:
        crowd = [opened.enter_context(socket.create_connection(group.address)) for _ in range(1000)]
        for connection in crowd[: 1000 - VISITORS]:
            assert _is_closed(connection)


STRANGERS = {
    "noise": (_say(random.Random(5).randbytes(300)), StrangerKind.NOISE),
    "http": (_say(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"), StrangerKind.NOISE),
    "1 GB": (_say(struct.pack(">Q", 1 << 30) + bytes(100)), StrangerKind.NOISE),
    "old version": (_say(MAGIC.replace(b"1", b"0") + bytes(100)), StrangerKind.VERSION),
    "64 KB announced": (_announce, StrangerKind.LENGTH),
    "goes away": (_go_away, StrangerKind.LEFT),
    "slow loris": (_drip, StrangerKind.SLOW),
    "guessed proof": (_guess, StrangerKind.KEY),
    "1000 connections": (_crowd, StrangerKind.CROWD),
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
    slow = 0.3 if kind is StrangerKind.SLOW else PATIENCE
    files = _open_files()
    with Group(ranks=2, handshake_seconds=slow) as group:
        # A worker that is in already, and waits.
        first = group.join(0)
        first.result(PATIENCE)
        tracemalloc.start()
        times = 1 if kind is StrangerKind.CROWD else 3
        strangers = [threading.Thread(target=knock, args=(group,)) for _ in range(times)]
        for stranger in strangers:
            stranger.start()
        if kind is not StrangerKind.SLOW:
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
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("cortexmlx.hosts")]
    if kind is StrangerKind.CROWD:  # The last ones of the crowd go away by themselves.
        warnings = [warning for warning in warnings if StrangerKind.LEFT.value not in warning]
    if kind is StrangerKind.SLOW:  # Those who still talk when the last worker comes are sent away with the port.
        assert len(warnings) <= 1
    else:
        assert len(warnings) == 1
    assert all("127.0.0.1" in warning and kind.value in warning for warning in warnings)
    assert soon(lambda: _open_files() == files)


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
        assert _is_closed(waiting)
        group.join()
        group.links()


def test_a_slow_loris_is_sent_away_however_often_it_speaks(caplog: pytest.LogCaptureFixture) -> None:
    with Group(handshake_seconds=0.3) as group:
        for _ in range(2):
            _drip(group)
        group.join()
        group.links()
    assert [StrangerKind.SLOW.value in record.getMessage() for record in caplog.records] == [True]


def test_other_addresses_than_the_groups_are_closed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with Group(allowed_addresses=["10.0.0.0/8", "fe80::1%en0"]) as group:
        for _ in range(3):
            with socket.create_connection(group.address) as connection:
                assert _is_closed(connection)
        assert not group.accepted.done()
    assert [StrangerKind.ADDRESS.value in record.getMessage() for record in caplog.records] == [True]


def test_networks_and_both_families_of_addresses_are_allowed() -> None:
    with Group(allowed_addresses=["127.0.0.0/8"]) as group:
        group.join()
        group.links()
    if socket.has_ipv6:
        with contextlib.suppress(HostRefused), Group(allowed_addresses=["::1"], bind=["::1"]) as group:
            name = group.join().result(PATIENCE).name
            group.links()
            assert name.startswith("the controller at [::1]:")


def test_links_come_by_rank_in_whatever_order_workers_join() -> None:
    names = ["mac-1", "mac-2", "mac-3", "mac-4"]
    with Group(ranks=4, names=names) as group:
        joined: dict[int, Future[Link]] = {}
        for rank in (2, 0, 3, 1):
            joined[rank] = group.join(rank)
            joined[rank].result(PATIENCE)
        links = group.links()
        assert [link.name for link in links] == names
        for rank, link in enumerate(links):
            link.send(b"to %d" % rank)
            assert joined[rank].result().receive(PATIENCE) == b"to %d" % rank


def test_a_recorded_connection_that_is_played_again_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with Group(ranks=2) as group, contextlib.ExitStack() as opened:
        recorded = []
        for purpose in Purpose:
            connection = opened.enter_context(socket.create_connection(group.address))
            recorded.append(_shake_hands(connection, group, purpose))
        for said in recorded:
            for rank in (0, 1):  # Also as the rank that is still awaited.
                changed = bytearray(said)
                changed[len(MAGIC) + 1 : len(MAGIC) + 5] = struct.pack(">I", rank)
                _say(bytes(changed))(group)
        assert not group.accepted.done()
        group.join(1)
        group.links()
    assert [StrangerKind.KEY.value in record.getMessage() for record in caplog.records] == [True]


def test_a_worker_of_an_old_epoch_is_refused_in_words(caplog: pytest.LogCaptureFixture) -> None:
    with Group() as group:
        group.epoch = 0
        error = group.join().exception(PATIENCE)
        assert isinstance(error, HostRefused) and "epoch 0 was given up, and this is epoch 1" in str(error)
        group.epoch = 1
        group.join()
        group.links()
    assert len(caplog.records) == 1 and "epoch 0" in caplog.text


def test_a_rank_that_is_here_already_is_refused_and_the_first_stays() -> None:
    with Group(ranks=2) as group:
        first = group.join(0).result(PATIENCE)
        error = group.join(0).exception(PATIENCE)
        assert isinstance(error, HostRefused) and "rank 0 is here already" in str(error)
        group.join(1)
        group.links()[0].send(b"hello")
        assert first.receive(PATIENCE) == b"hello"


@pytest.mark.parametrize("rank", [2, 2**32 - 1])
def test_a_rank_out_of_range_is_refused(rank: int) -> None:
    with Group(ranks=2) as group:
        error = group.join(rank).exception(PATIENCE)
        assert isinstance(error, HostRefused) and f"there is no rank {rank} in a group of 2" in str(error)
        assert not group.accepted.done()


@pytest.mark.parametrize("what", ["cortexmlx", "mlx", "weights"])
def test_another_version_or_other_weights_are_refused_on_both_sides_with_both_values(what: str) -> None:
    with Group(ranks=2, names=["mac-1", "mac-2"]) as group:
        group.join(0).result(PATIENCE)
        errors = [
            group.join(1, identity=IDENTITY | {what: "other"}).exception(PATIENCE),
            group.accepted.exception(PATIENCE),
        ]
        for error in errors:
            assert isinstance(error, HostRefused)
            assert f"mac-2 has {what} other, and the controller has {what} {IDENTITY[what]}" in str(error)


def test_ranks_that_are_missing_at_the_deadline_are_named_and_the_port_is_free() -> None:
    with Group(ranks=3, names=["mac-1", "mac-2", "mac-3"], seconds=1.0) as group:
        joined = group.join(1).result(PATIENCE)
        error = group.accepted.exception(PATIENCE)
        assert isinstance(error, HostLost) and error.host == "mac-1"
        assert "2 of 3 workers did not join in time: mac-1, mac-3" in str(error)
        with pytest.raises(HostLost):
            joined.receive(PATIENCE)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(group.address)


def test_the_port_is_closed_when_all_are_here() -> None:
    with Group() as group:
        group.join()
        group.links()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(group.address)
        with pytest.raises(HostLost, match="make a new one"):
            group.listener.accept(time.monotonic() + PATIENCE)


def test_accept_can_be_ended_by_its_check_and_by_closing() -> None:
    asked: list[float] = []

    def check() -> None:
        asked.append(time.monotonic())
        if len(asked) == 3:
            raise HostLost("the process of mac-2 ended", host="mac-2")

    with Group(check=check) as group:
        error = group.accepted.exception(PATIENCE)
        assert isinstance(error, HostLost) and error.host == "mac-2"
    with Group() as group:
        group.listener.close()
        error = group.accepted.exception(PATIENCE)
        assert isinstance(error, HostLost) and "closed before all workers" in str(error)
        group.listener.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(group.address)
    unused = Listener(new_key(), 1, 1, IDENTITY, [])
    unused.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(unused.addresses[0])


def test_a_worker_that_is_lost_while_others_are_awaited_ends_the_wait() -> None:
    with Group(ranks=2, names=["mac-1", "mac-2"]) as group:
        group.join(0).result(PATIENCE).close()
        error = group.accepted.exception(PATIENCE)
        assert isinstance(error, HostLost) and error.host == "mac-1"
        assert "before all workers had joined" in str(error)


def test_a_worker_that_has_one_connection_of_two_may_begin_again() -> None:
    with Group() as group, socket.create_connection(group.address) as half:
        _shake_hands(half, group, Purpose.MESSAGES)
        group.join()
        group.links()
        assert _is_closed(half)


def test_a_worker_that_never_makes_its_second_connection_is_sent_away() -> None:
    with Group(handshake_seconds=0.5) as group, socket.create_connection(group.address) as half:
        _shake_hands(half, group, Purpose.MESSAGES)
        assert _is_closed(half)
        assert not group.accepted.done()


def test_heartbeats_of_another_session_are_refused() -> None:
    with Group() as group, socket.create_connection(group.address) as alone:
        with pytest.raises(HostRefused, match="its first connection is gone"):
            _shake_hands(alone, group, Purpose.HEARTBEATS)
        with socket.create_connection(group.address) as half:
            _shake_hands(half, group, Purpose.MESSAGES)
            other = socket.create_connection(group.address)
            with other, pytest.raises(HostRefused, match="rank 0 is here already"):
                _shake_hands(other, group, Purpose.HEARTBEATS, session=b"another session.")
        group.join()
        group.links()


def test_one_lost_worker_ends_all_links_by_its_name() -> None:
    with Group(ranks=3, names=["mac-1", "mac-2", "mac-3"]) as group:
        joined = [group.join(rank) for rank in range(3)]
        links = group.links()
        joined[1].result(PATIENCE).close()
        for link in links:
            with pytest.raises(HostLost) as raised:
                link.receive(PATIENCE)
            assert raised.value.host == "mac-2"
        for other in (joined[0], joined[2]):
            with pytest.raises(HostLost):
                other.result().receive(PATIENCE)


def test_addresses_that_are_none_are_refused() -> None:
    files = _open_files()
    attempts: list[Callable[[], Listener]] = [
        lambda: Listener(new_key(), 1, 1, IDENTITY, ["mac-2.local"]),
        lambda: Listener(new_key(), 1, 1, IDENTITY, [], bind=["127.0.0.1", "203.0.113.9"]),
        lambda: Listener(b"short", 1, 1, IDENTITY, []),
    ]
    for attempt in attempts:
        with pytest.raises(HostRefused, match=r"mac-2.local|203.0.113.9|32 bytes"):
            attempt()
    assert soon(lambda: _open_files() == files)


def test_a_silent_worker_is_lost_while_others_are_awaited() -> None:
    limits = LinkLimits(silence_seconds=0.5, beat_seconds=0.1)
    with Group(ranks=2, limits=limits) as group:
        group.join(0, limits=LinkLimits(silence_seconds=PATIENCE, beat_seconds=PATIENCE)).result(PATIENCE)
        error = group.accepted.exception(PATIENCE)
        assert isinstance(error, CortexError) and "no heartbeat for 0.5 s" in str(error)
    assert PATIENT.silence_seconds == PATIENCE
