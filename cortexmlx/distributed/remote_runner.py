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
    Arrange,
    Arranged,
    Begin,
    CanResize,
    Choose,
    Collect,
    Copy,
    Dispatch,
    Forget,
    Forward,
    Open,
    PlanDigest,
    Prepare,
    RankInfo,
    RankOptions,
    RankState,
    Release,
    Resize,
    Settle,
    TellCommandBuffers,
    Trim,
    Value,
    sent_plan,
)
from cortexmlx.distributed.overdue import DEFAULT_HANG_LIMITS, HangLimits
from cortexmlx.distributed.ranks import Ranks
from cortexmlx.errors import HostLost, InvalidRequest
from cortexmlx.execution.boundary import MemoryInUse, Refused, StepResult, TokenMask
from cortexmlx.kv.snapshots import StateOps
from cortexmlx.kv.spec import Counts, LayerGroup
from cortexmlx.kv.step import BlockCopy
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.stats import ArenaWrites, CommandBuffers
from cortexmlx.types.sampling_params import LogitsProcessor

T = TypeVar("T")


class RemoteRunner:
    """Implements `execution.boundary.Runner` over one channel to each rank, rank 0 first. `open` and `arrange` come
    first, once each. Only the engine's thread may call it.

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
        """Making bytes of calls, and sending them. What the ranks' own steps take is in `ranks`."""
        self.wait_seconds = 0.0
        """Waiting for answers."""
        self._ranks = Ranks(channels, names, limits)
        self._every = 1
        self._digest = PlanDigest(1)
        self._arranged: list[Arranged] = []
        self._command_buffers: tuple[Counts, CommandBuffers | None] | None = None

    def open(self, options: RankOptions) -> tuple[RankInfo, ...]:
        """Have every rank open its part. Return what each tells, by rank. Raises what a rank raises, with its name in
        front.
        """
        self._every = options.compare_every
        return tuple(_of_kind(self._ranks.ask(Open(options), opening=True), RankInfo))

    def arrange(self, groups: Sequence[Sequence[LayerGroup]]) -> None:
        """Have every rank make its runner: `groups[rank]` are the groups of all ranks in one order, each with the
        layers that this rank has of it. Raises as `open`.
        """
        answers = self._ranks.ask([Arrange(tuple(each)) for each in groups], opening=True)
        self._arranged = _of_kind(answers, Arranged)
        self.computes_at_dispatch = self._arranged[0].computes_at_dispatch

    @property
    def ranks(self) -> tuple[RankState, ...]:
        """What each rank holds, and how long it has worked so far, as it told with its newest answer."""
        return tuple(state for state in self._ranks.states if state is not None)

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> Counts:
        """How many blocks each layer group has in the smallest arena of all ranks."""
        return tuple(map(min, zip(*(state.blocks for state in self.ranks), strict=True)))

    @property
    def bytes(self) -> MemoryInUse:
        """The bytes that all ranks hold join_groups, as of their newest answers."""
        held = [state.bytes for state in self.ranks]
        writes = [each.writes for each in held]
        return MemoryInUse(
            sum(each.arena for each in held),
            sum(each.tail for each in held),
            sum(each.states for each in held),
            sum(each.active for each in held),
            sum(each.peak for each in held),
            ArenaWrites(
                sum(each.measured for each in writes),
                sum(each.copied for each in writes),
                sum(each.copied_bytes for each in writes),
            ),
        )

    @property
    def command_buffers(self) -> CommandBuffers | None:
        """Those of rank 0, which is asked again when the arena has another size. The others have about as many."""
        if self.computes_at_dispatch or self._ranks.lost:
            return None
        if self._command_buffers is None or self._command_buffers[0] != self.blocks:
            others = [None] * (len(self._arranged) - 1)
            (told,) = self._ranks.ask([TellCommandBuffers(), *others])
            self._command_buffers = self.blocks, told if isinstance(told, CommandBuffers) else None
        return self._command_buffers[1]

    def begin(self, blocks: Counts) -> Refused | None:
        """See `Runner`, as for all further methods. If one rank is refused memory, no rank has an arena."""
        self._digest = PlanDigest(self._every)
        refused = _first_refusal(self._ask(Begin(blocks)))
        if refused is not None:
            self.release()
        return refused

    def can_resize(self, blocks: Counts) -> bool:
        """Return whether all ranks would be given the memory now."""
        return all(self._ask(CanResize(blocks)))

    def resize(self, blocks: Counts) -> Refused | None:
        """Resize all arenas. If one rank is refused memory, the others go back to the sizes that they had."""
        return self._ask_to_resize(Resize(blocks))

    def copy(self, copies: Sequence[BlockCopy]) -> Refused | None:
        """Copy blocks."""
        return _first_refusal(self._ask(Copy(tuple(copies))))

    def release(self) -> None:
        """Give all arenas back."""
        with suppress(HostLost):
            self._ask(Release())

    def trim(self) -> None:
        """Give back memory that is kept for later steps."""
        with suppress(HostLost):
            self._ask(Trim())

    # -- steps --------------------------------------------------------------------------------------------------------

    def dispatch(self, plan: StepPlan) -> Refused | None:
        """Start a step."""
        return self._start(plan, Dispatch)

    def forward(self, plan: StepPlan) -> Refused | None:
        """Start the forward pass of a step."""
        return self._start(plan, Forward)

    def choose(self, mask: TokenMask | None = None) -> Refused | None:
        """Start to choose tokens. Rank 0 chooses, so only it gets the mask."""
        started = time.perf_counter()
        self._ranks.send([Choose(mask)] + [Choose(None)] * (len(self._arranged) - 1))
        self.build_seconds += time.perf_counter() - started
        return None

    def collect(self) -> StepResult | Refused:
        """Return rank 0's result. The others are through soon, too: they say so in their next answers."""
        number, _ = self._ranks.send([Collect(True)] + [Collect(False)] * (len(self._arranged) - 1))
        (result,) = _of_kind(self._answers(number, [0]), StepResult)
        return result

    def settle(self, ops: StateOps) -> Refused | None:
        """Carry out `ops`, and drop everything of the last step."""
        return _first_refusal(self._ask(Settle(ops)))

    def forget(self) -> None:
        """Drop everything in flight. What has gone wrong in it is raised by the next answer that is read."""
        with suppress(HostLost):
            self._ranks.send(Forget())

    def close(self) -> None:
        """Have all workers end, as far as they answer, and end the connections. Safe to call again."""
        self._ranks.close()

    def _start(self, plan: StepPlan, call: type[Dispatch] | type[Forward]) -> Refused | None:
        started, waited = time.perf_counter(), self.wait_seconds
        if self._changes_arena(plan):
            refused = self._ask_to_resize(Prepare(sent_plan(plan)))
            if refused is not None:
                return refused
            number, _ = self._ranks.send(call(None))
        else:
            number, message = self._ranks.send(call(sent_plan(plan)))
            self._digest.add(message)
        digest = self._digest.take(plan, plan.blocks)
        if digest is not None:
            self._ranks.expect(number, plan.number, digest)
        self.build_seconds += time.perf_counter() - started - (self.wait_seconds - waited)
        return None

    def _changes_arena(self, plan: StepPlan) -> bool:
        """Return whether a step does something before its pass for which memory may be refused."""
        return plan.flush is not None or bool(plan.copies) or any(state.blocks != plan.blocks for state in self.ranks)

    # -- all ranks ----------------------------------------------------------------------------------------------------

    def _ask(self, asks: AnyCall) -> list[Value]:
        return self._answers(self._ranks.send(asks)[0], range(len(self._ranks.names)))

    def _answers(self, number: int, ranks: Sequence[int]) -> list[Value]:
        started = time.perf_counter()
        answers = self._ranks.answers(number, ranks)
        self.wait_seconds += time.perf_counter() - started
        return answers

    def _ask_to_resize(self, asks: Resize | Prepare) -> Refused | None:
        """Ask all ranks for something that resizes their arenas. If that was refused to some, undo it on the others."""
        before = [state.blocks for state in self.ranks]
        number, message = self._ranks.send(asks)
        if isinstance(asks, Prepare):
            self._digest.add(message)
        refused = _first_refusal(self._answers(number, range(len(before))))
        if refused is None or not refused.of_arena:
            return refused
        undo = [
            None if state.blocks == blocks else Resize(blocks) for state, blocks in zip(self.ranks, before, strict=True)
        ]
        if _first_refusal(self._ranks.ask(undo)) is not None:  # now some arenas are larger than others
            return Refused(refused.why, of_arena=False)
        return refused


class _NoProcessors(dict[JobId, Sequence[LogitsProcessor]]):
    """The callers' own functions: none, since they cannot be sent."""

    def __setitem__(self, job: JobId, processors: Sequence[LogitsProcessor]) -> NoReturn:
        raise InvalidRequest(
            "logits_processors are functions of this process, and the model runs on hosts: leave them out, or run the "
            "model without hosts",
            field="logits_processors",
        )


def _of_kind(answers: Sequence[Value], kind: type[T]) -> list[T]:
    """Return the answers of all ranks. Raises HostLost unless all are of that kind."""
    of_kind = [answer for answer in answers if isinstance(answer, kind)]
    if len(of_kind) != len(answers):
        raise HostLost(f"a worker answered {[type(answer).__name__ for answer in answers]} instead of {kind.__name__}")
    return of_kind


def _first_refusal(answers: Sequence[Value]) -> Refused | None:
    """Return the refusal of some rank; None if there is none. An arena is as it was only if it is so on all ranks."""
    refusals = [answer for answer in answers if isinstance(answer, Refused)]
    return min(refusals, key=lambda refused: refused.of_arena, default=None)
