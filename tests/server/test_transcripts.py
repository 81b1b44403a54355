"""A prompt has the tokens that the model wrote where a client sends its answers back, and else those of its text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from cortexmlx.errors import InvalidRequest
from cortexmlx.server.transcripts import TranscriptMemory, TranscriptTable
from cortexmlx.structured.tools import ToolCall
from cortexmlx.types.request import Completion, FinishReason, Message, Timings, Usage
from cortexmlx.types.sampling_params import SamplingParams
from support.effort import examples
from support.models.loop_templates import KIMI, fitted

WORDS = [">", "<", "a", "b", "ab", "bb", "aab", " ", "u", "m", "t", "c", "0", "(", ")", "  "]
END = 0
PARAMS = SamplingParams()


class Reader:
    """A tokenizer whose tokens cross any place but those beside brackets, and a template that trims and rewrites."""

    eos_token_ids = frozenset({END})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            word = next(w for w in sorted(WORDS, key=len, reverse=True) if text.startswith(w))
            ids.append(WORDS.index(word))
            text = text[len(word) :]
        return ids

    def token_bytes(self, token: int) -> bytes:
        return WORDS[token].encode()

    def render(self, messages: Sequence[Message]) -> str:
        return "".join(self._message(message) for message in messages) + "<m"

    def _message(self, message: Any) -> str:
        calls = "".join(f"c({call['function']['arguments']['x']})" for call in message.get("tool_calls", ()))
        return (
            {"user": "<u", "assistant": "<m", "tool": "<t"}[message["role"]] + message["content"].strip() + calls + ">"
        )


def meaning(text: str) -> str:
    """A text without what the template changes: spaces, and the form of calls."""
    return text.replace(" ", "").replace("c0(", "c(")


def decoded(tokens: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def completion(tokens: Sequence[int], call: str | None, ended: bool = True) -> Completion:
    """What the engine makes of these tokens, which spell a text, and a call in a form that is not the template's."""
    reader, number = Reader(), len(tokens)
    calls = () if call is None else (ToolCall(f"call{number}", "f", json.dumps({"x": call})),)
    written = () if call is None else tuple(reader.encode(f"c0({call})"))
    text = decoded(tokens)
    reason = (FinishReason.TOOL_CALLS if calls else FinishReason.STOP) if ended else FinishReason.LENGTH
    ids = (*tokens, *written, *([END] if ended else []))
    usage, timings = Usage(1, len(ids)), Timings(0, 0, 0, 0, 0)
    return Completion(text, ids, reason, usage, timings, raw_text=decoded((*tokens, *written)), tool_calls=calls)


def sent_back(done: Completion) -> Message:
    calls = [{"id": c.id, "function": {"name": c.name, "arguments": c.values}} for c in done.tool_calls]
    return {"role": "assistant", "content": done.text, **({"tool_calls": calls} if calls else {})}


def asked(table: TranscriptTable, messages: Sequence[Message], client: str = "") -> tuple[TranscriptMemory, list[int]]:
    reader, reading = Reader(), TranscriptMemory(table, client, messages, PARAMS)
    return reading, reading.tokens(reader, reader.render(reading.messages), reader.render)


USER: Message = {"role": "user", "content": "ab a"}
TOOL: Message = {"role": "tool", "content": "bb"}


def test_an_answer_that_comes_back_has_the_tokens_that_were_written() -> None:
    table = TranscriptTable(1 << 20)
    first, prompt = asked(table, [USER])
    said = completion([2, 3, 7, 3, 3], "ab")  # a, b, space, b, b: the tokenizer would write ab and bb
    first.remember(said)
    _, more = asked(table, [USER, sent_back(said), TOOL])
    written = [*prompt, *said.token_ids[:-1]]
    assert more[: len(written)] == written
    assert meaning(decoded(more)) == "<uaba><mabbbc(ab)><tbb><m"
    assert asked(TranscriptTable(1 << 20), [USER, sent_back(said), TOOL])[1][: len(written)] != written, (
        "nobody else has them"
    )
    assert asked(table, [USER, sent_back(said), TOOL], "another key")[1][: len(written)] != written


def test_a_changed_answer_has_the_tokens_of_its_text() -> None:
    table = TranscriptTable(1 << 20)
    first, prompt = asked(table, [USER])
    said = completion([2, 3], "ab")
    first.remember(said)
    changed: Any = sent_back(said)
    changed["tool_calls"][0]["function"]["arguments"] = {"x": "b"}
    for message in (changed, {**sent_back(said), "content": "abb"}, {"role": "assistant", "content": "ab"}):
        reader = Reader()
        _, more = asked(table, [USER, message, TOOL])
        assert decoded(more) == reader.render([USER, message, TOOL])
        assert more[: len(prompt)] == prompt


def test_true_is_no_number_and_an_order_is_not_a_difference() -> None:
    table = TranscriptTable(1 << 20)
    first, _ = asked(table, [USER])
    call = ToolCall("call0", "f", '{"x": 1, "y": [{"a": null, "b": 2.0}]}')
    done = completion([2], None)
    first.remember(
        Completion(done.text, done.token_ids, FinishReason.TOOL_CALLS, done.usage, done.timings, tool_calls=(call,))
    )

    def message(arguments: object) -> Message:
        function = {"name": "f", "arguments": arguments}
        return {"role": "assistant", "content": "a", "tool_calls": [{"id": "call0", "function": function}]}

    same = TranscriptMemory(table, "", [USER, message({"y": [{"b": 2.0, "a": None}], "x": 1})], PARAMS).messages[1]
    [kept] = same["tool_calls"]  # type: ignore[misc, str-unpack]
    assert list(kept["function"]["arguments"]) == ["x", "y"], "in the order that was written"  # type: ignore[index]
    other = message({"x": True, "y": [{"a": None, "b": 2.0}]})
    assert TranscriptMemory(table, "", [USER, other], PARAMS).messages[1] is other


def test_a_client_may_put_in_what_is_a_default() -> None:
    """Claude Code sends `"replace_all": false` back with each edit."""
    schema = {"type": "object", "properties": {"x": {"type": "string"}, "all": {"type": "boolean", "default": False}}}
    params = SamplingParams(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])
    table, reader = TranscriptTable(1 << 20), Reader()
    first = TranscriptMemory(table, "", [USER], params)
    prompt = first.tokens(reader, reader.render([USER]), reader.render)
    said = completion([2, 3], "ab")
    first.remember(said)
    written = [*prompt, *said.token_ids[:-1]]
    for put, same in ((False, True), (True, False), (0, False), (None, False)):
        message: Any = sent_back(said)
        message["tool_calls"][0]["function"]["arguments"] = {"all": put, "x": "ab"}
        reading = TranscriptMemory(table, "", [USER, message, TOOL], params)
        more = reading.tokens(reader, reader.render(reading.messages), reader.render)
        assert (more[: len(written)] == written) == same, put
        assert (reading.messages[1] is message) != same


def test_a_template_that_cannot_render_the_part_is_no_error() -> None:
    table, reader = TranscriptTable(1 << 20), Reader()
    first, _ = asked(table, [USER])
    said = completion([2, 3], "ab")
    first.remember(said)
    reading = TranscriptMemory(table, "", [USER, sent_back(said), TOOL], PARAMS)

    def refuse(messages: object) -> str:
        raise InvalidRequest("roles must alternate")

    text = reader.render(reading.messages)
    assert decoded(reading.tokens(reader, text, refuse)) == text


TURNS = st.lists(
    st.tuples(
        st.sampled_from(["send back", "trim", "change", "ask again", "forget"]),
        st.lists(st.sampled_from([2, 3, 4, 5, 6, 7]), max_size=6),
        st.none() | st.sampled_from(["a", "ab", "bbb"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@given(TURNS, st.sampled_from([0, 6000, 1 << 20]))
@settings(max_examples=examples(300), deadline=None)
def test_a_prompt_always_means_its_text(turns: Any, most: int) -> None:
    """And what a client sends back unchanged is computed no second time."""
    table, reader = TranscriptTable(most), Reader()
    messages: list[Message] = [USER]
    for how, tokens, call, ended in turns:
        reading, prompt = asked(table, messages)
        assert meaning(decoded(prompt)) == meaning(reader.render(messages))
        if how == "forget":
            continue
        done = completion(tokens, call if ended else None, ended)
        reading.remember(done)
        if how == "ask again":
            continue
        message: Any = sent_back(done)
        if how == "trim":
            message["content"] = message["content"].strip()
        if how == "change":
            message["content"] += "a"
        messages = [*messages, message, TOOL if call is not None else USER]
        if how in ("send back", "trim") and most == 1 << 20 and ended and (done.text.strip() or call):
            _, more = asked(table, messages)
            written = [*prompt, *done.token_ids[:-1]]
            assert more[: len(written)] == written


class Marked(Reader):
    """A reader whose template leaves out thoughts, or writes them."""

    def __init__(self, thoughts: bool = False) -> None:
        self._thoughts = thoughts

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(each) for each in text]

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()

    def _message(self, message: Any) -> str:
        thoughts = message.get("reasoning_content", "") if self._thoughts else ""
        calls = "".join(f"c({call['function']['arguments']['x']})" for call in message.get("tool_calls", ()))
        begin, end = ("", "") if message["role"] == "system" else ({"assistant": "<m"}.get(message["role"], "<u"), ">")
        return begin + thoughts + message["content"].strip() + calls + end


def after(
    reader: Marked, first: Sequence[Message], written: str, messages: Sequence[Message], **answer: Any
) -> tuple[str, str]:
    """What the tokens of `messages` say after an answer to `first` that was `written` so, and what they should."""
    table = TranscriptTable(1 << 20)
    reading = TranscriptMemory(table, "", first, PARAMS)
    reading.tokens(reader, reader.render(first), reader.render)
    ids = (*map(ord, written), END)
    answer = {"text": written, **answer}
    usage, timings = Usage(1, len(ids)), Timings(0, 0, 0, 0, 0)
    said = Completion(token_ids=ids, finish_reason=FinishReason.STOP, usage=usage, timings=timings, **answer)
    reader.token_bytes = lambda token: b">" if token == END else chr(token).encode()  # type: ignore[method-assign]
    reading.remember(said)
    more = TranscriptMemory(table, "", messages, PARAMS)
    text = reader.render(more.messages)
    return "".join(map(chr, more.tokens(reader, text, reader.render))), text


def test_an_answer_that_says_the_token_that_ends_it_is_not_said_twice() -> None:
    for written in ("a > b", " a > b", "a > b > "):
        said: Message = {"role": "assistant", "content": written}
        tokens, text = after(Marked(), [USER], written, [USER, said, TOOL])
        assert tokens.replace(" ", "") == text.replace(" ", "")
    call = ToolCall("1", "f", '{"x": "a\\u003eb"}')  # the template writes the character itself
    done: Any = {"role": "assistant", "content": "", "tool_calls": [call.as_mapping()]}
    tokens, text = after(
        Marked(), [USER], 'c("a\\u003eb")', [USER, done, TOOL], text="", raw_text='c("a\\u003eb")', tool_calls=(call,)
    )
    assert tokens == text


def test_thoughts_that_are_not_those_of_the_answer_are_read_as_they_were_sent() -> None:
    wrote: Any = {"text": "yes it is", "thinking": "yes", "raw_text": "yes  yes it is"}
    sent: Message = {"role": "assistant", "content": "yes it is", "reasoning_content": "yes"}
    tokens, text = after(Marked(thoughts=False), [USER], "yes  yes it is", [USER, sent, USER], **wrote)
    assert tokens == text, "the template leaves thoughts out, though their words are in the answer"
    other: Message = {**sent, "reasoning_content": "oh yes, or no"}
    tokens, text = after(Marked(thoughts=True), [USER], "yes  yes it is", [USER, other, USER], **wrote)
    assert tokens == text, "the client sends other thoughts"
    tokens, text = after(Marked(thoughts=True), [USER], " it is", [USER, {**other, "content": "it is"}, USER])
    assert tokens == text, "the client sends thoughts, and there were none"


def test_an_answer_is_known_only_after_the_messages_that_it_answered() -> None:
    empty: Message = {"role": "system", "content": ""}
    other, same = ({"role": "assistant", "content": each} for each in ("no", "ok"))
    tokens, text = after(Marked(), [empty, USER], " ok", [USER, other, same, USER])
    assert tokens == text, "the second message after the question is not its answer"


def test_a_call_has_the_id_of_its_result_where_the_model_counted_otherwise() -> None:
    class Kimi:
        eos_token_ids = frozenset({END})

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [ord(sign) for sign in text]

        def token_bytes(self, token: int) -> bytes:
            return b"<|im_end|>" if token == END else chr(token).encode()

        def render(self, messages: Sequence[Message]) -> str:
            return fitted(KIMI, *map(dict, messages))

    reader = Kimi()
    for counted, own in (("0", True), ("7", False)):
        table = TranscriptTable(1 << 20)
        first = TranscriptMemory(table, "", [USER], PARAMS)
        first.tokens(reader, reader.render([USER]), reader.render)
        call = f"functions.f:{counted}<|tool_call_argument_begin|>" + '{"x":  1}'  # with two spaces
        raw = f"<think></think><|tool_calls_section_begin|><|tool_call_begin|>{call}<|tool_call_end|>"
        raw += "<|tool_calls_section_end|>"
        calls = (ToolCall("call_1", "f", '{"x":  1}'),)
        ids, usage, timings = (*reader.encode(raw), END), Usage(1, 1), Timings(0, 0, 0, 0, 0)
        done = Completion("", ids, FinishReason.TOOL_CALLS, usage, timings, raw_text=raw, tool_calls=calls)
        first.remember(done)
        again = TranscriptMemory(table, "", [USER, sent_back(done), {**TOOL, "tool_call_id": "call_1"}], PARAMS)
        text = "".join(map(chr, again.tokens(reader, reader.render(again.messages), reader.render)))
        assert text.count("functions.f:0") == 2 and ('"x":  1' in text) is own
