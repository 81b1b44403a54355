"""RemoteRunner: a runner whose work is done by workers, each with its part of the model. Without mlx.

Steps are pipelined: `dispatch`, `forward` and `choose` are sent, and not waited for. What goes wrong in them is raised
by the next answer that is read. A step that changes the arena is prepared first, and all ranks answer: if one is
refused memory, no rank begins the pass, in which it would wait for the others.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from cortexmlx.distributed.channel import Channel
from cortexmlx.distributed.messages import (
    ANSWER,
    CALL,
    AnyCall,
    Begin,
    CallAnswer,
    CanResize,
    Choose,
    Close,
    Collect,
    Copy,
    Dispatch,
    Forget,
    Forward,
    MakeRunner,
    NumberedCall,
    Open,
    PlanDigest,
    Prepare,
    RankInfo,
    RankOptions,
    RankState,
    Release,
    Resize,
    RunnerConstants,
    Settle,
    TellCommandBuffers,
    Trim,
    Value,
    copy_error,
    to_sent_plan,
)
from cortexmlx.distributed.overdue import DEFAULT_HANG_LIMITS, HANG_SWITCH, HangDetector, HangLimits, OverdueCall
from cortexmlx.errors import CortexError, HostLost, InvalidRequest
from cortexmlx.execution.boundary import MemoryInUse, Refusal, StepResult, TokenMask
from cortexmlx.kv.snapshots import StateOps
from cortexmlx.kv.spec import GroupCounts, LayerGroup
from cortexmlx.kv.step import BlockCopy
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.stats import ArenaWrites, CommandBuffers
from cortexmlx.types.sampling_params import LogitsProcessor

T = TypeVar("T")


class RemoteRunner:
    """A `Runner` whose work is done by workers, over one channel to each rank, rank 0 first. `open` and `make_runners`
    come first, once each, on any thread. All else is called by the engine's thread only.

    A call raises HostLost, with the host if it is known, if a rank ended, hangs, raised or was refused memory within a
    step's pass. From then on every call raises it, except `forget`, `release`, `trim` and `close`, which clean up and
    never do.
    """

    def __init__(
        self, channels: Sequence[Channel], names: Sequence[str], limits: HangLimits = DEFAULT_HANG_LIMITS
    ) -> None:
        """`names` are those of the ranks, as a user would name them. `limits` say when one hangs."""
        self.processors: MutableMapping[JobId, Sequence[LogitsProcessor]] = _NoProcessors()
        self.computes_at_dispatch = False
        self.build_seconds = 0.0
        """Making bytes of calls, and sending them."""
        self.wait_seconds = 0.0
        """Waiting for answers."""
        self._ranks = RankChannels(channels, names, limits)
        self._compare_every = 1
        self._digest = PlanDigest(1)
        self._runner_constants: list[RunnerConstants] = []
        self._command_buffers: tuple[GroupCounts, CommandBuffers | None] | None = None

    def open(self, options: RankOptions) -> tuple[RankInfo, ...]:
        """Have each rank open its part. Return their descriptions by rank. Raises a rank's error, its name in front."""
        self._compare_every = options.compare_every
        return tuple(_check_answer_types(self._ranks.ask(Open(options), is_opening=True), RankInfo))

    def make_runners(self, groups: Sequence[Sequence[LayerGroup]]) -> None:
        """Have every rank make its runner. `groups[rank]` are the groups of all ranks in one order, each with the
        layers that this rank has of it. Raises as `open`.
        """
        answers = self._ranks.ask([MakeRunner(tuple(each)) for each in groups], is_opening=True)
        self._runner_constants = _check_answer_types(answers, RunnerConstants)
        self.computes_at_dispatch = self._runner_constants[0].computes_at_dispatch

    @property
    def ranks(self) -> tuple[RankState, ...]:
        """The state of each rank, as of its newest answer."""
        return tuple(state for state in self._ranks.states if state is not None)

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> GroupCounts:
        """How many blocks each layer group has in the smallest arena of all ranks."""
        return tuple(map(min, zip(*(state.blocks for state in self.ranks), strict=True)))

    @property
    def bytes(self) -> MemoryInUse:
        """The sum of all ranks' memory, as of their newest answers."""
        rank_memory = [state.bytes for state in self.ranks]
        writes = [each.writes for each in rank_memory]
        return MemoryInUse(
            sum(each.arena for each in rank_memory),
            sum(each.tail for each in rank_memory),
            sum(each.states for each in rank_memory),
            sum(each.active for each in rank_memory),
            sum(each.peak for each in rank_memory),
            ArenaWrites(
                sum(each.measured for each in writes),
                sum(each.copied for each in writes),
                sum(each.copied_bytes for each in writes),
            ),
        )

    @property
    def command_buffers(self) -> CommandBuffers | None:
        """The command buffers of rank 0, read again when the arena's size changes. Other ranks have about as many."""
        if self.computes_at_dispatch or self._ranks.has_ended:
            return None
        if self._command_buffers is None or self._command_buffers[0] != self.blocks:
            other_calls = [None] * (len(self._runner_constants) - 1)
            (answer,) = self._ranks.ask([TellCommandBuffers(), *other_calls])
            self._command_buffers = self.blocks, answer if isinstance(answer, CommandBuffers) else None
        return self._command_buffers[1]

    def begin(self, blocks: GroupCounts) -> Refusal | None:
        """Do what `Runner.begin` says, on all ranks. If one rank is refused memory, no rank has an arena."""
        self._digest = PlanDigest(self._compare_every)
        refusal = _worst_refusal(self._ask_all(Begin(blocks)))
        if refusal is not None:
            self.release()
        return refusal

    def can_resize(self, blocks: GroupCounts) -> bool:
        """Return whether all ranks would get the memory now."""
        return all(self._ask_all(CanResize(blocks)))

    def resize(self, blocks: GroupCounts) -> Refusal | None:
        """Resize all arenas. If one rank is refused memory, the others go back to the sizes that they had."""
        return self._ask_to_resize(Resize(blocks))

    def copy(self, copies: Sequence[BlockCopy]) -> Refusal | None:
        """Copy blocks in the arenas of all ranks."""
        return _worst_refusal(self._ask_all(Copy(tuple(copies))))

    def release(self) -> None:
        """Free the arenas of all ranks."""
        with suppress(HostLost):
            self._ask_all(Release())

    def trim(self) -> None:
        """Free memory that ranks keep for later steps."""
        with suppress(HostLost):
            self._ask_all(Trim())

    # -- steps --------------------------------------------------------------------------------------------------------

    def dispatch(self, plan: StepPlan) -> Refusal | None:
        """Start a step on all ranks."""
        return self._start_step(plan, Dispatch)

    def forward(self, plan: StepPlan) -> Refusal | None:
        """Start the forward pass of a step on all ranks."""
        return self._start_step(plan, Forward)

    def choose(self, mask: TokenMask | None = None) -> Refusal | None:
        """Have the ranks choose tokens. Rank 0 chooses, so only it gets the mask."""
        start_time = time.perf_counter()
        self._ranks.send([Choose(mask)] + [Choose(None)] * (len(self._runner_constants) - 1))
        self.build_seconds += time.perf_counter() - start_time
        return None

    def collect(self) -> StepResult | Refusal:
        """Wait for rank 0's result of the step. The others finish soon, too, and say so in their next answers."""
        number, _ = self._ranks.send([Collect(True)] + [Collect(False)] * (len(self._runner_constants) - 1))
        (result,) = _check_answer_types(self._await_answers(number, [0]), StepResult)
        return result

    def settle(self, ops: StateOps) -> Refusal | None:
        """Carry out state operations on all ranks, and drop everything of the last step."""
        return _worst_refusal(self._ask_all(Settle(ops)))

    def forget(self) -> None:
        """Have all ranks drop everything in flight. An error in it is raised by the next answer that is read."""
        with suppress(HostLost):
            self._ranks.send(Forget())

    def close(self) -> None:
        """Have all workers end, if they still answer, and close the connections. Safe to call again."""
        self._ranks.close()

    def _start_step(self, plan: StepPlan, call: type[Dispatch] | type[Forward]) -> Refusal | None:
        """Send a step to all ranks, after they have prepared it if it changes the arena."""
        start_time, previous_wait_seconds = time.perf_counter(), self.wait_seconds
        if self._changes_arena(plan):
            refusal = self._ask_to_resize(Prepare(to_sent_plan(plan)))
            if refusal is not None:
                return refusal
            number, _ = self._ranks.send(call(None))
        else:
            number, message = self._ranks.send(call(to_sent_plan(plan)))
            self._digest.add_message(message)
        digest = self._digest.add_step(plan, plan.blocks)
        if digest is not None:
            self._ranks.expect_digest(number, plan.number, digest)
        self.build_seconds += time.perf_counter() - start_time - (self.wait_seconds - previous_wait_seconds)
        return None

    def _changes_arena(self, plan: StepPlan) -> bool:
        """Return whether a step first flushes, copies or resizes, for which memory may be refused."""
        return plan.flush is not None or bool(plan.copies) or any(state.blocks != plan.blocks for state in self.ranks)

    # -- all ranks ----------------------------------------------------------------------------------------------------

    def _ask_all(self, call: AnyCall) -> list[Value]:
        """Send a call to all ranks, and return their answers."""
        return self._await_answers(self._ranks.send(call)[0], range(len(self._ranks.names)))

    def _await_answers(self, number: int, ranks: Sequence[int]) -> list[Value]:
        """Wait for answers to a call, and add the time to `wait_seconds`."""
        start_time = time.perf_counter()
        answers = self._ranks.await_answers(number, ranks)
        self.wait_seconds += time.perf_counter() - start_time
        return answers

    def _ask_to_resize(self, call: Resize | Prepare) -> Refusal | None:
        """Send all ranks a call that resizes their arenas. If some refuse, undo it on the others."""
        previous_blocks = [state.blocks for state in self.ranks]
        number, message = self._ranks.send(call)
        if isinstance(call, Prepare):
            self._digest.add_message(message)
        refusal = _worst_refusal(self._await_answers(number, range(len(previous_blocks))))
        if refusal is None or not refusal.is_resize:
            return refusal
        undo = [
            None if state.blocks == blocks else Resize(blocks)
            for state, blocks in zip(self.ranks, previous_blocks, strict=True)
        ]
        if _worst_refusal(self._ranks.ask(undo)) is not None:  # now some arenas are larger than others
            return Refusal(refusal.why, is_resize=False)
        return refusal


class _NoProcessors(dict[JobId, Sequence[LogitsProcessor]]):
    """The logits processors of jobs: always empty, since functions cannot be sent to workers."""

    def __setitem__(self, job: JobId, processors: Sequence[LogitsProcessor]) -> NoReturn:
        raise InvalidRequest(
            "logits_processors are functions of this process, and the model runs on hosts: leave them out, or run the "
            "model without hosts",
            field="logits_processors",
        )


def _check_answer_types(answers: Sequence[Value], kind: type[T]) -> list[T]:
    """Return the answers of all ranks if they are of this type. Raises HostLost otherwise."""
    of_kind = [answer for answer in answers if isinstance(answer, kind)]
    if len(of_kind) != len(answers):
        raise HostLost(f"a worker answered {[type(answer).__name__ for answer in answers]} instead of {kind.__name__}")
    return of_kind


def _worst_refusal(answers: Sequence[Value]) -> Refusal | None:
    """Return one of the refusals in `answers`, preferably one that may have left an arena half written; None if there
    is none. A refusal may say that the arena is unchanged only if it is so on all ranks.
    """
    refusals = [answer for answer in answers if isinstance(answer, Refusal)]
    return min(refusals, key=lambda refused: refused.is_resize, default=None)


# RankChannels: sends calls to all ranks of a group, and takes their answers.


_CLOSE_SECONDS = 2.0
"""How long `close` waits for the ranks, which may be in a collective that never ends."""

_LOOK_SECONDS = 0.5
"""How often a wait for answers is interrupted, to see who takes too long."""

_SILENT_SECONDS = 2.0
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
class _ExpectedDigest:
    """The plan digest that the answers to a call must have."""

    step: int
    digest: bytes
    ranks: int
    """How many ranks have not answered yet."""


class RankChannels:
    """The channels to all ranks of a group. A thread listens to each, so that the failure of one rank is noticed
    while others wait for it in a collective. A rank that sends heartbeats but answers nothing for far longer than usual
    fails, too (`HangDetector`).

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
        self._is_sending = False
        self._failure: CortexError | None = None
        self._digests: dict[int, _ExpectedDigest] = {}
        self._calls = HangDetector(len(channels), limits)
        self._message_queue: queue.SimpleQueue[tuple[int, bytes | Exception, float]] = queue.SimpleQueue()
        for rank, channel in enumerate(self.channels):
            listener = threading.Thread(
                target=self._listen, args=(rank, channel), name=f"cortexmlx-{self.names[rank]}", daemon=True
            )
            listener.start()

    @property
    def has_ended(self) -> bool:
        """Whether the group has ended: by a failure, by an interrupted call, or by `close`."""
        return self._failure is not None or self._is_sending

    def send(self, call_or_calls: AnyCall | Sequence[AnyCall | None]) -> tuple[int, bytes]:
        """Send all ranks one call, or each its own or none. Return its number and last message. Raises HostLost."""
        self._raise_if_ended()
        self._number += 1
        calls = call_or_calls if isinstance(call_or_calls, Sequence) else [call_or_calls] * len(self.channels)
        messages: dict[int, bytes] = {}
        message = b""
        for call in calls:
            if call is not None and id(call) not in messages:
                messages[id(call)] = message = CALL.encode(NumberedCall(self._number, call))
        self._is_sending = True
        for rank, (channel, call) in enumerate(zip(self.channels, calls, strict=True)):
            if call is not None:
                self._calls.note_call(rank, self._number, call, time.monotonic())
                try:
                    channel.send(messages[id(call)])
                except HostLost as error:
                    self._is_sending = False
                    raise self._mark_ended(self._channel_error(rank, error)) from error
        self._is_sending = False
        return self._number, message

    def ask(self, calls: AnyCall | Sequence[AnyCall | None], is_opening: bool = False) -> list[Value]:
        """Send a call, and return the answers of all ranks that got it, by rank. Raises HostLost. With `is_opening`,
        while a model is opened, it raises the first error of a rank, with the rank's name in front.
        """
        number, _ = self.send(calls)
        asked_ranks = [r for r in range(len(self.channels)) if not isinstance(calls, Sequence) or calls[r] is not None]
        return self.await_answers(number, asked_ranks, is_opening)

    def await_answers(self, number: int, ranks: Sequence[int], is_opening: bool = False) -> list[Value]:
        """Wait for the answers of some ranks to the call with this number."""
        values: dict[int, Value] = {}
        while not all(rank in values for rank in ranks):
            self._raise_if_ended()
            rank, answer = self._next_answer(is_opening)
            if answer.number == number:
                values[rank] = answer.value
        return [values[rank] for rank in ranks]

    def expect_digest(self, number: int, step: int, digest: bytes) -> None:
        """Require that every rank answers call `number` with this digest of the plans up to step `step`."""
        self._digests[number] = _ExpectedDigest(step, digest, len(self.channels))

    def close(self) -> None:
        """Ask the ranks to close, and end the connections. Raises nothing. Safe to call again."""
        if not self.has_ended:
            with suppress(HostLost):
                self._await_close(self.send(Close())[0])
        self._failure = self._failure or HostLost("the model on the hosts is closed")
        for channel in self.channels:
            channel.close()

    def _await_close(self, number: int) -> None:
        """Wait for all answers to the call that closes, for two seconds at most."""
        deadline, waiting_ranks = time.monotonic() + _CLOSE_SECONDS, set(range(len(self.channels)))
        while waiting_ranks and (remaining := deadline - time.monotonic()) > 0:
            with suppress(queue.Empty):
                rank, message, _ = self._message_queue.get(timeout=remaining)
                if isinstance(message, Exception) or ANSWER.decode(message).number == number:
                    waiting_ranks.discard(rank)

    def _listen(self, rank: int, channel: Channel) -> None:
        """Queue all messages of a rank, and its loss at the end: the target of each thread."""
        try:
            while True:
                self._message_queue.put((rank, channel.receive(), time.monotonic()))
        except Exception as error:
            self._message_queue.put((rank, error, time.monotonic()))

    def _next_answer(self, is_opening: bool) -> tuple[int, CallAnswer]:
        """Return the next answer of any rank. Raises a rank's error, and HostLost, also if a rank hangs."""
        rank, message, arrival_time = self._next_message()
        name = self.names[rank]
        if isinstance(message, Exception):
            raise self._mark_ended(self._channel_error(rank, message))
        try:
            answer = ANSWER.decode(message)
        except HostLost as error:
            raise self._mark_ended(copy_error(error, name)) from error
        if (failure := answer.error) is not None:
            is_own_error = is_opening and not isinstance(failure, HostLost)
            raise self._mark_ended(
                (not is_own_error and self._lost_rank_error()) or copy_error(failure, name), is_opening
            )
        self._calls.note_answer(rank, arrival_time)
        if answer.state is not None:
            self.states[rank] = answer.state
        self._compare_digest(name, answer)
        return rank, answer

    def _next_message(self) -> tuple[int, bytes | Exception, float]:
        """Return the next message or failure of any rank, and when it came. Raises HostLost if a rank hangs."""
        while True:
            try:
                return self._message_queue.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                overdue = self._calls.find_overdue(time.monotonic(), [each.processor_seconds for each in self.channels])
                if overdue is not None and not any(each.silent_seconds > _SILENT_SECONDS for each in self.channels):
                    raise self._mark_ended(_hanging_error(overdue, self.names)) from None

    def _lost_rank_error(self) -> CortexError | None:
        """Return the error of a rank whose connection is lost, if one is known within `_CAUSE_SECONDS`; else None."""
        failure_time = time.monotonic()
        while True:
            with suppress(queue.Empty):
                rank, message, _ = self._message_queue.get(timeout=0.02)
                if isinstance(message, Exception):
                    return self._channel_error(rank, message)
            is_loss_known = any(channel.loss_reason for channel in self.channels)
            if time.monotonic() >= failure_time + (_TOLD_SECONDS if is_loss_known else _CAUSE_SECONDS):
                return None

    def _channel_error(self, rank: int, error: Exception) -> CortexError:
        """Return the error of a rank's channel, with the host that it is about."""
        return copy_error(error, error.host if isinstance(error, HostLost) else self.names[rank])

    def _compare_digest(self, name: str, answer: CallAnswer) -> None:
        """Raise HostLost if an answer has another digest than expected."""
        expected = self._digests.get(answer.number)
        if answer.digest != (None if expected is None else expected.digest):
            step_text = "" if expected is None else f", as seen at step {expected.step}"
            raise self._mark_ended(
                HostLost(
                    f"{name} has carried out other plans or block tables than were sent{step_text}: this is a fault of "
                    "cortexmlx, please report it",
                    host=name,
                )
            )
        if expected is not None:
            expected.ranks -= 1
            if not expected.ranks:
                del self._digests[answer.number]

    def _raise_if_ended(self) -> None:
        """Raise HostLost if the group has ended, or if a call was interrupted."""
        if self._is_sending:
            raise HostLost("a call to the hosts was interrupted, so that only some have it: the group must start anew")
        if self._failure is not None:
            raise HostLost(str(self._failure), host=getattr(self._failure, "host", None))

    def _mark_ended(self, error: CortexError, is_opening: bool = False) -> CortexError:
        """Note that the group has ended. Return the error to raise: HostLost, unless the model is being opened."""
        if not isinstance(error, HostLost) and not is_opening:
            error = HostLost(f"{type(error).__name__} on {error}")
        self._failure = error
        return error


def _hanging_error(overdue: OverdueCall, names: Sequence[str]) -> HostLost:
    """Return the error for a call that takes too long."""
    usual_text = (
        "" if overdue.usual_seconds is None else f", and calls like it took at most {overdue.usual_seconds:.3g} s"
    )
    delay_text = f"took {overdue.seconds:.1f} s for a call while its heartbeats came{usual_text}"
    hint = f"If it is only slow, give it more time: {HANG_SWITCH}={math.ceil(2 * overdue.seconds)}"
    if overdue.culprit is not None:
        host = names[overdue.culprit]
        return HostLost(f"{host} hangs: it {delay_text}. {hint}", host=host)
    usage_text = "; ".join(
        f"{names[rank]} used {'an unknown' if seconds is None else f'{seconds:.1f} s of'} processor time"
        for rank, seconds in zip(overdue.ranks, overdue.processor_seconds, strict=True)
    )
    return HostLost(f"a worker hangs, and it is not known which: each {delay_text}. {usage_text}. {hint}")
