"""serve: a worker's loop, which carries out the controller's calls with a real runner, in order. Without mlx."""

from __future__ import annotations

from collections.abc import Callable
from traceback import clear_frames
from typing import TYPE_CHECKING

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
    Open,
    PlanDigest,
    Prepare,
    RankOptions,
    RankState,
    Release,
    Resize,
    RunnerConstants,
    SentPlan,
    Settle,
    TellCommandBuffers,
    Trim,
    Value,
    answer_with,
    copy_error,
    from_sent_plan,
)
from cortexmlx.errors import CortexError, HostLost
from cortexmlx.execution.boundary import Refusal, StepResult
from cortexmlx.scheduling.plan import StepPlan

if TYPE_CHECKING:
    from cortexmlx.distributed.rank import OpenedRank
    from cortexmlx.execution.runner import ModelRunner

OpenRank = Callable[[RankOptions], "OpenedRank"]
"""Loads this rank's part of a model."""


def serve(channel: Channel, open_rank: OpenRank) -> None:
    """Carry out the controller's calls until it sends `Close`. Raises HostLost if the controller is lost, or sends
    what cannot be read.

    A call that raises is answered by its error, as is every later call but `Close`: other ranks may be in a collective
    that this one will never enter, so the group has to be started anew.
    """

    rank = _CallHandler(open_rank)
    try:
        while not rank.closed:
            message = channel.receive()
            try:
                number, call = rank.decode_call(message)
            except HostLost as error:
                channel.send(ANSWER.encode(CallAnswer(0, error=error)))
                raise
            channel.send(ANSWER.encode(rank.handle(number, call)))
    finally:
        rank.close()


class _CallHandler:
    """Carries out the controller's calls on this rank's runner."""

    def __init__(self, open_rank: OpenRank) -> None:
        self.closed = False
        self._open_rank = open_rank
        self._opened_rank: OpenedRank | None = None
        self._made_runner: ModelRunner | None = None
        self._plan: StepPlan | None = None
        self._compare_every = 1
        self._digest = PlanDigest(1)
        self._failure: CortexError | None = None

    def decode_call(self, message: bytes) -> tuple[int, AnyCall]:
        """Decode a call and its number. Raises HostLost."""
        numbered = CALL.decode(message)
        if isinstance(numbered.call, Prepare | Dispatch | Forward) and numbered.call.plan is not None:
            self._digest.add_message(message)
        return numbered.number, numbered.call

    def close(self) -> None:
        """Free the model and all memory. Safe to call again."""
        self.closed, self._plan, self._opened_rank = True, None, None
        if self._made_runner is not None:
            self._made_runner.close()
            self._made_runner = None

    def handle(self, number: int, call: AnyCall) -> CallAnswer:
        """Carry out a call, and return its answer."""
        if isinstance(call, Close):
            self.close()
            return CallAnswer(number)
        if self._failure is not None:
            return CallAnswer(number, error=self._failure)
        try:
            if isinstance(call, Dispatch | Forward | Choose):
                return CallAnswer(number, digest=self._start_step_part(call))
            value = self._carry_out(call)
            runner = self._made_runner
            return answer_with(number, value, None if runner is None else RankState(runner.bytes, runner.blocks))
        except Exception as error:
            clear_frames(error.__traceback__)  # they hold arrays
            self._failure = copy_error(error)
            return CallAnswer(number, error=self._failure)

    @property
    def _runner(self) -> ModelRunner:
        """The runner. Raises HostLost if it is not made yet."""
        if self._made_runner is None:
            raise HostLost("a call came before the model was opened and its layers arranged")
        return self._made_runner

    def _start_step_part(self, call: Dispatch | Forward | Choose) -> bytes | None:
        """Start a step, its forward pass or its choice of tokens. Return the digest if it is to be compared now."""
        runner = self._runner
        if isinstance(call, Choose):
            _raise_if_refused(runner.choose(call.mask))
            return None
        plan = self._resolve_plan(call.plan)
        _raise_if_refused(runner.dispatch(plan) if isinstance(call, Dispatch) else runner.forward(plan))
        return self._digest.add_step(plan, runner.blocks)

    def _resolve_plan(self, sent_plan: SentPlan | None) -> StepPlan:
        """Return the plan that was sent with a call, or else the one that was prepared."""
        if sent_plan is not None:
            self._plan = from_sent_plan(sent_plan)
        if self._plan is None:
            raise HostLost("a step came whose plan was never prepared")
        return self._plan

    def _carry_out(self, call: AnyCall) -> Value:
        """Carry out a call that neither starts a part of a step nor closes. Return the value of its answer."""
        match call:
            case Open(options):
                self._opened_rank = self._open_rank(options)
                self._compare_every = options.compare_every
                return self._opened_rank.info
            case MakeRunner(groups):
                if self._opened_rank is None:
                    raise HostLost("layers were to be arranged before the model was opened")
                self._made_runner = self._opened_rank.make_runner(groups)
                return RunnerConstants(self._made_runner.computes_at_dispatch)
            case Begin(blocks):
                self._digest = PlanDigest(self._compare_every)
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
                return self._runner.prepare(self._resolve_plan(plan))
            case Collect(tell):
                result = _raise_if_refused(self._runner.collect())
                return result if tell else None
            case Settle(ops):
                return self._runner.settle(ops)
            case Forget():
                self._runner.forget()
        return None


def _raise_if_refused(answer: StepResult | Refusal | None) -> StepResult | None:
    """Return a step's result. Raises HostLost if memory was refused: other ranks wait within the step."""
    if isinstance(answer, Refusal):
        raise HostLost(f"memory was refused within a step: {answer.why}")
    return answer
