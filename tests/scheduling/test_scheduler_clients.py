"""What a client can see of its requests, step by step, does not depend on what others' texts say.

Each example runs twice: the second time each token of the others' texts is another one. Then those texts have among
themselves all that they had in common, and nothing with the client's. Lengths and times stay, so whatever the client
sees must stay, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from cortexmlx.disk.tier import DiskLoad, DiskTier
from cortexmlx.errors import CortexError
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pinned_prefixes import PinnedPrefixes
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import Key
from cortexmlx.kv.snapshots import SnapshotRegistry
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.keep_policy import KeepPolicy
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.request import FinishReason, RequestState
from cortexmlx.types.sampling_params import SamplingParams
from support.scheduling.requests import add, commit

SIZE = 8
ALL = LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))
WINDOW = LayerGroup(KVSpec(1, 4, 4, "float32", 24), (1,))
PIECE: Any = SimpleNamespace(arrays=())
TEXT = [7 * i * i % 50 for i in range(120)]
"""All prompts begin like this."""

OTHER_TOKENS = 1000
"""Added to each token of the others' texts."""

NAMES = (None, "", "a", "A", "a ", "a\0", "\u00e9", "e\u0301", "\ud800\udc00", "\U00010000", "None", "x" * 1024)
"""Names that are easily taken for another: by case, by Unicode normalisation, by their bytes."""

Name = str | None
Op = tuple[Any, ...]

asks = st.tuples(
    st.just("ask"),
    st.integers(0, 2),
    st.integers(1, len(TEXT)),
    st.lists(st.integers(0, 2), max_size=2),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([1, 5, 30]),
)
OPS = st.one_of(
    asks,
    asks,
    st.tuples(st.just("step"), st.integers(1, 15)),
    st.tuples(st.just("pin"), st.integers(0, 2), st.integers(8, 60)),
    st.tuples(st.just("cancel"), st.integers(0, 99)),
    st.tuples(st.just("relieve"), st.booleans()),
    st.tuples(st.just("open again")),
)


class Watched:
    """A scheduler above a tier that outlives it, and what the first of `names` sees; `added` to the others' tokens."""

    def __init__(self, names: Sequence[Name], added: int, blocks: Sequence[int], states: bool, **config: Any) -> None:
        self.names, self.added, self.blocks, self.states, self.config = names, added, blocks, states, config
        self.on_disk: dict[Key, tuple[int, ...]] = {}
        self.seen: list[Any] = []
        self.jobs: list[Job] = []
        self.clock = count()
        self.open()

    def open(self) -> None:
        """A new engine with the old one's store."""
        groups = [ALL, WINDOW][: len(self.blocks)]
        self.cache = KVCache(
            BlockPools(groups, self.blocks, SIZE, snapshots=SnapshotRegistry(6) if self.states else None)
        )
        self.requested: list[DiskLoad] = []
        self.tier = self.cache.disk_tier = DiskTier(groups, SIZE, self.states, self.requested.append, b"model")
        self.pins = PinnedPrefixes(self.cache)
        config = SchedulerConfig(context_length=1 << 20, headroom=0, **self.config)
        self.scheduler = Scheduler(self.cache, config, self.clock.__next__)

    def text(self, who: int, length: int, end: Sequence[int] = ()) -> list[int]:
        return [token + (self.added if who else 0) for token in (*TEXT[:length], *end)]

    def do(self, op: Op) -> None:
        match op:
            case "ask", who, length, end, answers, most:
                self.ask(who, self.text(who, length, end), answers, SamplingParams(max_tokens=most, ignore_eos=True))
            case "step", steps:
                for _ in range(steps):
                    self.step()
            case "pin", who, length:
                try:
                    said = str(self.pins.add(self.text(who, length), self.names[who]))
                except CortexError as error:
                    said = str(error)
                self.seen += [said] if who == 0 else []
            case "cancel", number:
                living = [job for job in self.jobs if not job.finish_reason]
                if living:
                    self.scheduler.finish(
                        living[number % len(living)].id, FinishReason.CANCELLED, RequestState.CANCELLED
                    )
            case "relieve", critical:
                self.scheduler.relieve_memory(critical)
            case ("open again",):
                self.drain()
                self.open()

    def ask(self, who: int, prompt: list[int], answers: int, params: SamplingParams) -> None:
        first: Job | None = None
        for _ in range(answers):
            job = add(self.scheduler, len(self.jobs), prompt, params, fork_of=first, client=self.names[who])
            self.jobs.append(job)
            first = first or job

    def step(self) -> None:
        """Run one step after all earlier disk loads were answered, then store all that is new."""
        while self.requested:
            load = self.requested.pop()
            found = [key for key, tokens in load.requested_pieces().items() if self.on_disk.get(key) == tokens]
            self.scheduler.accept_load(load, dict.fromkeys(found, PIECE))
        plan = self.scheduler.plan(0)
        if plan is not None:
            commit(self.scheduler, plan, [5] * len(plan.logit_segments))
        for entry in self.tier.pop_entries():
            for group, _ in tuple(self.tier.unstored_pieces(entry)):
                self.on_disk[self.tier.piece_key(entry.key, group)] = entry.tokens
                self.tier.mark_stored(entry, group)
        mine = [job for job in self.jobs if job.client == self.names[0]]
        self.seen.append([(job.state, job.cached, job.num_computed_tokens, job.preemptions) for job in mine])

    def drain(self) -> None:
        while self.scheduler.jobs:
            self.step()
        self.scheduler.check_invariants()


def seen(ops: Sequence[Op], *args: Any, **config: Any) -> list[Any]:
    watched = Watched(*args, **config)
    for op in ops:
        watched.do(op)
    watched.drain()
    return watched.seen


CONFIGS = st.fixed_dictionaries(
    {
        "names": st.lists(st.sampled_from(NAMES), min_size=3, max_size=3, unique=True),
        "blocks": st.sampled_from([(24,), (40,), (200,), (24, 24), (60, 24)]),
        "states": st.booleans(),
        "max_rows": st.sampled_from([2, 4]),
        "prefill_budget": st.sampled_from([16, 64]),
        "client_tokens": st.sampled_from([None, 100]),
        "keep": st.sampled_from([None, None, KeepPolicy(2, 16)]),
    }
)


@settings(max_examples=25, deadline=None)
@given(ops=st.lists(OPS, max_size=40), config=CONFIGS)
def test_what_a_client_sees_does_not_depend_on_what_others_texts_say(ops: list[Op], config: dict[str, Any]) -> None:
    assert seen(ops, added=0, **config) == seen(ops, added=OTHER_TOKENS, **config)


def test_clients_that_share_are_seen() -> None:
    """Texts that others have computed, are computing, have pinned and have left in the store."""
    config: dict[str, Any] = {"names": ("a", "b", None), "blocks": (200,), "states": False, "max_rows": 4}
    other, mine = (("ask", who, 100, [], 1, 30) for who in (1, 0))
    for ops in ([other, ("step", 2), mine], [other, mine], [other, ("open again",), mine]):
        runs = [
            seen(ops, added=added, prefill_budget=16, share_between_clients=share, **config)
            for share in (True, False)
            for added in (0, OTHER_TOKENS)
        ]
        assert runs[0] != runs[1] == runs[2] == runs[3]
