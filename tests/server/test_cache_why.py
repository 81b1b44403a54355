"""`/cache/why` and `cortexmlx cache why`: a client learns why its own prompts were computed again, and nobody else."""

from __future__ import annotations

import json
import logging
import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from unittest.mock import Mock
from urllib.error import HTTPError, URLError

import pytest

from cortexmlx import Engine
from cortexmlx.cli.serve.keys import ask_server
from cortexmlx.cli.start import run
from cortexmlx.server import ServerSettings, app
from support.clients.in_process import in_process
from support.patience import PATIENCE

KEYS = {"mine-1234567890": "mine", "other-1234567890": "other"}
SECRET = "The code of the safe is larkspur-4711, tell nobody. " * 4


def ask(http: Any, key: str | None, system: str, model: str = "tiny") -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": SECRET}]
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"model": model, "messages": messages, "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200


def reports(http: Any, key: str | None) -> list[dict[str, Any]]:
    reply = http.get("/cache/why", headers={} if key is None else {"authorization": f"Bearer {key}"})
    assert reply.status_code == 200 and reply.headers["cache-control"] == "no-store"
    told: list[dict[str, Any]] = reply.json()["reports"]
    return told


def test_a_key_is_told_of_its_own_prompts_only(ask_all: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logged: list[Any] = []
    http = ask_all(keys=KEYS, log=logged.append)
    mine, other = KEYS
    ask(http, mine, "It is 10:41 now.")
    ask(http, mine, "It is 10:42 now.")
    for system in ("It is 10:41 now.", "It is 10:42 now."):
        before = len(reports(http, other))
        ask(http, other, system)  # the very prompts of the other key
        assert len(reports(http, other)) == before + 1
    newest, first = reports(http, mine)
    assert (newest["old"], newest["new"], newest["message"], newest["character"]) == ("10:41", "10:42", 1, 10)
    assert newest["text"].startswith("system message, character 10: `10:41` became `10:42`; ")
    assert first["reason"] is None and first["known_tokens"] == 0
    rest = first["prompt_tokens"] - first["memory_tokens"]
    assert f"; the other {rest:,} are new text" in first["text"]
    assert reports(http, other)[1]["known_tokens"] == reports(http, other)[1]["recomputed_tokens"] == 0
    assert http.get("/cache/why").status_code == 401 and http.post("/cache/why").status_code == 401
    metrics = http.get("/metrics", headers={"authorization": f"Bearer {other}"}).text
    assert 'cortexmlx_recomputed_tokens_total{model="tiny",reason="text"}' in metrics
    for said in (metrics, caplog.text, repr(logged)):
        assert "larkspur" not in said and "10:41" not in said and "10:42" not in said


def test_one_model_after_another_is_told_by_the_name_of_the_first(folder: Any) -> None:
    from support.models.calling import write_calling

    other = write_calling(folder.parent / "second", "hermes", num_hidden_layers=2)
    with (
        Engine(str(folder), kv_memory="4MB") as one,
        Engine(str(other), kv_memory="4MB") as two,
        in_process(app({"one": one, "two": two}, ServerSettings())) as http,
    ):
        ask(http, None, "It is 10:41 now.", "one")
        ask(http, None, "It is 10:41 now.", "two")
        newest, _ = reports(http, None)
        assert (newest["reason"], newest["detail"]) == ("model", f"`{folder.name}`")


def test_the_command_asks_with_the_key_of_the_environment(
    serve: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import httpx2 as httpx

    url, (mine, _) = serve(keys=KEYS), KEYS
    with httpx.Client(base_url=url) as http:
        ask(http, mine, "It is 10:41 now.")
        ask(http, mine, "It is 10:42 \x1b[31mnow.")
    for key, says in (("", "wants a key: put one of its"), ("x", "does not know your key: put one of its")):
        monkeypatch.setenv("CORTEXMLX_API_KEY", key)
        assert run(["cache", "why", "--url", url]) == 1
        assert says in capsys.readouterr().err
    monkeypatch.setenv("CORTEXMLX_API_KEY", mine)
    assert run(["cache", "why", "--url", f"{url}/v1", "--last", "1"]) == 0
    head, why = capsys.readouterr().out.splitlines()
    assert head.split(" · ")[1] == "tiny" and "found in memory, 0 on disk" in head and "\x1b" not in why
    assert why.startswith("  system message, character 10: `10:41 now` became `10:42 \N{SYMBOL FOR ESCAPE}[31mnow`")
    assert run(["cache", "why", "--url", url, "--json"]) == 0
    assert [each["reason"] for each in json.loads(capsys.readouterr().out)] == ["text", None]
    monkeypatch.setenv("CORTEXMLX_API_KEY", KEYS and list(KEYS)[1])
    assert run(["cache", "why", "--url", url]) == 0
    assert "remembers no prompt of this key" in capsys.readouterr().err
    for nowhere, says in (
        (url.replace("http", "https"), f"answers by http only: give {url} (--url)"),
        ("no.host.invalid:8510", "no machine is known by the name no.host.invalid: check the address (--url)"),
    ):
        assert run(["cache", "why", "--url", nowhere]) == 1 and says in capsys.readouterr().err
        assert run(["launch", "claude", "--print", "--url", nowhere]) == 1 and says in capsys.readouterr().err
    for nowhere in ("127.0.0.1:1", "http://["):
        assert run(["cache", "why", "--url", nowhere]) == 1
        out, err = capsys.readouterr()
        assert out == "" and f"no server of cortexmlx explains its cache at {nowhere}" in err and "--url" in err


def test_a_key_goes_nowhere_else() -> None:
    """A redirect is not followed: whatever listens at the address could lead the key away."""
    heard: list[str] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Redirecting) as there:
        threading.Thread(target=there.serve_forever).start()
        try:
            with pytest.raises(HTTPError, match="302"):
                ask_server(f"http://127.0.0.1:{there.server_port}", "/cache/why", "secret", seconds=PATIENCE)
        finally:
            there.shutdown()
    assert heard == ["/cache/why"]


def test_a_server_that_is_not_trusted_is_not_told_as_missing(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    untrusted = ssl.SSLCertVerificationError()
    untrusted.verify_message = "self-signed certificate"
    monkeypatch.setattr("urllib.request.OpenerDirector.open", Mock(side_effect=URLError(untrusted)))
    for command in (["cache", "why"], ["launch", "claude", "--print"]):
        assert run([*command, "--url", "https://a.org"]) == 1
        assert (
            "https://a.org shows a certificate that is not trusted here (self-signed certificate): use the"
            in capfd.readouterr().err
        )


@pytest.fixture
def ask_all(folder: Any) -> Any:
    """Return clients of a server with an engine of its own, which has seen nothing."""
    with Engine(str(folder), kv_memory="4MB", max_rows=2) as engine:
        made = []

        def make(**options: Any) -> Any:
            made.append(in_process(app(engine, ServerSettings(**options))))
            return made[-1]

        yield make
        for each in made:
            each.close()
