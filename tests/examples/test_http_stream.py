"""The streaming server: events as they come, errors by name, and a client that goes away takes its request with it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from cortexmlx import Engine, SamplingParams
from support.engine.core_driver import finally_nothing_lost
from support.engine.held import hold_long_answers
from support.examples import example
from support.patience import PATIENCE


@pytest.fixture
def server(engine: Engine) -> Iterator[Any]:
    with example("http_stream/server.py").serve(engine) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    web = openai.DefaultHttpxClient(trust_env=False, timeout=PATIENCE)
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=web) as client:
        yield client


def post(server: Any, body: bytes) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=PATIENCE)
    connection.request("POST", "/v1/completions", body)
    return connection, connection.getresponse()


CHAT: Any = {"model": "any", "messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 20, "temperature": 0}


def test_the_openai_package_reads_a_chat_as_it_comes_and_whole(client: openai.OpenAI, engine: Engine) -> None:
    wanted = engine.generate(CHAT["messages"], SamplingParams(max_tokens=20))
    with client.chat.completions.stream(**CHAT, n=2, stop="never", stream_options={"include_usage": True}) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        streamed = stream.current_completion_snapshot
    whole = client.chat.completions.create(**CHAT, n=2, stop="never")
    assert [choice.message.content for choice in streamed.choices] == [wanted.text] * 2 and len(texts) > 2
    for choice, same in zip(whole.choices, streamed.choices, strict=True):
        assert (choice.message.content, choice.finish_reason) == (same.message.content, same.finish_reason)
    assert whole.usage is not None and streamed.usage is not None
    assert whole.usage.prompt_tokens == streamed.usage.prompt_tokens == engine.count_tokens(CHAT["messages"])
    assert whole.usage.completion_tokens == streamed.usage.completion_tokens == 2 * len(wanted.token_ids)


def test_the_openai_package_reads_the_answers_to_several_prompts(client: openai.OpenAI, engine: Engine) -> None:
    asked: Any = {"model": "any", "prompt": ["the cat", "a dog"], "max_tokens": 8, "temperature": 0, "logprobs": 1}
    whole = client.completions.create(**asked)
    texts, tokens = ["", ""], [[], []]  # type: tuple[list[str], list[list[str]]]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += (choice.logprobs and choice.logprobs.tokens) or []
    assert [choice.text for choice in whole.choices] == texts
    assert [choice.logprobs and choice.logprobs.tokens for choice in whole.choices] == tokens
    assert texts == [engine.generate(prompt, SamplingParams(max_tokens=8)).text for prompt in asked["prompt"]]


BAD = {
    b"": ("the body has 0 bytes", None),
    b"no json": ("Expecting value", None),
    b"[1]": ("must be a JSON object", None),
    b'{"prompt": "a", "max_token": 5}': ("'max_token' (did you mean 'max_tokens'?)", "max_token"),
    b'{"prompt": "a", "temperature": -1}': ("temperature is -1", "temperature"),
    b'{"prompt": ["a", ""]}': ("the prompt is empty", "prompt[1]"),
    b'{"prompt": 5}': ("`prompt` must be one text or a list of token ids", "prompt"),
}


@pytest.mark.parametrize("body", BAD)
def test_what_cannot_be_answered_is_refused_by_its_name(server: Any, body: bytes) -> None:
    _, response = post(server, body)
    error = json.loads(response.read())["error"]
    says, path = BAD[body]
    assert response.status == 400 and says in error["message"] and error["param"] == path


def test_another_path_is_refused_with_those_that_are_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings is not served, only /v1/chat/completions and"):
        client.embeddings.create(model="any", input="a")


def test_a_client_that_goes_away_has_its_request_cancelled(server: Any, engine: Engine) -> None:
    server.RequestHandlerClass.quiet_seconds = 0.01
    hold_long_answers(engine)
    connection, response = post(server, b'{"prompt": "the cat", "max_tokens": 480, "stream": true}')
    response.fp.readline()
    response.close()
    connection.close()
    finally_nothing_lost(engine)


def test_one_that_goes_away_before_the_first_word_is_missed_too(server: Any, engine: Engine) -> None:
    """The engine's thread is held, as by a long prompt; comments find out that nobody reads."""
    server.RequestHandlerClass.quiet_seconds = 0.01
    held, seen = threading.Event(), threading.Event()
    threading.Thread(target=engine.inspect, args=(lambda core: (seen.set(), held.wait(PATIENCE)),)).start()
    assert seen.wait(PATIENCE)
    connection, response = post(server, b'{"prompt": "the cat", "max_tokens": 480, "stream": true}')
    assert response.fp.readline() == b":\n"
    response.close()
    connection.close()
    while not any(handle._cancelling for handle in list(engine._worker._handles.values())):
        time.sleep(0.01)
    held.set()
    finally_nothing_lost(engine)
    assert engine.stats().generated_tokens == 0


def test_a_request_that_fails_says_so_in_its_last_event(server: Any, engine: Engine) -> None:
    hold_long_answers(engine)
    _, response = post(server, b'{"prompt": "the cat", "max_tokens": 480, "stream": true}')
    engine.close()
    *_, last = [line for line in response.read().splitlines() if line]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert "engine was closed" in error["message"] and error["type"] == "server_error"
