"""The workers of a group come in, and nobody else, whatever strangers do at the door."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from cortexmlx.distributed.links.handshake import MAGIC, ConnectionPurpose, HandshakeFault, new_key
from cortexmlx.distributed.links.link import LinkLimits, WorkerLink
from cortexmlx.distributed.links.listener import Listener
from cortexmlx.errors import CortexError, HostLost, HostRefused
from support.hosts.links.peers import IDENTITY, PATIENT, Group
from support.hosts.links.strangers import is_closed, open_sockets, say, shake_hands
from support.patience import PATIENCE, soon


def test_other_addresses_than_the_groups_are_closed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with Group(allowed_addresses=["10.0.0.0/8", "fe80::1%en0"]) as group:
        for _ in range(3):
            with socket.create_connection(group.address) as connection:
                assert is_closed(connection)
        assert not group.accepted.done()
    assert [HandshakeFault.ADDRESS.value in record.getMessage() for record in caplog.records] == [True]


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
        joined: dict[int, Future[WorkerLink]] = {}
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
        for purpose in ConnectionPurpose:
            connection = opened.enter_context(socket.create_connection(group.address))
            recorded.append(shake_hands(connection, group, purpose))
        for said in recorded:
            for rank in (0, 1):  # Also as the rank that is still awaited.
                changed = bytearray(said)
                changed[len(MAGIC) + 1 : len(MAGIC) + 5] = struct.pack(">I", rank)
                say(bytes(changed))(group)
        assert not group.accepted.done()
        group.join(1)
        group.links()
    assert [HandshakeFault.KEY.value in record.getMessage() for record in caplog.records] == [True]


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
        shake_hands(half, group, ConnectionPurpose.MESSAGES)
        group.join()
        group.links()
        assert is_closed(half)


def test_a_worker_that_never_makes_its_second_connection_is_sent_away() -> None:
    with Group(handshake_seconds=0.5) as group, socket.create_connection(group.address) as half:
        shake_hands(half, group, ConnectionPurpose.MESSAGES)
        assert is_closed(half)
        assert not group.accepted.done()


def test_heartbeats_of_another_session_are_refused() -> None:
    with Group() as group, socket.create_connection(group.address) as alone:
        with pytest.raises(HostRefused, match="its first connection is gone"):
            shake_hands(alone, group, ConnectionPurpose.HEARTBEATS)
        with socket.create_connection(group.address) as half:
            shake_hands(half, group, ConnectionPurpose.MESSAGES)
            other = socket.create_connection(group.address)
            with other, pytest.raises(HostRefused, match="rank 0 is here already"):
                shake_hands(other, group, ConnectionPurpose.HEARTBEATS, session=b"another session.")
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
    sockets = open_sockets()
    attempts: list[Callable[[], Listener]] = [
        lambda: Listener(new_key(), 1, 1, IDENTITY, ["mac-2.local"]),
        lambda: Listener(new_key(), 1, 1, IDENTITY, [], bind=["127.0.0.1", "203.0.113.9"]),
        lambda: Listener(b"short", 1, 1, IDENTITY, []),
    ]
    for attempt in attempts:
        with pytest.raises(HostRefused, match=r"mac-2.local|203.0.113.9|32 bytes"):
            attempt()
    assert soon(lambda: open_sockets() <= sockets)


def test_a_silent_worker_is_lost_while_others_are_awaited() -> None:
    limits = LinkLimits(silence_seconds=0.5, beat_seconds=0.1)
    with Group(ranks=2, limits=limits) as group:
        group.join(0, limits=LinkLimits(silence_seconds=PATIENCE, beat_seconds=PATIENCE)).result(PATIENCE)
        error = group.accepted.exception(PATIENCE)
        assert isinstance(error, CortexError) and "no heartbeat for 0.5 s" in str(error)
    assert PATIENT.silence_seconds == PATIENCE
