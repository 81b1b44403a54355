"""Ranks: sends calls to all ranks of a group, and takes their answers. Without mlx."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from cortexmlx.distributed.channel import Channel
from cortexmlx.distributed.messages import (
    ANSWER,
    CALL,
    Answer,
    AnyCall,
    Call,
    Close,
    RankState,
    Value,
    copy_error,
)
from cortexmlx.distributed.overdue import DEFAULT_HANG_LIMITS, HANG_SWITCH, HangLimits, Overdue, OverdueCalls
from cortexmlx.errors import CortexError, HostLost

_CLOSE_SECONDS = 2.0
"""How long `close` waits for the ranks, which may be in a collective that never ends."""

_LOOK_SECONDS = 0.5
"""How often a wait for answers is interrupted, to see who takes too long."""

_BEATS_SECONDS = 2.0
"""While no heartbeat of some rank came for so long, no rank counts as hanging: its link knows soon whether that one was
stopped or is cut off, for which the others wait.
"""

_CAUSE_SECONDS = 1.0
"""How long a rank's failure waits for the news that another rank is lost. If a process dies, its neighbours may fail in
their collective before its connection is known to be closed.
"""

_TOLD_SECONDS = 5.0
"""How long it waits when a connection is known to be lost: its error comes when the launcher was asked how the process
ended.
"""


@dataclass
class _Expected:
    """The digest that a step's answers must have."""

    step: int
    digest: bytes
    ranks: int
    """How many ranks have not answered yet."""


class Ranks:
    """The channels to all ranks. Whatever rank answers, fails or is lost first is heard first, since another one may
    wait for it in a collective for ever. So a thread listens to each channel. A rank whose heartbeats come, and which
    answers nothing for far longer than usual, fails too (`OverdueCalls`).

    The first failure of any rank ends the group: it is raised, and every later call raises HostLost. That also holds
    for an exception that lands while a call is being sent, since some ranks may have it and others not.
    """

    def __init__(
        self, channels: Sequence[Channel], names: Sequence[str], limits: HangLimits = DEFAULT_HANG_LIMITS
    ) -> None:
        """`names` are those of the ranks, as a user would name them."""
        self.channels, self.names = tuple(channels), tuple(names)
        self.states: list[RankState | None] = [None] * len(channels)
        """What each rank told last."""
        self._number = 0
        self._sending = False
        self._lost: CortexError | None = None
        self._digests: dict[int, _Expected] = {}
        self._calls = OverdueCalls(len(channels), limits)
        self._arrived: queue.SimpleQueue[tuple[int, bytes | Exception, float]] = queue.SimpleQueue()
        for rank, channel in enumerate(self.channels):
            listener = threading.Thread(
                target=self._listen, args=(rank, channel), name=f"cortexmlx-{self.names[rank]}", daemon=True
            )
            listener.start()

    @property
    def lost(self) -> bool:
        """Whether the group has ended."""
        return self._lost is not None or self._sending

    def send(self, asks: AnyCall | Sequence[AnyCall | None]) -> tuple[int, bytes]:
        """Send a call to all ranks, or to each its own, or none. Return its number, and the last message that was sent.
        Raises HostLost.
        """
        self._check()
        self._number += 1
        each = asks if isinstance(asks, Sequence) else [asks] * len(self.channels)
        messages: dict[int, bytes] = {}
        message = b""
        for one in each:
            if one is not None and id(one) not in messages:
                messages[id(one)] = message = CALL.encode(Call(self._number, one))
        self._sending = True
        for rank, (channel, one) in enumerate(zip(self.channels, each, strict=True)):
            if one is not None:
                self._calls.note_call(rank, self._number, one, time.monotonic())
                try:
                    channel.send(messages[id(one)])
                except HostLost as error:
                    self._sending = False
                    raise self._end(self._of_channel(rank, error)) from error
        self._sending = False
        return self._number, message

    def ask(self, asks: AnyCall | Sequence[AnyCall | None], opening: bool = False) -> list[Value]:
        """Send a call, and return the answers of all ranks that got it, by rank. Raises HostLost. While a model is
        `opening`, it raises what the first rank raised that did, with its name in front.
        """
        number, _ = self.send(asks)
        asked = [r for r in range(len(self.channels)) if not isinstance(asks, Sequence) or asks[r] is not None]
        return self.answers(number, asked, opening)

    def answers(self, number: int, ranks: Sequence[int], opening: bool = False) -> list[Value]:
        """Wait for the answers of some ranks to a call."""
        values: dict[int, Value] = {}
        while not all(rank in values for rank in ranks):
            self._check()
            rank, answer = self._next(opening)
            if answer.number == number:
                values[rank] = answer.value
        return [values[rank] for rank in ranks]

    def expect(self, number: int, step: int, digest: bytes) -> None:
        """Compare the digest that each rank answers to a call with this one, that of the step `step`."""
        self._digests[number] = _Expected(step, digest, len(self.channels))

    def close(self) -> None:
        """Ask the ranks to close, and end the connections. Raises nothing. Safe to call again."""
        if not self.lost:
            with suppress(HostLost):
                self._await_close(self.send(Close())[0])
        self._lost = self._lost or HostLost("the model on the hosts is closed")
        for channel in self.channels:
            channel.close()

    def _await_close(self, number: int) -> None:
        until, waiting = time.monotonic() + _CLOSE_SECONDS, set(range(len(self.channels)))
        while waiting and (left := until - time.monotonic()) > 0:
            with suppress(queue.Empty):
                rank, message, _ = self._arrived.get(timeout=left)
                if isinstance(message, Exception) or ANSWER.decode(message).number == number:
                    waiting.discard(rank)

    def _listen(self, rank: int, channel: Channel) -> None:
        try:
            while True:
                self._arrived.put((rank, channel.receive(), time.monotonic()))
        except Exception as error:
            self._arrived.put((rank, error, time.monotonic()))

    def _next(self, opening: bool) -> tuple[int, Answer]:
        """Return the next answer of any rank. Raises what a rank raised, and HostLost, also if a rank hangs."""
        rank, message, at = self._next_message()
        name = self.names[rank]
        if isinstance(message, Exception):
            raise self._end(self._of_channel(rank, message))
        try:
            answer = ANSWER.decode(message)
        except HostLost as error:
            raise self._end(copy_error(error, name)) from error
        if (failure := answer.error) is not None:
            own = opening and not isinstance(failure, HostLost)
            raise self._end((not own and self._lost_rank_error()) or copy_error(failure, name), opening)
        self._calls.note_answer(rank, at)
        if answer.state is not None:
            self.states[rank] = answer.state
        self._compare(name, answer)
        return rank, answer

    def _next_message(self) -> tuple[int, bytes | Exception, float]:
        """Return what comes next of any rank, and when it came. Raises HostLost if a rank hangs."""
        while True:
            try:
                return self._arrived.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                overdue = self._calls.look(time.monotonic(), [each.processor_seconds for each in self.channels])
                if overdue is not None and not any(each.silent_seconds > _BEATS_SECONDS for each in self.channels):
                    raise self._end(_hanging_error(overdue, self.names)) from None

    def _lost_rank_error(self) -> CortexError | None:
        """Return the error of a rank whose connection is lost, if that is known within `_CAUSE_SECONDS`."""
        failed = time.monotonic()
        while True:
            with suppress(queue.Empty):
                rank, message, _ = self._arrived.get(timeout=0.02)
                if isinstance(message, Exception):
                    return self._of_channel(rank, message)
            known = any(channel.lost for channel in self.channels)
            if time.monotonic() >= failed + (_TOLD_SECONDS if known else _CAUSE_SECONDS):
                return None

    def _of_channel(self, rank: int, error: Exception) -> CortexError:
        """Return the error of a rank's channel. A loss says itself whose it is, or that it is no worker's."""
        return copy_error(error, error.host if isinstance(error, HostLost) else self.names[rank])

    def _compare(self, name: str, answer: Answer) -> None:
        expected = self._digests.get(answer.number)
        if answer.digest != (None if expected is None else expected.digest):
            at = "" if expected is None else f", as seen at step {expected.step}"
            raise self._end(
                HostLost(
                    f"{name} has carried out other plans or block tables than were sent{at}: this is a fault of "
                    "cortexmlx, please report it",
                    host=name,
                )
            )
        if expected is not None:
            expected.ranks -= 1
            if not expected.ranks:
                del self._digests[answer.number]

    def _check(self) -> None:
        if self._sending:
            raise HostLost("a call to the hosts was interrupted, so that only some have it: the group must start anew")
        if self._lost is not None:
            raise HostLost(str(self._lost), host=getattr(self._lost, "host", None))

    def _end(self, error: CortexError, opening: bool = False) -> CortexError:
        """Note that the group has ended. Return the error to raise: HostLost, unless the model is being opened."""
        if not isinstance(error, HostLost) and not opening:
            error = HostLost(f"{type(error).__name__} on {error}")
        self._lost = error
        return error


def _hanging_error(overdue: Overdue, names: Sequence[str]) -> HostLost:
    """The error for a call that takes too long."""
    usual = "" if overdue.usual is None else f", and calls like it took at most {overdue.usual:.3g} s"
    late = f"took {overdue.seconds:.1f} s for a call while its heartbeats came{usual}"
    slow = f"If it is only slow, give it more time: {HANG_SWITCH}={math.ceil(2 * overdue.seconds)}"
    if overdue.culprit is not None:
        host = names[overdue.culprit]
        return HostLost(f"{host} hangs: it {late}. {slow}", host=host)
    used = "; ".join(
        f"{names[rank]} used {'an unknown' if seconds is None else f'{seconds:.1f} s of'} processor time"
        for rank, seconds in zip(overdue.ranks, overdue.used, strict=True)
    )
    return HostLost(f"a worker hangs, and it is not known which: each {late}. {used}. {slow}")
