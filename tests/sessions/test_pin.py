"""`engine.pin`: what prompts begin with stays, for texts, tokens and messages, in every kind of model."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx import Engine, RequestHandle, SamplingParams
from cortexmlx.errors import InvalidRequest, PinRefused, PromptTooLong
from support.models.tiny import tokens_of

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
SYSTEM = {"role": "system", "content": "You know all of this: " + "and that, " * 5}


def crowd(engine: Engine, count: int = 12) -> None:
    """Other requests, more than the arena holds."""
    for seed in range(count):
        engine.generate(tokens_of(100, seed=50 + seed), SHORT)


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("gemma3_text", "80KB"),
        pytest.param("lfm2", "300KB", marks=pytest.mark.slow),
    ],
)
def test_a_pinned_system_prompt_outlives_others_in_a_tight_arena(tiny: Any, name: str, memory: str) -> None:
    with Engine(tiny(name), kv_memory=memory, block_size=8, max_rows=2) as engine:
        question = [SYSTEM, {"role": "user", "content": "What?"}]
        cold = engine.generate(question, SHORT)
        with engine.pin([SYSTEM]) as pin:
            assert pin.tokens > 48 and pin.tokens % 8 == 0
            assert engine.stats().pins == 1 and engine.stats().pinned_blocks > 0
            crowd(engine)
            warm = engine.generate(question, SHORT)
            assert warm.usage.cached_tokens >= pin.tokens and warm.token_ids == cold.token_ids
            engine.check_invariants()
        crowd(engine, 16)
        assert engine.generate(question, SHORT).usage.cached_tokens < pin.tokens
        assert (engine.stats().pins, engine.stats().pinned_blocks) == (0, 0)
        pin.unpin()


@pytest.mark.parametrize("last", ["system", "user", "assistant"])
def test_messages_are_pinned_as_far_as_all_that_goes_on_is_alike(engine: Engine, last: str) -> None:
    messages = [SYSTEM, {"role": "user", "content": "One?"}, {"role": "assistant", "content": "1."}]
    messages = messages[: ["system", "user", "assistant"].index(last) + 1]
    with engine.pin(messages) as pin:
        role = "assistant" if last == "user" else "user"
        going_on = engine.encode([*messages, {"role": role, "content": "and more"}])
        assert engine.generate(going_on, SHORT).usage.cached_tokens >= pin.tokens
        assert pin.tokens >= len(engine.encode(messages)) - len(engine.encode("<s>assistant: ")) - 8


def test_texts_and_tokens_are_pinned_and_computed_only_once(engine: Engine) -> None:
    text = "a text that has some length, and a few blocks of eight tokens"
    tokens = engine.encode(text)
    engine.generate(tokens, SHORT)
    computed = engine.stats().prompt_tokens - engine.stats().cached_tokens
    with engine.pin(text) as one, engine.pin(tokens) as other:
        assert one.tokens == other.tokens == len(tokens) // 8 * 8
        assert engine.stats().prompt_tokens - engine.stats().cached_tokens <= computed + 2
        assert engine.stats().pins == 2


def test_a_client_pins_for_itself(engine: Engine) -> None:
    tokens = tokens_of(40, seed=1)
    with engine.pin(tokens, client="one"):
        for client, most in (("one", 39), ("other", 0), (None, 0)):
            assert engine.submit(tokens, SHORT, client=client).result().usage.cached_tokens == most


def test_what_cannot_be_pinned_is_refused_with_the_numbers(tiny: Any, engine: Engine) -> None:
    blocks = engine.inspect(lambda core: core.cache.pools.max_blocks[0])
    with pytest.raises(PinRefused, match=f"beside 0 that are pinned, and pins may have {blocks // 2} of {blocks}"):
        engine.pin(tokens_of(8 * (blocks // 2 + 1)))
    with pytest.raises(InvalidRequest, match="whole blocks of 8 tokens, and this has 7"):
        engine.pin(tokens_of(7))
    assert engine.stats().pins == 0
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        engine.pin([*tokens_of(20), 2**40])
    with pytest.raises(PromptTooLong):
        engine.pin(tokens_of(600))
    assert engine.stats().pins == 0
    with Engine(tiny("llama"), prefix_cache=False) as uncached, pytest.raises(InvalidRequest, match="prefix_cache"):
        uncached.pin(tokens_of(100))


def test_a_model_that_keeps_one_text_pins_none(tiny: Any, unpaged: None) -> None:
    with Engine(tiny("llama")) as serial, pytest.raises(InvalidRequest, match="keep the last text alone"):
        serial.pin(tokens_of(100))


def test_pressure_spares_pins_until_it_is_critical(engine: Engine) -> None:
    with engine.pin(tokens_of(41)):
        engine.generate(tokens_of(20, seed=3), SHORT)
        engine.on_memory_pressure("warning")
        engine.on_memory_pressure("warning")
        assert engine.stats().pinned_blocks == 5
        engine.on_memory_pressure("critical")
        assert (engine.stats().pins, engine.stats().pinned_blocks) == (1, 0)
        engine.generate(tokens_of(41), SHORT)
        assert engine.stats().pinned_blocks == 5


def test_an_interrupt_ends_the_request_of_a_pin(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(handle: RequestHandle, timeout: float | None = None) -> None:
        handles.append(handle)
        raise KeyboardInterrupt

    handles: list[RequestHandle] = []
    monkeypatch.setattr(RequestHandle, "result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.pin(tokens_of(40))
    assert handles[0].cancelling and engine.stats().pins == 0


def test_a_pin_of_a_closed_engine_is_let_go(tiny: Any) -> None:
    with Engine(tiny("llama"), kv_memory="256KB", block_size=8) as opened:
        pin = opened.pin(tokens_of(20))
    pin.unpin()


def test_prompts_that_need_the_memory_of_pins_get_it(tiny: Any) -> None:
    with Engine(tiny("llama"), kv_memory="40KB", block_size=8, max_rows=2) as engine:
        capacity = engine.inspect(lambda core: core.cache.tables.capacity_tokens)
        engine.pin(tokens_of(capacity // 2 // 8 * 8))
        answer = engine.generate(tokens_of(capacity - 5, seed=2), SHORT)
        assert len(answer.token_ids) == 4 and engine.stats().pinned_blocks < capacity // 2 // 8
        with pytest.raises(PromptTooLong):
            engine.generate(tokens_of(capacity + 1), SHORT)
        engine.check_invariants()
