"""Every field of a body is served, of no effect on purpose, or refused by name: the OpenAI package lists them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols import error_text as notes
from cortexmlx.protocols import fields as peers
from cortexmlx.protocols import responses, simple
from cortexmlx.protocols.anthropic import messages
from cortexmlx.protocols.batch import UNSERVED, LineStyle
from cortexmlx.protocols.fields import BodyFields, prefix_error_field, reject_unknown_fields, require_type
from cortexmlx.protocols.openai import chat_completions, completions
from cortexmlx.protocols.request import Request, RequestDefaults
from cortexmlx.types.sampling_params import SamplingParams

THEIRS = {
    LineStyle.CHAT: chat_create_params.CompletionCreateParamsBase,
    LineStyle.COMPLETIONS: completion_create_params.CompletionCreateParamsBase,
    LineStyle.RESPONSES: response_create_params.ResponseCreateParamsBase,
}


FIELDS: dict[LineStyle, BodyFields] = {
    LineStyle.CHAT: chat_completions.FIELDS,
    LineStyle.COMPLETIONS: completions.FIELDS,
    LineStyle.RESPONSES: responses.FIELDS,
    LineStyle.SIMPLE: simple.FIELDS,
}


def given(body: dict[str, Any], style: LineStyle) -> dict[str, Any]:
    return FIELDS[style].exclude(UNSERVED).validate(body)


@pytest.mark.parametrize("style", list(THEIRS))
def test_what_the_openai_api_has_is_served_accepted_on_purpose_or_refused_by_name(style: LineStyle) -> None:
    names = {*THEIRS[style].__annotations__, "stream"}
    assert len(names) > 15
    for name in names:
        if name in FIELDS[style].served - UNSERVED.keys():
            assert name not in FIELDS[style].unserved
            assert given({name: 1}, style) == {name: 1}
        elif name in FIELDS[style].no_effect:
            assert given({name: {} if name == "metadata" else 1}, style) == {}
        else:
            with pytest.raises(InvalidRequest, match=f"'{name}'") as refused:
                given({name: "x"}, style)
            assert refused.value.field == name


@pytest.mark.parametrize(
    ("style", "body"),
    [
        (LineStyle.CHAT, {"stream": False}),
        (LineStyle.COMPLETIONS, {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}),
        (LineStyle.CHAT, {"modalities": ["text"], "verbosity": "medium", "functions": [], "function_call": "none"}),
        (LineStyle.CHAT, {"tools": None, "response_format": None, "anything": None}),
        (LineStyle.COMPLETIONS, {"suffix": "", "stream": False}),
        (LineStyle.RESPONSES, {"background": False, "truncation": "disabled"}),
        (LineStyle.SIMPLE, {"logits_processors": [], "metadata": {"a": "b"}, "user": "me"}),
    ],
)
def test_what_asks_for_what_happens_anyway_is_no_error(style: LineStyle, body: dict[str, Any]) -> None:
    assert given(body, style) == {}


@pytest.mark.parametrize(
    ("style", "body", "says"),
    [
        (LineStyle.CHAT, {"functions": [{"name": "f"}]}, "'functions' is not served: it is the old form of `tools`"),
        (LineStyle.COMPLETIONS, {"tools": [{}]}, "'tools' is not served: a chat template tells a model about tools"),
        (LineStyle.CHAT, {"stream": 0}, "'stream' is not served"),
        (LineStyle.CHAT, {"echo": True}, "unknown field of a /v1/chat/completions body: 'echo'"),
        (LineStyle.CHAT, {"text": "hi"}, "unknown field of a /v1/chat/completions body: 'text'"),
        (LineStyle.RESPONSES, {"response_format": {"type": "text"}}, "unknown field"),
        (LineStyle.RESPONSES, {"previous_response_id": "r"}, "send all messages"),
        (LineStyle.RESPONSES, {"max_tokens": 3}, "'max_tokens' (did you mean 'max_output_tokens'?)"),
        (LineStyle.SIMPLE, {"logits_processors": ["print"]}, "they are functions, which a file cannot hold"),
        (
            LineStyle.SIMPLE,
            {"temperatur": 1, "x": 2},
            "fields of a request: 'temperatur' (did you mean 'temperature'?), 'x'",
        ),
    ],
)
def test_what_would_change_the_answer_is_refused_with_the_reason(
    style: LineStyle, body: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        given(body, style)
    assert says in str(refused.value)


USER = {"role": "user", "content": "hi"}
PARAMS = SamplingParams(max_tokens=9)


def asked(known: set[str] | None = None, **body: Any) -> Request:
    defaults = RequestDefaults(PARAMS, known_vars=None if known is None else frozenset(known))
    return chat_completions.read({"messages": [USER], **body}, defaults)


@pytest.mark.parametrize("name", sorted(peers.IGNORED))
def test_what_clients_of_other_servers_send_is_ignored_and_logged_once(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "_logged_kinds", set())
    for fields in (chat_completions.FIELDS, completions.FIELDS, responses.FIELDS, messages.FIELDS):
        for _ in range(2):
            assert fields.validate({name: True}) in ({}, {name: True})
    assert [name in record.getMessage() for record in caplog.records] in ([True], [])
    assert caplog.records or name in messages.NO_EFFECT


def test_what_of_it_would_change_the_answer_is_refused_unless_it_asks_for_what_happens_anyway() -> None:
    for name, harmless in peers.UNSERVED_DEFAULTS.items():
        for value in harmless:
            assert asked(**{name: value}).params == PARAMS
        with pytest.raises(InvalidRequest, match=f"'{name}' is not served") as refused:
            asked(**{name: [7]})
        assert refused.value.field == name


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({"max_tokens": -1, "top_k": -1, "stop": [""]}, {"max_tokens": None}),
        (
            {"n_predict": 5, "repeat_penalty": 1.5, "random_seed": 3},
            {"max_tokens": 5, "repetition_penalty": 1.5, "seed": 3},
        ),
        ({"thinking_token_budget": 7}, {"max_thinking_tokens": 7}),
        ({"thinking_budget": -1}, {}),
        ({"reasoning": {"max_tokens": 7, "exclude": True}}, {"max_thinking_tokens": 7}),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, {"max_thinking_tokens": 7}),
        ({"min_tokens": 0, "skip_special_tokens": True, "reasoning": {}}, {}),
    ],
)
def test_other_names_and_numbers_of_parameters_are_served(body: dict[str, Any], params: dict[str, Any]) -> None:
    assert asked(**body).params == replace(PARAMS, **params) and asked(**body).notes == ()


def test_what_is_not_enforced_of_it_is_a_note() -> None:
    request = asked(min_tokens=7, max_tokens=7, skip_special_tokens=False)
    assert request.params == replace(PARAMS, max_tokens=7, ignore_eos=True)
    assert len(request.notes) == 2 and "so end tokens do not end the answer (ignore_eos)" in str(request.notes)
    for body in ({"min_new_tokens": 2}, {"min_tokens": 2, "max_tokens": 7}, {"min_tokens": 9, "max_tokens": 7}):
        with pytest.raises(InvalidRequest, match=r"min_tokens is . and max_tokens (7|not given): .* make them equal"):
            asked(**body)
    for wrong in ({"min_tokens": -1}, {"skip_special_tokens": 1}, {"reasoning": {"efort": "low"}}, {"thinking": {}}):
        with pytest.raises(InvalidRequest):
            asked(**wrong)
    with pytest.raises(InvalidRequest, match=r"'max_token' \(did you mean 'max_tokens'\?\)"):
        asked(max_token=3)


@pytest.mark.parametrize(
    ("body", "known", "read"),
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort"}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"enable_thinking"}, {"reasoning_effort": "none"}),
        ({"chat_template_kwargs": {"thinking": False}}, {"enable_thinking"}, {"enable_thinking": False}),
        ({"enable_thinking": False}, {"thinking"}, {"thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking"}, {"enable_thinking": False}),
        ({"thinking": {"type": "auto"}}, {"enable_thinking"}, {}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking"}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"a": 1}}, None, {"a": 1}),
    ],
)
def test_variables_that_the_template_reads_are_served(body: Any, known: Any, read: Any) -> None:
    assert asked(known, **body).template_vars == read and asked(known, **body).notes == ()


def test_variables_that_the_template_does_not_read_are_a_note() -> None:
    for body in ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"enable_thinkin": 1, "x" * 9000: "\ud800"}}):
        request = asked({"enable_thinking"}, **body)
        assert request.template_vars == {} and len(request.notes) == 1 and len(request.notes[0]) < 200
    assert "did you mean 'enable_thinking'" in request.notes[0]


def test_an_unknown_field_is_named_with_those_that_it_may_stand_for() -> None:
    reject_unknown_fields(["a"], ("a", "b"), "a thing")
    with pytest.raises(InvalidRequest, match=r"unknown fields of a thing: 'f0', .*, 'f9' and 3 more$"):
        reject_unknown_fields([f"f{i}" for i in range(13)], ("a",), "a thing")


def test_the_path_of_what_is_wrong_is_put_together_from_its_parts() -> None:
    for own, path in ((None, "a[0]"), ("b", "a[0].b"), ("[1].c", "a[0][1].c")):
        with pytest.raises(InvalidRequest) as refused, prefix_error_field("a[0]"):
            raise InvalidRequest("wrong", field=own)
        assert (str(refused.value), refused.value.field) == ("wrong", path)


def test_a_field_of_another_kind_is_named_and_its_value_is_cut() -> None:
    assert require_type("stream", True, bool, "true or false") is True
    with pytest.raises(InvalidRequest, match=r"^stream is 'xxx.*, but must be true or false$") as refused:
        require_type("stream", "x" * 10_000, bool, "true or false")
    assert refused.value.field == "stream" and len(str(refused.value)) < 200
