"""docs/server.md: its client is answered by a server, and its limits are those of the code."""

from __future__ import annotations

import plistlib
from pathlib import Path
from typing import Any

import anthropic
import pytest

from cortexmlx import Engine
from cortexmlx.cli.serve.command import parse_duration
from cortexmlx.protocols.anthropic import conversation, messages
from cortexmlx.protocols.ollama import chat as ollama_chat
from cortexmlx.protocols.responses import reader as responses
from cortexmlx.protocols.responses.offered import IGNORED_TOOL_TYPES
from cortexmlx.server import ServerSettings, app
from cortexmlx.server.generation import MAX_QUEUED_EVENTS
from cortexmlx.server.stored_responses import MAX_PAGE_ITEMS
from support.clients.listening import listening
from support.clients.reach import reach_by_openai
from support.models.thinking import SWITCHED, write_thinking
from support.pages import blocks, read
from support.patience import PATIENCE

PAGE = "docs/server.md"


def test_the_clients_of_the_page_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client, chain, other, _, own, _ = (block for block in blocks("python") if block.page == PAGE)
    model = write_thinking(tmp_path / "smollm2", SWITCHED, max_position_embeddings=4096)
    with Engine(str(model), kv_memory="8MB") as engine:
        monkeypatch.setattr("cortexmlx.Engine", lambda name: engine)
        names: dict[str, Any] = {}
        exec(compile(own.text, own.name, "exec", dont_inherit=True), names)
        theirs = anthropic.Anthropic

        def there(base_url: str, api_key: str) -> anthropic.Anthropic:
            assert base_url == "http://localhost:8000"
            web = anthropic.DefaultHttpxClient(trust_env=False, timeout=PATIENCE)
            return theirs(base_url=url, api_key=api_key, http_client=web)

        monkeypatch.setattr(anthropic, "Anthropic", there)
        with listening(names["application"]) as url:
            reach_by_openai(url, monkeypatch)
            for each in (client, chain, other):
                exec(compile(each.text, each.name, "exec", dont_inherit=True), {})
                assert capsys.readouterr().out.strip()


def test_ollamas_client_of_the_page_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ollama")
    [block] = (block for block in blocks("python") if block.page == PAGE and "import ollama" in block.text)
    model = write_thinking(tmp_path / "smollm2", SWITCHED, max_position_embeddings=4096)
    with Engine(str(model), kv_memory="8MB") as engine, listening(app(engine)) as url:
        exec(compile(block.text.replace("http://localhost:8000", url), block.name, "exec", dont_inherit=True), {})
    assert capsys.readouterr().out.strip()


def test_the_pool_of_the_page_loads_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, own = (block for block in blocks("python") if block.page == PAGE)
    model = write_thinking(tmp_path / "smollm2", SWITCHED, max_position_embeddings=4096)
    monkeypatch.setattr("cortexmlx.Engine", lambda name, **options: Engine(str(model), **options))
    monkeypatch.setattr("cortexmlx.server.app", lambda pool, **options: (pool.acquire("small").name, options))
    names: dict[str, Any] = {}
    exec(compile(own.text, own.name, "exec", dont_inherit=True), names)
    assert names["application"] == ("small", {"aliases": {"default": "small"}})


def test_the_page_has_the_limits_and_the_paths() -> None:
    text, usual = read(PAGE), ServerSettings()
    assert f"{MAX_QUEUED_EVENTS:,} events" in text and f"{usual.max_body >> 20} MiB" in text
    assert f"nothing for {usual.quiet:g} seconds" in text
    assert all(f"`{method} {path}`" in text for method, path in [("POST", "/tokenize"), ("GET", "/health")])
    assert f"{usual.stored_bytes >> 20} MiB and {usual.stored_count:,} responses at most" in text
    assert f"at most {MAX_PAGE_ITEMS})" in text
    nothing: Any = None  # the paths need no engine
    served = {getattr(route, "path", "") for route in app(nothing).routes}
    assert all(f"`{name}`" in text for name in (*ollama_chat._PARAMETERS, *ollama_chat._NOT_ENFORCED))
    ignored = [*messages.NO_EFFECT - {"model"}, *messages.HINTS, *messages.UNSERVED]
    assert all(f"`{name}`" in text for name in ignored) and conversation.BILLING in text
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models"} < served
    assert all(path in text for path in served if "{" not in path)


def test_the_agent_of_launchd_is_a_property_list() -> None:
    """And its command is one that is understood."""
    [block] = (block for block in blocks("xml") if block.page == PAGE)
    said = plistlib.loads(block.text.encode())
    program, command, *options = said["ProgramArguments"]
    assert Path(program).name == "cortexmlx" and command == "serve" and said["RunAtLoad"] is True
    assert options[1:] == ["--idle", "30m"] and parse_duration(options[2]) == 1800


def test_the_page_names_what_has_no_effect_and_what_is_left_out() -> None:
    section = read(PAGE).partition("## Responses")[2].partition("\n## ")[0]
    hints = (responses.FIELDS.no_effect | responses.RESPONSE_UNSERVED.keys()) - {
        "model",
        "store",
        "prediction",
        "image",
    }
    assert {name for name in hints if f"`{name}`" not in section and f'"{name}"' not in section} == {
        "background_options"
    }
    kinds = {kind for kind in IGNORED_TOOL_TYPES if f"`{kind}`" not in section}
    assert all(any(kind.startswith(each) for each in IGNORED_TOOL_TYPES - kinds) for kind in kinds)
