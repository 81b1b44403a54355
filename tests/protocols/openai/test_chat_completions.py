"""/v1/chat/completions: bodies that are read, and chunks that the OpenAI package puts together to the whole reply."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion as TheirCompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from cortexmlx.errors import EngineClosed, InvalidRequest
from cortexmlx.protocols.openai import chat_completions, completions
from cortexmlx.protocols.openai.chat_completions import read
from cortexmlx.protocols.request import ReplyInfo, Request, RequestDefaults
from cortexmlx.types.logprobs import TokenLogprob
from cortexmlx.types.messages import EFFORT
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import Completion, FinishReason, Timings, TokenEvent, Usage
from cortexmlx.types.sampling_params import SamplingParams

USER = {"role": "user", "content": "hi"}
DEFAULTS = RequestDefaults(SamplingParams(max_tokens=99), {"a": 1})


def asked(**body: Any) -> Any:
    return read({"messages": [USER], **body}, DEFAULTS)


def test_a_body_becomes_a_request_with_the_defaults_of_who_serves_it() -> None:
    request = asked(n=2, stop="x", logprobs=True, top_logprobs=3, reasoning_effort="low", user="me")
    assert request.prompts == ([USER],) and not request.raw and not request.echo
    assert request.params == SamplingParams(max_tokens=99, n=2, stop=("x",), logprobs=3)
    assert request.template_vars == {"a": 1, EFFORT: "low"}
    assert request.body["user"] == "me"


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, (False, False)),
        ({"stream": None, "stream_options": None}, (False, False)),
        ({"stream": True}, (True, False)),
        ({"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}, (True, True)),
        ({"stream": True, "stream_options": {"include_usage": None}}, (True, False)),
    ],
)
def test_a_stream_is_asked_for_with_or_without_its_usage(body: dict[str, Any], wanted: tuple[bool, bool]) -> None:
    request = asked(**body)
    assert (request.stream, request.include_usage) == wanted


CALL = {"function": {"name": "f", "arguments": "{"}}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [USER, "hi"]}, "messages[1]"),
        ({"messages": [USER, {"content": "hi"}]}, "messages[1].role"),
        ({"messages": [{**USER, "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [USER], "tools": [{}]}, "tools[0]"),
        ({"messages": [USER], "tools": {}}, "tools"),
        ({"messages": [USER], "tool_choice": "f"}, "tool_choice"),
        ({"messages": [USER], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"messages": [USER], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"temperatur": 1}, "temperatur"),
        ({"temperature": -1}, "temperature"),
        ({"temp": 1, "temperature": 1}, "temp"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a" * 9] * 2000}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 500}, "top_logprobs"),
        ({"reasoning_effort": 1}, "reasoning_effort"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"stream": True, "prompt_logprobs": 1}, "stream"),
    ],
)
def test_an_error_names_the_field_with_its_path(body: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked(**body)
    assert refused.value.field is not None and refused.value.field.endswith(path)
    assert refused.value.field.partition("[")[0].partition(".")[0] in {*body}


# The chunks of a stream, put together, are the body of the whole reply: for every answer that an engine can give.


TOKENS = (b"a", b" b", b"\xe2\x80", b"\x94", "é".encode(), b" ", b"stop")
INFO = ReplyInfo("7", "m", 1_767_225_600, TOKENS.__getitem__)


@dataclass(frozen=True)
class Reply:
    """A request, and the events of the answers to each of its prompts in the order in which they came."""

    request: Request
    events: list[tuple[int, TokenEvent]]
    answers: list[tuple[Completion, ...]]


def pieces_of(draw: Any, text: str, count: int) -> list[str]:
    """`count` pieces of a text, many of them empty, as where half a character or of a stop string is held back."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), min_size=count - 1, max_size=count - 1)))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def answer_of(draw: Any, request: Request, index: int, usage: Usage, chat: bool) -> tuple[list[TokenEvent], Completion]:
    tokens = draw(st.lists(st.integers(0, len(TOKENS) - 1), min_size=1, max_size=8))
    text = b"".join(TOKENS[token] for token in tokens).decode("utf-8", "replace")
    text = text[: draw(st.integers(0, len(text)))]
    text = text.removeprefix(" ") if draw(st.booleans()) else text
    thinking = draw(st.text(max_size=6)) if chat else ""
    told = [TokenLogprob(t, -0.5 * t, ((t, -0.5 * t), (1, -9.5))) for t in tokens]
    events, whole = [], pieces_of(draw, thinking + text, len(tokens) + 1)
    for number, (piece, place) in enumerate(zip(whole, range(len(tokens) + 1), strict=True)):
        before = sum(map(len, whole[:place]))
        thought = piece[: max(0, len(thinking) - before)]
        logprob = told[number] if request.params.logprobs is not None and number < len(tokens) else None
        token = tokens[number] if number < len(tokens) else None
        events.append(TokenEvent(piece[len(thought) :], token, logprob, index=index, thinking=thought))
        if draw(st.integers(0, 5)) == 0:
            events.insert(-1, TokenEvent("", index=index, progress=Progress("prefilling", 1, 2)))
    reason = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    notes: tuple[str, ...] = draw(st.sampled_from([(), ("a note",)]))
    events[-1] = replace(events[-1], finish_reason=reason, notes=notes)
    logprobs = tuple(told) if request.params.logprobs is not None else None
    timings, own = Timings(0, 0, 0, 0, 0), replace(usage, completion_tokens=len(tokens))
    return events, Completion(
        text, tuple(tokens), reason, own, timings, logprobs, index, notes=notes, thinking=thinking
    )


def merged(draw: Any, lists: list[list[Any]]) -> list[Any]:
    """The items of some lists in any order that keeps each list's own."""
    order = draw(st.permutations([number for number, each in enumerate(lists) for _ in each]))
    left = [iter(each) for each in lists]
    return [next(left[number]) for number in order]


@st.composite
def replies(draw: Any, chat: bool) -> Reply:
    n, chosen = draw(st.integers(1, 3)), draw(st.booleans())
    prompts = ([{"role": "user", "content": "hi"}],) if chat else draw(st.sampled_from([("x",), ("x", [0, 1])]))
    params = SamplingParams(n=n, best_of=n + 1 if chosen else None, logprobs=draw(st.sampled_from([None, 2])))
    echo = not chat and draw(st.booleans())
    include_usage = draw(st.booleans())
    request = Request(prompts, params, raw=not chat, echo=echo, stream=True, include_usage=include_usage)
    streams, answers = [], []
    for prompt in range(len(prompts)):
        usage = Usage(
            draw(st.integers(1, 9)),
            0,
            draw(st.integers(0, 3)),
            thinking_tokens=draw(st.integers(0, 2)),
            drafted_tokens=7,
        )
        each = [answer_of(draw, request, index, usage, chat) for index in range(n)]
        kept = [completion for _, completion in each]
        events = merged(draw, [own for own, _ in each])
        last = max(place for place, event in enumerate(events) if event.finish_reason)
        whole = replace(kept[0], others=tuple(kept[1:]))
        if chosen:  # the engine says nothing before it knows which answers are the best
            events = [TokenEvent("", finish_reason=kept[0].finish_reason, completion=whole)]
        else:
            events = [*events[:last], replace(events[last], completion=whole)]
        streams.append([(prompt, event) for event in events])
        answers.append(tuple(kept))
    return Reply(request, merged(draw, streams), answers)


def holds(whole: Any, said: Any) -> bool:
    """Whether a value has all that `said` has. The OpenAI package adds fields that are null, and makes objects."""
    if isinstance(said, dict):
        return all(holds(whole.get(name), value) for name, value in said.items())
    if isinstance(said, list):
        return len(whole) == len(said) and all(map(holds, whole, said))
    return bool(whole == said)


@given(replies(chat=True))
def test_the_openai_package_puts_the_chunks_of_a_chat_together_to_the_whole_reply(reply: Reply) -> None:
    writer = chat_completions.ChatChunks(reply.request, INFO)
    chunks = [chunk for prompt, event in reply.events for chunk in writer.convert(event, prompt)]
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True))
    whole = chat_completions.write(reply.request, reply.answers, INFO)
    ChatCompletion.model_validate(whole, strict=True)
    told = {each["index"]: each.get("notes") for chunk in chunks for each in chunk["choices"] if each["finish_reason"]}
    assert told == {each["index"]: each.pop("notes", None) for each in whole["choices"]}  # the package leaves them out
    if not reply.request.include_usage:
        del whole["usage"]
        assert all("usage" not in chunk for chunk in chunks)
    assert holds(state.current_completion_snapshot.model_dump(), whole)


@given(replies(chat=True))
def test_each_choice_begins_with_the_role_and_ends_with_the_reason_and_the_usage_is_last(reply: Reply) -> None:
    writer = chat_completions.ChatChunks(reply.request, INFO)
    chunks = [chunk for prompt, event in reply.events for chunk in writer.convert(event, prompt)]
    if reply.request.include_usage:
        *chunks, last = chunks
        assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
        assert all(chunk["usage"] is None for chunk in chunks)
    for number in range(reply.request.params.n):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == number]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] is None for choice in own] == [True] * (len(own) - 1) + [False]
        assert own[-1]["delta"] == {} and all("role" not in choice["delta"] for choice in own[1:])
        assert all(choice["delta"] for choice in own[1:-1])
        assert all(any(choice["delta"].values()) or choice["logprobs"] for choice in own[1:-1]), "none says nothing"


@given(replies(chat=False))
def test_the_chunks_of_completions_put_together_are_the_whole_reply(reply: Reply) -> None:
    writer = completions.CompletionChunks(reply.request, INFO)
    chunks = [chunk for prompt, event in reply.events for chunk in writer.convert(event, prompt)]
    whole = completions.write(reply.request, reply.answers, INFO)
    TheirCompletion.model_validate(whole, strict=True)
    together: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        # Their type is that of a whole reply: it has no null for a choice that goes on.
        ended = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
        TheirCompletion.model_validate({**chunk, "choices": ended}, strict=True)
        assert {**chunk, "choices": [], "usage": None} == {**whole, "choices": [], "usage": None}
        for choice in chunk["choices"]:
            nothing = {**choice, "text": "", "logprobs": None, "finish_reason": None}
            so_far = together.setdefault(choice["index"], nothing)
            assert so_far["finish_reason"] is None
            so_far["text"] += choice["text"]
            so_far |= {name: choice[name] for name in ("finish_reason", "notes") if name in choice}
            if choice["logprobs"] is not None:
                before = so_far["logprobs"] or {name: [] for name in choice["logprobs"]}
                so_far["logprobs"] = {name: [*before[name], *more] for name, more in choice["logprobs"].items()}
    assert [together[number] for number in sorted(together)] == whole["choices"]
    assert (chunks[-1].get("usage") == whole["usage"]) is reply.request.include_usage


@given(st.one_of(replies(chat=True), replies(chat=False)))
def test_the_ids_and_the_usage_so_far_of_chunks_are_those_of_the_whole_reply(reply: Reply) -> None:
    request = replace(reply.request, token_ids=True, include_usage=True, usage_so_far=True)
    raw = isinstance(request.prompts[0], str) or len(request.prompts) > 1
    module = completions if raw else chat_completions
    chunks_of = completions.CompletionChunks if raw else chat_completions.ChatChunks
    totals = itertools.count(5)  # an answer that has lost its row reads its own tokens again, too
    info = replace(INFO, progress=lambda: Progress("prefilling", 5, next(totals)))
    writer = chunks_of(request, info)
    chunks = [chunk for prompt, event in reply.events for chunk in writer.convert(event, prompt)]
    whole = module.write(request, reply.answers, info)
    ids: dict[int, list[int]] = {}
    for chunk in chunks[:-1]:
        [choice] = chunk["choices"]
        ids.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
        assert chunk["usage"]["prompt_tokens"] == 5 and chunk["usage"]["total_tokens"] >= 5
    assert [ids[number] for number in sorted(ids)] == [choice["token_ids"] for choice in whole["choices"]]
    assert chunks[-1]["usage"]["completion_tokens"] >= chunks[-2]["usage"]["completion_tokens"]


def test_progress_is_no_chunk_and_an_error_takes_the_place_of_one() -> None:
    writer = chat_completions.ChatChunks(Request(("hi",), SamplingParams()), INFO)
    assert writer.convert(TokenEvent("", progress=Progress("prefilling", 1, 2))) == []
    [error] = writer.convert(TokenEvent.failed(EngineClosed("the engine was closed")))
    assert error == {
        "error": {"message": "the engine was closed", "type": "server_error", "param": None, "code": None},
    }


def test_the_usage_says_what_was_cached_unless_the_reply_is_to_be_repeatable() -> None:
    answer = Completion("a", (0,), FinishReason.STOP, Usage(5, 1, 3), Timings(0, 0, 0, 0, 0))
    request = Request(("hi",), SamplingParams())
    for module in (chat_completions, completions):
        assert module.write(request, [[answer]], INFO)["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        repeatable = module.write(request, [[answer]], replace(INFO, repeatable=True))
        assert "prompt_tokens_details" not in repeatable["usage"]


def test_drafted_tokens_are_in_a_reply_and_not_in_a_record_which_must_be_the_same_in_each_run() -> None:
    usage = Usage(5, 9, thinking_tokens=1, drafted_tokens=8, accepted_tokens=6)
    done = Completion("a", (1,), FinishReason.STOP, usage, Timings(0, 0, 0, 0, 0))
    request = Request(({"role": "user", "content": "hi"},), SamplingParams(n=2))
    body = chat_completions.write(request, [(done, done)], INFO)
    details = body["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 2, "drafted_tokens": 16, "accepted_tokens": 12}
    record = chat_completions.write(request, [(done, done)], replace(INFO, repeatable=True))
    assert record["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
