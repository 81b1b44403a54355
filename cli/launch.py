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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from urllib.error import HTTPError, URLError

import typer

from cortexmlx.cli import options
from cortexmlx.cli.limits import is_limited_by_memory
from cortexmlx.cli.serve.command import LogFormat, log_event, log_request, open_socket
from cortexmlx.cli.serve.keys import KEY_VARIABLE, RUNNING_URL, ask_server, load_secret, server_url
from cortexmlx.cli.serve.pool import DefaultSettings, open_pool, preload
from cortexmlx.cli.shortage import shortage_line
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import exit_immediately
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import CortexError
from cortexmlx.models.resolve import STARTER, resolve_model
from cortexmlx.server.model_pool import client_model_name
from cortexmlx.system.files import home_folder, state_folder

FIRST_TOKEN_MS = 3_600_000
"""How long an agent waits for a first token, in milliseconds. Claude Code and Codex give up after 300,000, whatever the
server sends meanwhile; 20,000 tokens of instructions may take longer.
"""

NOTE_SECONDS = 0.5
"""How long the end of a server may take without a word."""

NOT_INSTALLED = 127
"""The exit code if there is no such agent, as a shell has it."""

TOOL_CALLER = "mlx-community/Qwen3-4B-4bit"
"""A small model that calls tools, to name where one is needed."""

SETTINGS_PREFIX = "cortexmlx-launch-"
"""What the names of files with an agent's settings begin with, before the number of their process."""

MAX_OUTPUT_TOKENS = 32_000
"""Tokens of an answer that an agent asks for, at most. With a small context it is an eighth of that."""


class NoServer(CortexError):
    """No server of this program runs at an address."""


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
    """A server for an agent, and the model that it asks."""

    url: str
    key: str
    model: str
    context_length: int
    """Tokens that a prompt and its answer may have."""
    calls_tools: bool = True
    has_longer_context: bool = False
    """Whether the model's own context is longer, so that more KV memory helps."""

    @property
    def output_tokens(self) -> int:
        """The most tokens that an answer may have."""
        return min(MAX_OUTPUT_TOKENS, self.context_length // 8)


@dataclass(frozen=True)
class AgentSetup:
    """The environment and the arguments that tell an agent about its server."""

    environment: Mapping[str, str]
    arguments: Sequence[str] = ()
    removed: Sequence[str] = ()
    """Variables that must not be set."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of Claude Code, as a file: those in its home would hide the environment."""


@options.add_engine_options(has_store=True, excluded=(*options.PER_REQUEST, "hosts"))
def launch(
    context: typer.Context,
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
    try:
        server = find_server(model_option, url)
    except CortexError as error:
        if show or url is not None or (model_option is None and not isinstance(error, NoServer)):
            raise
        if model_option is None and sends_tools(agent, arguments or []):
            meant = f"`cortexmlx launch {agent} -m {TOOL_CALLER}` (2.3 GB to download)"
            raise CortexError(f"{STARTER}, the default, calls no tools, which {agent} needs: {meant}") from None
        server = None
        if not isinstance(error, NoServer):
            console.print_note(f"{error}. This time, launch starts a server of its own")
    if server is not None and (ignored := server_options(context)):
        console.print_note(
            f"the server at {server.url} keeps its own options, without {', '.join(ignored)}: end it first, and launch "
            "without --url starts one that has them"
        )
    if server is not None and show:
        print_setup(agent, make_setup(agent, server), arguments or [])
        for remark in setup_remarks(agent, server, arguments or []):
            console.print_note(remark)
        if agent is Agent.claude and (remark := settings_remark(server.url)):
            console.print_note(remark)
        return
    assert command is not None
    with ExitStack() as stack:
        note = "the server ends with the step that is under way. Ctrl-C ends it now"
        waits = threading.Timer(NOTE_SECONDS, console.print_note, [note])
        stack.callback(waits.cancel)
        log_path, config = state_folder() / "launch.log", replace(config, model=model_option or STARTER)
        log = stack.enter_context(open_log(log_path)) if server is None else None
        if server is None:
            if line := shortage_line(config):
                console.print_note(line)
            server = stack.enter_context(start_server(config))
        served = f"{to_single_line(server.model)} is served at {server.url}"
        console.print_note(f"{served}; its log: {log_path}" if log else f"{served} already")
        for remark in setup_remarks(agent, server, arguments or []):
            console.print_note(remark)
        agent_stderr = stack.enter_context(redirect_stderr(log)) if log else sys.stderr.fileno()
        code = run_agent(command, make_setup(agent, server), arguments or [], agent_stderr)
        if log:
            signal.signal(signal.SIGINT, lambda *_: exit_immediately())
            waits.start()
    raise typer.Exit(code)


def server_options(context: typer.Context) -> list[str]:
    """Return the options on the command line that only a server of launch's own would take."""
    names = {*options.given_parameters(context)} - {"agent", "arguments", "model_option", "show", "url"}
    return ["/".join((*each.opts, *each.secondary_opts)) for each in context.command.params if each.name in names]


def find_server(model: str | None, url: str | None = None) -> AgentServer:
    """Return the server at `url`, by default the usual one, with `model`, by default its first. Raises CortexError if
    none runs there, if it is not ready, wants another key, is another program, or does not have the model.
    """
    key, url = os.environ.get(KEY_VARIABLE, ""), server_url(url or RUNNING_URL)
    ask = partial(ask_server, url, key=key, seconds=2.0)
    try:
        models = {
            each["id"]: each
            for each in ask("/v1/models")["data"]
            if each["owned_by"] == "cortexmlx" and isinstance(each.get("context_length"), int)
        }
        names = (next(iter(models)),) if model is None else (model, client_model_name(model))
        if found := next((name for name in models if name in names), None):
            shown = ask("/api/show", body=json.dumps({"model": found}).encode()) if models[found]["loaded"] else None
            calls_tools = shown is None or "tools" in shown["capabilities"]
            return AgentServer(url, key or "none", found, models[found]["context_length"], calls_tools)
    except CortexError:
        raise
    except Exception as error:  # what else listens there may say anything
        raise _server_error(url, error, "another key" if key else "a key") from None
    raise CortexError(
        f"the server at {url} has no model {model!r}: name one of its own (--model {' or '.join(models)})"
    )


def _server_error(url: str, error: Exception, wanted_key: str) -> CortexError:
    """Convert the error of a request for a server's models into one that says what to do about the server."""
    match error:
        case HTTPError(code=401):
            return CortexError(f"the server at {url} wants {wanted_key}: set {KEY_VARIABLE} to one of its keys")
        case TimeoutError() | URLError(reason=TimeoutError()) | HTTPError(code=503):
            advice = "its model may still load, so try again later"
            return CortexError(f"the server at {url} has not answered within 2 s: {advice}")
        case URLError(reason=OSError()):
            return NoServer(f"no server runs at {url}: start one with `cortexmlx serve`, or give its address (--url)")
    advice = "start a server at another port (`cortexmlx serve --port 8001`), and give its address (--url)"
    return NoServer(f"another program answers at {url}: {advice}")


def claude_settings() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the files of Claude Code's settings and the environment in each, first those that outweigh the others."""
    home = Path(os.environ.get("CLAUDE_CONFIG_DIR") or home_folder() / ".claude")
    for path in (Path(".claude/settings.local.json"), Path(".claude/settings.json"), home / "settings.json"):
        with suppress(OSError, ValueError, LookupError, TypeError):  # whatever it is, claude reads it
            yield path, dict(json.loads(path.read_bytes())["env"])


def settings_remark(url: str) -> str:
    """Return which settings of Claude Code override the environment for a server at `url`, and what to do, or ""."""
    for path, settings in claude_settings():
        other = str(settings.get("ANTHROPIC_BASE_URL", url))
        if other.replace("localhost", "127.0.0.1").rstrip("/") != url:
            advice = "remove ANTHROPIC_BASE_URL from it, or run `cortexmlx launch claude` without --print"
            return f"{path} sends claude to {to_single_line(other)}, whatever the environment says: {advice}"
    return ""


@contextmanager
def start_server(config: EngineConfig) -> Iterator[AgentServer]:
    """Serve a model on a thread of this process while the context lasts. Raises what loading it raises."""
    resolve_model(config.model)
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
        abilities = (lease.engine.calls_tools, is_limited_by_memory(lease.engine))
        lease.release()
        server = HttpServer(app(pool, settings), listener)
        thread = threading.Thread(target=server.run, name="cortexmlx-server")
        thread.start()
        try:
            yield AgentServer(server.url, key, name, pool.context_length(name) or 0, *abilities)
        finally:
            server.stop()
            server.stop()  # nobody waits for the running requests
            thread.join()


def _user_token_limit(name: str, most: int) -> str:
    """Return the number that the user has set in claude's settings or the environment, if 1 to `most`; else `most`."""
    places = [*(settings for _, settings in claude_settings()), os.environ]
    own = str(next((each[name] for each in places if name in each), ""))
    return own if own.isdecimal() and 0 < int(own) <= most else str(most)


def make_setup(agent: Agent, server: AgentServer) -> AgentSetup:
    """Return the setup that tells an agent a server's address, its key, its model and the size of the context."""
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
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": _user_token_limit("CLAUDE_CODE_MAX_CONTEXT_TOKENS", context),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": _user_token_limit("CLAUDE_CODE_AUTO_COMPACT_WINDOW", context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": _user_token_limit("CLAUDE_CODE_MAX_OUTPUT_TOKENS", output),
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(FIRST_TOKEN_MS),
            "API_TIMEOUT_MS": str(FIRST_TOKEN_MS),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **dict.fromkeys(("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY"), ""),
        }
        settings = {"env": {**environment, "ANTHROPIC_API_KEY": ""}}  # a key in its home would go along
        return AgentSetup(environment, removed=("ANTHROPIC_API_KEY",), settings=settings)
    if agent is Agent.codex:
        values: dict[str, Any] = {
            "model": server.model,
            "model_provider": "cortexmlx",
            "model_context_window": context,
            "model_providers.cortexmlx.name": "cortexmlx",
            "model_providers.cortexmlx.base_url": f"{server.url}/v1",
            "model_providers.cortexmlx.wire_api": "responses",
            "model_providers.cortexmlx.env_key": KEY_VARIABLE,
            "model_providers.cortexmlx.stream_idle_timeout_ms": FIRST_TOKEN_MS,
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
    """Print the shell commands that set an agent's environment, and its command line if that needs arguments."""
    for name in setup.removed:
        console.print_result(f"unset {name}")
    for name, value in setup.environment.items():
        console.print_result(f"export {name}={shlex.quote(value)}")
    if setup.arguments or arguments:
        console.print_result(shlex.join([agent, *setup.arguments, *arguments]))


def sends_tools(agent: Agent, arguments: Sequence[str]) -> bool:
    """Whether an agent sends tools with its questions: all do, unless Claude Code is told to use none."""
    return agent is not Agent.claude or not ("--tools=" in arguments or ("--tools", "") in pairwise(arguments))


def setup_remarks(agent: Agent, server: AgentServer, arguments: Sequence[str] = ()) -> Iterator[str]:
    """Yield why an agent that gets these arguments will not work well with a model."""
    name = to_single_line(server.model)
    if not server.calls_tools and sends_tools(agent, arguments):
        yield (
            f"{name} calls no tools, and {agent} sends some with each question, so it gets errors: choose one that "
            f"does, such as {TOOL_CALLER}."
        )
    if server.context_length < (least := LEAST_CONTEXT[agent]):
        yield (
            f"{agent} needs a context of about {least:,} tokens, and {name} has {server.context_length:,} here: choose "
            f"another model{', or give it more memory (--kv-memory)' * server.has_longer_context}."
        )


def open_log(path: Path) -> BinaryIO:
    """Open the log of a server, for this user only. Raises CortexError if it cannot be written."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open(path, "ab", opener=partial(os.open, mode=0o600))
    except OSError as error:
        reason = f"{path} cannot be written ({error.strerror})"
        raise CortexError(f"the server's log {reason}: name another folder in XDG_STATE_HOME") from None


@contextmanager
def redirect_stderr(file: BinaryIO) -> Iterator[int]:
    """Send this process's stderr to a file in this context. Yield a descriptor of the old one, for the agent."""
    old = os.dup(2)
    sys.stderr.flush()
    os.dup2(file.fileno(), 2)
    try:
        yield old
    finally:
        sys.stderr.flush()
        os.dup2(old, 2)
        os.close(old)


def remove_orphaned_settings() -> None:
    """Remove the settings, with a key, of those launches that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{SETTINGS_PREFIX}*-*.json"):
        with suppress(OSError, ValueError, OverflowError):
            try:
                os.kill(int(path.name.removeprefix(SETTINGS_PREFIX).partition("-")[0]), 0)
            except ProcessLookupError:
                path.unlink()


def run_agent(command: str, setup: AgentSetup, arguments: Sequence[str], stderr: int) -> int:
    """Run an agent to its end, and return its exit code. It gets Ctrl-C itself, being in our process group; other
    signals that would end us are forwarded. If it stops (Ctrl-Z), so do we, and when we continue, so does it.
    """
    kept = {name: value for name, value in os.environ.items() if name not in (*setup.removed, KEY_VARIABLE)}
    for name in ("NO_PROXY", "no_proxy"):  # a proxy would read along
        kept[name] = ",".join(filter(None, (kept.get(name), "127.0.0.1")))
    with ExitStack() as stack:
        words = [command, *setup.arguments]
        if setup.settings:
            remove_orphaned_settings()
            prefix = f"{SETTINGS_PREFIX}{os.getpid()}-"  # and only this user reads it
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", prefix=prefix, suffix=".json"))
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
