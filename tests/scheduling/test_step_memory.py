"""The order of a step's memory operations, under random mixes of loads, copies, flushes, growth, snapshots and eviction
in arenas of a few blocks: every read finds its own tokens, and so does every block that goes to disk.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cortexmlx.disk.tier import STATE, DiskLoad, DiskTier
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import Key, PrefixEntry, PrefixNode
from cortexmlx.kv.sizing import max_row_blocks
from cortexmlx.kv.snapshots import SnapshotRegistry
from cortexmlx.kv.spec import AttentionWindow, KVSpec, LayerGroup
from cortexmlx.scheduling import plan as step_memory
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.request import FinishReason, RequestState
from cortexmlx.types.sampling_params import SamplingParams
from support.scheduling.requests import add
from support.scheduling.shadow import Shadow
from support.scheduling.stories import Story, number_after


@dataclass(frozen=True)
class Numbers:
    """The content of a piece: the numbers of a block's tokens `[block_size]`, or a state's tokens and number `[2]`."""

    arrays: tuple[np.ndarray, ...]


@dataclass
class ShadowDisk:
    """Keeps what leaves the cache, and answers requests when it is told to. `number(before, token)` is the number of a
    token after a position's number, `read(group, target)` what a block or a snapshot holds.
    """

    cache: KVCache
    number: Callable[[int | None, int], int]
    pieces: dict[Key, Numbers] = field(default_factory=dict)
    requested: list[DiskLoad] = field(default_factory=list)

    def __post_init__(self) -> None:
        states = self.cache.states
        self.tier = DiskTier(
            self.cache.groups,
            self.cache.block_size,
            states.has_states,
            self.requested.append,
            b"a model",
            may_have=self.pieces.__contains__,
        )
        self.cache.disk_tier = self.tier

    def store(self, most: int, read: Callable[[int, int], tuple[int, ...] | None]) -> None:
        """Keep the pieces of up to `most` entries, as `disk/connector.py` does between two steps. A state
        that the next step is to save cannot be read yet.
        """
        for entry in islice(self.tier.pop_entries(), most):
            numbers = self._numbers(entry)
            for group, target in tuple(self.tier.unstored_pieces(entry)):
                wanted = (len(numbers), numbers[-1]) if group == STATE else tuple(numbers[-self.cache.block_size :])
                found = read(group, target)
                if found is None:
                    continue
                assert found == wanted, f"a cached piece of group {group} is not that of its text"
                self.pieces[self.tier.piece_key(entry.key, group)] = Numbers((np.array(found, np.int64),))
                self.tier.mark_stored(entry, group)

    def answer(self, arrived: Callable[[DiskLoad, dict[Key, Numbers]], None], count: int, all_of_it: bool) -> None:
        """Tell `arrived` what is there for the oldest `count` loads: every piece, or those that it takes."""
        for load in self.requested[:count]:
            there = {key: self.pieces[key] for key in load.requested_pieces() if key in self.pieces}
            wanted: Iterable[Key] = there if all_of_it else load.choose_pieces(dict.fromkeys(there, 1), 1e12)
            arrived(load, {key: there[key] for key in wanted})
        del self.requested[:count]

    def _numbers(self, entry: PrefixEntry) -> list[int]:
        """Those of all tokens of a text up to the end of an entry."""
        chain: list[PrefixEntry] = []
        node: PrefixNode = entry
        while isinstance(node, PrefixEntry):
            chain.append(node)
            node = node.parent
        numbers: list[int] = []
        for part in reversed(chain):
            for token in part.tokens:
                numbers.append(self.number(numbers[-1] if numbers else None, token))
        return numbers


VOCAB = 5
ALL = AttentionWindow()
MODELS: dict[str, tuple[list[AttentionWindow], int | None]] = {
    "full": ([ALL], None),
    "window": ([AttentionWindow(12), ALL], None),
    "windows only": ([AttentionWindow(9), AttentionWindow(20)], None),
    "chunk": ([AttentionWindow(16, True), ALL], None),
    "hybrid": ([ALL], 4),
    "hybrid with a window": ([AttentionWindow(12), ALL], 6),
}
"""How far the layers of a model see, and how many snapshots of recurrent states it may have."""


class Mix:
    """A scheduler on a shadow arena, above a tier that answers late, with random requests drawn from a seed."""

    def __init__(self, model: str, seed: int, collisions: float | None = None) -> None:
        reaches, snapshots = MODELS[model]
        self.draw = draw = random.Random(f"{model} {seed}")
        size = draw.choice([2, 4, 8])
        most = draw.randrange(10, 30)
        limits = [
            most if (row := max_row_blocks(r, size)) is None else min(most, row + draw.randrange(9)) for r in reaches
        ]
        layers = [KVSpec(1, 4 + i, 4, "float32", r.tokens, chunked=r.chunked) for i, r in enumerate(reaches)]
        cache = KVCache(
            BlockPools(
                [LayerGroup(spec, (i,)) for i, spec in enumerate(layers)],
                [min(4, limit) for limit in limits],
                size,
                max_blocks=limits,
                snapshots=None if snapshots is None else SnapshotRegistry(snapshots),
            )
        )
        self.disk = ShadowDisk(cache, number_after)
        config = SchedulerConfig(
            max_rows=draw.randrange(2, 9),
            prefill_budget=draw.choice([3, 16, 64]),
            context_length=150,
            pipeline=draw.random() < 0.8,
            headroom=draw.choice([0, 8]),
            worth_waiting=draw.choice([1, 5, 64]),
        )
        self.scheduler = Scheduler(cache, config)
        self.shadow = Shadow(self.scheduler, VOCAB)
        self.texts = [[draw.randrange(VOCAB) for _ in range(100)] for _ in range(4)]
        self.collisions = draw.choice([0.02, 0.5]) if collisions is None else collisions
        """How often `collide` is drawn."""
        if draw.random() < 0.5:  # what is only cached goes before what is pinned, however new it is
            for group in range(len(cache.groups)):
                cache.pools.pin(group, cache.prefix.keys(self.texts[0], None))
        self.seen: Counter[str] = Counter()
        self.number = 0
        self.open: list[Job] = []

    def run(self, steps: int) -> None:
        """So many planned steps, then all that is left."""
        while self.scheduler.planned_steps < steps:
            self.once()
        self.rest()
        for job in self.open:
            answer = self.shadow.stories[job.id].answer()
            assert job.output == answer[: len(job.output)] and job.finish_reason is not None

    def once(self) -> None:
        """Something happens: mostly a step."""
        if self.draw.random() < self.collisions:
            return self.collide()
        chance = self.draw.random()
        if chance < 0.2 and len(self.scheduler.jobs) < 12:
            for _ in range(self.draw.choice([1, 1, 2, 4])):
                self.submit()
        elif chance < 0.27 and self.open:
            self.scheduler.finish(self.draw.choice(self.open).id, FinishReason.CANCELLED, RequestState.CANCELLED)
        elif chance < 0.30:
            self.scheduler.relieve_memory(self.draw.random() < 0.5)
        elif chance < 0.45 and not self.shadow.in_flight:
            self.disk.store(self.draw.randrange(1, 9), self.shadow.holds)
        elif chance < 0.55:
            self.disk.answer(self.scheduler.accept_load, self.draw.randrange(1, 3), self.draw.random() < 0.7)
        elif chance < 0.60 and len(self.scheduler.jobs) < 12:
            self.rush()
        else:
            self.step()

    def rush(self) -> None:
        """What is read arrives together with prompts that begin within cached blocks."""
        self.drain()
        for _ in range(self.draw.randrange(1, 4)):
            self.submit()
        self.step()
        self.drain()
        for _ in range(self.draw.randrange(1, 3)):
            self.submit()
        self.disk.answer(self.scheduler.accept_load, len(self.disk.requested), True)
        self.step()

    def drain(self) -> None:
        """Take all results that are in flight."""
        while self.shadow.in_flight:
            self.shadow.commit()

    def rest(self) -> None:
        """Carry out steps until nothing runs, waits, or is in flight."""
        for _ in range(5000):
            if not (self.scheduler.jobs or self.shadow.in_flight):
                return
            self.disk.answer(self.scheduler.accept_load, len(self.disk.requested), True)
            self.step()
            if not self.shadow.in_flight:
                self.disk.store(9, self.shadow.holds)
        raise AssertionError("somebody never ends")

    def collide(self) -> None:
        """A prompt whose blocks are loaded begins in one step with others that copy the block they begin within: one
        that is cached and would be evicted first, or one that is just being loaded.
        """
        self.rest()
        most = min(self.scheduler.cache.tables.capacity_tokens, 100)
        below = self.draw.choice(self.texts)[: int(most * self.draw.uniform(0.4, 0.8))]
        fresh = [self.draw.randrange(VOCAB) for _ in range(int(most * self.draw.uniform(0.3, 0.7)))]
        for text in (below, fresh):
            self.ask(text, self.draw.choice([1, 9]), 1)
            self.rest()
        last = self.draw.random() < 0.7
        self.ask(below, 1, 1, background=last)
        self.step()
        self.drain()
        for _ in range(self.draw.choice([1, 1, 2])):
            text = fresh if last else below
            part = text[: self.draw.choice([len(text), self.draw.randrange(1, len(text))])]
            self.ask([*part, self.draw.randrange(VOCAB)], 1, 1)
        self.disk.answer(self.scheduler.accept_load, len(self.disk.requested), True)
        self.step()

    def submit(self) -> None:
        ended = [job.tokens for job in self.open[-8:] if job.finish_reason is not None]
        text = self.draw.choice(ended if ended and self.draw.random() < 0.5 else self.texts)
        prompt = text[: self.draw.randrange(1, 70)] + [self.draw.randrange(VOCAB)] * self.draw.choice([0, 0, 0, 1, 5])
        self.ask(prompt, self.draw.choice([1, 2, 9, 20]), self.draw.choice([1, 1, 1, 2, 3]))

    def ask(self, text: list[int], max_tokens: int, answers: int, background: bool = False) -> None:
        """Queue a request for a prompt, or for as much of it as fits."""
        prompt = text[: min(self.scheduler.cache.tables.capacity_tokens, 140)]
        params = SamplingParams(max_tokens=max_tokens, n=answers)
        first: Job | None = None
        for _ in range(answers):
            self.number += 1
            seed = self.draw.randrange(100)
            job = add(self.scheduler, self.number, prompt, params, seed, fork_of=first, background=background)
            self.shadow.stories[job.id] = Story(job, VOCAB)
            self.open.append(job)
            first = first or job

    def step(self) -> None:
        blocks, cached = self.shadow.blocks, self.scheduler.cache.pools.block_counts[1]
        if (plan := self.shadow.plan()) is not None:
            self.count(plan, blocks, cached)
        if self.shadow.in_flight and (plan is None or len(self.shadow.in_flight) > 1):
            self.shadow.commit()
        self.scheduler.check_invariants()

    def count(self, plan: StepPlan, blocks: tuple[int, ...], cached: int) -> None:
        """What happened in a step, so that a run that has seen too little is no proof."""
        states = any(load.group == STATE for load in plan.loads)
        what = {
            "flush": plan.flush is not None,
            "growth": plan.blocks > blocks,
            "loads": bool(plan.loads),
            "copies": bool(plan.copies),
            "loads and copies": bool(plan.loads and plan.copies),
            "loads and a flush": bool(plan.loads and plan.flush),
            "loads and growth": bool(plan.loads) and plan.blocks > blocks,
            "loads of states": states,
            "eviction": self.scheduler.cache.pools.block_counts[1] < cached,
        }
        self.seen.update(name for name, happened in what.items() if happened)


def play(model: str, steps: int, seeds: range, collisions: float | None = None) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        mix = Mix(model, seed, collisions)
        mix.run(steps)
        seen += mix.seen
        seen["steps"] += mix.scheduler.planned_steps
    return seen


def all_happened(model: str, seen: Counter[str], also: Set[str] = frozenset()) -> None:
    names = {"flush", "growth", "loads", "copies", "loads and a flush", "eviction", *also}
    names |= {"loads of states"} if MODELS[model][1] else set()
    assert not {name for name in names if not seen[name]}, f"this run has not seen all: {seen}"


@pytest.mark.parametrize("model", [pytest.param("full", marks=pytest.mark.slow), "hybrid with a window"])
def test_every_read_finds_its_own_tokens_whatever_a_step_does_with_memory(model: str) -> None:
    all_happened(model, play(model, 200, range(4)))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_same_at_length(model: str) -> None:
    seen = play(model, 400, range(100, 130))
    all_happened(model, seen, {"loads and growth", "loads and copies"})
    assert seen["steps"] >= 10_000


def copies_first(plan: StepPlan, memory: step_memory.StepMemory) -> None:
    """The mirror fault: a copy reads a block before it is loaded."""
    if plan.flush is not None:
        memory.flush(plan.flush)
    if plan.blocks != memory.blocks:
        memory.resize(plan.blocks)
    memory.copy(plan.copies)
    memory.load(plan.loads)


def flush_last(plan: StepPlan, memory: step_memory.StepMemory) -> None:
    """Columns of the tail overwrite what was just brought to blocks that are free since."""
    if plan.blocks != memory.blocks:
        memory.resize(plan.blocks)
    memory.load(plan.loads)
    memory.copy(plan.copies)
    if plan.flush is not None:
        memory.flush(plan.flush)


@pytest.mark.parametrize(("order", "model"), [(copies_first, "full"), (flush_last, "full")])
def test_another_order_is_noticed(order: Callable[[StepPlan, step_memory.StepMemory], None], model: str) -> None:
    with mock.patch.object(step_memory, "prepare_memory", order), pytest.raises(AssertionError):
        play(model, 300, range(12), collisions=1.0)


def test_a_copy_whose_source_may_be_evicted_at_once_is_noticed() -> None:
    begin = KVCache.allocate_for

    def forgetful(self: KVCache, *args: Any) -> object:
        try:
            return begin(self, *args)
        finally:
            self.release_copy_sources()

    with mock.patch.object(KVCache, "allocate_for", forgetful), pytest.raises(AssertionError, match="not its own"):
        play("chunk", 300, range(12), collisions=1.0)
