"""Tools: calls that are always valid, in any batch, and exactly the tokens of mlx-lm under llguidance's own matcher."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import mlx.core as mx
import numpy as np
import pytest

from cortexmlx import (
    ChatPrompt,
    Completion,
    Engine,
    FinishReason,
    InvalidRequest,
    SamplingParams,
    StructuredOutputError,
    TokenEvent,
)
from cortexmlx.structured.calls.format import AllowedCalls
from cortexmlx.structured.calls.json_formats import Hermes
from cortexmlx.structured.compiler import grammar_source
from cortexmlx.structured.tools import Tool, result_message
from support.clients.scripted import write_scripted
from support.engine.grammar_judge import constrained_greedy, forced_greedy, judge_tokenizer
from support.models.calling import write_calling
from support.models.thinking import dictated
from support.models.tiny import EOS

USER = [{"role": "user", "content": "What is the weather?"}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:1],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


WEATHER = tool(
    "weather", city={"enum": ["Paris", "Rome", "Oslo"]}, days={"type": "integer", "minimum": 1, "maximum": 99}
)
NOTE = tool("note", text={"type": "string", "maxLength": 12}, urgent={"type": "boolean"})
NOW = tool("now")
TOOLS = [WEATHER, NOTE, NOW]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}

Open = Callable[..., Engine]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def folder(kind: str, begin: str = "", **config: Any) -> Path:
        key = f"{kind}{begin}{config}"
        if key not in made:
            made[key] = write_calling(tmp_path_factory.mktemp("calling") / "m", kind, begin, **config)
        return made[key]

    return folder


@pytest.fixture
def open_engine(folders: Callable[..., Path]) -> Iterator[Open]:
    opened: list[Engine] = []

    def start(kind: str = "hermes", begin: str = "", config: Any = None, **options: Any) -> Engine:
        settings = {"kv_memory": "8MB", "max_rows": 4, **options}
        opened.append(Engine(str(folders(kind, begin, **(config or {}))), **settings))
        return opened[-1]

    yield start
    for engine in opened:
        engine.check_invariants()
        engine.close()


def check(answer: Completion) -> None:
    """Every call is valid, and a whole answer ends for its calls."""
    for call in answer.tool_calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    if answer.finish_reason is FinishReason.TOOL_CALLS:
        assert answer.tool_calls
    assert len({call.id for call in answer.tool_calls}) == len(answer.tool_calls)


ENFORCED = ["hermes", "qwen coder", "llama", "mistral", "deepseek", "plain tags", "lfm", "gemma"]
"""Without harmony: random weights that speak it begin with thoughts, and never end them."""

NOTES = {"qwen coder": ("maxLength of 'text' of the tool 'note' is not enforced: it is written as raw text",)}
"""What a format cannot enforce of the schemas."""


@pytest.mark.parametrize("kind", ENFORCED)
def test_a_required_call_is_valid_whatever_the_model_is(kind: str, open_engine: Open) -> None:
    """Random weights at a high temperature write what no trained model would. The pieces of a stream are the whole."""
    engine = open_engine(kind)
    asked = SamplingParams(
        tools=TOOLS, tool_choice="required", max_tokens=250, temperature=1.5, parallel_tool_calls=False
    )
    streams = [list(engine.stream(USER, asked, seed=seed)) for seed in range(4)]
    answers = [events[-1].completion for events in streams]
    for events, answer in zip(streams, answers, strict=True):
        assert joined(events) == [(call.id, call.name, call.arguments) for call in answer.tool_calls]
        assert "".join(event.text for event in events) == answer.text
        check(answer)
        assert answer.finish_reason in (FinishReason.TOOL_CALLS, FinishReason.LENGTH)
        assert answer.notes == NOTES.get(kind, ())
        assert len(answer.tool_calls) == (answer.finish_reason is FinishReason.TOOL_CALLS)
    assert sum(len(answer.tool_calls) for answer in answers) >= 2


def joined(events: list[TokenEvent]) -> list[tuple[str, str, str]]:
    """The calls that the pieces of a stream make, without those that were cut."""
    deltas = [delta for event in events for delta in event.tool_calls]
    count = len(events[-1].completion.tool_calls) if events[-1].completion else 0
    made = []
    for index in range(count):
        own = [delta for delta in deltas if delta.index == index]
        made.append((own[0].id, own[0].name, "".join(delta.arguments for delta in own)))
        assert not any(delta.id or delta.name for delta in own[1:])
    return made


def judge_of(folder: Path, choice: str, parallel: bool, **judged: Any) -> Any:
    """A function from a number of tokens to mlx-lm's greedy tokens for USER, under llguidance's own matcher."""
    from mlx_lm import load

    model, tokenizer, *_ = load(str(folder))
    prompt = list(tokenizer.apply_chat_template(USER, tools=TOOLS, add_generation_prompt=True))
    calls = AllowedCalls(Hermes(), tuple(map(Tool.of, TOOLS)), choice, parallel)
    source = grammar_source(None, None, False, {}, calls)
    vocabulary = judge_tokenizer(tokenizer)

    def answer(count: int, forced: bool) -> list[int]:
        if forced:
            return list(forced_greedy(model, prompt, source, count, vocabulary)[0])
        return list(constrained_greedy(model, tokenizer, prompt, source, count, vocabulary))

    return answer


@pytest.mark.parametrize(
    ("choice", "forced"), [("auto", True), ("none", False), ("required", False), ("required", True), ("weather", True)]
)
def test_calls_are_exactly_the_tokens_of_the_judge(
    choice: str, forced: bool, folders: Callable[..., Path], open_engine: Open
) -> None:
    judge = judge_of(folders("plain tags"), choice, parallel=True)
    engine = open_engine("plain tags", forced_tokens=forced)
    answers = engine.generate_batch([USER] * 3, tools=TOOLS, tool_choice=choice, max_tokens=60)
    expected = judge(60, forced)
    assert [list(answer.token_ids) for answer in answers] == [expected] * 3


def test_a_tight_arena_and_forks_change_no_token(folders: Callable[..., Path], open_engine: Open) -> None:
    expected = judge_of(folders("plain tags"), "required", parallel=True)(90, True)
    engine = open_engine("plain tags", kv_memory="225KB", max_rows=3)
    handles = [engine.submit(USER, tools=TOOLS, tool_choice="required", max_tokens=90, n=2) for _ in range(3)]
    for handle in handles:
        answer = handle.result()
        assert [list(each.token_ids) for each in (answer, *answer.others)] == [expected] * 2
        check(answer)


def test_free_rows_beside_calls_stay_as_they_are(open_engine: Open) -> None:
    engine = open_engine()
    alone = engine.generate(USER, max_tokens=40)
    called = [engine.submit(USER, tools=TOOLS, tool_choice="required", max_tokens=80) for _ in range(2)]
    assert engine.generate(USER, max_tokens=40).token_ids == alone.token_ids
    for handle in called:
        check(handle.result())


def test_a_call_that_is_cut_is_no_call(open_engine: Open) -> None:
    engine = open_engine()
    whole = engine.generate(USER, tools=[WEATHER], tool_choice="weather", max_tokens=300, parallel_tool_calls=False)
    assert whole.tool_calls
    for count in range(1, len(whole.token_ids), 5):
        cut = engine.generate(USER, tools=[WEATHER], tool_choice="weather", max_tokens=count, parallel_tool_calls=False)
        assert (cut.tool_calls, cut.finish_reason, cut.text) == ((), FinishReason.LENGTH, "")
        assert whole.raw_text.startswith(cut.raw_text)


def test_stop_strings_end_text_and_no_call(open_engine: Open) -> None:
    engine = open_engine()
    answer = engine.generate(
        USER,
        tools=[WEATHER],
        tool_choice="weather",
        stop=["city", "tool_call"],
        max_tokens=200,
        parallel_tool_calls=False,
    )
    assert answer.finish_reason is FinishReason.TOOL_CALLS and answer.tool_calls
    said = engine.generate(USER, dictated(engine, "Let me look up the city", stop=["look"], tools=[WEATHER]))
    assert (said.text, said.finish_reason) == ("Let me ", FinishReason.STOP)


def test_a_call_comes_after_the_thoughts(open_engine: Open) -> None:
    engine = open_engine("hermes", begin="{{ '</think>' if false }}<think>\n")
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    thought = f"Is {call} right?"
    said = dictated(engine, f"{thought}\n</think>\n\n{call}", tools=TOOLS, tool_choice="required")
    answer = engine.generate(USER, said)
    assert answer.thinking == thought
    assert answer.text == "" and [each.name for each in answer.tool_calls] == ["now"]
    assert answer.finish_reason is FinishReason.TOOL_CALLS


def test_a_trigger_in_thoughts_of_the_models_own_begins_no_call(open_engine: Open) -> None:
    engine = open_engine("plain tags", begin="{{ '<think></think>' if false }}")
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for choice, begin in (("auto", ""), ("required", "\n"), ("auto", " \n")):
        text = f"{begin}<think>Shall I <tool_call> it?</think>\n\n{call}"
        answer = engine.generate(USER, dictated(engine, text, tools=TOOLS, tool_choice=choice))
        assert answer.thinking == "Shall I <tool_call> it?"
        assert answer.text == "" and [each.name for each in answer.tool_calls] == ["now"]


def test_the_thoughts_and_the_channels_of_harmony(open_engine: Open) -> None:
    engine = open_engine("harmony")
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Rome"}'
    answer = engine.generate(USER, dictated(engine, f"{thought}{call}", tools=TOOLS))
    assert (answer.thinking, answer.text) == ("Hm.", "")
    assert [each.values for each in answer.tool_calls] == [{"city": "Rome"}]
    final = engine.generate(USER, dictated(engine, f"{thought}<|channel|>final<|message|>It is hot.", tools=TOOLS))
    assert (final.thinking, final.text, final.tool_calls) == ("Hm.", "It is hot.", ())
    preamble = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
    both = engine.generate(USER, dictated(engine, f"{thought}{preamble}{call}", tools=TOOLS))
    assert (both.thinking, both.text, len(both.tool_calls)) == ("Hm.", "Let me look.", 1)


def test_a_form_or_a_call(open_engine: Open) -> None:
    """An answer with tools and a form is one of both, always."""
    engine = open_engine()
    form = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    seen = set()
    for seed in range(6):
        answer = engine.generate(USER, tools=TOOLS, structured=form, temperature=2.0, seed=seed, max_tokens=400)
        check(answer)
        if answer.finish_reason is FinishReason.STOP:
            jsonschema.validate(answer.parsed, form)
        elif answer.tool_calls:
            assert answer.parsed is None
        seen.add(answer.finish_reason)
    assert {FinishReason.STOP, FinishReason.TOOL_CALLS} <= seen
    with pytest.raises(InvalidRequest, match="writes calls as JSON without a tag"):
        open_engine("llama").generate(USER, tools=TOOLS, structured=form)


def test_what_cannot_call_tools_says_so(open_engine: Open) -> None:
    engine = open_engine()
    with pytest.raises(InvalidRequest, match="`tools` need messages"):
        engine.generate("plain text", tools=TOOLS)
    with pytest.raises(InvalidRequest, match="`tools` need messages"):
        engine.generate(np.array([1, 2, 3]), tools=TOOLS)  # type: ignore[arg-type]
    messages: Any = {1: USER[0]}.values()
    assert engine.count_tokens(messages, SamplingParams(tools=TOOLS)) > engine.count_tokens(USER)
    with pytest.raises(InvalidRequest, match=r"cannot call tools: .*, and ask for an answer of a JSON schema$"):
        open_engine("toolless").generate(USER, tools=TOOLS)
    uncalled = open_engine("toolless").generate(USER, tools=TOOLS, tool_choice="none", max_tokens=5)
    assert uncalled.token_ids == open_engine("toolless").generate(USER, max_tokens=5).token_ids


def test_a_format_that_is_not_always_enforced_says_so(open_engine: Open) -> None:
    engine = open_engine("kimi")
    call = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    answer = engine.generate(USER, dictated(engine, f"Well.{call}", tools=TOOLS))
    assert (answer.text, [each.values for each in answer.tool_calls]) == ("Well.", [{"city": "Rome"}])
    assert answer.notes == ("calls are not enforced by a grammar with this model",)
    broken = call.replace("}<", "<")
    said = engine.generate(USER, dictated(engine, broken, tools=TOOLS))
    assert (said.text, said.tool_calls, said.finish_reason) == (broken, (), FinishReason.STOP)
    odd = engine.generate(USER, dictated(engine, call.replace('"Rome"', "7"), tools=TOOLS))
    assert [each.values for each in odd.tool_calls] == [{"city": 7}] and "does not fit its schema" in odd.notes[-1]
    held = engine.generate(USER, tools=TOOLS, tool_choice="required", max_tokens=300, temperature=1.5, seed=1)
    assert held.notes == () and (held.tool_calls or held.finish_reason is FinishReason.LENGTH)


def test_a_call_at_the_end_of_thoughts_that_are_not_closed_is_a_call(tmp_path: Path) -> None:
    with Engine(str(write_scripted(tmp_path / "m")), kv_memory="64MB", max_rows=4) as engine:
        end = engine.encode("<|im_end|>")

        def said(text: str) -> Completion:
            """What becomes of an answer that the model ends after this text."""
            tokens, prompt = [*engine.encode(text), *end], 0

            def dictate(known: mx.array, logits: mx.array) -> mx.array:
                nonlocal prompt
                prompt = prompt or known.size
                return mx.where(mx.arange(logits.shape[-1]) == tokens[known.size - prompt], 0.0, -mx.inf)[None]

            return engine.generate(USER, tools=TOOLS, max_tokens=200, logits_processors=[dictate])

        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        answer = said(f"<think>I call it.\n{call}")
        assert [each.values for each in answer.tool_calls] == [{"city": "Rome"}]
        assert (answer.thinking, answer.finish_reason, answer.notes) == ("I call it.", FinishReason.TOOL_CALLS, ())
        for thought, notes in (("The answer is 4.", 0), (f"{call} No.", 1), (call.replace("Rome", "Bonn"), 1)):
            answer = said(f"<think>{thought}")
            assert (answer.thinking, answer.tool_calls, len(answer.notes)) == (thought, (), notes)
            assert answer.finish_reason is FinishReason.STOP


def test_a_schema_that_cannot_be_enforced_is_refused_with_the_name_of_its_tool(open_engine: Open) -> None:
    engine = open_engine()
    odd = tool("odd", x={"type": "array", "uniqueItems": True})
    odd["function"]["strict"] = True
    with pytest.raises(InvalidRequest, match=r"the parameters of the tool 'odd' cannot be enforced: .*uniqueItems"):
        engine.generate(USER, tools=[WEATHER, odd], max_tokens=5)
    odd["function"]["strict"] = False
    answer = engine.generate(USER, tools=[WEATHER, odd], max_tokens=5)
    assert any("uniqueItems" in note for note in answer.notes)


def test_a_conversation_keeps_calls_and_results(open_engine: Open, tmp_path: Path) -> None:
    engine = open_engine()
    talk = engine.conversation(params=SamplingParams(tools=TOOLS, max_tokens=60))
    asked = SamplingParams(tools=TOOLS, tool_choice="weather", max_tokens=300, parallel_tool_calls=False)
    answer = talk.ask("The weather?", asked)
    [call] = answer.tool_calls
    assert talk.messages[-1] == {"role": "assistant", "content": "", "tool_calls": [call.as_mapping()]}
    before = talk.tokens
    reply = talk.ask(result_message(call, "sunny"))
    assert reply.usage.cached_tokens > before // 2
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "tool", "assistant"]
    talk.save(tmp_path / "talk.json")
    other = engine.conversation()
    other.load(tmp_path / "talk.json")
    assert other.messages == talk.messages and other.params.offered == ()


def test_variables_go_with_tools(open_engine: Open) -> None:
    engine = open_engine(begin="{{ 'more' if extra else '' }}")
    plain = engine.generate(ChatPrompt(USER), tools=TOOLS, max_tokens=1)
    more = engine.generate(ChatPrompt(USER, {"extra": True}), tools=TOOLS, max_tokens=1)
    assert more.usage.prompt_tokens > plain.usage.prompt_tokens
    with pytest.raises(InvalidRequest, match="does not read tools"):
        engine.generate(ChatPrompt(USER, {"tools": TOOLS}), max_tokens=1)


def test_a_required_call_that_processors_forbid_is_told_so(open_engine: Open) -> None:
    with pytest.raises(StructuredOutputError, match=r"excluded by the form or the tools.*or by the logits processors"):
        open_engine().generate(USER, dictated(open_engine(), "Hello", tools=TOOLS, tool_choice="required"))


def test_an_end_token_of_the_model_ends_text(open_engine: Open) -> None:
    engine = open_engine()
    answer = engine.generate(USER, dictated(engine, "Hello", tools=TOOLS))
    assert (answer.text, answer.token_ids[-1], answer.finish_reason) == ("Hello", EOS, FinishReason.STOP)
