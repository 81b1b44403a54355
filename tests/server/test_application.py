"""What the server answers: to the OpenAI package, streamed and whole, and to what is wrong."""

from __future__ import annotations

import json
import socket
from typing import Any, Literal

import httpx2 as httpx
import openai
import pytest
from pydantic import BaseModel

from cortexmlx import Engine, SamplingParams
from cortexmlx.models.tokenizers import shared
from support.patience import soon

USER: Any = [{"role": "user", "content": "Hello?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_a_chat_completion_is_the_engines_answer(client: openai.OpenAI, engine: Engine) -> None:
    answer = client.chat.completions.create(model="tiny", messages=USER, max_tokens=20, temperature=0)
    judge = engine.generate(USER, SamplingParams(max_tokens=20))
    assert answer.choices[0].message.content == judge.text
    assert answer.usage is not None and answer.usage.completion_tokens == judge.usage.completion_tokens
    several = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=5, n=2, seed=1, temperature=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


def test_a_stream_says_the_same(client: openai.OpenAI, engine: Engine) -> None:
    judge = engine.generate(USER, SamplingParams(max_tokens=20))
    options: Any = {"include_usage": True}
    stream = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=20, temperature=0, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == judge.text
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == judge.usage.prompt_tokens
    [end] = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert end == judge.finish_reason.value


def test_a_call_is_streamed_and_whole(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": USER, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 300}
    whole = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0].message.tool_calls
    assert whole is not None and whole[0].type == "function"
    assert json.loads(whole[0].function.arguments)["city"] in ("Paris", "Rome")
    pieces = ""
    for chunk in client.chat.completions.create(**asked, parallel_tool_calls=False, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function is not None
            pieces += call.function.arguments or ""
    assert pieces == whole[0].function.arguments


class Visit(BaseModel):
    """A form."""

    city: Literal["Paris", "Rome"]


def test_the_package_reads_an_answer_of_a_type_by_both_protocols(client: openai.OpenAI) -> None:
    chat = client.chat.completions.parse(model="tiny", messages=USER, response_format=Visit, max_tokens=300)
    response = client.responses.parse(model="tiny", input="Hello?", text_format=Visit, max_output_tokens=300)
    assert isinstance(chat.choices[0].message.parsed, Visit) and isinstance(response.output_parsed, Visit)


@pytest.mark.parametrize("tools", [False, True])
def test_a_response_is_streamed_as_the_package_reads_it(client: openai.OpenAI, tools: bool) -> None:
    flat = {"type": "function", **WEATHER["function"], "strict": True}
    schema: Any = {"enum": ["a short text", "another"]}
    more: Any = (
        {"tools": [flat], "tool_choice": "required", "parallel_tool_calls": False}
        if tools
        else {"text": {"format": {"type": "json_schema", "name": "said", "schema": schema, "strict": True}}}
    )
    asked: Any = {
        "model": "tiny",
        "input": "Hello?",
        "max_output_tokens": 300,
        "temperature": 0,
        **more,
    }
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    if tools:
        assert final.output[-1].type == "function_call" and "response.function_call_arguments.delta" in kinds
        assert json.loads(final.output[-1].arguments)["city"] in ("Paris", "Rome")
    else:
        assert "response.output_text.delta" in kinds and "response.output_text.done" in kinds


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/chat/completions", b"{", 400, "the body is no JSON"),
        ("/v1/chat/completions", b"[]", 400, "must be a JSON object"),
        ("/v1/chat/completions", b"\xff", 400, "the body is no UTF-8"),
        ("/v1/chat/completions", b"[" * 100_000, 400, "the body is nested more than 128 deep"),
        ("/v1/chat/completions", b"{}", 400, "`messages` is missing"),
        ("/v1/chat/completions", b'{"messages": [], "tempratur": 1}', 400, "tempratur"),
        ("/v1/chat/completions", b'{"model": "other", "messages": []}', 404, "there is no model 'other'"),
        ("/v1/chat/completions", b'{"model": 7, "messages": []}', 400, "model is 7"),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 0}', 400, "max_tokens"),
        ("/v1/responses", b'{"input": "a", "previous_response_id": "x"}', 404, "there is no response 'x'"),
        ("/v1/responses", b'{"input": "a", "previous_response_id": 7}', 400, "previous_response_id is 7"),
        ("/v1/responses", b'{"input": "a", "background": true}', 400, "'background' is not served"),
        ("/v1/nothing", b"{}", 404, "/v1/nothing is not served: https://"),
        ("/v1/chat/completion", b"{}", 404, "is not served (did you mean '/v1/chat/completions'?)"),
        ("/tokenize", b"{}", 400, "`content` must be a text"),
        ("/v1/completions", b'{"prompt": "a", "guided_regex": "a[b&&c]"}', 400, '"param":"guided_regex"'),
        ("/v1/completions", b'{"prompt": "a", "structured_outputs": {"regex": "[b&&c]"}}', 400, '"structured_outputs"'),
        (
            "/v1/responses",
            b'{"input":"a","text":{"format":{"type":"json_schema","schema":{"$ref":"#"}}}}',
            400,
            '"text"',
        ),
    ],
)
def test_what_is_wrong_is_said(http: httpx.Client, path: str, body: bytes, status: int, says: str) -> None:
    reply = http.post(path, content=body)
    assert reply.status_code == status, reply.text
    assert says in reply.text


def test_the_package_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 9000}])
    with pytest.raises(openai.NotFoundError, match="did you mean 'tiny'"):
        client.chat.completions.create(model="tinny", messages=USER)


def test_the_model_is_listed_under_its_names(ask: Any) -> None:
    with ask(names=("small",)) as http:
        assert [each["id"] for each in http.get("/v1/models").json()["data"]] == ["tiny", "small"]
        assert http.get("/v1/models/small").json()["context_length"] == 4096
        assert http.get("/v1/models/x").status_code == 404
        assert http.get("/health").json() == {"status": "ok"} and http.head("/").status_code == 200
        assert http.get("/v1/chat/completions").status_code == 405
        tokens = http.post("/tokenize", json={"content": "Hello"}).json()
        assert tokens["count"] == len(tokens["tokens"]) > 0
        body = {"model": "small", "messages": USER, "max_tokens": 2}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    with ask(any_name=True) as http:
        body = {"model": "gpt-9", "messages": USER, "max_tokens": 2}
        assert http.post("/v1/chat/completions", json=body).json()["model"] == "tiny"


def test_a_body_that_is_too_large_is_refused_before_it_is_read(ask: Any) -> None:
    with ask(max_body=1000) as http:
        assert http.post("/v1/completions", content=b"x" * 1001).status_code == 413

        def pieces() -> Any:
            for _ in range(100):
                yield b"x" * 100

        assert http.post("/v1/completions", content=pieces()).status_code == 413


TOO_LONG: Any = {
    "/tokenize": {"content": "a b c d " * 200_000},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a b c d " * 200_000}]},
    "/v1/messages": {"system": "a b c d " * 200_000, "messages": USER, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a b c d " * 200_000}]},
    "/v1/completions": {"prompt": ["a", "a b c d " * 200_000]},
    "/v1/responses": {"input": "a", "instructions": "a b c d " * 200_000},
}


def test_a_text_that_surely_is_too_long_is_refused_before_it_takes_memory(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every path that makes tokens of a client's text: tokenized, 15 MiB take gigabytes."""
    made: list[int] = []
    encode = shared.encode_without_gil
    monkeypatch.setattr(shared, "encode_without_gil", lambda *of: made.append(len(of[1])) or encode(*of))
    for path, body in TOO_LONG.items():
        reply = http.post(path, json=body)
        assert reply.status_code == 400 and "at least" in reply.json()["error"]["message"], path
    assert made and max(made) < 1000
    counted = http.post("/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": "x" * 9000}]})
    assert counted.json()["input_tokens"] > 4096, "what may be too long is counted, so that a client can shorten it"


def test_every_path_that_makes_tokens_counts_as_open(serve: Any) -> None:
    url = httpx.URL(serve(max_open=1))
    with socket.create_connection((url.host, url.port)) as slow, httpx.Client(base_url=url, trust_env=False) as http:
        slow.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
        small = {path: {**body, "content": "a"} if path == "/tokenize" else body for path, body in TOO_LONG.items()}
        assert soon(lambda: http.post("/tokenize", json=small["/tokenize"]).status_code == 429)
        small |= {"/v1/embeddings": {"input": "a"}, "/v1/rerank": {"query": "a", "documents": ["a"]}}
        late = [http.post(path, json=small[path]) for path in small]
        assert {(reply.status_code, reply.headers["retry-after"]) for reply in late} == {(429, "1")}
