"""mlx-lm as a contestant: the same model object, hence the same weights, in the same process.

A single request goes through `generate_step` with a streaming detokenizer. This is `stream_generate` without its end at
an end token. Several requests go through `BatchGenerator`, on which `batch_generate` is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

from cortexmlx.bench.measure.trace import BenchRequest, RunTrace, Timestamp, TraceRecorder
from cortexmlx.models import LoadedModel


@dataclass(frozen=True)
class BatchSettings:
    """Arguments of mlx-lm's `BatchGenerator`, with mlx-lm's defaults."""

    completion_batch_size: int = 32
    prefill_batch_size: int = 8
    prefill_step_size: int = 2048
    watch_kv: bool = False
    """Whether to record the bytes of its caches, too."""


class MlxLmContestant:
    """mlx-lm as a contestant: runs requests on the calling thread, on the weights of `loaded`."""

    name = "mlx-lm"

    def __init__(
        self, loaded: LoadedModel, settings: BatchSettings | None = None, *, prompt_cache: bool = True
    ) -> None:
        self._model = loaded.model
        self._tokenizer = loaded.tokenizer
        self._settings = settings or BatchSettings()
        self._prompt_cache = prompt_cache

    def run(self, work: Sequence[BenchRequest]) -> RunTrace:
        """Run the requests to their end, and return their trace."""
        return self._run_one(work[0]) if len(work) == 1 else self._run_batch(work)

    def chat(self, turns: Sequence[BenchRequest]) -> RunTrace:
        """Run the turns of one conversation, and return the last one's trace. A `prompt` is only what its turn adds.

        With `prompt_cache`, a turn computes only what is not in the cache, as mlx-lm's chat does. Without it, a turn
        computes the whole conversation.
        """
        cache = make_prompt_cache(self._model)
        so_far: tuple[int, ...] = ()
        for turn in turns:
            so_far += turn.prompt
            if not self._prompt_cache:
                cache = make_prompt_cache(self._model)
            cached_count = cache[0].offset if self._prompt_cache else 0
            trace = self._run_one(BenchRequest(so_far[cached_count:], turn.max_tokens), cache)
            so_far += trace.tokens[0]
        return trace

    def _run_one(self, work: BenchRequest, cache: list[Any] | None = None) -> RunTrace:
        """Run one request by `generate_step`, and return its trace."""
        detokenizer = self._tokenizer.detokenizer
        recorder = TraceRecorder([work])
        steps = generate_step(mx.array(work.prompt), self._model, max_tokens=work.max_tokens, prompt_cache=cache)
        for token, _ in steps:
            detokenizer.add_token(token)
            _ = detokenizer.last_segment
            if recorder.record_token(0, token, Timestamp.now()) == work.max_tokens:
                break
        steps.close()
        mx.synchronize(generation_stream)
        return recorder.make_trace()

    def _run_batch(self, work: Sequence[BenchRequest]) -> RunTrace:
        """Run requests by mlx-lm's batch generator, and return their trace."""
        settings = self._settings
        recorder = TraceRecorder(work)
        generator = BatchGenerator(
            self._model,
            completion_batch_size=settings.completion_batch_size,
            prefill_batch_size=settings.prefill_batch_size,
            prefill_step_size=settings.prefill_step_size,
        )
        request_of: dict[int, int] = {}
        late_requests = sorted((i for i, w in enumerate(work) if w.after_tokens), key=lambda i: work[i].after_tokens)

        def insert(requests: Sequence[int]) -> None:
            for request in requests:
                recorder.record_submission(request)
            prompts, limits = [list(work[i].prompt) for i in requests], [work[i].max_tokens for i in requests]
            request_of.update(zip(generator.insert(prompts, limits), requests, strict=True))

        insert([i for i, w in enumerate(work) if not w.after_tokens])
        running_count, first_request_tokens = len(work), 0
        while running_count:
            _, responses = generator.next()
            stamp = Timestamp.now()
            for response in responses:
                count = recorder.record_token(request_of[response.uid], response.token, stamp)
                first_request_tokens = count if request_of[response.uid] == 0 else first_request_tokens
                running_count -= response.finish_reason is not None
            if settings.watch_kv:
                recorder.kv_bytes = max(recorder.kv_bytes, generator.prompt_cache_nbytes)
            while late_requests and first_request_tokens >= work[late_requests[0]].after_tokens:
                insert([late_requests.pop(0)])
        generator.close()
        trace = recorder.make_trace()
        for tokens in trace.tokens:
            self._tokenizer.decode(list(tokens))
        mx.synchronize(generation_stream)
        return trace
