"""Faults of speculation: in verification, in rolling back what was wrong, and in what is hashed and shared."""

from __future__ import annotations

from tests.faults.planted import Fault

DRAFTS, JOB = "cortexmlx/scheduling/drafts.py", "cortexmlx/scheduling/job.py"
SCHEDULER, GATE = "cortexmlx/scheduling/scheduler.py", "cortexmlx/scheduling/decode_window.py"
BUILDER, RUNNING = "cortexmlx/scheduling/builder.py", "cortexmlx/scheduling/running.py"
CACHE, REQUESTS = "cortexmlx/kv/cache.py", "cortexmlx/core/open_requests.py"
MATCHER, BUDGET = "cortexmlx/structured/matcher.py", "cortexmlx/core/text.py"
ANSWERS = "cortexmlx/core/answers.py"
HEAD, DRAFTER = "cortexmlx/execution/head_pass.py", "cortexmlx/speculation/drafter.py"
ASSISTANT = "cortexmlx/models/assistant.py"
RUNNER = "cortexmlx/execution/runner.py"
STATES, RECURRENT = "cortexmlx/execution/states.py", "cortexmlx/attention/recurrent.py"
SERVED = "cortexmlx/core/engine_model.py"

TESTS = (
    "scheduling/test_drafts.py",
    "scheduling/test_gate.py",
    "core/text/test_budget.py",
    "speculation",
    "engine/test_draft_head.py",
    "models/test_assistant.py",
    "engine/test_nan_drafts.py",
    "engine/test_speculation_known_bugs.py",
    "engine/test_speculation_known_memory_bugs.py",
    "engine/test_speculation.py",
    "scheduling/test_scheduler_model.py",
)
"""The tests that judge these faults."""

VERIFICATION = (
    Fault("a draft is taken without looking", DRAFTS, "is not None or draft_token != token:", "is not None:"),
    Fault(
        "the token after all drafts is left out",
        DRAFTS,
        "zip_longest(tokens, job.drafts_in_flight)",
        "zip(tokens, job.drafts_in_flight, strict=False)",
    ),
    Fault(
        "a wrong draft is taken instead of the target's token",
        DRAFTS,
        "reason = job.append_token(token)",
        "reason = job.append_token(token if draft_token is None else draft_token)",
    ),
    Fault("an answer goes on after its end", DRAFTS, "if reason is not None or draft_token", "if draft_token"),
    Fault("log-probabilities of the first place", REQUESTS, "row.first + token_index", "row.first"),
    Fault(
        "every draft counts as right",
        DRAFTS,
        "num_accepted += draft_token == token",
        "num_accepted += draft_token is not None",
    ),
    Fault(
        "no token behind drafts is taken as one",
        DRAFTS,
        "        if token < 0:\n            break\n",
        "",
    ),
    Fault("a place without a token spoils nothing", DRAFTS, "0, min(tokens) < 0", "0, False"),
    Fault(
        "a spoiled block is shared",
        DRAFTS,
        "num_computed - num_computed % running_set.cache.block_size if job.is_spoiled else ",
        "",
    ),
    Fault(
        "a block with drafts in flight is shared",
        RUNNING,
        "        if job.drafts_in_flight:\n            num_cach",
        "        if False:\n            num_cach",
    ),
    Fault("drafts may spoil a job again and again", DRAFTS, " or job.is_spoiled or", " or"),
    Fault("drafts may fail a request", REQUESTS, " and not answer.job.drafts_in_flight:", ":"),
    Fault(
        "drafts past the answer's end",
        DRAFTS,
        "min(job.num_plannable, cache.max_tokens_without_preemption",
        "min(10**9, cache.max_tokens_without_preemption",
    ),
    Fault(
        "drafts take blocks from others",
        DRAFTS,
        "cache.max_tokens_without_preemption(job.id) - job.num_computed_tokens",
        "10**9",
    ),
    Fault("tokens outside the vocabulary are drafted", DRAFTS, "0 <= token < vocab_size", "True"),
    Fault("negative tokens are drafted", DRAFTS, "0 <= token < vocab_size", "token < vocab_size"),
    Fault("the vocabulary is one token larger", DRAFTS, "0 <= token < vocab_size", "0 <= token <= vocab_size"),
    Fault(
        "the engine names no vocabulary",
        SERVED,
        "        vocab_size=vocab_size,\n        max_request",
        "        max_request",
    ),
    Fault("the caller's functions see drafts", DRAFTS, " or job.has_logits_processors or", " or"),
    Fault("rows on mlx-lm's own caches speculate", DRAFTS, " or not cache.can_take_back_drafts\n", "\n"),
    Fault("thoughts are drafted past their limit", DRAFTS, "min(MAX_DRAFTS, job.max_drafts)", "MAX_DRAFTS"),
    Fault(
        "the last token of thoughts is one too late",
        BUDGET,
        "max(0, self._remaining_tokens - 1)",
        "max(0, self._remaining_tokens)",
    ),
    Fault(
        "the limit of thoughts is that of their beginning",
        ANSWERS,
        "            self.budget.count_token(token)\n            self.job.max_drafts = self.budget.max_drafts\n",
        "            self.budget.count_token(token)\n",
    ),
    Fault("drafts that a token belies stay", JOB, "if self.drafts[0] == token else ()", "if True else ()"),
    Fault("right drafts are not shifted", JOB, "self.drafts = self.drafts[1:] if", "self.drafts = self.drafts if"),
    Fault("a verifying step does not wait", GATE, "job.drafts != () and job.can_decode", "False"),
    Fault(
        "drafts that are gone end a window",
        GATE,
        "(DrainReason.CONTRADICTED, DrainReason.HISTORY,",
        "(DrainReason.HISTORY,",
    ),
    Fault("a step runs ahead of one that verifies", GATE, "verifies or job.drafts_in_flight != () or", "verifies or"),
    Fault(
        "drafts have the token index of the row",
        BUILDER,
        "token_index.append(job.num_planned_outputs + num_drafts)",
        "token_index.append(job.num_planned_outputs)",
    ),
    Fault("penalties do not count drafts", BUILDER, "[*job.output, *job.drafts[:num_drafts]] if num_drafts else", ""),
    Fault(
        "penalties count a draft too many", BUILDER, "job.drafts[:num_drafts]] if", "job.drafts[: num_drafts + 1]] if"
    ),
    Fault(
        "masks do not follow drafts", REQUESTS, "(answer.matcher, answer.job.drafts_in_flight)", "(answer.matcher, ())"
    ),
    Fault(
        "drafts are followed by the answer's matcher",
        MATCHER,
        "draft_matcher = self.ll_matcher.deep_copy()",
        "draft_matcher = self.ll_matcher",
    ),
)

ROLLBACK = (
    Fault(
        "a job keeps the tokens of wrong drafts",
        DRAFTS,
        "    job.drop_rejected_drafts()\n",
        "    job.drafts_in_flight = ()\n",
    ),
    Fault(
        "a sequence is not cut back",
        DRAFTS,
        "    running_set.cache.truncate(job.id, num_computed)\n",
        "",
    ),
    Fault(
        "one token too many is kept", JOB, "self.state_at = len(self.tokens) - 1", "self.state_at = len(self.tokens)"
    ),
    Fault(
        "one right token is computed again",
        JOB,
        "= self.state_at = len(self.tokens) - 1",
        "= self.state_at = len(self.tokens) - 2",
    ),
    Fault(
        "wrong drafts count as planned tokens",
        JOB,
        "len(self.tokens) - 1\n        self.num_planned_outputs = self.num_generated\n",
        "len(self.tokens) - 1\n",
    ),
    Fault("a row keeps its drafts when it is preempted", JOB, "        self.drafts = self.drafts_in_flight = ()\n", ""),
    Fault(
        "cached tokens are cut off",
        CACHE,
        "if not sequence.registered * self.block_size <= tokens",
        "if not 0 <= tokens",
    ),
)

HASHING = (
    Fault(
        "drafts are hashed when they are planned",
        RUNNING,
        "            num_cacheable = job.num_sharable(min(tokens, len(job.tokens)))\n"
        "            self.cache.register(job.id, job.tokens, num_cacheable, job.keys)",
        "            self.cache.register(job.id, [*job.tokens, *job.drafts_in_flight, *job.drafts], tokens, job.keys)\n"
        "            num_cacheable = tokens",
    ),
    Fault(
        "what was taken is not shared",
        DRAFTS,
        "running_set.note_stored(\n"
        "        job, num_computed - num_computed % running_set.cache.block_size if job.is_spoiled else num_computed\n"
        "    )",
        "",
    ),
    Fault(
        "the newest token counts as stored",
        DRAFTS,
        "if job.is_spoiled else num_computed\n    )",
        "if job.is_spoiled else len(job.tokens))",
    ),
    Fault(
        "wrong drafts are shared when an answer ends",
        DRAFTS,
        "if job.is_spoiled else num_computed\n    )",
        "if job.is_spoiled else job.num_stored_tokens)",
    ),
)

OF_LENGTH = "count = place.offset_in_span(segment.first)"

STATES_TAKEN_BACK = (
    Fault(
        "states have seen refused drafts", STATES, "if rows_by_count.keys() != {span.length} else ()", "if 0 else ()"
    ),
    Fault("a state is one token late", STATES, OF_LENGTH, f"{OF_LENGTH} + 1"),
    Fault("a state is one token early", STATES, OF_LENGTH, f"{OF_LENGTH} - 1"),
    Fault(
        "a snapshot has seen refused drafts",
        STATES,
        "place.row], place.offset_in_span(save.tokens))",
        "place.row], place.span.length)",
    ),
    Fault(
        "all rows get the state of the first",
        STATES,
        "span.compute_state([place.row for _, place in members], count)",
        "span.compute_state([0 for _, place in members], count)",
    ),
    Fault("a state is computed from the one after", STATES, "VerifiedSpan(start, ", "VerifiedSpan(batch, "),
    Fault(
        "a row is computed again and its neighbour with another length is not",
        STATES,
        "for count, members in rows_by_count.items()",
        "for count, members in list(rows_by_count.items())[:1]",
    ),
    Fault(
        "what a module gave is not cut to the tokens that stay",
        RECURRENT,
        "return call() if output is None else cut_to_rows_and_tokens(output)",
        "return call() if output is None else output",
    ),
    Fault(
        "a recorded input keeps all rows",
        RECURRENT,
        "array if index is None else mx.take",
        "array if True else mx.take",
    ),
    Fault(
        "the newest value is that of the last draft",
        RECURRENT,
        "RecordedCall(keep, None, (values, cache), {}, part.tokens.shape)",
        "RecordedCall(keep, None, (values[:, -1:], cache), {}, part.tokens.shape)",
    ),
    Fault(
        "a state after drafts is kept",
        RUNNING,
        "min(job.num_computed_tokens + count, len(job.tokens))",
        "job.num_computed_tokens + count",
    ),
    Fault("rows of different lengths are one part", STATES, "key = segment.count, place", "key = place"),
)

OF_HEAD = (
    Fault("the head gets the token itself", HEAD, "np.append(plan.tokens[1:], 0)", "np.append(plan.tokens, 0)[:-1]"),
    Fault("the head gets no token after a piece", HEAD, "- 1] = plan.following", "- 1] = 0"),
    Fault(
        "the token after a piece is one too late",
        BUILDER,
        "[tokens[end] if end < len(tokens) else 0",
        "[tokens[end + 1] if end + 1 < len(tokens) else 0",
    ),
    Fault("the head does not see chosen tokens", HEAD, "] = mx.maximum(chosen, 0)", "] = 0"),
    Fault(
        "a row gets its neighbour's proposal", HEAD, "first + position - logits.start if", "position - logits.start if"
    ),
    Fault("a row of an older life gets a proposal", HEAD, "firsts.get((job, generation), ", "firsts.get((job, 0), "),
    Fault("a tail that nobody flushed stays for the next window", RUNNER, "not plan.column:", "plan.column > 99:"),
    Fault(
        "a head that slept knows of rejected drafts",
        RUNNER,
        "None:  # rows have gone on without it",
        "None and not self._plan:",
    ),
    Fault(
        "the head runs on states before the norm",
        "cortexmlx/execution/runner.py",
        "self._output_projection.hidden_states(states), tokens, embeddings",
        "states[:, 0], tokens, embeddings",
    ),
    Fault(
        "the newest token's proposal is the one before",
        "cortexmlx/speculation/drafter.py",
        "len(job.tokens) - 2, job",
        "len(job.tokens) - 3, job",
    ),
    Fault("a guess takes the model's place in the arena", HEAD, "begin(positions + number)", "begin(positions)"),
    Fault("keys of guesses come before the tail's newest", HEAD, ".get(layer), self.columns_used,", ".get(layer), 0,"),
    Fault(
        "a guess sees no guess before it", HEAD, "self.columns_used += 1", "self.columns_used += not self.columns_used"
    ),
    Fault(
        "guesses are written to the rows' own tail", HEAD, "tuple(map(mx.array, self.tail[layer]))", "self.tail[layer]"
    ),
    Fault("the head's second guess has the model's state", HEAD, "states = self._head(states, ", "self._head(states, "),
    Fault(
        "guesses of a window go to the rows that ask",
        HEAD,
        "else [place or 0 for place in places]",
        "else list(range(len(places)))",
    ),
    Fault("a row in the tail gets its neighbour's guesses", HEAD, "place or 0 if in_tail else index", "index"),
    Fault(
        "rows are located one token early",
        SCHEDULER,
        "[(job, 1) for job in jobs], writes_to_arena=False",
        "[(job, 1) for job in jobs], writes_to_arena=True",
    ),
    Fault(
        "an assistant moves on with its guesses",
        HEAD,
        "embeddings, positions, lambda",
        "embeddings, positions + 1, lambda",
    ),
    Fault("an assistant does not see the tail", HEAD, "self.tail.get(layer), self.columns_used)", "None, 0)"),
    Fault(
        "an assistant reads the first layer of a kind",
        ASSISTANT,
        "last = {kind: index for index, kind in enumerate(own_layers)}",
        "last = {kind: own_layers.index(kind) for kind in own_layers}",
    ),
    Fault("an assistant gets the embedding last", ASSISTANT, "[next_embeddings, hidden]", "[hidden, next_embeddings]"),
    Fault("an assistant's embeddings are not scaled", ASSISTANT, " * inner.embed_scale", ""),
    Fault(
        "a head's chances are those of a streak",
        "cortexmlx/speculation/speculation.py",
        "streak_class(streak if place is None else place)",
        "streak_class(streak)",
    ),
)

FAULTS = (*VERIFICATION, *ROLLBACK, *STATES_TAKEN_BACK, *OF_HEAD, *HASHING)
