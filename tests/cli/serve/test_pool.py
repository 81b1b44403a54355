"""`cortexmlx serve` with several models, as a process: what it says, loads, refuses and leaves behind."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from cortexmlx.cli.start import run
from support.models.calling import write_calling
from support.patience import PATIENCE

BODY: Any = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 5}
PATH = "/v1/chat/completions"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    one, two = write_calling(tmp_path / "one", "hermes"), write_calling(tmp_path / "two", "llama")
    (one / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.7, "top_k": 1}))
    return one, two


def test_two_models_take_turns_in_the_room_of_one_with_settings_of_their_own(
    serve: Any, folders: tuple[Path, Path]
) -> None:
    process, url, text = serve(*folders, "--memory", "10MB", "--alias", "big=two", "--any-name")
    assert "serves 2 models, which take up to 9.54 MiB together:" in text
    assert re.search(r"  one: [\d.]+ MiB, up to 4,096 tokens, loaded\n", text)
    assert re.search(r"  two: [\d.]+ MiB, up to 4,096 tokens, loaded when it is asked for\n", text)
    with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as http:
        listed = [(each["id"], each["loaded"]) for each in http.get("/v1/models").json()["data"]]
        assert listed == [("one", True), ("two", False), ("big", False)]
        # The makers of the first model recommend its likeliest token. Nobody says so of the second.
        body = {**BODY, "max_tokens": 40, "ignore_eos": True, "model": "one"}
        answers = [http.post(PATH, json=each).json() for each in (body, body, {**body, "temperature": 0})]
        assert len({each["choices"][0]["message"]["content"] for each in answers}) == 1
        for name, model in (("big", "two"), ("gpt-9", "one"), ("two", "two")):
            assert http.post(PATH, json={**BODY, "model": name}).json()["model"] == model
        one = folders[0]
        shutil.rmtree(one)
        reply = http.post(PATH, json={**BODY, "model": "one"})
        assert reply.status_code == 503 and "its files are not there" in reply.text and str(one) not in reply.text
        assert http.post(PATH, json={**BODY, "model": "two"}).status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    said = process.stderr.read()
    assert "unloaded one\n" in said and "loaded two in" in said and f"one cannot be loaded: no model '{one}'" in said
    assert " 200 " in said and " · two · " in said and "Traceback" not in said
    assert said.endswith("\nended\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_while_models_are_loaded_and_waited_for_ends_it_with_0(number: int, serve: Any, folders: Any) -> None:
    process, url, _ = serve(*folders, "--memory", "10MB", "--grace", "0", "--log-format", "none")
    with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as http:
        long: Any = {**BODY, "max_tokens": 4000, "ignore_eos": True, "stream": True, "model": "one"}
        with http.stream("POST", PATH, json=long) as reply:
            next(reply.iter_lines())
            body = json.dumps({**BODY, "model": "two"})
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", http.base_url.port)) as waiting:
                waiting.sendall((head + body).encode())
                process.send_signal(number)
                assert process.wait(PATIENCE) == 0
    assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--memory", "10KB"], 1, "one takes"),
        (["--memory", "9000TB"], 1, "is more than this machine has"),
        (["--memory", "lots"], 2, "is not a size"),
        (["--idle", "soon"], 2, "is no duration: write 30s"),
        (["--keep-loaded", "three"], 1, "--keep-loaded: 'three' is not among the models: 'one', 'two'"),
        (["--keep-loaded", "one", "--memory", "10MB", "--kv-memory", "8MB"], 1, "two takes"),
        (["--alias", "x"], 1, "does not say of which model: write x=MODEL"),
        (["--model", "three"], 2, "several models, and --model 'three'"),
        (["--adapter", "x"], 2, "it is for one model"),
        (["--draft", "x"], 2, "it is for one model, but there are several"),
        (["--think"], 1, "enable_thinking"),
        (["missing-model"], 1, "missing-model"),
    ],
)
def test_wrong_options_are_said_before_anything_is_loaded(
    folders: tuple[Path, Path], options: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", *map(str, folders), "--port", "0", *options]) == code
    said = capsys.readouterr().err
    assert says in " ".join(said.split()).replace("│ ", ""), said
