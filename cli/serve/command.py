"""`cortexmlx serve`: models for every program that speaks the OpenAI API or Anthropic's."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cortexmlx.cli import options
from cortexmlx.cli.prompts import template_vars
from cortexmlx.cli.serve.keys import KEY, kept_secret, keys_in
from cortexmlx.cli.serve.names import Names, names_of
from cortexmlx.cli.serve.pool import Asked, open_pool, preload
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import in_a_line
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.models.resolve import STARTER
from cortexmlx.server.settings import LOOPBACK, LoggedRequest, check_origins
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.server.model_pool import ModelPool


_WRITTEN = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([smhd]?)\s*", re.IGNORECASE)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(text: str) -> float | None:
    """Return the seconds of "30s", "10m", "1.5h", "1d" or a number of seconds; None for "never". Raises InvalidRequest
    for anything else, and for 0.
    """
    if text.strip().lower() == "never":
        return None
    written = _WRITTEN.fullmatch(text)
    seconds = float(written[1]) * _SECONDS[written[2].lower()] if written else 0.0
    if not 0 < seconds < 1e12:
        raise InvalidRequest(f"{text!r:.40} is no duration: write 30s, 10m, 1h, or never")
    return seconds


# The line of a request in the log of a server.


class LogFormat(StrEnum):
    """The lines of a log."""

    text = "text"
    json = "json"
    none = "none"


def line_of(logged: LoggedRequest, form: LogFormat, now: float) -> str:
    """Return the line of a request that ended `now`, in seconds since 1970."""
    if form is LogFormat.json:
        counts = {} if logged.tokens is None else asdict(logged.tokens)
        parts = {name: value for name, value in asdict(logged).items() if name != "tokens"}
        return json.dumps({"time": round(now, 3), **parts, "seconds": round(logged.seconds, 4), **counts})
    at = time.strftime("%H:%M:%S", time.localtime(now))
    line = f"{at} {logged.method} {in_a_line(logged.path)[:100]} {logged.status} {logged.seconds:.2f} s"
    if logged.model is not None:
        line += f" · {in_a_line(logged.model)[:100]}"
    if (tokens := logged.tokens) is None:
        return line
    cached = f" ({tokens.cached:,} cached)" if tokens.cached else ""
    return f"{line} · {tokens.prompt:,}{cached} + {tokens.answer:,} tokens"


def event_line(text: str, form: LogFormat, now: float) -> str:
    """Return the line of an event of the server `now`, in seconds since 1970: a model was loaded, or unloaded."""
    if form is LogFormat.json:
        return json.dumps({"time": round(now, 3), "event": text})
    return f"{time.strftime('%H:%M:%S', time.localtime(now))} {in_a_line(text)}"


_USUAL_IDLE = 600.0
"""Seconds after which one of several models is unloaded, if nobody says otherwise."""


@options.takes_sampling(without=("stop", "schema", "open_schema", "regex", "choice"), max_tokens=None)
@options.takes_engine(stored=True)
def serve(
    context: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help=f"Folders, .gguf files, hub ids or {STARTER} (the default).",
            show_default=False,
            autocompletion=options.complete_model,
        ),
    ] = None,
    model_option: options.ModelOption = None,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0: any free port.")] = 8000,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help=f"A key in each line; {KEY} in the environment is one, too.",
            show_default=False,
        ),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve other machines without a key.")] = False,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors",
            metavar="ORIGIN",
            help="Web pages that may ask, like https://a.org; * for all.",
            show_default=False,
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            "--alias", metavar="NAME[=MODEL]", help="Another name of a model; may be repeated.", show_default=False
        ),
    ] = None,
    any_name: Annotated[
        bool, typer.Option("--any-name", help="The first model answers under every other name.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="For all models together, like 40GB; see `plan`.", show_default=False
        ),
    ] = None,
    keep_loaded: Annotated[
        list[str] | None,
        typer.Option(
            "--keep-loaded",
            metavar="MODEL",
            help="Load it at the start, and never unload it; may be repeated.",
            show_default=False,
        ),
    ] = None,
    idle: Annotated[
        str | None,
        typer.Option(
            "--idle",
            metavar="TIME",
            help="Unload a model without requests after 30s, 10m (the default for several), 1h, or never.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="S", min=0.001, help="Seconds that a request may take.", show_default=False),
    ] = None,
    max_open: Annotated[
        int, typer.Option("--max-open", metavar="N", min=1, help="Requests that run or wait at most; more get 429.")
    ] = 256,
    grace: Annotated[
        float, typer.Option("--grace", metavar="S", min=0.0, help="Seconds for running requests at the end.")
    ] = 10.0,
    log_format: Annotated[LogFormat, typer.Option("--log-format", help="The lines of requests, on stderr.")] = (
        LogFormat.text
    ),
    template_var: options.TemplateVar = None,
    think: options.Think = None,
    *,
    params: SamplingParams,
    config: EngineConfig,
) -> None:
    """Answer programs that speak the OpenAI API (chat completions, completions, responses) or Anthropic's (messages).

    It needs `pip install 'cortexmlx[server]'`. Ctrl-C ends it: running requests get the time of --grace. Sampling
    options are for what a request does not set; without them, the model's makers' recommendation holds. The first of
    several models is loaded at once, the others when a request asks for them.
    """
    keys = keys_in(key_file)
    if host not in LOOPBACK and not keys and not insecure:
        raise typer.BadParameter(
            f"{host} can be reached from other machines: give keys (--api-key-file FILE or {KEY}), or --insecure",
            param_hint="--host",
        )
    if host in LOOPBACK and insecure:
        raise typer.BadParameter(f"{host} is reached from this machine only", param_hint="--insecure")
    try:
        check_origins(cors or ())
    except InvalidRequest as error:
        raise typer.BadParameter(str(error), param_hint="--cors") from None
    asked = Asked(options.given_sampling(context, params), template_vars(template_var, think))
    budget, names, seconds = options.memory_size(memory, "--memory"), _named(models, model_option, alias), _idle(idle)
    if len(names.models) > 1 and config.adapter is not None:
        raise typer.BadParameter("an adapter belongs to one model, but there are several", param_hint="--adapter")
    if len(names.models) > 1 and config.draft is not None:
        raise typer.BadParameter("it drafts for one model, but there are several", param_hint="--draft")
    if len(names.models) > 1 and config.hosts is not None:
        raise typer.BadParameter("it spreads one model, but there are several", param_hint="--hosts")
    if memory is not None and config.hosts is not None:
        raise typer.BadParameter("with --hosts, the model is elsewhere: give --kv-memory", param_hint="--memory")
    adapters = names.adapters(config.adapters)
    kept = {names.of(each, "--keep-loaded"): None for each in keep_loaded or ()}
    listener = listening_socket(host, port)
    from cortexmlx.server import ServerSettings, app

    settings = ServerSettings(
        keys=keys,
        hosts=("*",) if insecure else LOOPBACK,
        origins=tuple(cors or ()),
        aliases=names.aliases,
        any_name=any_name,
        max_open=max_open,
        timeout=timeout,
        transcripts_folder=None if config.kv_store is None else Path(config.kv_store),
        log=None if log_format is LogFormat.none else partial(tell, log_format),
        secret=kept_secret(),
    )
    usual = replace(config, resume_lost=True)
    configs = {name: replace(usual, model=each, adapters=adapters.get(name)) for name, each in names.models.items()}
    with (
        listener,
        open_pool(
            configs,
            asked,
            memory=budget,
            keep=kept,
            idle=_USUAL_IDLE if idle is None and len(configs) > 1 else seconds,
            tell=None if log_format is LogFormat.none else partial(tell_event, log_format),
        ) as pool,
    ):
        first = next(iter(configs))
        preload(pool, {name: names.models[name] for name in {first: None, **kept}})
        listen(pool, app(pool, settings), listener, grace, keyed=bool(keys))


def _named(models: list[str] | None, option: str | None, aliases: list[str] | None) -> Names:
    """Return the names of the models that were given. Raises typer.BadParameter and InvalidRequest."""
    given = list(models or ())
    if len(given) < 2:
        given = [options.model_name(given[0] if given else None, option)]
    elif option is not None:
        raise typer.BadParameter(f"several models, and --model {option!r}: give it with the others")
    return names_of(given, aliases or ())


def _idle(text: str | None) -> float | None:
    """Return the seconds of --idle. Raises typer.BadParameter."""
    try:
        return None if text is None else seconds_of(text)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error), param_hint="--idle") from None


def listening_socket(host: str, port: int) -> socket.socket:
    """Return the socket of the server, before the model is loaded. Raises CortexError if it cannot be had, or if what
    a server needs is not installed.
    """
    needed = ("starlette", "uvicorn", "prometheus_client")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise CortexError(f"{' and '.join(missing)} not installed: pip install 'cortexmlx[server]'")
    from cortexmlx.server.listening import bound

    return bound(host, port)


def tell(form: LogFormat, logged: LoggedRequest) -> None:
    """Print the line of a request."""
    console.tell(line_of(logged, form, time.time()))


def tell_event(form: LogFormat, text: str) -> None:
    """Print the line of an event."""
    console.tell(event_line(text, form, time.time()))


def listen(pool: ModelPool, application: Any, listener: socket.socket, grace: float, *, keyed: bool) -> None:
    """Say where the server is, and answer until the end."""
    from cortexmlx.server.listening import Listening

    listening = Listening(application, listener, grace)
    for each in says(pool, listening.url):
        console.tell(each)
    header = f" -H 'Authorization: Bearer ${KEY}'" if keyed else ""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello?"}]})
    console.tell(f"  curl {listening.url}/v1/chat/completions{header} -H 'Content-Type: application/json' -d '{body}'")
    listening.run()
    console.tell("\nended: no request is running")


def says(pool: ModelPool, url: str) -> Iterator[str]:
    """Yield what a server says when it begins: its address, its models, and their memory."""
    first, *others = pool.names
    watch = f"Watch it in a browser at {url}/ or try:"
    if not others:
        lease = pool.take(first)
        kv = lease.engine.stats().kv_bytes_limit
        lease.release()
        yield (
            f"{url}/v1 serves {in_a_line(first)}: up to {pool.context_length(first):,} tokens, "
            f"{format_bytes(kv)} for keys and values. Ctrl-C ends it."
        )
        yield watch
        return
    yield f"{url}/v1 serves {len(pool.names)} models, which take up to {format_bytes(pool.memory or 0)} together:"
    for name in pool.names:
        when = "loaded" if pool.is_loaded(name) else "loaded when it is asked for"
        yield (
            f"  {in_a_line(name)}: {format_bytes(pool.memory_of(name))}, up to {pool.context_length(name):,} tokens, "
            f"{when}"
        )
    yield f"Ctrl-C ends it. {watch}"
