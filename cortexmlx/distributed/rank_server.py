"""serve: a worker's loop. It carries out the controller's calls with a real runner, in order. Without mlx."""

from __future__ import annotations

from collections.abc import Callable
from traceback import clear_frames
from typing import TYPE_CHECKING

from cortexmlx.distributed.channel import Channel
from cortexmlx.distributed.messages import (
    ANSWER,
    CALL,
    Answer,
    AnyCall,
    Arrange,
    Arranged,
    Begin,
    CanResize,
    Choose,
    Close,
    Collect,
    Copy,
    Dispatch,
    Forget,
    Forward,
    Open,
    PlanDigest,
    Prepare,
    RankOptions,
    RankState,
    Release,
    Resize,
    SentPlan,
    Settle,
    TellCommandBuffers,
    Trim,
    Value,
    answer_with,
    copy_error,
    whole_plan,
)
from cortexmlx.errors import CortexError, HostLost
from cortexmlx.execution.boundary import Refused, StepResult
from cortexmlx.scheduling.plan import StepPlan

if TYPE_CHECKING:
    from cortexmlx.distributed.rank import OpenedRank
    from cortexmlx.execution.runner import ModelRunner

OpenRank = Callable[[RankOptions], "OpenedRank"]
"""Loads this rank's part of a model."""


def serve(channel: Channel, open_rank: OpenRank) -> None:
    """Carry out the controller's calls until it asks to close. Raises HostLost if the controller is lost, or if what
    comes from it cannot be read.

    A call that raises is answered by its error, as is every later call but `Close`: other ranks may be in a collective
    that this one will never enter, so the group has to be started anew.
    """

    rank = _Rank(open_rank)
    try:
        while not rank.closed:
            message = channel.receive()
            try:
                number, asks = rank.read(message)
            except HostLost as error:
                channel.send(ANSWER.encode(Answer(0, error=error)))
                raise
            channel.send(ANSWER.encode(rank.answer(number, asks)))
    finally:
        rank.close()


class _Rank:
    """Carries out calls."""

    def __init__(self, open_rank: OpenRank) -> None:
        self.closed = False
        self._open_rank = open_rank
        self._opened: OpenedRank | None = None
        self._made: ModelRunner | None = None
        self._plan: StepPlan | None = None
        self._every = 1
        self._digest = PlanDigest(1)
        self._failed: CortexError | None = None

    def read(self, message: bytes) -> tuple[int, AnyCall]:
        """Return a call with its number. Raises HostLost."""
        call = CALL.decode(message)
        if isinstance(call.asks, Prepare | Dispatch | Forward) and call.asks.plan is not None:
            self._digest.add(message)
        return call.number, call.asks

    def close(self) -> None:
        """Free the model and all memory. Safe to call again."""
        self.closed, self._plan, self._opened = True, None, None
        if self._made is not None:
            self._made.close()
            self._made = None

    def answer(self, number: int, asks: AnyCall) -> Answer:
        """Carry out a call, and return its answer."""
        if isinstance(asks, Close):
            self.close()
            return Answer(number)
        if self._failed is not None:
            return Answer(number, error=self._failed)
        try:
            if isinstance(asks, Dispatch | Forward | Choose):
                return Answer(number, digest=self._start(asks))
            value = self._carry_out(asks)
            return answer_with(number, value, self._state())
        except Exception as error:
            clear_frames(error.__traceback__)  # they hold arrays
            self._failed = copy_error(error)
            return Answer(number, error=self._failed)

    @property
    def _runner(self) -> ModelRunner:
        if self._made is None:
            raise HostLost("a call came before the model was opened and its layers arranged")
        return self._made

    def _state(self) -> RankState | None:
        runner = self._made
        if runner is None:
            return None
        return RankState(runner.bytes, runner.blocks, runner.build_seconds, runner.wait_seconds)

    def _start(self, asks: Dispatch | Forward | Choose) -> bytes | None:
        """Start a part of a step. Return the digest if it is to be compared now."""
        runner = self._runner
        if isinstance(asks, Choose):
            _check_granted(runner.choose(asks.mask))
            return None
        plan = self._whole(asks.plan)
        _check_granted(runner.dispatch(plan) if isinstance(asks, Dispatch) else runner.forward(plan))
        return self._digest.take(plan, runner.blocks)

    def _whole(self, sent: SentPlan | None) -> StepPlan:
        """Return the plan that was sent now, or, if none was, the one that was prepared."""
        if sent is not None:
            self._plan = whole_plan(sent)
        if self._plan is None:
            raise HostLost("a step came whose plan was never prepared")
        return self._plan

    def _carry_out(self, asks: AnyCall) -> Value:
        match asks:
            case Open(options):
                self._opened = self._open_rank(options)
                self._every = options.compare_every
                return self._opened.info
            case Arrange(groups):
                if self._opened is None:
                    raise HostLost("layers were to be arranged before the model was opened")
                self._made = self._opened.arrange(groups)
                return Arranged(self._made.computes_at_dispatch)
            case Begin(blocks):
                self._digest = PlanDigest(self._every)
                return self._runner.begin(blocks)
            case CanResize(blocks):
                return self._runner.can_resize(blocks)
            case Resize(blocks):
                return self._runner.resize(blocks)
            case Copy(copies):
                return self._runner.copy(copies)
            case Release():
                self._runner.release()
            case Trim():
                self._runner.trim()
            case TellCommandBuffers():
                return self._runner.command_buffers
            case Prepare(plan):
                return self._runner.prepare(self._whole(plan))
            case Collect(tell):
                result = _check_granted(self._runner.collect())
                return result if tell else None
            case Settle(ops):
                return self._runner.settle(ops)
            case Forget():
                self._runner.forget()
        return None


def _check_granted(answer: StepResult | Refused | None) -> StepResult | None:
    """Return an answer that is no refusal. A refusal within a step's pass ends the group: other ranks are in it."""
    if isinstance(answer, Refused):
        raise HostLost(f"memory was refused within a step: {answer.why}")
    return answer
