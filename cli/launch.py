"""`cortexmlx launch`: run a coding agent with a model of this machine."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cortexmlx.cli import options
from cortexmlx.cli.serve.command import LogFormat, log_event, log_request, open_socket
from cortexmlx.cli.serve.keys import KEY_VARIABLE, RUNNING_URL, load_secret, server_url
from cortexmlx.cli.serve.pool import DefaultSettings, open_pool, preload
from cortexmlx.cli.shortage import shortage_line
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import CortexError
from cortexmlx.models.resolve import STARTER
from cortexmlx.server.model_pool import client_model_name
from cortexmlx.system.files import state_folder

NOT_INSTALLED = 127
"""The exit code if there is no such agent, as a shell has it."""

MAX_OUTPUT_TOKENS = 32_000
"""Tokens of an answer that an agent asks for, at most. With a small context it is an eighth of that."""


class Agent(StrEnum):
    """The agents that can be launched, by their commands."""

    claude = "claude"
    codex = "codex"
    opencode = "opencode"


PACKAGES = {Agent.claude: "@anthropic-ai/claude-code", Agent.codex: "@openai/codex", Agent.opencode: "opencode-ai"}
"""The npm packages that have them."""

LEAST_CONTEXT = {Agent.claude: 49_152, Agent.codex: 16_384, Agent.opencode: 16_384}
"""Tokens of context with which an agent works for a while before it has to compact. Their first questions have about
21,000, 10,500 and 8,000; Claude Code keeps 13,000 free.
"""


@dataclass(frozen=True)
class AgentServer:
    """A server that an agent can ask, and its model."""

    url: str
    key: str
    model: str
    context_length: int
    """Tokens that a prompt and its answer may have."""
    calls_tools: bool = True

    @property
    def output_tokens(self) -> int:
        """The most tokens that an answer may have."""
        return min(MAX_OUTPUT_TOKENS, self.context_length // 8)


@dataclass(frozen=True)
class AgentSetup:
    """What an agent is told of its server."""

    environment: Mapping[str, str]
    arguments: Sequence[str] = ()
    removed: Sequence[str] = ()
    """Variables that must not be set."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of Claude Code, as a file: those in its home would hide the environment."""


@options.add_engine_options(has_store=True, excluded=(*options.PER_REQUEST, "hosts"))
def launch(
    agent: Annotated[Agent, typer.Argument(metavar="AGENT", help="claude, codex or opencode.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="What the agent gets.", show_default=False)
    ] = None,
    model_option: options.ModelOption = None,
    show: Annotated[
        bool, typer.Option("--print", help="Only print what the agent would get, of a server that runs.")
    ] = False,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="The server, if not at port 8000.")] = None,
    *,
    config: EngineConfig,
) -> None:
    """Run Claude Code, Codex or opencode with a model of this machine.

    It uses the server at port 8000 if one runs there and has the model; a server with keys needs CORTEXMLX_API_KEY.
    Otherwise it starts a server of its own, on a free port and with a key, which ends with the agent. The agent is told
    the model's true context, so that it compacts in time. Ctrl-C is the agent's, and so is the exit code.
    """
    if agent == "claude" and any(word.startswith("--settings") for word in arguments or ()):
        raise CortexError("launch gives claude --settings that name its server: put yours into ~/.claude/settings.json")
    command = shutil.which(agent)
    if command is None and not show:
        console.print_error(f"{agent} is not installed: npm install -g {PACKAGES[agent]}")
        raise typer.Exit(NOT_INSTALLED)
    server = find_server(model_option, url)
    if server is None and (show or url is not None):
        raise CortexError(
            f"no server with this model runs at {url or RUNNING_URL}, or it wants a key in {KEY_VARIABLE}: start one "
            "with `cortexmlx serve`, or give its address (--url)"
        )
    if server is not None and show:
        print_setup(agent, make_setup(agent, server), arguments or [])
        return
    assert command is not None
    with ExitStack() as stack:
        is_ours = server is None
        log_path, config = state_folder() / "launch.log", replace(config, model=model_option or STARTER)
        if server is None:
            if line := shortage_line(config):
                console.print_note(line)
            server = stack.enter_context(start_server(config))
        served = f"{to_single_line(server.model)} is served at {server.url}"
        console.print_note(f"{served}; its log: {log_path}" if is_ours else f"{served} already")
        for remark in setup_remarks(agent, server):
            console.print_note(remark)
        agent_stderr = stack.enter_context(redirect_stderr(log_path)) if is_ours else sys.stderr.fileno()
        code = run_agent(command, make_setup(agent, server), arguments or [], agent_stderr)
    raise typer.Exit(code)


def find_server(model: str | None, url: str | None = None) -> AgentServer | None:
    """Return the server at `url`, by default the usual one, if it accepts our key and has `model`, if given."""
    key, url = os.environ.get(KEY_VARIABLE, ""), server_url(url or RUNNING_URL)
    try:
        asked = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key or 'none'}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(asked, timeout=2.0) as reply:
            entries = json.load(reply)["data"]
        names = (None,) if model is None else (model, client_model_name(model))
        found = next(
            each
            for each in entries
            if each["owned_by"] == "cortexmlx"
            and (model is None or each["id"] in names)
            and isinstance(each.get("context_length"), int)
        )
        return AgentServer(url, key or "none", found["id"], found["context_length"])
    except Exception:  # what else listens there may say anything
        return None


@contextmanager
def start_server(config: EngineConfig) -> Iterator[AgentServer]:
    """Serve a model on a thread of this process while the context lasts. Raises what loading it raises."""
    listener = open_socket("127.0.0.1", 0)
    from cortexmlx.server import ServerSettings, app
    from cortexmlx.server.listening import HttpServer

    name, key = client_model_name(config.model), secrets.token_urlsafe(24)
    settings = ServerSettings(
        keys={key: "launch"},
        transcripts_folder=None if config.kv_store is None else Path(config.kv_store),
        log=partial(log_request, LogFormat.text),
        secret=load_secret(),
    )
    configs, tell = {name: replace(config, resume_lost=True)}, partial(log_event, LogFormat.text)
    with listener, open_pool(configs, DefaultSettings({}, {}), memory=None, keep=(), idle=None, tell=tell) as pool:
        preload(pool, {name: str(config.model)})
        lease = pool.acquire(name)
        calls_tools = lease.engine.calls_tools
        lease.release()
        server = HttpServer(app(pool, settings), listener)
        thread = threading.Thread(target=server.run, name="cortexmlx-server")
        thread.start()
        try:
            yield AgentServer(server.url, key, name, pool.context_length(name) or 0, calls_tools)
        finally:
            server.stop()
            server.stop()  # nobody waits for the running requests
            thread.join()


def make_setup(agent: Agent, server: AgentServer) -> AgentSetup:
    """Return what an agent is told of a server: the address, the key, the model and the size of its context."""
    context, output = server.context_length, server.output_tokens
    if agent is Agent.claude:
        environment = {
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": server.key,
            **dict.fromkeys(
                (
                    "ANTHROPIC_MODEL",
                    "ANTHROPIC_SMALL_FAST_MODEL",
                    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
                    "ANTHROPIC_DEFAULT_SONNET_MODEL",
                    "ANTHROPIC_DEFAULT_OPUS_MODEL",
                    "CLAUDE_CODE_SUBAGENT_MODEL",
                ),
                server.model,
            ),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(output),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **dict.fromkeys(("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY"), ""),
        }
        return AgentSetup(environment, removed=("ANTHROPIC_API_KEY",), settings={"env": environment})
    if agent is Agent.codex:
        provider = {
            "name": "cortexmlx",
            "base_url": f"{server.url}/v1",
            "wire_api": "responses",
            "env_key": KEY_VARIABLE,
        }
        values: dict[str, Any] = {
            "model": server.model,
            "model_provider": "cortexmlx",
            "model_context_window": context,
            **{f"model_providers.cortexmlx.{name}": value for name, value in provider.items()},
        }
        arguments = [
            word for name, value in values.items() for word in ("-c", f"{name}={json.dumps(value, ensure_ascii=False)}")
        ]
        return AgentSetup({KEY_VARIABLE: server.key}, arguments)
    content = {
        "model": f"cortexmlx/{server.model}",
        "small_model": f"cortexmlx/{server.model}",
        "provider": {
            "cortexmlx": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "cortexmlx",
                "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
                "models": {server.model: {"name": server.model, "limit": {"context": context, "output": output}}},
            }
        },
    }
    return AgentSetup({"OPENCODE_CONFIG_CONTENT": json.dumps(content)})


def print_setup(agent: Agent, setup: AgentSetup, arguments: Sequence[str]) -> None:
    """Print an agent's environment as a shell takes it, and then its command if it needs arguments of ours."""
    for name in setup.removed:
        console.print_result(f"unset {name}")
    for name, value in setup.environment.items():
        console.print_result(f"export {name}={shlex.quote(value)}")
    if setup.arguments or arguments:
        console.print_result(shlex.join([agent, *setup.arguments, *arguments]))


def setup_remarks(agent: Agent, server: AgentServer) -> Iterator[str]:
    """Yield why an agent will not work well with a model."""
    name = to_single_line(server.model)
    if not server.calls_tools:
        yield (
            f"{name} calls no tools, and {agent} sends some with each question, so it gets errors: docs/tools.md names "
            "models that call tools."
        )
    if server.context_length < (least := LEAST_CONTEXT[agent]):
        yield (
            f"{agent} needs a context of about {least:,} tokens, and {name} has {server.context_length:,} here: choose "
            "another model, or give it more memory (--kv-memory)."
        )


@contextmanager
def redirect_stderr(path: Path) -> Iterator[int]:
    """Append to a file what this process writes on stderr while the context lasts. Yield a descriptor of the old
    stderr, for the agent.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    old = os.dup(2)
    try:
        with open(path, "ab", opener=partial(os.open, mode=0o600)) as file:
            sys.stderr.flush()
            os.dup2(file.fileno(), 2)
            try:
                yield old
            finally:
                sys.stderr.flush()
                os.dup2(old, 2)
    finally:
        os.close(old)


def run_agent(command: str, setup: AgentSetup, arguments: Sequence[str], stderr: int) -> int:
    """Run an agent to its end, and return its exit code. It gets Ctrl-C itself, being in our process group; other
    signals that would end us are forwarded. If it stops (Ctrl-Z), so do we, and when we continue, so does it.
    """
    kept = {name: value for name, value in os.environ.items() if name not in setup.removed}
    for name in ("NO_PROXY", "no_proxy"):  # a proxy would read along
        kept[name] = ",".join(filter(None, (kept.get(name), "127.0.0.1")))
    with ExitStack() as stack:
        words = [command, *setup.arguments]
        if setup.settings:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))  # only this user reads it
            json.dump(setup.settings, file)
            file.flush()
            words += ["--settings", file.name]
        processes: list[int] = []

        def forward_signal(number: int, frame: object) -> None:
            for process in processes if number != signal.SIGINT else ():
                os.kill(process, number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # with nohup, the agent ignores it, too
                stack.callback(signal.signal, number, signal.signal(number, forward_signal))
        process = subprocess.Popen([*words, *arguments], env={**kept, **setup.environment}, stderr=stderr)
        processes.append(process.pid)
        while True:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(process.pid, signal.SIGCONT)
        processes.clear()
        process.returncode = code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
