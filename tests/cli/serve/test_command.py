"""`cortexmlx serve` as a process: it says where it is, answers, and ends with its signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from cortexmlx.cli.serve import command
from cortexmlx.cli.start import run
from cortexmlx.server.listening import open_listener
from support.models.calling import write_calling
from support.patience import PATIENCE

BODY: Any = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling(tmp_path_factory.mktemp("calling") / "tiny", "hermes")


@pytest.fixture
def started(folder: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[Any, str]]]:
    """Start the command with some options; returns the process and the address."""
    processes = []

    def start(*options: str, **environment: str) -> tuple[Any, str]:
        command = [sys.executable, "-m", "cortexmlx", "serve", str(folder), "--port", "0", "--kv-memory", "8MB"]
        variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), **environment}
        process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=variables)
        processes.append(process)
        assert process.stderr is not None
        line = next(line for line in process.stderr if "serves" in line)
        found = re.search(r"http://\S+?(?=/v1)", line)
        assert found is not None
        return process, found[0]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_it_answers_whom_its_keys_let_in_and_ctrl_c_ends_it_with_0(started: Any, tmp_path: Path) -> None:
    """The keys come from a file and from the environment."""
    (tmp_path / "keys").write_text("# ours\nfirst ann\n\nsecond\n")
    options = ("--alias", "small", "--temp", "0", "--api-key-file", f"{tmp_path}/keys", "--log-format", "json")
    process, url = started(*options, CORTEXMLX_API_KEY="third")
    with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as http:
        for key, status in (("first", 200), ("second", 200), ("third", 200), ("ann", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            reply = http.post("/v1/chat/completions", json={**BODY, "model": "small"}, headers=headers)
            assert reply.status_code == status and (status != 200 or reply.json()["model"] == "tiny")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
    said = process.stderr.read()
    assert '-H "Authorization: Bearer $CORTEXMLX_API_KEY"' in said, "the shell puts the key in"
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    asked = [line for line in lines if "status" in line]
    assert [line["status"] for line in asked] == [200, 200, 200, 401] and asked[0]["answer"] > 0
    assert said.splitlines()[-1] == "ended" and "Traceback" not in said


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--host", "0.0.0.0"], 2, "0.0.0.0 can be reached from other machines"),
        (["--insecure"], 2, "127.0.0.1 is reached from this machine only"),
        (["--api-key-file", "missing"], 1, "the keys in missing cannot be read"),
        (["--host", "no.such.host.invalid", "--insecure"], 1, "there is no address"),
        (["--port", "70000"], 2, "65535"),
        (["--temp", "-1"], 2, "temp"),
        (["--cors", "app.example"], 2, "--cors: the origin 'app.example' is none that a browser sends"),
        (["missing-model", "--port", "0"], 1, "missing-model"),
    ],
)
def test_wrong_options_are_said_before_a_model_is_loaded(
    options: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CORTEXMLX_API_KEY", raising=False)
    assert run(["serve", *options]) == code
    assert says in capsys.readouterr().err


def test_a_port_in_use_is_said_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with open_listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert run(["serve", "missing-model", "--port", str(port)]) == 1
    assert f"port {port} of 127.0.0.1 is in use" in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_is_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "missing-model", "--port", "0"]) == 1
    assert capsys.readouterr().err.count("no model 'missing-model'") == 1


def test_what_is_not_installed_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert run(["serve", "missing-model"]) == 1
    assert "pip install -e '.[server]'" in capsys.readouterr().err
