"""Arguments of the wrong type are refused by their names, in words of ours, before anything is queued."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cortexmlx import CortexError, Engine
from cortexmlx.errors import InvalidRequest

WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "params, a text": (lambda e: e.generate("hi", "x"), "params is 'x', but must be SamplingParams or None: write"),
    "params, a map": (lambda e: e.generate("hi", {"max_tokens": 5}), r"params is \{'max_tokens': 5\}, but must be"),
    "params of a batch": (lambda e: e.generate_batch([[1]], 5), "params is 5, but must be"),
    "params of a prompt of a batch": (lambda e: e.generate_batch([[1]], [5]), "params is 5, but must be"),
    "params of a batch, a map": (lambda e: e.generate_batch([[1]], {"n": 1}), "params is {'n': 1}, but must be"),
    "params of a conversation": (lambda e: e.conversation(params="x"), "params is 'x', but must be"),
    "params of a turn": (lambda e: e.conversation().ask("hi", "x"), "params is 'x', but must be"),
    "no prompts": (lambda e: e.generate_batch(None), "prompts are a list of prompts, or any other iterable, not None"),
    "window": (lambda e: e.as_completed([[1]], window="x"), "window is 'x', but must be at least 1"),
    "client": (lambda e: e.submit([1], client=5), "client is 5, but must be a text or None"),
    "client, an array": (lambda e: e.submit([1], client=np.array(["a"])), "client is array"),
    "client of a pin": (lambda e: e.pin([1] * 64, client=5), "client is 5, but must be a text or None"),
    "client of a conversation": (lambda e: e.conversation(client=5), "client is 5, but must be a text or None"),
    "a long client": (lambda e: e.submit([1], client="x" * 1025), "client has 1,025 characters, .* at most 1,024"),
    "system": (lambda e: e.conversation(system=5), "system is 5, but must be a text or None"),
    "messages": (lambda e: e.conversation(messages=5), "messages are a list of maps, not 5"),
    "question": (lambda e: e.conversation().ask(5), "messages are a list of maps, not 5"),
    "on_event": (lambda e: e.submit([1], on_event=5), "on_event is 5, but must be a function or None"),
    "listener": (lambda e: e.submit([1], listener=5), "listener is 5, but must be a function or None"),
    "on_progress": (lambda e: e.generate([1], on_progress=5), "on_progress is 5, but must be a function or None"),
    "pin": (lambda e: e.pin(5), "a prompt is a text, a list of token ids"),
    "pin, bytes": (lambda e: e.pin(b"a" * 64), "a prompt is a text, a list of token ids"),
    "tokens": (lambda e: e.decode(5), "tokens are a list of token ids, not 5"),
    "token": (lambda e: e.token_bytes("x"), "a token id is an integer, not 'x'"),
    "no content": (lambda e: e.generate([{"role": "user"}]), "message 1, of the role 'user', has no `content`"),
    "content under another name": (
        lambda e: e.encode([{"role": "user", "text": "hi"}]),
        "message 1, .* has no `content`",
    ),
    "content is null": (lambda e: e.encode([{"role": "user", "content": None}]), "message 1, .* has no `content`"),
    "content, a number": (lambda e: e.encode([{"role": "user", "content": 5}]), "`content` of message 1 is 5, but"),
    "content, bytes": (lambda e: e.encode([{"role": "user", "content": b"x"}]), "`content` of message 1 is b'x'"),
    "no role": (lambda e: e.encode([{"role": "user", "content": "a"}, {"content": "b"}]), "message 2 needs a `role`"),
    "prompt, an array without axes": (lambda e: e.generate(np.array(3)), "a prompt is a text, a list of token ids"),
    "prompts, an array without axes": (lambda e: e.generate_batch(np.array(3)), "prompts are a list of prompts"),
    "pin, an array without axes": (lambda e: e.pin(np.array(3)), "a prompt is a text, a list of token ids"),
    "tokens, an array without axes": (lambda e: e.decode(np.array(3)), "tokens are a list of token ids"),
    "a text to be scored": (lambda e: e.perplexity(np.array(3)), "a text to be scored is a text or a list"),
    "messages, an array": (lambda e: e.conversation(messages=np.array(3)), "messages are a list of maps"),
    "params of a batch with keywords": (lambda e: e.generate_batch([[1]], 5, n=1), "params is 5, but must be"),
    "params, a map with keywords": (lambda e: e.generate_batch([[1]], {"n": 1}, n=1), "params is {'n': 1}, but must"),
    "on_window": (lambda e: e.perplexity([1] * 9, on_window=5), "on_window is 5, but must be a function or None"),
    "content of a turn": (lambda e: e.conversation().ask([{"role": "user"}]), "message 1, .* has no `content`"),
}


@pytest.fixture(scope="module")
def engine(tiny: Any) -> Iterator[Engine]:
    with Engine(tiny("llama"), kv_memory="256KB") as opened:
        yield opened


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_argument_is_refused_by_its_name(engine: Engine, call: str) -> None:
    wrong, said = WRONG[call]
    with pytest.raises(InvalidRequest, match=said) as caught:
        wrong(engine)
    assert isinstance(caught.value, CortexError) and len(str(caught.value)) < 300
    assert engine.stats().rows_waiting == engine.stats().rows_running == 0


OPTIONS = ("kv_memory", "kv_bits", "kv_group_size", "block_size", "max_rows", "attention", "prefill_budget")
OPTIONS += ("max_request_tokens", "client_tokens", "token_target", "keep_first", "keep_last", "adapter", "on_progress")


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("value", [b"x", {}, {1}, object(), np.zeros((2, 2)), np.array([]), complex(1), float("nan")])
def test_an_option_of_the_wrong_type_is_refused_by_its_name(tiny: Any, option: str, value: Any) -> None:
    others = {"kv_bits": 8} if option == "kv_group_size" else {"keep_last": 9} if option == "keep_first" else {}
    with pytest.raises(InvalidRequest, match=f"{option} is |is not a size"):
        Engine(tiny("llama"), **others, **{option: value})


def test_a_conversation_keeps_messages_that_can_be_read_only_once(engine: Engine) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert list(engine.conversation(messages=iter(said)).messages) == said  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", ["x", float("nan"), True, np.zeros(2)])
def test_a_result_refuses_what_is_no_number_of_seconds(engine: Engine, timeout: Any) -> None:
    handle = engine.submit([1], max_tokens=1)
    with pytest.raises(InvalidRequest, match=r"timeout is .*, but must be a number of seconds or None"):
        handle.result(timeout)
    assert handle.result().token_ids
