"""A scheduler with a shadow arena, ready for requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.request import RequestState
from cortexmlx.types.sampling_params import SamplingParams
from support.scheduling.requests import add
from support.scheduling.shadow import Shadow
from support.scheduling.stories import KeptStory, Story

VOCAB = 11


class Stage:
    """A scheduler with a shadow arena, ready for requests."""

    def __init__(
        self,
        blocks: int | Sequence[int],
        block_size: int = 4,
        limit: int | Sequence[int] | None = None,
        groups: Sequence[LayerGroup] = (LayerGroup(KVSpec(1, 4, 4, "float32"), (0,)),),
        **settings: Any,
    ) -> None:
        self.cache = KVCache(BlockPools(groups, blocks, block_size, max_blocks=limit, prefix=PrefixCache(block_size)))
        defaults = {"max_rows": 4, "prefill_budget": 64, "context_length": 1000, "headroom": 0}
        self.scheduler = Scheduler(self.cache, SchedulerConfig(**(defaults | settings)))
        self.shadow = Shadow(self.scheduler, VOCAB)

    def ask(self, prompt: Sequence[int], max_tokens: int | None = 30, fork_of: Job | None = None) -> Job:
        number = len(self.shadow.stories)
        params = SamplingParams(max_tokens=max_tokens)
        job = add(self.scheduler, number, prompt, params, number, fork_of=fork_of)
        keep = job.keep
        self.shadow.stories[job.id] = (
            Story(job, VOCAB) if keep is None else KeptStory(job, VOCAB, first=keep.first, last=keep.last)
        )
        return job

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.shadow.step()

    def finish(self) -> None:
        self.shadow.finish(2000)
        for story in self.shadow.stories.values():
            if story.job.state is RequestState.FINISHED:
                assert story.job.output == story.answer()
        stats = self.cache.stats()
        assert (stats.used_blocks, stats.free_blocks) == (0, stats.total_blocks)
