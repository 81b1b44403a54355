"""Images in each protocol reach a model that sees, as they do from the engine; others and URLs do not."""

from __future__ import annotations

import base64
import io
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest

pytest.importorskip("PIL")

from cortexmlx import Engine
from cortexmlx.vision import elsewhere
from cortexmlx.vision.elsewhere import NamedImageReader
from support.clients.in_process import in_process
from support.models.sighted import picture, shown, write_sighted
from support.models.tiny import write_tiny
from support.models.tool_templates import HERMES
from support.patience import PATIENCE


def png(width: int, height: int, seed: int = 0) -> bytes:
    file = io.BytesIO()
    picture(width, height, seed).save(file, "PNG")
    return file.getvalue()


def text64(data: bytes) -> str:
    return base64.b64encode(data).decode()


PNG = png(24, 32)
HUGE = struct.pack("<2sIHHIIiiHH6I", b"BM", 54, 0, 0, 54, 40, 60_000, 60_000, 1, 24, *[0] * 6)
TEXT = {"type": "text", "text": "what?"}
REMOTE = {"type": "image_url", "image_url": {"url": "http://localhost:1/photo.png"}}
LINE = "[An image was here, but it cannot be read.]\n"
GREEDY: dict[str, Any] = {"max_tokens": 3, "temperature": 0}


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{text64(data)}"


def openai_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), "detail": "low"}}


def block(data: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text64(data)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sighted(tmp_path_factory.mktemp("sighted") / "tiny")


def chat(http: httpx.Client, *content: dict[str, Any], **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": [*content]}], "logprobs": True, **GREEDY, **fields}
    return http.post("/v1/chat/completions", json=body)


def chat_messages(http: httpx.Client, *said: dict[str, Any]) -> Any:
    return chat(http, messages=[*said])


def responses(http: httpx.Client, *items: Any, **fields: Any) -> Any:
    body = {"input": [*items], "temperature": 0, "max_output_tokens": 3, "include": ["message.output_text.logprobs"]}
    return http.post("/v1/responses", json=body | fields)


def messages(http: httpx.Client, *said: dict[str, Any], path: str = "") -> Any:
    body = {"messages": [*said], "model": "tiny", **({} if path else GREEDY)}
    return http.post(f"/v1/messages{path}", json=body)


def chances(engine: Engine, *said: dict[str, Any]) -> list[float]:
    answer = engine.generate([*said], max_tokens=3, temperature=0, logprobs=1)
    return [each.logprob for each in answer.logprobs or ()]


def test_an_image_in_each_protocol_is_seen_as_from_the_engine(http: httpx.Client, engine: Engine) -> None:
    seen, other = chances(engine, shown("what?", PNG)), chances(engine, shown("what?", png(24, 32, 1)))
    assert seen != pytest.approx(other, abs=1e-3)
    for data, want in ((PNG, seen), (png(24, 32, 1), other)):
        choice = chat(http, openai_part(data), TEXT).json()["choices"][0]
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == pytest.approx(want, abs=1e-4)
        parts = [{"type": "input_image", "image_url": data_url(data)}, {"type": "input_text", "text": "what?"}]
        text = responses(http, {"role": "user", "content": parts}).json()["output"][0]["content"][0]
        assert [each["logprob"] for each in text["logprobs"]] == pytest.approx(want, abs=1e-4)
        said = {"role": "user", "content": "what?", "images": [text64(data)]}
        body = {"messages": [said], "logprobs": True, "options": {"num_predict": 3, "temperature": 0}, "stream": False}
        told = http.post("/api/chat", json=body).json()["logprobs"]
        assert [each["logprob"] for each in told] == pytest.approx(want, abs=1e-4)
    assert http.post("/api/show", json={"model": "tiny"}).json()["capabilities"] == ["completion", "vision"]
    usage = messages(http, {"role": "user", "content": [block(PNG), TEXT]}).json()["usage"]
    prompt = engine.count_tokens([shown("what?", PNG)])
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
    assert usage["cache_read_input_tokens"] == prompt - 1  # the image is the same one, in the same place


def test_an_image_in_a_result_stands_in_its_place(http: httpx.Client, engine: Engine) -> None:
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "shoot", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [TEXT, block(PNG)]}
    said = [{"role": "user", "content": "go"}, call, {"role": "user", "content": [result, TEXT]}]
    counted = messages(http, *said, path="/count_tokens").json()["input_tokens"]
    parts = [TEXT, {"type": "image", "image": PNG}, {"type": "text", "text": "<user>\nwhat?\n</user>"}]
    calls = [{"id": "a", "type": "function", "function": {"name": "shoot", "arguments": {}}}]
    asked = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "name": "shoot", "content": parts},
    ]
    assert counted == engine.count_tokens(asked)
    assert messages(http, *said).status_code == 200
    output = {"type": "function_call_output", "call_id": "a"}
    output |= {"output": [{"type": "input_image", "image_url": data_url(PNG)}]}
    items = [{"role": "user", "content": "go"}, {"type": "function_call", "call_id": "a", "name": "shoot"}]
    asked[2]["content"] = parts[1:2]
    first = responses(http, *items, output).json()
    assert first["usage"]["input_tokens"] == engine.count_tokens(asked)
    later = responses(http, {"role": "user", "content": "and?"}, previous_response_id=first["id"]).json()
    assert later["usage"]["input_tokens"] > first["usage"]["input_tokens"]  # the image is kept
    assert "data:image/png" in http.get(f"/v1/responses/{first['id']}/input_items").text


@pytest.mark.parametrize(
    "data", [b"", b"text", PNG[:60], HUGE, b"%PDF-1.4", PNG[:-50]], ids=["empty", "text", "head", "huge", "pdf", "cut"]
)
def test_a_hostile_image_is_the_senders_error_once_and_then_a_line(http: httpx.Client, data: bytes) -> None:
    last = {"role": "user", "content": "well?"}
    for part in (openai_part(data), block(data)):
        asked, post = {"role": "user", "content": [part, TEXT]}, messages if "source" in part else chat_messages
        strict = post(http, asked)
        assert strict.status_code == 400 and "messages[0].content[0]" in strict.text
        assert strict.json()["error"]["type"] == "invalid_request_error"
        assert post(http, asked, last).status_code == 200


def test_nothing_is_fetched_and_no_file_is_opened(http: httpx.Client, engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    path, url = str(tmp_path / "a.png"), f"file://{tmp_path}/a.png"
    plain = {"type": "image", "image": path}
    parts = [REMOTE, plain, *({"type": "image_url", "image_url": each} for each in (path, url, {"url": path}))]
    parts += [{"type": "image", "source": {"type": "file", "file_id": path}}, {"type": "image", "image": list(PNG)}]
    for part in parts:
        assert chat(http, part, TEXT).status_code == 400
        old = chat(http, messages=[{"role": "user", "content": [part, TEXT]}, {"role": "user", "content": "b"}]).json()
        want = [{"role": "user", "content": f"{LINE}what?"}, {"role": "user", "content": "b"}]
        assert old["usage"]["prompt_tokens"] == engine.count_tokens(want)
        assert any("is not read" in note for note in old["choices"][0]["notes"])


def test_only_what_a_listed_host_has_is_fetched_and_nobody_waits_for_it(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cortexmlx.server import ServerSettings, app

    asked, answer = threading.Event(), threading.Event()

    def fetch(url: Any, *origin: Any) -> bytes:
        asked.set()
        assert answer.wait(PATIENCE)
        return b"no image" if "bad" in url.path else PNG

    monkeypatch.setattr(elsewhere, "_request_body", fetch)
    read = NamedImageReader(["pictures.example"]).read
    url = "https://pictures.example/a.png"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "input_image", "image_url": url}]
    source = {"type": "image", "source": {"type": "url", "url": url}}
    with in_process(app(engine, ServerSettings(read_elsewhere=read))) as http:
        with ThreadPoolExecutor() as pool:
            fetching = pool.submit(chat, http, parts[0], TEXT)
            assert asked.wait(PATIENCE)
            assert chat(http, TEXT).status_code == 200, "others are answered meanwhile"
            answer.set()
            got = fetching.result(PATIENCE).json()
        want = engine.count_tokens([shown("what?", PNG)])
        assert got["usage"]["prompt_tokens"] == want
        said = {"role": "user", "content": [parts[1], {"type": "input_text", "text": "what?"}]}
        assert responses(http, said).json()["usage"]["input_tokens"] == want
        said = {"role": "user", "content": [source, TEXT]}
        assert messages(http, said, path="/count_tokens").json()["input_tokens"] == want
        for other, says in (("https://pictures.example/bad", "is text"), ("https://a.example/b", "not listed")):
            refused = chat(http, {"type": "image_url", "image_url": {"url": other}}, TEXT)
            assert refused.status_code == 400 and says in refused.text and "messages[0].content[0]" in refused.text
    with in_process(app(engine)) as http:
        assert "hosts that its owner has listed" in chat(http, parts[0], TEXT).text


def test_images_are_decoded_off_the_event_loop(
    http: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, check = set(), engine.check_image
    monkeypatch.setattr(engine, "check_image", lambda data: (threads.add(threading.current_thread().name), check(data)))
    assert chat(http, openai_part(PNG), TEXT).status_code == 200
    assert threads == {"cortexmlx-async"}


def test_a_model_without_sight_reads_a_line(tmp_path: Path) -> None:
    from cortexmlx.server import app

    with Engine(str(write_tiny(tmp_path / "blind")), kv_memory="4MB") as blind, in_process(app(blind)) as http:
        assert not blind.sees_images
        answer = chat(http, openai_part(PNG), TEXT, logprobs=False).json()
        assert any("a line says" in note for note in answer["choices"][0]["notes"])


def test_the_package_of_openai_shows_images(http: httpx.Client, engine: Engine) -> None:
    url, parts = "http://localhost/v1", [openai_part(PNG), TEXT]
    client = openai.OpenAI(base_url=url, api_key="none", http_client=http)
    chosen = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=3, temperature=0
    )
    items = [{"type": "input_image", "image_url": data_url(PNG)}, {"type": "input_text", "text": "what?"}]
    answered = client.responses.create(
        model="tiny", input=[{"role": "user", "content": items}], max_output_tokens=16, temperature=0
    )
    want = engine.generate([shown("what?", PNG)], max_tokens=16, temperature=0)
    assert chosen.usage.prompt_tokens == answered.usage.input_tokens == want.usage.prompt_tokens
    assert want.text.startswith(chosen.choices[0].message.content) and answered.output_text == want.text


def test_a_session_of_claude_code_with_a_pasted_image_and_a_screenshot(tmp_path: Path) -> None:
    """A pasted image, then a screenshot that a tool has read, then a question about both: each is computed once."""
    from cortexmlx.server import app

    folder = write_sighted(tmp_path / "tiny", max_position_embeddings=4096)
    (folder / "chat_template.jinja").write_text(HERMES)
    with Engine(str(folder), kv_memory="8MB") as engine, in_process(app(engine)) as http:
        converse(anthropic.Anthropic(base_url="http://localhost", api_key="none", max_retries=0, http_client=http))


def converse(claude: anthropic.Anthropic) -> None:
    ephemeral = {"type": "ephemeral"}
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.abc; cch=abc;"},
        {"type": "text", "text": "You are an agent.", "cache_control": ephemeral},
    ]
    reading = {"name": "Read", "description": "reads", "input_schema": {"type": "object", "properties": {}}}
    body: dict[str, Any] = {"model": "tiny", "system": system, "tools": [reading], "thinking": {"type": "adaptive"}}
    asked = {"type": "text", "text": "[Image #1] what?", "cache_control": ephemeral}
    said: list[Any] = [{"role": "user", "content": [block(PNG), asked]}]
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "screen.png"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [block(png(40, 40, 7))]}
    later = [
        [
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result | {"cache_control": ephemeral}]},
        ],
        [{"role": "assistant", "content": "It is."}, {"role": "user", "content": "And the first one?"}],
        [],
    ]
    before = 0
    for more in later:
        counted = claude.messages.count_tokens(messages=said, **body).input_tokens
        with claude.beta.messages.stream(messages=said, max_tokens=3, betas=["claude-code-20250219"], **body) as stream:
            usage = stream.get_final_message().usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted
        assert usage.cache_read_input_tokens >= before - 40, "what was there is not computed again"
        before, said = counted, [*said, *more]
