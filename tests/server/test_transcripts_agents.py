"""An agent's next turn computes only what is new, though it sends texts back, in another form than was written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from cortexmlx import Engine
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.server import ServerSettings, app
from support.clients.listening import listening
from support.engine.core_driver import soon
from support.models import tool_templates
from support.models.recurrent import RECURRENT
from support.models.thinking import dictated, write_thinking
from support.patience import PATIENCE

ENDED = tool_templates.HERMES.replace("<|im_end|>", "</s>")
_CONTENT = "<|im_start|>{{ m.role }}\n{{ m.content }}"
KEEPS = ENDED.replace(
    _CONTENT,
    _CONTENT.replace("{{ m.c", "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.c"),
)
"""Writes all thoughts that it is given."""
DROPS = ENDED + "<think>\n\n"
"""Opens thoughts, and never writes those of earlier answers. Its prompt ends with one line break."""
TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
BLOCK = 16

NUMBER = {"type": "number"}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"days": NUMBER, "city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"days": 3.50, "city": "Paris"}}\n</tool_call>'
"""The template writes 3.5."""
ANSWERS = (
    f"let me see</think>{CALL}",
    f"and there?</think>{CALL.replace('Paris', 'Rome')}",
    "so</think> It is  fine. ",
    "oh</think>Bye",
)


@contextmanager
def agent(
    folder: Path,
    template: str,
    answers: tuple[str, ...],
    config: Any,
    store: Path | None = None,
    rows: int = 4,
    **settings: Any,
) -> Iterator[Callable[[Any], Any]]:
    write_thinking(folder, template, TOKENS, **{**config, "max_position_embeddings": 4096})
    with Engine(str(folder), kv_memory="16MB", max_rows=rows, block_size=BLOCK, kv_store=store) as engine:
        defaults = RequestDefaults(dictated(engine, *answers))
        settings["transcripts_folder"] = store
        with listening(app(engine, ServerSettings(defaults=defaults, **settings))) as url:
            web = openai.DefaultHttpxClient(trust_env=False, timeout=PATIENCE)
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=web) as client:
                yield lambda messages: client.chat.completions.create(
                    model="tiny", messages=messages, tools=[WEATHER], max_tokens=200
                )
        engine.check_invariants()


def sent_back(message: Any, thoughts: bool) -> dict[str, Any]:
    """The answer as an agent's program sends it: calls are parsed and written again, with the names in order."""
    said = {"role": "assistant", "content": message.content}
    if thoughts and getattr(message, "reasoning_content", None):
        said["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        [call] = message.tool_calls
        arguments = json.dumps(json.loads(call.function.arguments), sort_keys=True, indent=1)
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        ]
    return said


def computed(ask: Callable[[Any], Any], thoughts: bool, turns: int = 4) -> list[int]:
    """How many tokens of each turn's prompt were computed."""
    messages: list[Any] = [
        {"role": "system", "content": "You are a helpful agent. " * 10},
        {"role": "user", "content": "How is the weather?"},
    ]
    counts = []
    for _ in range(turns):
        reply = ask(messages)
        usage = reply.usage
        counts.append(usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens)
        message = reply.choices[0].message
        more = {"role": "user", "content": "Thanks!"}
        if message.tool_calls:
            more = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        messages = [*messages, sent_back(message, thoughts), more]
    return counts


NEW = len("</s>\n<|im_start|>tool\nsunny</s>\n<|im_start|>assistant\n")
"""Characters, and so at least as many as tokens, that a turn adds to its own answer."""


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_answers_with_their_thoughts_are_computed_no_second_time(tmp_path: Path, kind: str) -> None:
    answers = tuple("<think>" + each for each in ANSWERS)
    config = RECURRENT.get(kind, {})
    with agent(tmp_path / "tiny", KEEPS, answers, config) as ask:
        first, *later = computed(ask, thoughts=True)
    assert first > 400 and all(count <= NEW + 2 * BLOCK for count in later), later
    with agent(tmp_path / "other" / "tiny", KEEPS, answers, config, transcripts=0) as ask:
        without = computed(ask, thoughts=True, turns=2)
    assert without[1] > later[0] + 20, "the number comes back in another form"


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_a_template_that_drops_thoughts_is_followed_from_there(tmp_path: Path, kind: str) -> None:
    """The answer without its thoughts is new to the model, and nothing before it."""
    with agent(tmp_path / "tiny", DROPS, ANSWERS, RECURRENT.get(kind, {})) as ask:
        first, *later = computed(ask, thoughts=False)
    assert first > 400
    bounds = [NEW + len(CALL) + 2 * BLOCK] * 2 + [NEW + len("It is  fine.") + 2 * BLOCK]
    assert all(count <= bound for count, bound in zip(later, bounds, strict=True)), later


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_after_a_restart_an_agent_goes_on(tmp_path: Path, kind: str) -> None:
    answers = tuple("<think>" + each for each in ANSWERS)
    config, store = RECURRENT.get(kind, {}), tmp_path / "store"
    messages: list[Any] = [{"role": "user", "content": "How is the weather? " * 20}]
    with agent(tmp_path / "tiny", KEEPS, answers, config, store) as ask:
        for _ in range(2):
            message = ask(messages).choices[0].message
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
            messages = [*messages, sent_back(message, thoughts=True), result]
    soon(lambda: any(b"Rome" in path.read_bytes() for path in store.glob("*.transcript")))
    with agent(tmp_path / "tiny", KEEPS, answers[2:], config, store) as ask:
        usage = ask(messages).usage
    again = len(answers[1]) if config else 0  # a recurrent state is on disk as it was before the last answer
    assert usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens <= NEW + again + 2 * BLOCK
    soon(lambda: any(b"It is  fine." in path.read_bytes() for path in store.glob("*.transcript")))
    [kept] = store.glob("*.transcript")
    kept.unlink()
    with agent(tmp_path / "tiny", KEEPS, answers[2:], config, store) as ask:
        without = ask(messages).usage
    assert without.prompt_tokens_details.cached_tokens < usage.prompt_tokens_details.cached_tokens - 50


LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
LOOPS = (
    LAST
    + ENDED.replace(
        _CONTENT,
        _CONTENT.replace(
            "{{ m.c",
            "{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content.strip('\n') }}"
            "</think>{% endif %}{{ m.c",
        ),
    )
    + "<think>\n\n"
)
"""Writes the thoughts since the last user's message (Qwen3). Its prompt ends with one line break."""


@pytest.mark.parametrize("kind", ["qwen3_5", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_new_question_computes_what_followed_the_last_one(tmp_path: Path, kind: str) -> None:
    """Then the thoughts of all rounds are left out. A recurrent state is kept before them, however many there were."""
    rounds = 2
    answers = (*(f"step {n}</think>{CALL}" for n in range(rounds)), "so</think>Fine.", "oh</think>Bye")
    system, question = "You are a helpful agent. " * 10, "How is the weather? " * 8
    messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    counts = []
    with agent(tmp_path / "tiny", LOOPS, answers, RECURRENT.get(kind, {}), rows=1) as ask:
        for _ in range(rounds + 2):
            reply = ask(messages)
            counts.append(reply.usage.prompt_tokens - reply.usage.prompt_tokens_details.cached_tokens)
            message, more = reply.choices[0].message, {"role": "user", "content": "Thanks!"}
            if message.tool_calls:
                more = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
            messages = [*messages, sent_back(message, thoughts=True), more]
    first, *later, last = counts
    assert all(count <= NEW + 2 * BLOCK for count in later), later
    assert last <= reply.usage.prompt_tokens - first + NEW + 2 * BLOCK, "all before the first call is there"
