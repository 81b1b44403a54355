"""Faults of texts without an answer: states that count twice or not at all, chats that lose what they have cached,
vectors that are plausible and wrong.
"""

from __future__ import annotations

from tests.faults.planted import Fault

JOB, BUILDER = "cortexmlx/scheduling/job.py", "cortexmlx/scheduling/builder.py"
RUNNING, ADMISSION = "cortexmlx/scheduling/running.py", "cortexmlx/scheduling/admission.py"
SCHEDULER, SHORTAGE = "cortexmlx/scheduling/scheduler.py", "cortexmlx/scheduling/shortage.py"
CACHE, POOL, POOLS = "cortexmlx/kv/cache.py", "cortexmlx/kv/pools.py", "cortexmlx/kv/pools.py"
KEPT, ROWS = "cortexmlx/execution/prompt_scores.py", "cortexmlx/execution/output_projection.py"
REQUESTS, ANSWERS = "cortexmlx/core/open_requests.py", "cortexmlx/core/answers.py"
TEXTS, CALLS = "cortexmlx/core/embedding.py", "cortexmlx/core/embedding.py"
AHEAD, SUPPORT = "cortexmlx/core/embedding.py", "cortexmlx/core/embedding_support.py"
FILES, LAYERS = "cortexmlx/models/embedding.py", "cortexmlx/models/embedding.py"
CAUSAL, RERANKER = "cortexmlx/models/embedding.py", "cortexmlx/models/embedding.py"
FIRST = "cortexmlx/core/embedding.py"
BACKBONE = "cortexmlx/models/embedding.py"

TESTS = (
    "scheduling/test_scheduler_pooled.py",
    "execution/test_kept_states.py",
    "execution/test_scores.py",
    "models/embedding",
    "core/embedding",
    "execution/test_output_projection.py",
    "engine/test_embedding.py",
)
"""The tests that judge these faults."""

FAULTS = (
    Fault("cached states are not summed up", JOB, "min(max_reusable, self.num_pooled_tokens))", "max_reusable)"),
    Fault(
        "states count again after a preemption",
        JOB,
        "range(max(first, self.num_pooled_tokens), end)",
        "range(first, end)",
    ),
    Fault("the states of a piece are not counted", JOB, "self.num_pooled_tokens = pooled_range.stop", "pass"),
    Fault(
        "a text ends one token early",
        JOB,
        "self.num_pooled_tokens == self.prompt_length",
        "self.num_pooled_tokens >= self.prompt_length - 1",
    ),
    Fault(
        "all of a text is kept",
        JOB,
        "return tokens if pooling_spec is None else min(tokens, pooling_spec.shared)",
        "return tokens",
    ),
    Fault(
        "texts drop tokens as answers do",
        JOB,
        "self.keep, self.num_pooled_tokens = None, ",
        "self.num_pooled_tokens = ",
    ),
    Fault(
        "a text chooses a token",
        BUILDER,
        "range(0) if job.is_pooling else range(num_known_tokens - 1, end)",
        "range(num_known_tokens - 1, end)",
    ),
    Fault(
        "states are those of other texts",
        BUILDER,
        "rows.append(positions - segment.first + flat_offset)",
        "rows.append(positions - segment.first)",
    ),
    Fault(
        "states are not weighted",
        BUILDER,
        "positions + 1 if pooling_spec.position_weighted",
        "np.ones(len(pooled_range)) if pooling_spec.position_weighted",
    ),
    Fault("weights begin at 0", BUILDER, "(positions + 1 if", "(positions if"),
    Fault(
        "a text has one token of an answer",
        SHORTAGE,
        "            return 0\n        available_tokens =",
        "            return 1\n        available_tokens =",
    ),
    Fault("a text must leave room for an answer", SHORTAGE, "elif tokens > (limit", "elif tokens >= (limit"),
    Fault("texts take rows", RUNNING, "return len(self.jobs) - self._texts", "return len(self.jobs)"),
    Fault("texts begin without bound", RUNNING, "return self._text_tokens < self.backoff.tokens", "return True"),
    Fault(
        "memory that was refused does not hold texts back",
        RUNNING,
        "if self.backoff.holds_back:\n            return len(",
        "if False:\n            return len(",
    ),
    Fault(
        "what a text stores is cached whole",
        RUNNING,
        "job.num_sharable(min(job.num_stored_tokens, len(job.tokens)))",
        "min(job.num_stored_tokens, len(job.tokens))",
    ),
    Fault(
        "texts look up other texts",
        RUNNING,
        "self.compute_keys(job.tokens[: job.num_sharable(len(job.tokens))],",
        "self.compute_keys(job.tokens,",
    ),
    Fault("texts wait behind chats without a row", ADMISSION, "and not self._num_pooling", ""),
    Fault("a text without a place ends the look", ADMISSION, "if num_passed == _MAX_PASSED:", "if num_passed:"),
    Fault(
        "texts evict what chats have cached",
        RUNNING,
        "headroom, match, load, job.is_pooling)",
        "headroom, match, load)",
    ),
    Fault(
        "a text may evict chats to begin",
        RUNNING,
        "        if tables.can_obtain(need, None, job.is_pooling):\n            return True\n",
        "        if tables.can_obtain(need):\n            return True\n",
    ),
    Fault(
        "a text that does not fit waits for ever",
        RUNNING,
        " and self.cache.pools.drop_cached(1):",
        " and False:",
    ),
    Fault(
        "chats cache in the room of texts", POOLS, "while spare and pool.evictable", "while False and pool.evictable"
    ),
    Fault(
        "the room of texts counts what they cached", POOLS, "pool.evictable - len(pool.transient) >", "pool.evictable >"
    ),
    Fault(
        "texts evict the next to go",
        POOLS,
        "next(iter(pool.transient.values()), None) if transient else pool.next_eviction",
        "pool.next_eviction",
    ),
    Fault(
        "a text evicts what windows have passed",
        POOLS,
        "while pool.passed and not transient and",
        "while pool.passed and",
    ),
    Fault(
        "an instruction that a chat uses goes first",
        CACHE,
        "            self.pools.clear_transient(entry)\n        for group",
        "            pass\n        for group",
    ),
    Fault(
        "a chat's own copy leaves an instruction transient",
        CACHE,
        "if entry is not None and not sequence.transient:",
        "if False:",
    ),
    Fault(
        "an instruction is taken over by the first text",
        CACHE,
        "takes_over = takes_over and not sequence.transient",
        "pass",
    ),
    Fault("what texts cache goes last", CACHE, "entry.transient = sequence.transient", "entry.transient = False"),
    Fault(
        "instructions stay where they are",
        POOL,
        "for queue in self.queues\n",
        "for queue in (self.passed, {}, self.unused, self.needed, self.pinned)\n",
    ),
    Fault("instructions wait with chats", POOL, "elif entry.transient:", "elif False:"),
    Fault(
        "a held instruction can be evicted",
        POOL,
        "(self.unused, self.needed, self.pinned, self.transient)",
        "(self.unused, self.needed, self.pinned)",
    ),
    Fault(
        "states are those before the norm",
        KEPT,
        "self._projection.hidden_states(kept_states).astype",
        "kept_states[:, 0].astype",
    ),
    Fault(
        "sums are made in the model's type",
        KEPT,
        "(states[begin:end] * weights[begin:end]).sum",
        "(states[begin:end] * weights[begin:end]).astype(kept_states.dtype).sum",
    ),
    Fault("sums have no weights", KEPT, " * weights[begin:end]", ""),
    Fault(
        "scores take the states of texts",
        KEPT,
        "self._projection.project, self._kept_states[:scored_count]",
        "self._projection.project, self._kept_states",
    ),
    Fault(
        "logits are those after the first token",
        KEPT,
        "kept_states[mx.array([ends[place] - 1",
        "kept_states[mx.array([begins[place]",
    ),
    Fault("any class has last states", ROWS, "return len(outputs) > 1 and outputs[-1] is outputs[-2]", "return True"),
    Fault("the model keeps a wrapper", ROWS, '            self._pick["norm"] = norm\n', "            pass\n"),
    Fault(
        "sums of an older row count",
        REQUESTS,
        "answer.job.generation == segment.generation:\n                answer.group.add_pooled_part",
        "answer.job.id:\n                answer.group.add_pooled_part",
    ),
    Fault(
        "only the last piece counts",
        ANSWERS,
        "part if self.handle.pooled is None else self.handle.pooled + part",
        "part",
    ),
    Fault(
        "no special tokens",
        TEXTS,
        "(self._begin_tokens, self._end_tokens) if isinstance(text, str) else ((), ())",
        "((), ())",
    ),
    Fault(
        "blanks stay",
        TEXTS,
        'self._apply_case(self._prompt + text.encode("utf-8", "replace").decode()).strip()',
        'self._apply_case(self._prompt + text.encode("utf-8", "replace").decode())',
    ),
    Fault(
        "a cut text loses its end token",
        TEXTS,
        "*body[: max(self._max_tokens - len(begin_tokens) - len(end_tokens), 0)], *end_tokens][\n"
        "            : self._max_tokens\n"
        "        ]",
        "*body, *end_tokens][: self._max_tokens]",
    ),
    Fault(
        "one beginning of a long text is enough",
        FIRST,
        "short_tokens[: max_tokens + 1] == long_tokens[: max_tokens + 1]",
        "short_tokens or not short_tokens",
    ),
    Fault("all of a long text is tokenized", FIRST, "while size < len(text):", "while False:"),
    Fault("a long text takes memory without bound", FIRST, "if tries == _TRIES or ", "if "),
    Fault(
        "a long text that is cut has no more than fit",
        FIRST,
        "return long_tokens[: max_tokens + 1]",
        "return long_tokens[:max_tokens]",
    ),
    Fault("a long text is cut in silence", TEXTS, "if is_truncated and not self._truncate:", "if False:"),
    Fault("the prompt is always pooled", TEXTS, "if self._prompt and not files.include_prompt:", "if False:"),
    Fault("blanks after a prompt are part of it", TEXTS, "self._prompt.strip()", "self._prompt.lstrip()"),
    Fault(
        "token ids lose the length of a prompt that they do not have",
        TEXTS,
        "self._unpooled_count if isinstance(text, str) else 0",
        "self._unpooled_count",
    ),
    Fault(
        "a weighted mean divides by the tokens",
        TEXTS,
        "divisor = (first + 1 + count) * (count - first) / 2",
        "divisor = count - first",
    ),
    Fault("mean_sqrt is a mean", TEXTS, "sqrt(count - first)", "(count - first)"),
    Fault("an unknown prompt is none", TEXTS, "not (isinstance(name, str) and name in info.prompts)", "False"),
    Fault("the default prompt is forgotten", TEXTS, "info.default_prompt if prompt is None else prompt", "prompt"),
    Fault("texts stay in capitals", TEXTS, "text.lower() if self._files.lowercase", "text if self._files.lowercase"),
    Fault(
        "short vectors are not normalized again",
        CALLS,
        "normalize(vectors[:, :dimension_count]) if files.normalized else",
        "vectors[:, :dimension_count] if files.normalize else",
    ),
    Fault(
        "short vectors are always normalized",
        CALLS,
        "if files.normalized else vectors[:, :dimension_count]",
        "if True else vectors[:, :dimension_count]",
    ),
    Fault("dense layers are left out", CALLS, "        vectors = layer(vectors)", "        pass"),
    Fault(
        "the score is that of no",
        CALLS,
        "float(each.vector[0]) - float(each.vector[1])",
        "float(each.vector[1]) - float(each.vector[0])",
    ),
    Fault(
        "long documents are cut in silence", CALLS, "if full_token_count > len(tokens) and not truncate:", "if False:"
    ),
    Fault("nothing is cancelled", AHEAD, "            handle.cancel()", "            pass"),
    Fault("NaN is a vector", AHEAD, "if not np.isfinite(vector).all():", "if False:"),
    Fault(
        "all texts are submitted at once",
        AHEAD,
        "while has_more and submitted_tokens < tokens_ahead and",
        "while has_more and",
    ),
    Fault("texts of a client share with all", AHEAD, "        client=client,\n", ""),
    Fault(
        "windows are embedded with",
        SUPPORT,
        "elif any(group.spec.window is not None for group in groups):",
        "elif False:",
    ),
    Fault("nothing is kept free", SUPPORT, "min(self.spare_blocks, count // SHARE)", "0"),
    Fault(
        "texts may fill the arena",
        SUPPORT,
        "capacity_tokens = min(count // SHARE * block_size for count in blocks)",
        "capacity_tokens = min(count * block_size for count in blocks)",
    ),
    Fault(
        "flags are read in a wrong order", FILES, '"pooling_mode_cls_token": "cls"', '"pooling_mode_cls_token": "mean"'
    ),
    Fault("texts outgrow a window", FILES, "max_tokens = min(max_tokens or window, window)", "pass"),
    Fault(
        "a prompt that is not pooled is pooled",
        FILES,
        'pooling_config.get("include_prompt", True) is not False',
        "True",
    ),
    Fault("a module may lie anywhere", FILES, 'if Path(path).is_absolute() or ".." in parts:', "if False:"),
    Fault("other modules are left out", FILES, 'elif kind != "Dropout":', "elif False:"),
    Fault(
        "the stated length is not read", FILES, 'max_length = text_config.get("max_seq_length")', "max_length = None"
    ),
    Fault("a dense layer has no bias", LAYERS, "out if self.bias is None else out + self.bias", "out"),
    Fault(
        "a dense layer has no activation",
        LAYERS,
        "return _ACTIVATIONS[self.activation](",
        'return _ACTIVATIONS["Identity"](',
    ),
    Fault("pickles are no reason", LAYERS, "if not file.is_file():", "if False:"),
    Fault("bidirectional models pass", CAUSAL, "        if reasons:\n", "        if False:\n"),
    Fault("is_causal is not read", CAUSAL, 'if part.get("is_causal") is False', "if False"),
    Fault("code of its own passes", CAUSAL, "    if custom_classes:\n", "    if False:\n"),
    Fault("any class passes", CAUSAL, "if not _is_causal_class(str(each), kind):", "if False:"),
    Fault(
        "any Qwen3 judges documents",
        RERANKER,
        "if logit_score is None and (not has_reranker_name or modules):",
        "if False:",
    ),
    Fault("the prompt has no empty thoughts", RERANKER, "<think>\\n\\n</think>\\n\\n", ""),
    Fault(
        "documents are cut with what follows them",
        RERANKER,
        "return [*prefix, *pair[:max_pair_tokens], *suffix], len",
        "return [*prefix, *pair, *suffix][:max_tokens], len",
    ),
    Fault(
        "other tokens are compared",
        RERANKER,
        "if logit_score is not None and (logit_score.true_token",
        "if False and (logit_score.true_token",
    ),
    Fault("flat names are not found", BACKBONE, "if flat:", "if False:"),
    Fault("a chat model without its head passes", BACKBONE, "return embeds and is_untied", "return is_untied"),
)
