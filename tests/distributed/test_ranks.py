"""Calls to all ranks: whatever goes wrong first is heard first, whichever rank is waited for."""

from __future__ import annotations

import itertools
import threading

import pytest

from cortexmlx.distributed import remote_runner as ranks_module
from cortexmlx.distributed.messages import ANSWER, CALL, CanResize, Forget, Value, answer_with
from cortexmlx.distributed.overdue import DEFAULT_HANG_LIMITS, HangLimits, OverdueCall
from cortexmlx.distributed.remote_runner import RankChannels
from cortexmlx.errors import HostLost, ModelCorrupt
from support.hosts.channels import QueueChannel, channel_pair
from support.patience import PATIENCE, soon


class Group:
    """Ranks whose answers the test gives."""

    def __init__(self, count: int, limits: HangLimits = DEFAULT_HANG_LIMITS) -> None:
        pairs = [channel_pair(f"rank {rank}") for rank in range(count)]
        self.ends = [theirs for _, theirs in pairs]
        self.ranks = RankChannels([ours for ours, _ in pairs], [ours.name for ours, _ in pairs], limits)

    def answer(self, rank: int, value: Value, digest: bytes | None = None) -> None:
        """Answer the next call of a rank."""
        end: QueueChannel = self.ends[rank]
        end.send(ANSWER.encode(answer_with(CALL.decode(end.receive()).number, value, digest=digest)))


def test_answers_are_by_rank_whoever_answers_first() -> None:
    group = Group(3)
    number, _ = group.ranks.send(CanResize((1,)))
    for rank, value in ((2, False), (0, True), (1, None)):
        group.answer(rank, value)
    assert group.ranks.await_answers(number, [0, 1, 2]) == [True, None, False]


def test_each_rank_can_get_its_own_call_or_none() -> None:
    group = Group(3)
    number, _ = group.ranks.send([CanResize((1,)), None, CanResize((2,))])
    assert [CALL.decode(group.ends[rank].receive()).call for rank in (0, 2)] == [CanResize((1,)), CanResize((2,))]
    for rank in (0, 2):
        group.ends[rank].send(ANSWER.encode(answer_with(number, True)))
    assert group.ranks.await_answers(number, [0, 2]) == [True, True]
    assert not group.ends[1].other.sent, "it was not asked"


def test_a_failure_is_heard_while_another_rank_is_waited_for() -> None:
    group = Group(2)
    number, _ = group.ranks.send(Forget())
    group.answer(1, ModelCorrupt("no weights"))
    with pytest.raises(HostLost, match="ModelCorrupt on rank 1: no weights"):
        group.ranks.await_answers(number, [0])
    assert group.ranks.has_ended


def test_a_lost_rank_is_named_though_its_neighbour_failed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process dies, its neighbour's collective fails, and then the connection is found to be closed."""
    monkeypatch.setattr(ranks_module, "_CAUSE_SECONDS", 60.0)
    group = Group(3)
    number, _ = group.ranks.send(Forget())
    group.answer(0, HostLost("RuntimeError: the ring broke"))
    group.answer(2, None)
    threading.Timer(0.05, group.ends[1].close).start()
    with pytest.raises(HostLost, match="rank 1: the connection is closed") as raised:
        group.ranks.await_answers(number, [0, 1, 2])
    assert raised.value.host == "rank 1"


def test_a_lost_rank_is_named_though_how_it_ended_is_known_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a connection comes when the launcher was asked how the process ended, which takes a moment."""
    monkeypatch.setattr(ranks_module, "_CAUSE_SECONDS", 0.0)
    monkeypatch.setattr(ranks_module, "_TOLD_SECONDS", PATIENCE)
    group = Group(2)
    number, _ = group.ranks.send(Forget())
    asked = threading.Event()
    lost = HostLost("rank 1 ended", host="rank 1")
    monkeypatch.setattr(group.ends[1].other, "_error", lambda: asked.wait() and lost)
    group.ends[1].close()
    group.answer(0, HostLost("RuntimeError: the ring broke"))
    threading.Timer(0.1, asked.set).start()
    with pytest.raises(HostLost, match=r"^rank 1 ended$"):
        group.ranks.await_answers(number, [0, 1])


def test_a_loss_that_is_no_rank_s_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for answered in (False, True):
        group = Group(2)
        number, _ = group.ranks.send(Forget())
        monkeypatch.setattr(group.ends[1].other, "_error", lambda: HostLost("the launcher was ended"))
        if answered:
            group.answer(0, HostLost("RuntimeError: the ring broke"))
        group.ends[1].close()
        with pytest.raises(HostLost, match=r"^the launcher was ended$") as raised:
            group.ranks.await_answers(number, [0, 1])
        assert raised.value.host is None
        group = Group(1)
        monkeypatch.setattr(group.ends[0].other, "_error", lambda: HostLost("the launcher was ended"))
        group.ends[0].close()
        with pytest.raises(HostLost, match=r"^the launcher was ended$"):
            group.ranks.send(Forget())


IMPATIENT = HangLimits(0.05, 0.05)


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are interrupted all the time."""
    monkeypatch.setattr(ranks_module, "_LOOK_SECONDS", 0.01)


def test_a_rank_that_hangs_while_its_heartbeats_come_is_named(looking: None) -> None:
    group = Group(3, IMPATIENT)
    number, _ = group.ranks.send(Forget())
    for rank in (0, 2):
        group.answer(rank, None)
    assert soon(lambda: group.ranks._message_queue.qsize() == 2)
    with pytest.raises(HostLost, match=r"^rank 1 hangs: it took \d+\.\d s for a call while its heartbeats") as raised:
        group.ranks.await_answers(number, [0, 1, 2])
    assert raised.value.host == "rank 1" and group.ranks.has_ended
    assert "If it is only slow, give it more time: CORTEXMLX_HANG_SECONDS=" in str(raised.value)
    with pytest.raises(HostLost, match="rank 1 hangs"):
        group.ranks.send(Forget())


@pytest.mark.parametrize("silent", [0, 1])
def test_no_rank_hangs_while_the_heartbeats_of_one_do_not_come(looking: None, silent: int) -> None:
    """That one was stopped, and its link will say so. The other one waits for it."""
    group = Group(2, IMPATIENT)
    group.ends[silent].other.silent_seconds = 2.1
    number, _ = group.ranks.send(Forget())
    group.answer(0, None)
    threading.Timer(0.5, group.ends[silent].close).start()
    with pytest.raises(HostLost, match=f"rank {silent}: the connection is closed"):
        group.ranks.await_answers(number, [0, 1])


@pytest.mark.parametrize(
    ("busy", "who", "host"),
    [
        ((False, True), "^rank 0 hangs: it took", "rank 0"),
        ((True, True), r"not known which: .*rank 0 used \d+\.0 s.*rank 1 used \d+\.0 s of processor", None),
    ],
)
def test_if_all_wait_the_one_that_does_nothing_hangs_or_all_are_told(
    looking: None, monkeypatch: pytest.MonkeyPatch, busy: tuple[bool, ...], who: str, host: str | None
) -> None:
    group = Group(2, IMPATIENT)
    number, _ = group.ranks.send(Forget())
    own, looks = group.ranks._calls.find_overdue, itertools.count()

    def look(now: float, used: object) -> OverdueCall | None:
        seconds = 1000.0 * next(looks)
        return own(now, [seconds * works for works in busy])

    monkeypatch.setattr(group.ranks._calls, "find_overdue", look)
    with pytest.raises(HostLost, match=who) as raised:
        group.ranks.await_answers(number, [0, 1])
    assert raised.value.host == host


def test_a_rank_that_is_only_slow_is_waited_for(looking: None) -> None:
    group = Group(2)
    number, _ = group.ranks.send(CanResize((1,)))
    group.answer(0, True)
    threading.Timer(0.2, group.answer, (1, True)).start()
    assert group.ranks.await_answers(number, [0, 1]) == [True, True]


def test_answers_to_a_call_that_nobody_waits_for_any_more_are_passed_over() -> None:
    group = Group(2)
    group.ranks.send(CanResize((1,)))
    number, _ = group.ranks.send(CanResize((2,)))
    for rank in (0, 1):
        group.answer(rank, True)
        group.answer(rank, False)
    assert group.ranks.await_answers(number, [0, 1]) == [False, False]


@pytest.mark.parametrize("digests", [(b"same", None), (b"same", b"other"), (b"same", b"same")])
def test_a_digest_that_is_missing_or_another_one_is_found(digests: tuple[bytes, bytes | None]) -> None:
    group = Group(2)
    number, _ = group.ranks.send(Forget())
    group.ranks.expect_digest(number, 77, b"same")
    for rank, digest in enumerate(digests):
        group.answer(rank, None, digest)
    if digests[1] == b"same":
        group.ranks.await_answers(number, [0, 1])
        assert not group.ranks._digests
        return
    with pytest.raises(HostLost, match=r"rank 1 has carried out other plans or block tables .*at step 77"):
        group.ranks.await_answers(number, [0, 1])


def test_a_digest_that_nobody_asked_for_is_found() -> None:
    group = Group(1)
    number, _ = group.ranks.send(Forget())
    group.answer(0, None, b"x")
    with pytest.raises(HostLost, match="other plans"):
        group.ranks.await_answers(number, [0])


def test_bytes_that_are_no_answer_end_the_group() -> None:
    group = Group(1)
    number, _ = group.ranks.send(Forget())
    group.ends[0].send(b"\xff\xff")
    with pytest.raises(HostLost, match="rank 0: a message cannot be read"):
        group.ranks.await_answers(number, [0])


def test_what_cannot_be_encoded_is_sent_to_nobody() -> None:
    group = Group(2)
    with pytest.raises(TypeError):
        group.ranks.send(CanResize((object(),)))  # type: ignore[arg-type]
    assert not group.ranks.has_ended and not group.ends[0].other.sent


def test_close_does_not_wait_for_a_rank_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "_CLOSE_SECONDS", 0.05)
    group = Group(2)
    group.ranks.close()
    with pytest.raises(HostLost):
        group.ends[0].send(b"late")
