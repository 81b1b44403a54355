"""`cortexmlx serve` as a process: it says where it is, answers, and ends with its signals."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from cortexmlx.cli.serve import command
from cortexmlx.cli.start import run
from cortexmlx.server.listening import open_listener
from support.patience import PATIENCE

BODY: Any = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 5}


def test_it_answers_whom_its_keys_let_in_and_ctrl_c_ends_it_with_0(serve: Any, folder: Path, tmp_path: Path) -> None:
    """The keys come from a file and from the environment."""
    (tmp_path / "keys").write_text("# ours\nfirst ann\n\nsecond\n")
    options = ("--alias", "small", "--temp", "0", "--api-key-file", f"{tmp_path}/keys", "--log-format", "json")
    process, url, said = serve(folder, *options, CORTEXMLX_API_KEY="third")
    with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as http:
        for key, status in (("first", 200), ("second", 200), ("third", 200), ("ann", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            reply = http.post("/v1/chat/completions", json={**BODY, "model": "small"}, headers=headers)
            assert reply.status_code == status and (status != 200 or reply.json()["model"] == "tiny")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
    said += process.stderr.read()
    assert " or put a key into CORTEXMLX_API_KEY and try:\n  curl " in said
    assert '-H "Authorization: Bearer $CORTEXMLX_API_KEY"' in said, "the shell puts the key in"
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    asked = [line for line in lines if "status" in line]
    assert [line["status"] for line in asked] == [200, 200, 200, 401] and asked[0]["answer"] > 0
    assert said.splitlines()[-1] == "ended" and "Traceback" not in said


def test_log_lines_that_cannot_be_written_end_neither_the_server_nor_an_answer(serve: Any, folder: Path) -> None:
    process, url, _ = serve(folder)
    process.stderr.close()
    assert httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=PATIENCE, trust_env=False).is_success
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0


def test_ctrl_c_says_what_it_waits_for_and_a_second_one_ends_it_now(serve: Any, folder: Path) -> None:
    process, url, _ = serve(folder, "--grace", "600")
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=PATIENCE) as client:
        head = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
        client.sendall(head)
        assert client.recv(99).startswith(b"HTTP/1.1 100")  # it runs
        process.send_signal(signal.SIGINT)
        line = next(line for line in process.stderr if "waiting" in line)
        assert line == "waiting for 1 request, for up to 600 s. Ctrl-C again ends it now.\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0 and b"HTTP/1.1 503" in client.recv(9999)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--host", "0.0.0.0"], 2, "0.0.0.0 can be reached from other machines"),
        (["--insecure"], 2, "127.0.0.1 is reached from this machine only"),
        (["--api-key-file", "missing"], 1, "the keys in missing cannot be read"),
        (["--host", "no.such.host.invalid", "--insecure"], 1, "there is no address"),
        (["--port", "70000"], 2, "65535"),
        (["-c", "9"], 2, "No such option: -c. The context is the model's own; --kv-memory limits what it takes"),
        (["--api-key", "x"], 2, "No such option: --api-key. Here it is --api-key-file FILE, or CORTEXMLX_API_KEY in"),
        (["-ctk", "q8_0"], 2, "No such option: -ctk. Here it is --kv-bits 8, or 4"),
        (["--temp", "-1"], 2, "temp"),
        (["--cors", "app.example"], 2, "--cors: the origin 'app.example' is none that a browser sends"),
        (["missing-model", "--port", "0"], 1, "no model 'missing-model'"),
    ],
)
def test_wrong_options_are_said_before_a_model_is_loaded(
    options: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CORTEXMLX_API_KEY", raising=False)
    assert run(["serve", *options]) == code
    assert capsys.readouterr().err.count(says) == 1


def test_a_port_in_use_is_said_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with open_listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert run(["serve", "missing-model", "--port", str(port)]) == 1
    assert f"port {port} of 127.0.0.1 is in use" in capsys.readouterr().err


def test_what_is_not_installed_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert run(["serve", "missing-model"]) == 1
    assert "uvicorn, prometheus_client: `pip install 'starlette>=1,<2' 'uvicorn" in capsys.readouterr().err
