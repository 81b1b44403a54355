"""A link carries whole messages however they are cut, and fails every call soon after the other side is gone."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.distributed.links import link as heartbeat
from cortexmlx.distributed.links.link import (
    BEAT,
    FrameStream,
    HeartbeatLoss,
    LinkLimits,
    StreamBroken,
    WorkerLink,
    beat_until_lost,
)
from cortexmlx.errors import HostLost
from support.hosts.links.peers import PATIENT, EchoProcess, link_pair, tcp_pair
from support.patience import PATIENCE, soon

MEGABYTE = 1 << 20


class _Cut(socket.socket):
    """A socket whose calls carry as many bytes as `cuts` says; at 0 nothing is ready."""

    cuts: Iterator[int]

    def recv_into(self, view: memoryview) -> int:  # type: ignore[override]
        return super().recv_into(view[: self._next()])

    def sendmsg(self, parts: list[memoryview]) -> int:  # type: ignore[override]
        return super().send(b"".join(parts)[: self._next()])

    def _next(self) -> int:
        count = next(self.cuts, 1 << 30)
        if not count:
            raise BlockingIOError
        return count


def _cut(connection: socket.socket, cuts: list[int]) -> _Cut:
    cut = _Cut(fileno=connection.detach())
    cut.cuts = iter(cuts)
    return cut


CUTS = st.lists(st.integers(0, 9), max_size=60)


@given(messages=st.lists(st.binary(max_size=40), max_size=6), sent=CUTS, received=CUTS)
def test_messages_arrive_whole_and_in_order_wherever_they_are_cut(
    messages: list[bytes], sent: list[int], received: list[int]
) -> None:
    one, other = socket.socketpair()
    with _cut(one, sent) as sender, _cut(other, received) as receiver:
        outgoing, incoming = FrameStream(sender, 40), FrameStream(receiver, 40)
        for message in messages:
            outgoing.send(memoryview(message), PATIENCE)
        assert [incoming.receive(PATIENCE) for _ in messages] == messages


@given(message=st.binary(min_size=1, max_size=40), data=st.data())
def test_a_message_that_ends_early_is_none(message: bytes, data: st.DataObject) -> None:
    whole = struct.pack(">Q", len(message)) + message
    one, other = socket.socketpair()
    with one, other:
        one.sendall(whole[: data.draw(st.integers(0, len(whole) - 1))])
        one.close()
        with pytest.raises(StreamBroken, match="ended or closed"):
            FrameStream(other, 40).receive(PATIENCE)


def test_a_length_beyond_the_limit_is_refused_before_memory_is_allocated() -> None:
    one, other = tcp_pair()
    pulse, other_pulse = tcp_pair()
    link = WorkerLink(one, pulse, "one", PATIENT)
    other.sendall(struct.pack(">Q", 1 << 30) + b"x")
    tracemalloc.start()
    with pytest.raises(HostLost, match=r"one announced a message of 1073741824 bytes, and 268435456 are allowed"):
        link.receive(10.0)
    assert tracemalloc.get_traced_memory()[1] < MEGABYTE
    tracemalloc.stop()
    link.close()
    other.close()
    other_pulse.close()


def test_a_message_beyond_the_limit_is_not_sent() -> None:
    one, other = link_pair(LinkLimits(PATIENCE, message_bytes=100))
    one.send(bytes(100))
    with pytest.raises(HostLost, match=r"one would get a message of 101 bytes, and 100 are allowed"):
        one.send(bytes(101))
    assert other.receive() == bytes(100)
    other.close()


def test_any_buffer_can_be_sent() -> None:
    one, other = link_pair()
    numbers = np.arange(12, dtype=np.int32).reshape(3, 4)
    for message in (b"", b"one", bytearray(b"two"), memoryview(b"three"), memoryview(numbers)):
        one.send(message)
        assert other.receive() == bytes(message)
    with pytest.raises(TypeError):
        one.send("text")  # type: ignore[arg-type]
    one.send(b"the link is as before")
    assert other.receive() == b"the link is as before"
    one.close()
    other.close()


def test_large_messages_go_both_ways_at_once_without_copies() -> None:
    one, other = link_pair()
    size = 40 * MEGABYTE
    here, there = random.Random(1).randbytes(size), random.Random(2).randbytes(size)
    tracemalloc.start()
    with ThreadPoolExecutor() as threads, closing(one), closing(other):
        sends = [threads.submit(one.send, here), threads.submit(other.send, there)]
        at_other, at_one = threads.submit(other.receive), threads.submit(one.receive)
        assert at_one.result(PATIENCE) == there and at_other.result(PATIENCE) == here
        for send in sends:
            send.result(PATIENCE)
    # The two messages that were received, and nothing of their size besides.
    assert tracemalloc.get_traced_memory()[1] < 2 * size + 4 * MEGABYTE
    tracemalloc.stop()


def test_the_loss_of_a_link_is_final() -> None:
    one, other = link_pair()
    lost: list[HostLost] = []
    one.when_lost(lost.append)
    other.close()
    assert soon(lambda: lost)
    uses: list[Callable[[], object]] = [one.receive, lambda: one.send(b"x"), lambda: one.receive(0.1)]
    for use in uses:
        with pytest.raises(HostLost, match="one ended or closed its connection") as raised:
            use()
        assert raised.value.host == "one" and raised.value is not lost[0]
    assert str(lost[0]) == one.loss_reason and len(lost) == 1 and one.ended_there and not other.ended_there
    one.when_lost(lost.append)
    assert len(lost) == 2
    one.close()


def test_closing_wakes_who_waits_and_is_no_loss() -> None:
    one, other = link_pair()
    lost: list[HostLost] = []
    one.when_lost(lost.append)
    with ThreadPoolExecutor() as threads, closing(one), closing(other):
        receiving = threads.submit(one.receive)
        sending = threads.submit(one.send, bytes(50 * MEGABYTE))
        assert select.select([other._sockets[0]], [], [], PATIENCE)[0]
        one.close()
        for call in (receiving, sending):
            with pytest.raises(HostLost, match="was closed on this side"):
                call.result(PATIENCE)
    one.close()
    one.when_lost(lost.append)
    with pytest.raises(HostLost, match="was closed on this side"):
        one.receive()
    assert lost == []
    other.close()


def test_what_came_before_the_end_is_received() -> None:
    one, other = link_pair()
    for number in range(3):
        other.send(b"%d" % number)
    other.close()
    time.sleep(0.2)  # The heartbeats have ended for long when this side reads.
    assert [one.receive() for _ in range(3)] == [b"0", b"1", b"2"]
    with pytest.raises(HostLost, match="ended or closed"):
        one.receive()
    one.close()


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next() -> None:
    one, other = link_pair()
    with pytest.raises(HostLost, match=r"one sent no whole message within 0.05 s"):
        one.receive(0.05)
    with pytest.raises(HostLost):
        other.send(b"late")
        other.receive()
    with pytest.raises(HostLost, match="no whole message"):
        one.receive()
    assert not one.ended_there
    other.close()


def test_a_sender_does_not_wait_for_ever_for_one_who_does_not_take() -> None:
    one, other = link_pair(LinkLimits(PATIENCE, stall_seconds=0.2))
    with pytest.raises(HostLost, match=r"one took nothing of a message for 0.2 s"):
        one.send(bytes(100 * MEGABYTE))
    one.close()
    other.close()


def test_a_message_in_flight_delays_no_heartbeat() -> None:
    limits = LinkLimits(silence_seconds=2.0, beat_seconds=0.1, stall_seconds=PATIENCE)
    one, other = link_pair(limits)
    with ThreadPoolExecutor() as threads, closing(one), closing(other):
        sending = threads.submit(one.send, bytes(50 * MEGABYTE))
        time.sleep(3.5)  # Longer than the limit, and the message is stuck all the time.
        assert not sending.done() and one.loss_reason is None and other.loss_reason is None
        assert len(other.receive()) == 50 * MEGABYTE
        sending.result(PATIENCE)


def test_a_lost_link_gives_the_reason_of_another() -> None:
    one, other = link_pair()
    lost: list[HostLost] = []
    one.when_lost(lost.append)
    with ThreadPoolExecutor() as threads, closing(one), closing(other):
        waiting = threads.submit(one.receive)
        one.fail(HostLost("mac-2 is gone", host="mac-2"))
        with pytest.raises(HostLost, match="mac-2 is gone") as raised:
            waiting.result(PATIENCE)
    assert raised.value.host == "mac-2"
    assert soon(lambda: lost) and lost[0].host == "mac-2"


def test_an_interrupt_within_a_message_ends_the_link() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    one, other = link_pair()
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            one.receive()
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(HostLost, match="was interrupted"):
        one.receive(10.0)
    with pytest.raises(HostLost):
        other.receive()
    one.close()
    other.close()


def test_a_forked_child_cannot_use_the_link_and_does_not_end_it() -> None:
    one, other = link_pair()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            one.send(b"from the child")
        except HostLost as error:
            code = 0 if "the parent" in str(error) else 2
        finally:
            one.close()
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    one.send(b"from the parent")
    assert other.receive() == b"from the parent"
    one.close()
    other.close()


def test_threads_that_send_and_close_at_random_mix_no_messages_and_all_end() -> None:
    for seed in range(12):
        dice = random.Random(seed)
        one, other = link_pair()

        def send(link: WorkerLink, value: int, sizes: list[int]) -> None:
            for size in sizes:
                link.send(bytes([value]) * size)

        def take(link: WorkerLink) -> list[bytes]:
            taken = []
            try:
                while True:
                    taken.append(link.receive())
            except HostLost:
                return taken

        def close(link: WorkerLink, after: float) -> None:
            time.sleep(after)
            link.close()

        with ThreadPoolExecutor(max_workers=16) as threads, closing(one), closing(other):
            sizes = [[dice.choice((1, 100, 70_000, 2 * MEGABYTE)) for _ in range(20)] for _ in range(4)]
            sends = [threads.submit(send, (one, other)[i % 2], i, sizes[i]) for i in range(4)]
            takes = [threads.submit(take, link) for link in (one, other)]
            closes = [threads.submit(close, link, dice.random() * 0.05) for link in (one, other, one)]
            for done in (*closes, *takes):
                done.result(PATIENCE)
            for sent in sends:
                assert isinstance(sent.exception(PATIENCE), HostLost | None)
        for taken in takes:
            for message in taken.result():
                value = message[0]
                assert message == bytes([value]) * len(message) and len(message) in sizes[value]
        for link in (one, other):
            link._watcher.join(PATIENCE)
            assert [connection.fileno() for connection in link._sockets] == [-1, -1]


def test_a_worker_that_is_killed_is_lost_at_once() -> None:
    with ThreadPoolExecutor() as threads, EchoProcess(PATIENT) as worker:
        worker.link.send(b"alive")
        assert worker.link.receive(PATIENCE) == b"alive"
        waiting = threads.submit(worker.link.receive)
        worker.process.kill()
        with pytest.raises(HostLost, match="rank 0"):  # The limit of silence is that of PATIENT.
            waiting.result(PATIENCE / 2)


def test_a_worker_that_is_stopped_is_lost_and_ends_when_it_wakes() -> None:
    with EchoProcess(LinkLimits(silence_seconds=1.0, beat_seconds=0.1)) as worker:
        lost: list[HostLost] = []
        worker.link.when_lost(lost.append)
        worker.process.send_signal(signal.SIGSTOP)
        with pytest.raises(HostLost, match=r"\(rank 0\) sent no heartbeat for 1 s"):
            worker.link.receive()
        assert soon(lambda: lost)
        worker.process.send_signal(signal.SIGCONT)
        assert worker.process.wait(PATIENCE) == 1
        with pytest.raises(HostLost, match="no heartbeat"):
            worker.link.send(b"welcome back")


def test_heartbeats_count_that_came_while_this_side_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps when it is read for the second time: this process was stopped there, and heartbeats wait."""
    reads = count()
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: 100.0 * (next(reads) > 0))  # type: ignore[attr-defined]
    one, other = socket.socketpair()
    with one, other:
        other.sendall(2 * BEAT.pack(7))
        other.shutdown(socket.SHUT_WR)
        assert beat_until_lost(one, beat_seconds=1.0, silence_seconds=50.0) is HeartbeatLoss.ENDED


def test_silence_is_noticed_by_the_clock_alone() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert beat_until_lost(one, beat_seconds=0.01, silence_seconds=0.1) is HeartbeatLoss.SILENT
        assert len(other.recv(100)) % BEAT.size == 0


def test_heartbeats_tell_the_processor_time_however_they_are_cut() -> None:
    one, other = socket.socketpair()
    heard: list[float] = []
    with one, other, ThreadPoolExecutor() as threads:
        watching = threads.submit(beat_until_lost, one, 0.01, PATIENCE, heard.append)
        for part in (BEAT.pack(1500) + BEAT.pack(2500)[:3], BEAT.pack(2500)[3:], BEAT.pack(4000)):
            known = len(heard)
            other.sendall(part)
            assert soon(lambda known=known: len(heard) > known)
        told = [BEAT.unpack(other.recv(BEAT.size, socket.MSG_WAITALL))[0] for _ in range(3)]
        other.shutdown(socket.SHUT_WR)
        assert watching.result(PATIENCE) is HeartbeatLoss.ENDED
    assert heard == [1.5, 2.5, 4.0]
    assert told == sorted(told) and 0 < told[0] <= 1000 * time.process_time()


def test_each_side_of_a_link_knows_the_processor_time_of_the_other() -> None:
    one, other = link_pair(LinkLimits(silence_seconds=PATIENCE, beat_seconds=0.4))
    assert soon(lambda: one.processor_seconds and other.processor_seconds)
    assert one.processor_seconds is not None and one.processor_seconds <= time.process_time()
    assert soon(lambda: one.silent_seconds > 0.2) and soon(lambda: one.silent_seconds < 0.2)
    one.close()
    other.close()
