"""`cortexmlx launch`: an agent gets a server and the truth about it, and both end together."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from cortexmlx import Engine
from cortexmlx.cli import launch
from cortexmlx.cli.launch import Agent, AgentServer, AgentSetup, make_setup, run_agent, setup_remarks
from cortexmlx.cli.program import adapt_commands
from cortexmlx.cli.start import run
from cortexmlx.errors import CortexError
from cortexmlx.server import ServerSettings, app
from support.cli.terminal import Terminal
from support.clients.listening import listening
from support.patience import PATIENCE, soon

SERVER = AgentServer("http://127.0.0.1:9", "sesame", "org/my model", 40_960)

AGENT = """#!{python}
import json, os, signal, sys, time, urllib.request
told = {{name: value for name, value in os.environ.items() if name.startswith(("ANTH", "CLAUDE", "API_T", "NO_PROXY"))}}
settings = sys.argv[sys.argv.index("--settings") + 1]
about = {{"told": told, "words": sys.argv[1:], "settings": json.load(open(settings)), "file": settings}}
headers = {{"Authorization": "Bearer " + told["ANTHROPIC_AUTH_TOKEN"]}}
asked = urllib.request.Request(told["ANTHROPIC_BASE_URL"] + "/v1/models", headers=headers)
about["models"] = json.load(urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open(asked))["data"]
print("an agent's own words", file=sys.stderr)
signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
signal.signal(signal.SIGINT, lambda *_: open("{folder}/interrupted", "w").close())
with open("{folder}/new", "w") as file: json.dump(about, file)
os.rename("{folder}/new", "{folder}/told")
while True: time.sleep(1)
"""


@pytest.fixture
def launched(folder: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Claude Code, or what stands for it, launched in a process group of its own."""
    agent = tmp_path / "claude"
    agent.write_text(AGENT.format(python=sys.executable, folder=tmp_path))
    agent.chmod(0o755)
    places = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_STATE_HOME": str(tmp_path), "ANTHROPIC_API_KEY": "mine"}
    places |= {"NO_PROXY": "a.org", "CLAUDE_CODE_USE_BEDROCK": "1", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "cortexmlx", "launch", "claude", "-m", str(folder), "--kv-memory", "8MB"]
    options: Any = {"env": {**os.environ, **places}, "start_new_session": True}
    with subprocess.Popen([*command, "--", "--print", "hi"], stderr=subprocess.PIPE, text=True, **options) as process:
        yield process
        with suppress(ProcessLookupError):  # the agent may be there though its server is not
            os.killpg(process.pid, signal.SIGKILL)


def refusal(model: str | None = None) -> str:
    """Why the usual server cannot be used."""
    with pytest.raises(CortexError) as raised:
        launch.find_server(model)
    return str(raised.value)


def is_served(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", trust_env=False)
    except httpx.TransportError:
        return False
    return True


def test_an_agent_gets_a_server_of_its_own_and_interrupts_and_an_end_ends_both(launched: Any, tmp_path: Path) -> None:
    assert soon(lambda: (tmp_path / "told").exists() or launched.poll() is not None)
    about = json.loads((tmp_path / "told").read_text())
    told = about["told"]
    url = told["ANTHROPIC_BASE_URL"]
    os.killpg(launched.pid, signal.SIGINT)
    assert soon(lambda: (tmp_path / "interrupted").exists()) and launched.poll() is None and is_served(url)
    launched.terminate()
    assert launched.wait(PATIENCE) == 5
    said = launched.stderr.read()
    assert about["words"][-2:] == ["--print", "hi"] and "ANTHROPIC_API_KEY" not in told
    assert told.pop("NO_PROXY") == "a.org,127.0.0.1" and not told["CLAUDE_CODE_USE_BEDROCK"]  # nobody else is asked
    assert about["settings"] == {"env": {**told, "ANTHROPIC_API_KEY": ""}}  # what is set in its home cannot hide it
    assert told["ANTHROPIC_AUTH_TOKEN"] not in "".join(about["words"]) and not Path(about["file"]).exists()
    [model] = about["models"]
    assert told["ANTHROPIC_MODEL"] == model["id"] == "tiny"
    context = str(model["context_length"])
    assert told["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == told["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == context
    assert int(told["CLAUDE_STREAM_IDLE_TIMEOUT_MS"]) > 300_000 < int(told["API_TIMEOUT_MS"]), "both end by default"
    assert told["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == str(model["context_length"] // 8)
    assert "an agent's own words" in said and f"claude needs a context of about {49_152:,} tokens" in said
    log = tmp_path / "cortexmlx" / "launch.log"
    assert str(log) in said and "GET /v1/models 200" in log.read_text() and "GET /v1/models" not in said
    assert not is_served(url) and not log.stat().st_mode & 0o077


def test_the_exit_code_is_the_agents_as_a_shell_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for ends, code in (("exit 3", 3), ("kill -9 $$", 137), ("kill -HUP $$; exit 4", 129)):
        assert run_agent("/bin/sh", AgentSetup({}), ["-c", ends], 2) == code
    monkeypatch.setenv("CORTEXMLX_API_KEY", "3")
    for setup, code in ((AgentSetup({}), 4), (AgentSetup({"CORTEXMLX_API_KEY": "5"}), 5)):  # only Codex needs it
        assert run_agent("/bin/sh", setup, ["-c", "exit ${CORTEXMLX_API_KEY:-4}"], 2) == code
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by nohup
    try:
        assert run_agent("/bin/sh", AgentSetup({}), ["-c", "kill -HUP $$; exit 4"], 2) == 4
    finally:
        signal.signal(signal.SIGHUP, old)


def test_ctrl_c_ends_the_wait_for_a_servers_step_at_once(tmp_path: Path) -> None:
    (tmp_path / "claude").symlink_to("/bin/true")
    code = """if True:
        import contextlib, time
        from cortexmlx.cli import launch, start

        @contextlib.contextmanager
        def start_server(config):
            yield launch.AgentServer("http://127.0.0.1:9", "sesame", "tiny", 65_536)
            time.sleep(99)  # a step

        launch.start_server, launch.RUNNING_URL = start_server, "http://127.0.0.1:9"
        start.run(["launch", "claude", "-m", "tiny"])
    """
    places = {"PATH": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    with Terminal(program=(sys.executable, "-c", code), command=(), environment=places) as terminal:
        terminal.wait_for("the server ends with the step that is under way. Ctrl-C ends it now")
        terminal.type("\x03")
        assert terminal.exit_code() == 130 and b"Traceback" not in terminal.raw


def test_what_is_not_installed_or_cannot_be_written_is_said_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for agent, package in launch.PACKAGES.items():
        assert run(["launch", agent, "-m", "/no/model"]) == 127
        assert f"{agent} is not installed: npm install -g {package}" in capsys.readouterr().err
    (tmp_path / "claude").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "claude"))
    assert run(["launch", "claude", "-m", "/no/model"]) == 1
    assert "launch.log cannot be written (Not a directory): name another folder" in capsys.readouterr().err
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for model, says in (("/no/model", "no model '/no/model': no such"), (str(tmp_path), "the server needs starlette")):
        assert run(["launch", "claude", "-m", model]) == 1
        assert says in capsys.readouterr().err


def test_a_killed_launch_leaves_its_key_no_longer_than_to_the_next(tmp_path: Path) -> None:
    agent, folder = tmp_path / "claude", tmp_path / "temporary"
    folder.mkdir()
    code = "from cortexmlx.cli.launch import *; "
    code += f"run_agent({str(agent)!r}, AgentSetup({{}}, settings={{'env': {{}}}}), [], 2)"
    for does, left in (("kill -9 $PPID", 1), (f"ls {folder} >&2", 0)):
        agent.write_text(f"#!/bin/sh\n{does}\n")
        agent.chmod(0o755)
        alive = folder / f"cortexmlx-launch-{os.getpid()}-x.json"
        alive.touch()
        ended = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(folder)}, stderr=-1)
        assert alive.exists() and len(list(folder.glob("cortexmlx-launch-*"))) == left + 1, ended.stderr


def test_what_is_the_agents_follows_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["-m", "a", "-p", "hi"], "option: -p. If it is the agent's: cortexmlx launch claude -m a -- -p hi"),
        (["codex", "a/b"], "`cortexmlx launch codex --model a/b`, or `cortexmlx launch codex -- a/b`"),
    ):
        assert run(["launch", *words]) == 2
        assert adapt_commands(says) in " ".join(capsys.readouterr().err.split())


def test_settings_that_would_take_the_place_of_ours_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Claude reads one --settings. With another, its home could name another server, which would get the prompts."""
    for words in (["--settings", "{}"], ["-p", "hi", "--settings=mine.json"]):
        assert run(["launch", "claude", "-m", "/no/model", "--", *words]) == 1
        assert "put yours into ~/.claude/settings.json" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["environment", "home", "project"])
def test_a_limit_that_its_user_has_set_is_kept_if_it_fits(place: str, monkeypatch: Any, tmp_path: Path) -> None:
    name, folder = "CLAUDE_CODE_MAX_OUTPUT_TOKENS", tmp_path / ".claude"
    folder.mkdir()
    monkeypatch.chdir(tmp_path if place == "project" else "/")
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(folder if place == "home" else tmp_path))
    for set_by_user, told in (("100", "100"), ("6000", "5120"), ("0", "5120"), ("many", "5120"), ("", "5120")):
        monkeypatch.setenv(name, set_by_user if place == "environment" else "50")  # which claude's settings hide
        (folder / "settings.json").write_text(json.dumps({"env": {name: set_by_user}}))
        assert make_setup(Agent.claude, SERVER).environment[name] == told


def test_codex_is_told_in_arguments_without_the_key() -> None:
    setup = make_setup(Agent.codex, replace(SERVER, model="org/my model 🎉"))  # no pair of escapes, which TOML refuses
    assert setup.arguments[::2] == ["-c"] * (len(setup.arguments) // 2) and "sesame" not in "".join(setup.arguments)
    said = tomllib.loads("\n".join(setup.arguments[1::2]))
    assert (said["model"], said["model_provider"], said["model_context_window"]) == (
        "org/my model 🎉",
        "cortexmlx",
        40_960,
    )
    provider = said["model_providers"]["cortexmlx"]
    assert provider["stream_idle_timeout_ms"] > 300_000  # which is Codex's default
    assert provider["base_url"] == "http://127.0.0.1:9/v1" and provider["wire_api"] == "responses"
    assert setup.environment == {provider["env_key"]: "sesame"}


def test_opencode_is_told_in_one_variable() -> None:
    said = json.loads(make_setup(Agent.opencode, SERVER).environment["OPENCODE_CONFIG_CONTENT"])
    provider = said["provider"]["cortexmlx"]
    assert said["model"] == said["small_model"] == "cortexmlx/org/my model"
    assert provider["options"] == {"baseURL": "http://127.0.0.1:9/v1", "apiKey": "sesame"}
    assert provider["models"]["org/my model"]["limit"] == {"context": 40_960, "output": 5_120}


def test_a_model_that_will_not_do_is_told() -> None:
    good = AgentServer("", "", "m", 65_536)
    assert not any(list(setup_remarks(agent, good)) for agent in Agent)
    [words] = setup_remarks(Agent.codex, AgentServer("", "", "m", 65_536, calls_tools=False))
    assert "m calls no tools, and codex sends some with each question, so it gets errors" in words
    assert words.endswith(": choose one that does, such as mlx-community/Qwen3-4B-4bit.")
    for words in (["--tools", ""], ["-p", "hi", "--tools="]):
        assert not list(setup_remarks(Agent.claude, replace(good, calls_tools=False), words))
    assert list(setup_remarks(Agent.claude, replace(good, calls_tools=False), ["--tools", "Bash", ""]))
    [words] = setup_remarks(Agent.claude, AgentServer("", "", "m", 32_768))
    assert words.endswith("needs a context of about 49,152 tokens, and m has 32,768 here: choose another model.")
    [words] = setup_remarks(Agent.claude, AgentServer("", "", "m", 32_768, has_longer_context=True))
    assert words.endswith(": choose another model, or give it more memory (--kv-memory).")


def test_a_server_that_runs_is_used_and_printed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        Engine(str(folder), kv_memory="8MB", max_rows=2) as engine,
        listening(app(engine, ServerSettings(keys={"sesame": "me"}))) as url,
    ):
        monkeypatch.setattr(launch, "RUNNING_URL", url)
        monkeypatch.setattr(Engine, "calls_tools", False)
        monkeypatch.setattr(launch, "run_agent", lambda *told: 0)
        monkeypatch.setattr(launch, "start_server", lambda config: nullcontext(SERVER))
        (tmp_path / "claude").symlink_to("/bin/true")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert run(["launch", "claude", "--print"]) == 1
        says = f"the server at {url} wants a key: set CORTEXMLX_API_KEY to one of its keys"
        assert capfd.readouterr().err == f"error: {says}\n"
        assert run(["launch", "claude", "-m", "smollm2"]) == 0
        assert f"cortexmlx: {says}. This time, launch starts a server of its own\n" in capfd.readouterr().err
        monkeypatch.setenv("CORTEXMLX_API_KEY", "wrong")
        assert f"the server at {url} wants another key: set" in refusal()
        monkeypatch.setenv("CORTEXMLX_API_KEY", "sesame")
        found = launch.find_server(str(folder))
        assert found == launch.find_server(None) == AgentServer(url, "sesame", "tiny", engine.longest_request, False)
        assert run(["launch", "claude"]) == 0
        says = " ".join(capfd.readouterr().err.split())
        assert f"tiny is served at {url} already cortexmlx: tiny calls no tools, and claude sends some" in says
        assert f"the server at {url} has no model 'other': name one of its own (--model tiny)" in refusal("other")
        monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path))
        settings, ours = tmp_path / "settings.json", url.replace("127.0.0.1", "localhost")
        for content in ("no JSON", "[]", json.dumps({"env": {"ANTHROPIC_BASE_URL": ours}})):
            settings.write_text(content)
            assert run(["launch", "claude", "--print"]) == 0
            out, err = capfd.readouterr()
            assert "unset ANTHROPIC_API_KEY\n" in out and f"export ANTHROPIC_BASE_URL={url}\n" in out
            assert "tiny calls no tools" in err and "tiny has" in err and "sends claude to" not in err
        settings.write_text(json.dumps({"env": {"ANTHROPIC_BASE_URL": "https://a.org"}}))
        assert run(["launch", "claude", "--print", "--kv-memory", "8MB", "--no-speculate"]) == 0
        options, *_, hidden = capfd.readouterr().err.splitlines()
        assert f"server at {url} keeps its own options, without --kv-memory, --speculate/--no-speculate: end" in options
        assert f"{settings} sends claude to https://a.org, whatever the environment says: remove ANTHROPIC" in hidden
        assert run(["launch", "codex", "--print", "--", "exec", "a b"]) == 0
        lines = capfd.readouterr().out.splitlines()
        assert lines[0] == "export CORTEXMLX_API_KEY=sesame"
        assert shlex.split(lines[1]) == ["codex", *make_setup(Agent.codex, found).arguments, "exec", "a b"]
        monkeypatch.setattr(launch, "RUNNING_URL", "http://127.0.0.1:9")
        assert "no server runs at http://127.0.0.1:9: start one" in refusal()
        assert run(["launch", "claude"]) == 1
        meant = "`cortexmlx launch claude -m mlx-community/Qwen3-4B-4bit`"
        assert f"smollm2, the default, calls no tools, which claude needs: {meant}" in capfd.readouterr().err
        assert run(["launch", "claude", "-m", "smollm2"]) == run(["launch", "claude", "--", "--tools", ""]) == 0
        assert launch.find_server(None, f"{url}/v1/") == found
        port = url.rpartition(":")[2]
        for short in (url.removeprefix("http://"), port, f":{port}"):
            assert launch.find_server(None, short) == found
        assert run(["launch", "claude", "--print", "--url", url]) == 0


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 99_999,
        b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": "m", "owned_by": "another", "context_length": 9}]}',
    ],
)
def test_what_else_listens_there_is_no_server(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as peer:
                peer.recv(9999)
                peer.sendall(said)

        monkeypatch.setattr(launch, "RUNNING_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread = threading.Thread(target=answer)
        thread.start()
        assert "another program answers at http://127.0.0.1:" in refusal()
        thread.join(PATIENCE)
        assert "has not answered within 2 s: its model may still load" in refusal()
