"""Ollama's API, asked with the `ollama` package: whole, streamed and from asyncio, with tools, forms, thoughts, vectors
and errors.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta, timezone
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

pytest.importorskip("ollama")

import ollama

from cortexmlx import Engine, SamplingParams
from cortexmlx.errors import DownloadFailed, ModelNotFound
from cortexmlx.protocols.ollama.errors import is_ollama_path
from cortexmlx.protocols.ollama.models import API_VERSION
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.server import ModelPool, ServedModel, ServerSettings, app, application
from cortexmlx.types.progress import Progress
from support.clients.in_process import in_process
from support.engine.held import hold_long_answers
from support.fakes.numbers import MadeUpNumbers, vector_of
from support.models.thinking import write_thinking
from support.models.tiny import EOS
from support.models.tool_templates import HERMES
from support.patience import PATIENCE, soon

USER: Any = [{"role": "user", "content": "Hello?"}]
SWITCH = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
GREEDY: Any = {"num_predict": 20, "temperature": 0}
CITY: Any = {"city": {"enum": ["Paris", "Rome"]}}
FORM: Any = {"type": "object", "properties": CITY, "required": ["city"]}
ASSISTANT = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    path = tmp_path_factory.mktemp("ollama") / "tiny"
    return write_thinking(path, HERMES + SWITCH, tags, max_position_embeddings=4096)


def package(url: str, **options: Any) -> Any:
    return ollama.Client(url, trust_env=False, timeout=PATIENCE, **options)


@pytest.fixture
def client(serve: Any) -> Any:
    return package(serve())


def writes(engine: Engine, text: str) -> RequestDefaults:
    """Defaults with which the model writes this text after any prompt."""

    head, answer = engine.encode(ASSISTANT), [*engine.encode(text), EOS]

    def force(tokens: Any, logits: Any) -> Any:
        import mlx.core as mx

        known = tokens.tolist()
        start = next(n for n in range(len(known), 0, -1) if known[n - len(head) : n] == head)
        return mx.where(mx.arange(logits.shape[-1]) == answer[len(known) - start], 0.0, -mx.inf)[None]

    return RequestDefaults(SamplingParams(max_tokens=None, logits_processors=[force]))


def test_an_answer_is_the_engines_whole_and_streamed(client: Any, engine: Engine) -> None:
    chat = engine.generate(USER, SamplingParams(max_tokens=20, logprobs=2))
    raw = engine.generate("Hello?", SamplingParams(max_tokens=20))
    asked: Any = {"model": "tiny:latest", "options": GREEDY}
    for judge, call, text in (
        (chat, lambda **more: client.chat(messages=USER, **asked, **more), lambda part: part.message.content),
        (chat, lambda **more: client.generate(prompt="Hello?", **asked, **more), lambda part: part.response),
        (raw, lambda **more: client.generate(prompt="Hello?", raw=True, **asked, **more), lambda part: part.response),
    ):
        whole, parts = call(), list(call(stream=True))
        assert text(whole) == "".join(map(text, parts)) == judge.text
        assert not any(part.done for part in parts[:-1]) and len(parts) > 2
        for last in (whole, parts[-1]):
            assert (last.model, last.done, last.done_reason) == ("tiny", True, "length")
            assert (last.prompt_eval_count, last.eval_count) == (judge.usage.prompt_tokens, 20)
            assert 0 <= last.load_duration < last.total_duration < PATIENCE * 1e9
            assert 0 < last.prompt_eval_duration + last.eval_duration <= last.total_duration
    told = client.chat("tiny", USER, options=GREEDY, logprobs=True, top_logprobs=2)
    parts = list(client.chat("tiny", USER, options=GREEDY, logprobs=True, top_logprobs=2, stream=True))
    for logprobs in (told.logprobs, [each for part in parts for each in part.logprobs or ()]):
        assert [each.logprob for each in logprobs] == pytest.approx([t.logprob for t in chat.logprobs or ()], abs=1e-4)
        assert all(len(each.top_logprobs) == 2 for each in logprobs)


def test_line_breaks_in_an_answer_break_no_line(serve: Any, engine: Engine) -> None:
    text = "one\u2028two\x85three\n\x0b\x1cfour"
    parts = package(serve(defaults=writes(engine, text))).chat("tiny", USER, stream=True)
    assert "".join(part.message.content for part in parts) == text


def test_it_answers_from_asyncio(serve: Any) -> None:
    async def ask(url: str) -> tuple[str, str]:
        one = ollama.AsyncClient(url, trust_env=False, timeout=PATIENCE)
        whole = await one.chat("tiny", USER, options=GREEDY)
        parts = [part.message.content async for part in await one.chat("tiny", USER, options=GREEDY, stream=True)]
        return whole.message.content, "".join(parts)

    whole, streamed = asyncio.run(ask(serve()))
    assert whole == streamed and whole


def test_the_context_of_a_reply_continues_it(serve: Any, engine: Engine) -> None:
    client = package(serve(defaults=writes(engine, "I am fine.")))
    first = client.generate("tiny", "Hello?", system="Be kind.", options=GREEDY)
    then = client.generate("tiny", "And?", context=first.context, options=GREEDY)
    turns = [{"role": "assistant", "content": first.response}, {"role": "user", "content": "And?"}]
    system = {"role": "system", "content": "Be kind."}
    assert then.prompt_eval_count == engine.count_tokens([system, *USER, *turns])
    other = client.generate("tiny", "And?", system="Be rude.", context=first.context, options=GREEDY)
    assert other.prompt_eval_count == then.prompt_eval_count
    assert client.generate("tiny", ASSISTANT, raw=True, options=GREEDY).context is None
    for foreign in ([1, 2, 3], [2**60], [-1], first.context[1:]):
        with pytest.raises(ollama.ResponseError, match="not from a reply of this server"):
            client.generate("tiny", "And?", context=foreign)


def test_calls_and_thoughts_are_told_and_read_again(serve: Any, engine: Engine) -> None:
    def weather(city: str) -> str:
        """The weather.

        Args:
          city: of which city
        """
        return f"rain in {city}"

    text = '<think>Hm.</think><tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    caller = package(serve(defaults=writes(engine, text)))
    whole = caller.chat("tiny", USER, tools=[weather])
    parts = list(caller.chat("tiny", USER, tools=[weather], stream=True))
    for messages in ([whole.message], [part.message for part in parts]):
        [call] = [call for message in messages for call in message.tool_calls or ()]
        assert (call.function.name, call.function.arguments) == ("weather", {"city": "Oslo"})
        assert "".join(message.thinking or "" for message in messages) == "Hm."
        assert "".join(message.content for message in messages) == ""
    assert whole.done_reason == parts[-1].done_reason == "stop"
    result = {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
    turns = [*USER, whole.message, result]
    again = package(serve(defaults=writes(engine, "It rains."))).chat("tiny", turns, tools=[weather])
    assert again.message.content == "It rains." and again.message.tool_calls is None
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
    said = [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "rain in Oslo"}]
    tool = ollama._utils.convert_function_to_tool(weather).model_dump(exclude_none=True)
    assert again.prompt_eval_count == engine.count_tokens([*USER, *said], SamplingParams(tools=[tool]))


def test_think_switches_thoughts(client: Any, engine: Engine) -> None:
    plain = client.chat("tiny", USER, options=GREEDY).prompt_eval_count
    counts = [
        client.chat("tiny", USER, think=think, options=GREEDY).prompt_eval_count for think in (True, "low", False)
    ]
    assert counts[0] == counts[1] == plain < counts[2]
    assert client.generate("tiny", "Hello?", think=False, options=GREEDY).prompt_eval_count == counts[2]
    with pytest.raises(
        ollama.ResponseError, match="think is 'deep', but must be true, false or low, medium, high, max"
    ):
        client.chat("tiny", USER, think="deep")


def test_a_format_is_kept_to(client: Any) -> None:
    answer = client.chat("tiny", USER, format=FORM, options={"temperature": 1, "seed": 1})
    assert json.loads(answer.message.content) in ({"city": "Paris"}, {"city": "Rome"}), "and nothing else, as by Ollama"
    parts = client.generate("tiny", "Hello?", format=FORM, stream=True)
    assert json.loads("".join(part.response for part in parts))["city"] in ("Paris", "Rome")
    with pytest.raises(ollama.ResponseError, match="format"):
        client.chat("tiny", USER, format={"type": "nothing"})


def test_an_empty_prompt_loads_a_model_which_is_then_told(folder: Path) -> None:
    def load(name: str) -> ServedModel:
        return ServedModel(name, lambda progress: Engine(str(folder), kv_memory="8MB", max_rows=4), 1000, 512)

    with ModelPool([load("one"), load("two:8b")], memory=1000) as pool, in_process(app(pool)) as http:
        tags = http.get("/api/tags").json()["models"]
        assert [(each["name"], each["size"]) for each in tags] == [("one:latest", 1000), ("two:8b", 1000)]
        assert http.get("/api/ps").json() == {"models": []}
        assert http.post("/api/show", json={"model": "one"}).json()["capabilities"] == ["completion"]
        loaded = http.post("/api/chat", json={"model": "one:latest", "messages": []}).json()
        assert (loaded["done"], loaded["done_reason"], loaded["message"]["content"]) == (True, "load", "")
        assert loaded["load_duration"] > 0
        refused = http.post("/api/generate", json={"model": "one", "keep_alive": "0s"})
        assert refused.status_code == 400 and "--idle" in refused.json()["error"]
        assert http.post("/api/generate", json={"model": "two:8b"}).json()["done_reason"] == "load"
        shown = ollama.ShowResponse(**http.post("/api/show", json={"name": "one", "verbose": True}).json())
        assert shown.capabilities == ["completion", "tools", "thinking"]  # though it is not in memory any more
        assert shown.modelinfo["llama.context_length"] == 512 and shown.details.format == "mlx"
        [running] = ollama.ProcessResponse(**http.get("/api/ps").json()).models
        assert (running.name, running.context_length, running.size_vram) == ("two:8b", 512, running.size)
        assert running.expires_at.astimezone(timezone(timedelta(hours=14))).year > 2200  # in any zone of time
        assert http.get("/api/version").json()["version"] == API_VERSION


def test_a_client_of_the_package_lists_what_it_may_ask(client: Any) -> None:
    [listed] = client.list().models
    assert listed.model == "tiny:latest" and len(listed.digest) == 64 and listed.details.family == "llama"
    assert client.show(listed.model).capabilities == ["completion", "tools", "thinking"]
    assert client.chat(listed.model, USER, options=GREEDY).message.content


def test_vectors_are_the_models(engine: Engine) -> None:
    made = MadeUpNumbers(engine)
    with in_process(app(made)) as http:
        for body, texts in (({"input": "one"}, ["one"]), ({"input": ["one", "two"], "dimensions": 8}, ["one", "two"])):
            reply = ollama.EmbedResponse(**http.post("/api/embed", json={"model": "tiny", **body}).json())
            want = [vector_of(text, dimensions=body.get("dimensions")) for text in texts]  # type: ignore[arg-type]
            assert np.array_equal(np.array(reply.embeddings, np.float32), np.stack(want))
            assert reply.prompt_eval_count == 3 * len(texts) and 0 <= reply.load_duration <= reply.total_duration
        old = http.post("/api/embeddings", json={"model": "tiny", "prompt": "one"}).json()
        assert np.array_equal(np.array(old["embedding"], np.float32), vector_of("one"))
        long = {"input": "x" * 100}
        assert http.post("/api/embed", json=long).json()["prompt_eval_count"] == 64
        assert "text 0 has 100 tokens" in http.post("/api/embed", json={**long, "truncate": False}).json()["error"]
        assert http.post("/api/embed", json={"input": ""}).json()["embeddings"] == []
        assert http.post("/api/embeddings", json={}).json() == {"embedding": []}


def test_what_is_not_served_is_refused_in_words(client: Any, serve: Any) -> None:
    refusals: list[tuple[Callable[[], Any], int, str]] = [
        (lambda: client.pull("gemma3"), 403, "start it with the model's name"),
        (lambda: client.push("tiny"), 403, "hub's own tools"),
        (lambda: client.create("new", from_="tiny"), 403, "models are not made here"),
        (lambda: client.copy("tiny", "new"), 403, "--alias"),
        (lambda: client.delete("tiny"), 403, "remove the files"),
        (lambda: client.chat("tinny", USER), 404, "did you mean 'tiny'"),
        (lambda: client.show("other"), 404, "there is no model 'other'"),
        (lambda: client.generate("tiny", "a", suffix="b"), 400, "'suffix' is not served"),
        (lambda: client.generate("tiny", "a", template="{{ .Prompt }}"), 400, "'template' is not served"),
        (lambda: client.generate("tiny", "a", raw=True, system="b"), 400, "leave out `system`"),
        (lambda: client.chat("tiny", USER, options={"top_p": 2}), 400, r"^options.top_p: top_p is 2"),
        (lambda: client.chat("tiny", USER, options={"num_predit": 2}), 400, "did you mean 'num_predict'"),
        (lambda: client.chat("tiny", [{"role": "user", "content": "x" * 9000}]), 400, "prompt"),
        (lambda: list(client.chat("tiny", USER, top_logprobs=2, stream=True)), 400, 'top_logprobs needs "logprobs"'),
    ]
    for ask, status, words in refusals:
        with pytest.raises(ollama.ResponseError, match=words.removeprefix("^")) as raised:
            ask()
        assert raised.value.status_code == status
        assert not words.startswith("^") or raised.value.error.startswith("options.top_p")
    guarded = serve(keys={"secret": "ann"})
    with pytest.raises(ollama.ResponseError, match="API key"):
        package(guarded).list()
    assert package(guarded, headers={"Authorization": "Bearer secret"}).list().models


def test_the_ollama_command_is_answered(engine: Engine) -> None:
    """It sends every field of a Go struct that has no `omitempty`, with its zero value."""
    zero: Any = {"model": "tiny", "system": "", "template": "", "options": None}
    with in_process(app(engine)) as http:
        assert http.head("/").status_code == 200
        assert "tools" in http.post("/api/show", json=zero | {"verbose": False, "name": ""}).json()["capabilities"]
        assert http.post("/api/show", json=zero | {"model": "", "name": "tiny"}).status_code == 200
        assert "missing" in http.post("/api/show", json=zero | {"model": "", "name": ""}).json()["error"]
        load = http.post("/api/generate", json=zero | {"prompt": "", "suffix": "", "stream": False})
        assert load.json()["done_reason"] == "load"
        pull = {"model": "tiny", "username": "", "password": "", "name": "", "stream": False}
        assert http.post("/api/pull", json=pull).json() == {"status": "success"}


def test_every_path_has_errors_in_ollamas_shape() -> None:
    paths = [path for path in application.PATHS if is_ollama_path(path)]
    assert len(paths) == 13 and paths == [path for path in application.PATHS if path.startswith("/api/")]


def test_a_client_may_pull_if_the_server_says_so(folder: Path) -> None:
    def load(name: str, memory: int = 1) -> ServedModel:
        return ServedModel(name, lambda progress: Engine(str(folder), kv_memory="8MB", max_rows=4), memory, 512)

    def pull(name: str, on_progress: Any) -> None:
        on_progress(Progress("downloading", 3, 9))
        if name == "org/none":
            raise ModelNotFound("the hub has no model org/none")
        if name == "org/full":
            raise DownloadFailed("no room on disk")
        pool.add(load(name, memory=9 if name == "org/huge" else 1))

    with ModelPool([load("one")], memory=2) as pool, in_process(app(pool, any_name=True, pull=pull)) as http:
        told = http.post("/api/pull", json={"model": "org/two"}).text.splitlines()
        statuses = [ollama.ProgressResponse(**json.loads(line)) for line in told]
        assert [each.status for each in statuses] == ["pulling manifest", "pulling org/two", "success"]
        assert (statuses[1].completed, statuses[1].total) == (3, 9)
        assert [each["name"] for each in http.get("/api/tags").json()["models"]] == ["one:latest", "org/two:latest"]
        answer = http.post("/api/chat", json={"model": "org/two", "messages": USER, "options": GREEDY}).text
        assert json.loads(answer.splitlines()[-1])["model"] == "org/two"
        for served in ("org/two:latest", "one"):  # nothing is downloaded
            assert http.post("/api/pull", json={"name": served, "stream": False}).json() == {"status": "success"}
        for name, status, words in (
            ("org/none", 404, "the hub has no model"),
            ("org/huge", 400, "takes 9 B when it is loaded"),
            ("org/full", 500, "no room on disk"),
            ("../etc/passwd", 400, "must be the hub id"),
            ("llama3.2", 400, "must be the hub id"),
        ):
            refused = http.post("/api/pull", json={"model": name, "stream": False})
            assert refused.status_code == status and words in refused.json()["error"], refused.text
        last = json.loads(http.post("/api/pull", json={"model": "org/none"}).text.splitlines()[-1])
        assert last == {"error": "the hub has no model org/none"}
        assert len(pool.names) == 2


def test_downloads_go_on_one_by_one_without_their_clients(serve: Any) -> None:
    begun, let_go = list[str](), threading.Event()

    def pull(name: str, on_progress: Any) -> None:
        begun.append(name)
        let_go.wait(PATIENCE)

    with httpx.Client(base_url=serve(pull=pull, max_open=2), timeout=PATIENCE, trust_env=False) as http:
        for name in ("org/one", "org/two"):
            with http.stream("POST", "/api/pull", json={"model": name}) as reply:
                told = reply.iter_lines()  # more than once: the stream is never silent for long
                assert all("manifest" in next(told) for _ in range(3)) and soon(lambda: begun == ["org/one"])
        for _ in range(4):  # who leaves a whole reply leaves its place, too
            with pytest.raises(httpx.ReadTimeout):
                http.post("/api/pull", json={"model": "org/three", "stream": False}, timeout=0.1)
            time.sleep(0.05)
        assert begun == ["org/one"]
        let_go.set()
        assert http.post("/api/pull", json={"model": "org/last", "stream": False}).json() == {"status": "success"}
        assert begun == ["org/one", "org/last"]


def test_options_mean_what_ollama_means_by_them(client: Any, engine: Engine) -> None:
    def ask(**options: Any) -> Any:
        return client.chat("tiny", USER, options={**GREEDY, **options}).message.content

    def judge(**params: Any) -> str:
        return engine.generate(USER, SamplingParams(**{"max_tokens": 20, **params})).text

    assert ask(num_ctx=99, num_gpu=1, num_thread=8, mirostat_tau=5, typical_p=0.7, seed=-1, top_k=-1) == judge()
    assert ask(repeat_penalty=3, repeat_last_n=5) == judge(repetition_penalty=3, repetition_context=5)
    assert ask(repeat_penalty=3, repeat_last_n=-1) == judge(repetition_penalty=3, repetition_context=4096)
    assert ask(repeat_penalty=3, repeat_last_n=0) == judge()
    assert ask(frequency_penalty=9, presence_penalty=9) == judge(frequency_penalty=9, presence_penalty=9)
    sampled = {"temperature": 1, "seed": 7, "top_k": 9, "top_p": 0.9, "min_p": 0.01}
    assert ask(**sampled) == judge(**sampled)
    character = judge()[5]
    assert ask(stop=[character]) == judge(stop=[character]) != judge()
    long = client.chat("tiny", USER, options={"num_predict": -1, "temperature": 0})
    assert long.eval_count > 100 and long.done_reason == "stop"


def test_an_error_in_a_stream_is_its_last_line(serve: Any, engine: Engine) -> None:
    def fail(tokens: Any, logits: Any) -> Any:
        if tokens.shape[-1] > count + 3:
            raise ValueError("broken")
        return logits

    count = engine.count_tokens(USER)
    broken = package(serve(defaults=RequestDefaults(SamplingParams(logits_processors=[fail]))))
    with pytest.raises(ollama.ResponseError, match=r"broken|logits"):
        list(broken.chat("tiny", USER, stream=True))


def test_a_quiet_stream_says_nothing_in_lines_that_can_be_read(serve: Any, engine: Engine) -> None:
    let_go = hold_long_answers(engine, tokens=3)
    try:
        with httpx.Client(base_url=serve(quiet=0.05), timeout=PATIENCE, trust_env=False) as http:
            body = {"messages": USER, "options": {"num_predict": 30, "temperature": 0}}
            with http.stream("POST", "/api/chat", json=body) as reply:
                assert reply.headers["content-type"] == "application/x-ndjson"
                lines: Iterator[Any] = map(json.loads, reply.iter_lines())
                parts: list[Any] = []
                while len(parts) < 9 or parts[-1]["message"]["content"]:
                    parts.append(next(lines))
                let_go()
                parts += lines
        assert parts[-1]["done"] and not any(part["done"] for part in parts[:-1])
        assert "".join(part["message"]["content"] for part in parts) == engine.generate(USER, max_tokens=30).text
    finally:
        let_go()


def test_settings_of_the_server_hold(engine: Engine) -> None:
    """Several answers, of which the best is chosen, are one here; and what the engine wrote at its end is told."""
    defaults = RequestDefaults(SamplingParams(n=2, best_of=3, max_tokens=5))
    with in_process(app(engine, ServerSettings(defaults=defaults))) as http:
        assert http.post("/api/chat", json={"messages": USER, "stream": False}).json()["eval_count"] == 5
