"""The engine's answers: what ends them, what comes with them, and that a neighbour never changes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.errors import EngineClosed, InvalidRequest, ModelUnsupported, PromptTooLong
from cortexmlx.types.request import FinishReason, TokenEvent
from support.engine.core_driver import Driver, assert_nothing_lost, finally_nothing_lost
from support.engine.judge import NOISE
from support.models.tiny import EOS, VOCAB, tokens_of, write_tiny
from support.patience import PATIENCE, soon

PROMPT = tokens_of(20, seed=1)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny: Any) -> Iterator[Engine]:
    with Engine(tiny("one layer"), kv_memory="128KB", block_size=8, max_rows=4, prefill_budget=32) as engine:
        yield engine
        assert_nothing_lost(engine.stats())


def test_a_text_prompt_is_encoded_as_it_is(engine: Engine, judged: Callable[[str], Any], theirs: Any) -> None:
    prompt = "the cat and the hat: é"
    tokens = list(judged("one layer")[1].encode(prompt))
    assert engine.encode(prompt) == tokens
    completion = engine.generate(prompt, SamplingParams(max_tokens=20))
    assert list(completion.token_ids) == theirs("one layer", tokens, 20)
    assert completion.usage.prompt_tokens == len(tokens)
    assert completion.usage.completion_tokens == len(completion.token_ids)


def test_messages_go_through_the_chat_template(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert engine.encode(messages) == [256, *engine.encode("user: hi\n"), 256, *engine.encode("assistant: ")]
    assert engine.generate(messages, SamplingParams(max_tokens=3)).usage.prompt_tokens == len(engine.encode(messages))


def test_the_text_is_what_the_tokenizer_makes_of_the_tokens(engine: Engine, judged: Callable[[str], Any]) -> None:
    completion = engine.generate(PROMPT, GREEDY)
    assert completion.text == judged("one layer")[1].decode(list(completion.token_ids))


def test_streamed_pieces_join_to_the_completion(engine: Engine) -> None:
    *events, last = list(engine.stream(PROMPT, GREEDY))
    assert last.completion is not None and last.finish_reason is FinishReason.LENGTH
    assert tuple(e.token_id for e in events) == last.completion.token_ids == engine.generate(PROMPT, GREEDY).token_ids
    assert "".join(e.text for e in [*events, last]) == last.completion.text


def test_astream_gives_the_same_events(engine: Engine) -> None:
    async def collect() -> list[Any]:
        return [event async for event in engine.astream(PROMPT, GREEDY) if event.progress is None]

    async def both() -> list[list[Any]]:
        return await asyncio.gather(collect(), collect())

    first, second = asyncio.run(both())
    wanted = engine.generate(PROMPT, GREEDY)
    for events in (first, second):
        assert tuple(e.token_id for e in events[:-1]) == wanted.token_ids
        assert events[-1].completion.text == wanted.text


def test_on_event_is_called_for_every_event(engine: Engine) -> None:
    events: list[Any] = []
    completion = engine.submit(PROMPT, GREEDY, on_event=events.append).result(PATIENCE)
    assert soon(lambda: events and events[-1].completion is not None)
    assert tuple(e.token_id for e in events[:-1]) == completion.token_ids


@pytest.mark.parametrize("max_tokens", [1, 16, 17])
def test_max_tokens_is_exact(engine: Engine, max_tokens: int) -> None:
    completion = engine.generate(PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert len(completion.token_ids) == completion.usage.completion_tokens == max_tokens
    assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("at", [0, 5])
def test_a_stop_token_ends_the_answer_and_is_not_in_its_text(engine: Engine, at: int) -> None:
    whole = engine.generate(PROMPT, GREEDY)
    stop = whole.token_ids[at]
    first = whole.token_ids.index(stop)
    completion = engine.generate(
        PROMPT, SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=(stop, VOCAB - 1))
    )
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids == whole.token_ids[: first + 1]
    shorter = engine.generate(PROMPT, SamplingParams(max_tokens=max(first, 1), ignore_eos=True))
    assert completion.text == (shorter.text if first else "")


def test_the_end_token_ends_the_answer_unless_it_is_ignored(engine: Engine) -> None:
    ends = {"logit_bias": {EOS: 1e6}, "max_tokens": 5}
    completion = engine.generate(PROMPT, SamplingParams(**ends))
    assert (completion.token_ids, completion.text) == ((EOS,), "")
    assert completion.finish_reason is FinishReason.STOP
    assert engine.generate(PROMPT, SamplingParams(**ends, ignore_eos=True)).token_ids == (EOS,) * 5


def test_a_stop_string_ends_the_answer_before_it(engine: Engine) -> None:
    whole = engine.generate(PROMPT, GREEDY).text
    stop = whole[6:9]
    handle = engine.submit(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True, stop=(stop, "never seen")))
    events = list(handle)
    completion = handle.result()
    assert completion.finish_reason is FinishReason.STOP
    assert completion.text == whole[: whole.index(stop)] == "".join(e.text for e in events)


def test_log_probabilities_are_those_of_mlx_lms_logits(engine: Engine, judged: Callable[[str], Any]) -> None:
    import mlx.core as mx

    completion = engine.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, logprobs=3))
    assert completion.logprobs is not None and len(completion.logprobs) == 20
    tokens = [*PROMPT, *completion.token_ids]
    logits = np.array(judged("one layer")[0](mx.array([tokens])))[0, len(PROMPT) - 1 : -1].astype(np.float64)
    wanted = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    wanted -= logits.max(-1, keepdims=True)
    for place, found in enumerate(completion.logprobs):
        best = np.sort(wanted[place])[::-1][:3]
        assert found.token_id == completion.token_ids[place] == found.top[0][0]
        assert found.logprob == pytest.approx(wanted[place, found.token_id], abs=NOISE)
        assert [p for _, p in found.top] == pytest.approx(best, abs=NOISE)
        assert [wanted[place, t] for t, _ in found.top] == pytest.approx(best, abs=NOISE)


MANY = [
    SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=7),
    SamplingParams(max_tokens=31, ignore_eos=True, temperature=0.8, top_p=0.9, seed=8),
    SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.3, top_k=5, seed=9, logprobs=1),
    SamplingParams(max_tokens=26, ignore_eos=True, repetition_penalty=1.5, presence_penalty=0.5),
    SamplingParams(max_tokens=18, ignore_eos=True, temperature=0.7, frequency_penalty=1.0, seed=1),
    SamplingParams(max_tokens=22, ignore_eos=True, temperature=1.0, seed=7),
]


@pytest.mark.parametrize("pipeline", [True, False])
def test_a_seed_gives_the_same_tokens_alone_and_in_any_crowd(tiny: Any, pipeline: bool) -> None:
    prompts = [tokens_of(5 + 9 * i, seed=i) for i in range(5)]
    prompts.append(prompts[0])
    with Engine(
        tiny("one layer"), kv_memory="96KB", block_size=8, max_rows=3, prefill_budget=20, pipeline=pipeline
    ) as engine:
        alone = [engine.generate(p, s) for p, s in zip(prompts, MANY, strict=True)]
        crowd = engine.generate_batch(prompts, MANY)
        assert [c.token_ids for c in crowd] == [c.token_ids for c in alone]
        assert crowd[5].token_ids[:20] == crowd[0].token_ids
        assert_nothing_lost(engine.stats())


def test_sampled_answers_without_a_seed_differ(engine: Engine) -> None:
    hot = SamplingParams(max_tokens=20, ignore_eos=True, temperature=2.0)
    assert len({engine.generate(PROMPT, hot).token_ids for _ in range(4)}) == 4


# -- as much as fits --------------------------------------------------------------------------------------------------


def test_a_prompt_that_fills_the_arena_gets_one_token(tiny: Any, theirs: Any) -> None:
    driver = Driver(tiny("one layer"), tokens=64)
    prompt = tokens_of(64, seed=3)
    completion = driver.result_of(prompt, None)
    assert list(completion.token_ids) == theirs("one layer", prompt, 1)
    assert completion.finish_reason is FinishReason.LENGTH
    with pytest.raises(PromptTooLong, match=r"65 tokens .* 64"):
        driver.result(driver.add([*prompt, 1], None))
    assert_nothing_lost(driver.core.stats())


def test_a_prompt_that_fills_the_context_gets_one_token(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), tokens=1024, prefill_budget=200)
    assert len(driver.result_of(tokens_of(511, seed=3), None).token_ids) == 1
    with pytest.raises(PromptTooLong, match=r"512 tokens .* 512"):
        driver.result(driver.add(tokens_of(512), None))


def test_answers_without_a_limit_end_when_the_arena_is_full(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), tokens=96, max_rows=3)
    prompts = [tokens_of(n, seed=n) for n in (10, 20, 30)]
    together = driver.answers(prompts, None)
    assert [len(p) + len(a) for p, a in zip(prompts, together, strict=True)] == [97, 97, 97]
    assert together == [driver.answers([p], None)[0] for p in prompts]
    assert_nothing_lost(driver.core.stats())


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, VOCAB], f"{VOCAB} is outside the vocabulary of {VOCAB}"),
        ([-1], "-1 is outside"),
        ([1, "two"], "a text, a list of token ids, a list of messages or a ChatPrompt"),
        ([True], "a text, a list of token ids, a list of messages or a ChatPrompt"),
        (None, "a text, a list of token ids, a list of messages or a ChatPrompt"),
        (7, "a text, a list of token ids, a list of messages or a ChatPrompt"),
        (b"bytes", "a text, a list of token ids, a list of messages or a ChatPrompt"),
        ({"role": "user", "content": "no list"}, "a text, a list of token ids, a list of messages or a ChatPrompt"),
        ([{"content": "who?"}], "message 1 needs a `role`"),
        ([{"role": "", "content": "who?"}], "chat template.*no role"),
    ],
)
def test_a_bad_prompt_is_refused_at_once(engine: Engine, prompt: Any, message: str) -> None:
    for ask in (engine.generate, engine.submit, engine.stream, lambda p: engine.generate_batch([PROMPT, p])):
        with pytest.raises(InvalidRequest, match=message):
            ask(prompt)


def test_a_prompt_longer_than_the_arena_is_refused_with_the_numbers(engine: Engine) -> None:
    room = engine.stats().total_blocks * 8
    with pytest.raises(PromptTooLong, match=rf"{room + 1} tokens"):
        engine.generate(tokens_of(room + 1))


def test_token_ids_may_be_numpys(engine: Engine) -> None:
    assert engine.generate(np.array(PROMPT), GREEDY).token_ids == engine.generate(PROMPT, GREEDY).token_ids


def test_odd_text_is_answered(engine: Engine) -> None:
    odd = ["a\0b", "\0", "broken \ud800 half", "\ufffe\uffff", "e\u0301" * 9, "🏴‍☠️"]
    assert [len(answer.token_ids) for answer in engine.generate_batch(odd, GREEDY)] == [24] * 6


def test_bad_parameters_are_refused(engine: Engine) -> None:
    for bad in ({"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}, {"stop_token_ids": [VOCAB]}):
        with pytest.raises(InvalidRequest, match=next(iter(bad))):
            engine.submit(PROMPT, SamplingParams(**bad))
    with pytest.raises(InvalidRequest, match="2 prompts need 2 params"):
        engine.generate_batch([PROMPT, PROMPT], [GREEDY])


@pytest.mark.parametrize(
    "bad", [{"block_size": 12}, {"max_rows": 0}, {"prefill_budget": 0}, {"kv_memory": "lots"}, {"kv_memory": 10}]
)
def test_bad_settings_are_refused(tiny: Any, bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Engine(tiny("one layer"), **bad)


def test_a_model_that_could_answer_wrongly_is_refused_by_name(tmp_path: Any) -> None:
    folder = write_tiny(tmp_path / "m", model_type="plamo3", sliding_window=8, sliding_window_pattern=2)
    with pytest.raises(ModelUnsupported, match="plamo3"):
        Engine(folder)


def test_a_batch_larger_than_the_queue_ahead_keeps_its_order(tiny: Any, theirs: Any) -> None:
    prompts = [tokens_of(3 + i % 5, seed=i) for i in range(30)]
    limits = [1 + 7 * i % 12 for i in range(30)]
    params = [SamplingParams(max_tokens=n) for n in limits]
    most = []
    with Engine(tiny("one layer"), kv_memory="512KB", max_rows=2) as engine:
        add = engine._worker.core.add

        def watched(request: Any, handle: Any, stops: Any, *grammar: Any) -> None:
            add(request, handle, stops)
            most.append(len(engine._worker.core.requests.by_id))

        engine._worker.core.add = watched  # type: ignore[method-assign]
        answers = engine.generate_batch(prompts, params)
        assert_nothing_lost(engine.stats())
    assert [[*a.token_ids] for a in answers] == [
        theirs("one layer", *each) for each in zip(prompts, limits, strict=True)
    ]
    assert max(most) == 8, "four requests per row are queued ahead"


def test_a_bad_prompt_late_in_a_batch_cancels_the_others(tiny: Any) -> None:
    with Engine(tiny("one layer"), kv_memory="512KB", max_rows=2) as engine:
        with pytest.raises(InvalidRequest, match="the prompt is empty") as refused:
            engine.generate_batch([*(tokens_of(5, seed=i) for i in range(20)), []], SamplingParams(max_tokens=20))
        assert "prompts[20]" in refused.value.__notes__[0]
        finally_nothing_lost(engine)


def test_what_is_submitted_while_the_core_is_looked_at_begins_together(tiny: Any) -> None:
    with Engine(tiny("one layer"), kv_memory="512KB", max_rows=32) as engine:
        prompts = [tokens_of(5, seed=i) for i in range(32)]
        told: list[tuple[int, str]] = []

        def listen(event: TokenEvent) -> None:
            if event.token_id is not None:
                told.append((len(told), threading.current_thread().name))

        before = engine.stats().steps
        handles = engine.inspect(lambda core: [engine.submit(p, SamplingParams(1), listener=listen) for p in prompts])
        assert [len(h.result().token_ids) for h in handles] == [1] * 32
        assert engine.stats().steps - before == 1
        assert engine.inspect(lambda core: core.info) == engine.info
        engine_thread = engine.inspect(lambda core: threading.current_thread().name)
        assert told == [(i, engine_thread) for i in range(32)]
    with pytest.raises(EngineClosed):
        engine.inspect(lambda core: None)
