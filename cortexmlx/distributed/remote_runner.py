"""RemoteRunner: a runner whose work is done by workers, each with its part of the model. Without mlx.

Steps are pipelined: `dispatch`, `forward` and `choose` are sent, and not waited for. What goes wrong in them is raised
by the next answer that is read. A step that changes the arena is prepared first, and all ranks answer: if one is
refused memory, no rank begins the pass, in which it would wait for the others.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from typing import NoReturn, TypeVar

from cortexmlx.distributed.channel import Channel
from cortexmlx.distributed.messages import (
    AnyCall,
    Begin,
    CanResize,
    Choose,
    Collect,
    Copy,
    Dispatch,
    Forget,
    Forward,
    MakeRunner,
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
    to_sent_plan,
)
from cortexmlx.distributed.overdue import DEFAULT_HANG_LIMITS, HangLimits
from cortexmlx.distributed.ranks import RankChannels
from cortexmlx.errors import HostLost, InvalidRequest
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
    come first, once each. Only the engine's thread may call it.

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
        """The memory of all ranks in sum, as of their newest answers."""
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
        """As `Runner.begin`, on all ranks. If one rank is refused memory, no rank has an arena."""
        self._digest = PlanDigest(self._compare_every)
        refusal = _first_refusal(self._ask_all(Begin(blocks)))
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
        return _first_refusal(self._ask_all(Copy(tuple(copies))))

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
        return _first_refusal(self._ask_all(Settle(ops)))

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

    def _ask_all(self, asks: AnyCall) -> list[Value]:
        """Send a call to all ranks, and return their answers."""
        return self._await_answers(self._ranks.send(asks)[0], range(len(self._ranks.names)))

    def _await_answers(self, number: int, ranks: Sequence[int]) -> list[Value]:
        """Wait for answers to a call, and add the time to `wait_seconds`."""
        start_time = time.perf_counter()
        answers = self._ranks.await_answers(number, ranks)
        self.wait_seconds += time.perf_counter() - start_time
        return answers

    def _ask_to_resize(self, asks: Resize | Prepare) -> Refusal | None:
        """Send all ranks a call that resizes their arenas. If some refuse, undo it on the others."""
        previous_blocks = [state.blocks for state in self.ranks]
        number, message = self._ranks.send(asks)
        if isinstance(asks, Prepare):
            self._digest.add_message(message)
        refusal = _first_refusal(self._await_answers(number, range(len(previous_blocks))))
        if refusal is None or not refusal.of_arena:
            return refusal
        undo = [
            None if state.blocks == blocks else Resize(blocks)
            for state, blocks in zip(self.ranks, previous_blocks, strict=True)
        ]
        if _first_refusal(self._ranks.ask(undo)) is not None:  # now some arenas are larger than others
            return Refusal(refusal.why, of_arena=False)
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


def _first_refusal(answers: Sequence[Value]) -> Refusal | None:
    """Return the refusal of some rank, one that may have left an arena half written if there is one; None if no rank
    refused. An arena is as it was only if it is so on all ranks.
    """
    refusals = [answer for answer in answers if isinstance(answer, Refusal)]
    return min(refusals, key=lambda refused: refused.of_arena, default=None)
