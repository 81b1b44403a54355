"""Models that cannot be paged: one request at a time on mlx-lm's own caches, with mlx-lm's tokens, through the same
queue, sampler and answers as all others.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache as PlainCache
from mlx_lm.models.cache import make_prompt_cache

from cortexmlx import CortexError, Engine, SamplingParams
from cortexmlx.errors import EngineClosed, PromptTooLong
from cortexmlx.execution.serial_runner import SequenceCaches
from cortexmlx.types.request import FinishReason, RequestState
from support.engine.core_driver import Driver, assert_nothing_lost, finally_nothing_lost
from support.engine.held import hold_long_answers
from support.models.recurrent import RECURRENT
from support.models.tiny import CONFIGS, tokens_of
from support.patience import PATIENCE, soon
from tests.architectures.parity import subject

LENGTHS = (1, 8, 33)
PROMPT = tokens_of(50, seed=2)


@pytest.fixture
def engine(tiny: Any, unpaged: None) -> Any:
    """A tiny llama that runs one request at a time."""
    with Engine(tiny("one layer"), kv_memory="32KB", block_size=8, max_rows=4, prefill_budget=32) as opened:
        yield opened


# -- the same tokens --------------------------------------------------------------------------------------------------


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("windowed llama", "mamba") else slow) for name in (*CONFIGS, *RECURRENT)],
)
def test_a_queue_of_requests_gets_mlx_lms_tokens(name: str, tiny: Any, theirs: Any, unpaged: None) -> None:
    """All asked at once, prompts in pieces, answers across several windows of decode steps."""
    driver = Driver(tiny(name), prefill_budget=12)
    prompts = [tokens_of(n, seed=n) for n in LENGTHS]
    wanted = [tuple(theirs(name, p, 20)) for p in prompts]
    assert driver.answers(prompts, 20, ignore_eos=False) == wanted
    driver.core.check_invariants()
    stats = driver.core.stats()
    assert stats.max_rows == 1 and stats.attention_backend == "mlx-lm's own"
    assert_nothing_lost(stats)


class Foreign(PlainCache):
    """A cache class of a model's own, which nobody here knows."""


def test_a_model_with_a_cache_class_of_its_own_is_served(
    tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = theirs("one layer", PROMPT, 20)
    from mlx_lm.models import llama

    monkeypatch.setattr(llama.Model, "make_cache", lambda self: [Foreign() for _ in self.layers])
    with Engine(tiny("one layer"), kv_memory="32KB") as engine:
        assert "llama keeps a Foreign" in engine.info.notes[-2]
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        assert list(engine.generate(PROMPT, params).token_ids) == wanted


def test_five_requests_with_a_sampling_each_are_answered_as_paged_ones_are(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paged engine is the judge: its sampling is judged elsewhere, and a row's choice depends on nobody else."""
    from cortexmlx.attention.probe import NotPaged

    asked = [
        SamplingParams(max_tokens=20, temperature=0.0, logprobs=3, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=1.0, top_k=5, min_p=0.05, seed=4, repetition_penalty=1.3),
        SamplingParams(max_tokens=20, temperature=0.7, seed=5, presence_penalty=0.5, frequency_penalty=0.5, n=3),
        SamplingParams(max_tokens=20, temperature=0.9, seed=6, best_of=3, stop=["e"], logit_bias={7: 2.0}),
    ]
    prompts = [tokens_of(20 + i, seed=40 + i) for i in range(5)]
    both = []
    for _ in range(2):
        with Engine(tiny("one layer"), kv_memory="128KB", block_size=8) as engine:
            answers = engine.generate_batch(prompts, asked)
            both.append([[(c.token_ids, c.text, c.finish_reason) for c in (a, *a.others)] for a in answers])
            logprobs = answers[0].logprobs
            assert logprobs is not None and len(logprobs) == 20 and len(logprobs[0].top) == 3
            assert engine.stats().max_rows == (16 if len(both) == 1 else 1)

        def refuse(_: Any) -> Any:
            raise NotPaged("tiny: the second engine is to run one request at a time")

        monkeypatch.setattr("cortexmlx.execution.execution_modes.probe_kv_specs", refuse)
    assert both[0] == both[1]


def test_higher_priority_goes_first_and_streams_come_piece_by_piece(engine: Engine, theirs: Any) -> None:
    def params(priority: int = 0) -> SamplingParams:
        return SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, priority=priority)

    order: list[int] = []
    handles = []
    for number, priority in enumerate((0, 0, 2)):
        listener = lambda event, number=number: order.append(number) if event.completion else None  # noqa: E731
        handles.append(engine.submit(tokens_of(40, seed=number), params(priority), listener=listener))
    for number, handle in enumerate(handles):
        assert list(handle.result(PATIENCE).token_ids) == theirs("one layer", tokens_of(40, seed=number), 12)
    assert order.index(2) < order.index(1)
    events = list(engine.stream(PROMPT, params()))
    assert [e.token_id for e in events if e.token_id is not None] == theirs("one layer", PROMPT, 12)


# -- the last text is kept --------------------------------------------------------------------------------------------


def their_turns(model: Any, turns: list[list[int]], tokens: int) -> list[list[int]]:
    """mlx-lm's answers to turns that go on in one cache, as its chat does."""
    cache, answers = make_prompt_cache(model), []
    for turn in turns:
        steps = generate_step(mx.array(turn), model, max_tokens=tokens, prompt_cache=cache)
        answers.append([int(token) for token, _ in steps])
    return answers


@pytest.mark.parametrize("name", ["one layer", "windowed llama", "mamba"])
def test_a_second_turn_computes_only_its_new_tokens(name: str, tiny: Any, judged: Any, unpaged: None) -> None:
    """Also where the caches cannot be cut back, and the window is long full: nothing is to be cut."""
    driver = Driver(tiny(name))
    first = driver.result_of(PROMPT, 12)
    # mlx-lm's cache ends before the last token of an answer, too.
    turns = [PROMPT, [first.token_ids[-1], *tokens_of(9, seed=5)]]
    theirs = their_turns(judged(name)[0], [PROMPT], 12)
    assert list(first.token_ids) == theirs[0]
    text = [*PROMPT, *first.token_ids, *turns[1][1:]]
    second = driver.result_of(text, 12)
    assert second.usage.cached_tokens == len(PROMPT) + 11
    assert list(second.token_ids) == their_turns(judged(name)[0], [text], 12)[0]
    assert driver.core.stats().cached_tokens == len(PROMPT) + 11


@pytest.mark.parametrize("name", ["one layer", "mamba"])
def test_a_second_turn_behind_an_end_token_computes_only_what_is_new(
    name: str, tiny: Any, theirs: Any, unpaged: None
) -> None:
    """With nothing computed behind the end that could not be cut off: only where it can be is a step on its way."""
    driver = Driver(tiny(name))
    answer = theirs(name, PROMPT, 12)
    end = next(token for token in answer if token != answer[0])  # a first token is read before a step is on its way
    first = driver.result_of(PROMPT, 12, stop_token_ids=(end,))
    assert first.finish_reason is FinishReason.STOP and first.token_ids[-1] == end
    text = [*PROMPT, *first.token_ids, 3, 4, 5]
    second = driver.result_of(text, 12)
    assert second.usage.cached_tokens == len(PROMPT) + len(first.token_ids) - (name == "mamba")
    assert list(second.token_ids) == theirs(name, text, 12)


def test_another_text_takes_over_what_it_shares_where_that_can_be_cut(tiny: Any, theirs: Any, unpaged: None) -> None:
    for name, cached in (("one layer", 30), ("windowed llama", 0), ("mamba", 0)):
        driver = Driver(tiny(name))
        driver.result_of(PROMPT, 5)
        other = [*PROMPT[:30], *tokens_of(20, seed=9)]
        answer = driver.result_of(other, 12)
        assert (name, answer.usage.cached_tokens) == (name, cached)
        assert list(answer.token_ids) == theirs(name, other, 12)


def test_clients_and_engines_without_a_prefix_cache_find_nothing(tiny: Any, theirs: Any, unpaged: None) -> None:
    driver = Driver(tiny("one layer"))
    for client, cached in (("one", 0), ("other", 0), ("other", len(PROMPT) - 1), ("one", 0)):
        answer = driver.result_of(PROMPT, 5, client=client)
        assert answer.usage.cached_tokens == cached and list(answer.token_ids) == theirs("one layer", PROMPT, 5)
    driver = Driver(tiny("one layer"), prefix_cache=False)
    assert [driver.result_of(PROMPT, 5).usage.cached_tokens for _ in range(2)] == [0, 0]


# -- memory -----------------------------------------------------------------------------------------------------------


def test_stats_count_mlx_lms_buffers(tiny: Any, unpaged: None) -> None:
    driver = Driver(tiny("one layer"), tokens=512)
    per_token = driver.core.info.kv_bytes_per_token
    before = driver.core.stats()
    assert (before.kv_bytes, before.kv_bytes_in_use, before.kv_bytes_limit) == (0, 0, 512 * per_token)
    driver.add(PROMPT, 20)
    driver.step(8)
    during = driver.core.stats()
    assert during.kv_bytes == during.kv_bytes_in_use == 256 * per_token and during.used_blocks > 0
    driver.finish()
    after = driver.core.stats()
    assert (after.kv_bytes, after.kv_bytes_in_use) == (256 * per_token, 0) and after.cached_blocks > 0
    driver.core.relieve(True)
    assert driver.core.stats().kv_bytes == 0
    assert driver.result_of(PROMPT, 5).usage.cached_tokens == 0


@pytest.mark.parametrize("level", [False, True])
def test_memory_pressure_while_a_request_runs_changes_no_token(
    tiny: Any, theirs: Any, unpaged: None, level: bool
) -> None:
    driver = Driver(tiny("one layer"))
    handle = driver.add(PROMPT, 30)
    for _ in range(6):
        driver.step(4)
        driver.core.relieve(level)
    driver.finish()
    assert list(driver.result(handle).token_ids) == theirs("one layer", PROMPT, 30)


def test_an_answer_ends_where_memory_or_context_is_full(tiny: Any, theirs: Any, unpaged: None) -> None:
    driver = Driver(tiny("one layer"), tokens=64)
    full = driver.result_of(PROMPT, None)
    assert full.finish_reason is FinishReason.LENGTH and len(full.token_ids) == 64 + 1 - len(PROMPT)
    assert list(full.token_ids) == theirs("one layer", PROMPT, len(full.token_ids))
    with pytest.raises(PromptTooLong, match="has 65 tokens and the KV cache holds 64"):
        driver.result_of(tokens_of(65), 5)
    context = RECURRENT["mamba"]["max_position_embeddings"]
    driver = Driver(tiny("mamba"))
    full = driver.result_of(tokens_of(context - 10), None)
    assert full.finish_reason is FinishReason.LENGTH and len(full.token_ids) == 10
    with pytest.raises(PromptTooLong, match=f"has {context} tokens and the model's context is {context}"):
        driver.result_of(tokens_of(context), 5)


def test_memory_that_the_system_refuses_ends_the_answer(
    tiny: Any, theirs: Any, unpaged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SequenceCaches, "can_resize", lambda self, blocks: blocks[0] <= 10)
    driver = Driver(tiny("one layer"), tokens=512)
    answer = driver.result_of(PROMPT, 100)
    assert answer.finish_reason is FinishReason.LENGTH and driver.core.cache.tables.capacity_tokens in (72, 80)
    assert len(answer.token_ids) == driver.core.cache.tables.capacity_tokens + 1 - len(PROMPT)
    assert list(answer.token_ids) == theirs("one layer", PROMPT, len(answer.token_ids))


# -- requests that end before their time ------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 9, 26, *(pytest.param(n, marks=slow) for n in (0, 2, 3, 7, 24))])
@pytest.mark.parametrize("name", ["one layer", pytest.param("mamba", marks=slow)])
def test_cancelled_at_a_step_and_the_next_is_right(
    name: str, steps: int, tiny: Any, theirs: Any, unpaged: None
) -> None:
    """In the middle of the prompt, too, and the next prompt begins like the cancelled one."""
    driver = Driver(tiny(name), prefill_budget=16)
    handle, waiting = driver.add(PROMPT, 40), driver.add([*PROMPT[:40], 1, 2, 3], 12)
    driver.step(steps)
    handle.cancel()
    cancelled = driver.result(handle)
    assert cancelled.finish_reason is FinishReason.CANCELLED
    assert list(cancelled.token_ids) == theirs(name, PROMPT, 40)[: len(cancelled.token_ids)]
    driver.finish()
    assert list(driver.result(waiting).token_ids) == theirs(name, [*PROMPT[:40], 1, 2, 3], 12)
    driver.core.check_invariants()
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize("steps", [9, 10])
def test_a_turn_that_was_cancelled_is_not_computed_anew(steps: int, tiny: Any, theirs: Any, unpaged: None) -> None:
    """With a step in flight and without, where the caches cannot be cut back."""
    driver = Driver(tiny("mamba"), prefill_budget=16)
    handle = driver.add(PROMPT, 40)
    driver.step(steps)
    driver.core.cancel(handle.id)
    driver.finish()
    answer = driver.result(handle).token_ids
    turn = [*PROMPT, *answer, 1, 2, 3]
    done = driver.result_of(turn, 12, ignore_eos=False)
    assert answer and done.usage.cached_tokens >= len(PROMPT) + len(answer) - 1
    assert list(done.token_ids) == theirs("mamba", turn, 12)


@pytest.mark.parametrize("part", ["dispatch", "run", "collect"])
def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(
    part: str, engine: Engine, theirs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    core = engine._worker.core
    owner: Any = core.runner.arena if part == "run" else core.runner
    original, calls = getattr(owner, part), [0]

    def call(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 6:
            raise RuntimeError("it broke")
        return original(*args)

    monkeypatch.setattr(owner, part, call)
    with caplog.at_level(logging.CRITICAL, "cortexmlx"):
        handles = [engine.submit(PROMPT, params) for _ in range(2)]
        for handle in handles:
            with pytest.raises(CortexError, match="it broke"):
                handle.result(PATIENCE)
            assert handle.state is RequestState.FAILED
    monkeypatch.undo()
    assert engine.generate(PROMPT, params).token_ids == tuple(theirs("one layer", PROMPT, 20))
    finally_nothing_lost(engine)


def test_an_engine_that_begins_anew_forgets_the_last_text(tiny: Any, theirs: Any, unpaged: None) -> None:
    """What an exception thrown at the engine's thread leads to."""
    driver = Driver(tiny("one layer"))
    driver.add(PROMPT, 20)
    driver.step(9)
    driver.core.reset()
    answer = driver.result_of(PROMPT, 20)
    assert answer.usage.cached_tokens == 0 and list(answer.token_ids) == theirs("one layer", PROMPT, 20)
    driver.core.check_invariants()


def test_an_engine_closed_while_it_runs_fails_its_requests(tiny: Any, unpaged: None) -> None:
    with Engine(tiny("one layer"), kv_memory="128KB") as engine:
        hold_long_answers(engine)
        handles = [engine.submit(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True)) for _ in range(2)]
        assert soon(lambda: handles[0].state is RequestState.DECODING)
    for handle in handles:
        with pytest.raises(EngineClosed):
            handle.result(PATIENCE)


def test_a_logits_processor_that_fails_ends_its_own_request(tiny: Any, theirs: Any, unpaged: None) -> None:
    def broken(tokens: Any, logits: Any) -> Any:
        if len(tokens) > len(PROMPT) + 2:
            raise ZeroDivisionError("its own mistake")
        return logits

    driver = Driver(tiny("one layer"))
    bad, good = driver.add(PROMPT, 20, logits_processors=(broken,)), driver.add([*PROMPT, 7], 20)
    driver.finish()
    with pytest.raises(CortexError, match="its own mistake"):
        driver.result(bad)
    assert list(driver.result(good).token_ids) == theirs("one layer", [*PROMPT, 7], 20)


# Model types that are not paged, or were not when this was written: texts one after the other on mlx-lm's own caches.


TYPES = (
    "nemotron-nas",
    "deepseek_v41",
    "deepseek_v32",
    "glm_moe_dsa",
    "minimax_m3_vl",
    "falcon_h1",
    "baichuan_m1",
    "recurrent_gemma",
    "longcat_flash",
    "llama4",
    "gemma3n",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_texts_that_share_their_beginnings_get_mlx_lms_tokens(name: str, tmp_path: Path, unpaged: None) -> None:
    made = subject(name, tmp_path / name)
    driver = Driver(made.folder, prefill_budget=32)

    def check(text: list[int]) -> list[int]:
        answer = driver.result_of(text, 20)
        wanted = [int(token) for token, _ in generate_step(mx.array(text), made.judge, max_tokens=20)]
        assert list(answer.token_ids) == wanted, f"{len(text)} tokens, {answer.usage.cached_tokens} of them cached"
        return [*text, *wanted]

    prompt = tokens_of(60, seed=2)
    for length in (1, 9, 31, 60):
        check(prompt[:length])
    for shared in (30, 0):
        gone_on = check([*prompt[:shared], *tokens_of(20, seed=9)])
        check([*gone_on, 1, 2, 3])
        assert driver.core.stats().cached_tokens >= len(gone_on) - 1, "a text that goes on is not computed anew"
