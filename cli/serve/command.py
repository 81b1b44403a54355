"""`cortexmlx serve`: models for every program that speaks the OpenAI API, Anthropic's or Ollama's."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cortexmlx.cli import options
from cortexmlx.cli.prompts import parse_template_vars
from cortexmlx.cli.serve.keys import KEY_VARIABLE, load_secret, read_keys
from cortexmlx.cli.serve.pool import DefaultSettings, open_pool, preload, pull_model
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.models.resolve import STARTER
from cortexmlx.server.model_pool import client_model_name
from cortexmlx.server.settings import LOOPBACK, SERVER_INSTALL, LoggedRequest, validate_origins
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.server.model_pool import ModelPool


_DURATION = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([smhd]?)\s*", re.IGNORECASE)
_UNIT_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(text: str) -> float | None:
    """Return the seconds of "30", "30s", "10m", "1.5h" or "1d"; None for "never". Raises InvalidRequest, also for 0."""
    if text.strip().lower() == "never":
        return None
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _UNIT_SECONDS[match[2].lower()] if match else 0.0
    if not 0 < seconds < 1e12:
        raise InvalidRequest(f"{text!r:.40} is no duration: write 30s, 10m, 1h, or never")
    return seconds


# The line of a request in the log of a server.


class LogFormat(StrEnum):
    """The format of the server's log lines."""

    text = "text"
    json = "json"
    none = "none"


def format_request(request: LoggedRequest, form: LogFormat, now: float) -> str:
    """Return the log line of a request that ended `now`, in seconds since 1970."""
    if form is LogFormat.json:
        counts = {} if request.tokens is None else asdict(request.tokens)
        parts = {name: value for name, value in asdict(request).items() if name != "tokens"}
        return json.dumps({"time": round(now, 3), **parts, "seconds": round(request.seconds, 4), **counts})
    time_text = time.strftime("%H:%M:%S", time.localtime(now))
    line = f"{time_text} {request.method} {to_single_line(request.path)[:100]} {request.status} {request.seconds:.2f} s"
    if request.model is not None:
        line += f" · {to_single_line(request.model)[:100]}"
    if (tokens := request.tokens) is None:
        return line
    cached = f" ({tokens.cached:,} cached)" if tokens.cached else ""
    return f"{line} · {tokens.prompt:,}{cached} + {tokens.answer:,} tokens"


def format_event(text: str, form: LogFormat, now: float) -> str:
    """Return the log line of a server event `now`, in seconds since 1970, such as the load of a model."""
    if form is LogFormat.json:
        return json.dumps({"time": round(now, 3), "event": text})
    return f"{time.strftime('%H:%M:%S', time.localtime(now))} {to_single_line(text)}"


_DEFAULT_IDLE = 600.0
"""Seconds after which one of several models is unloaded, if nobody says otherwise."""


@options.add_sampling_options(
    excluded=("stop", "schema", "open_schema", "regex", "choice"), follows_model=True, max_tokens=None
)
@options.add_engine_options(has_store=True)
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
            help=f"A key in each line; {KEY_VARIABLE} in the environment is one, too.",
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
    allow_pull: Annotated[
        bool, typer.Option("--allow-pull", help="Clients of Ollama's API may download models, within --memory.")
    ] = False,
    idle: Annotated[
        str | None,
        typer.Option(
            "--idle",
            metavar="TIME",
            help="Unload a model without requests after 30s, 10m (the default for several), 1h, or never.",
            show_default=False,
        ),
    ] = None,
    fetch_images: options.FetchImages = None,
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
    """Answer programs that speak the OpenAI API (chat completions, completions, responses, embeddings), Anthropic's
    (messages) or Ollama's, and rerank documents.

    It needs starlette, uvicorn and prometheus-client. Ctrl-C ends it: running requests get the time of --grace.
    Sampling options are for what a request does not set; the model's are in generation_config.json. The first of
    several models is loaded at once, the others when a request asks for them.
    """
    keys = read_keys(key_file)
    if host not in LOOPBACK and not keys and not insecure:
        raise typer.BadParameter(
            f"{host} can be reached from other machines: give keys (--api-key-file FILE or {KEY_VARIABLE}), or "
            "--insecure",
            param_hint="--host",
        )
    if host in LOOPBACK and insecure:
        raise typer.BadParameter(f"{host} is reached from this machine only", param_hint="--insecure")
    with options.wrong_usage("--cors"):
        validate_origins(cors or ())
    with options.wrong_usage("--idle"):
        seconds = None if idle is None else parse_duration(idle)
    default_settings = DefaultSettings(
        options.given_sampling(context, params), parse_template_vars(template_var, think)
    )
    budget, names = options.parse_memory_size(memory, "--memory"), _parse_models(models, model_option, alias)
    for option in ("adapter", "draft", "hosts"):
        if len(names.models) > 1 and getattr(config, option) is not None:
            raise typer.BadParameter("it is for one model, but there are several", param_hint=f"--{option}")
    if memory is not None and config.hosts is not None:
        raise typer.BadParameter("with --hosts, the model is elsewhere: give --kv-memory", param_hint="--memory")
    if allow_pull and budget is None:
        raise typer.BadParameter("say how much memory all models may take: --memory", param_hint="--allow-pull")
    adapters = names.group_adapters(config.adapters)
    always_loaded = {names.resolve(each, "--keep-loaded"): None for each in keep_loaded or ()}
    listener = open_socket(host, port)
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
        log=None if log_format is LogFormat.none else partial(log_request, log_format),
        secret=load_secret(),
        read_elsewhere=options.make_linked_image_reader(fetch_images),
    )
    base_config = replace(config, resume_lost=True)
    configs = {
        name: replace(base_config, model=each, adapters=adapters.get(name)) for name, each in names.models.items()
    }
    with (
        listener,
        open_pool(
            configs,
            default_settings,
            memory=budget,
            keep=always_loaded,
            idle=_DEFAULT_IDLE if idle is None and len(configs) > 1 else seconds,
            tell=None if log_format is LogFormat.none else partial(log_event, log_format),
        ) as pool,
    ):
        first = next(iter(configs))
        preload(pool, {name: names.models[name] for name in {first: None, **always_loaded}})
        if allow_pull:
            settings = replace(settings, pull=partial(pull_model, pool, base_config, default_settings))
        kept = "" if config.kv_store is None else f"Kept on disk for later: {config.kv_store} (--no-kv-store: nothing)."
        run_server(pool, app(pool, settings), listener, grace, kept, has_keys=bool(keys))


def _parse_models(models: list[str] | None, option: str | None, aliases: list[str] | None) -> ServedNames:
    """Return the names of the models on the command line. Raises typer.BadParameter and InvalidRequest."""
    model_names = list(models or ())
    if len(model_names) < 2:
        model_names = [options.model_name(model_names[0] if model_names else None, option)]
    elif option is not None:
        raise typer.BadParameter(f"several models, and --model {option!r}: give it with the others")
    return make_names(model_names, aliases or ())


def open_socket(host: str, port: int) -> socket.socket:
    """Open the listening socket before the model loads. Raises CortexError if that fails or a package is missing."""
    required_packages = ("starlette", "uvicorn", "prometheus_client")
    if missing_packages := [name for name in required_packages if importlib.util.find_spec(name) is None]:
        raise CortexError(f"the server needs {', '.join(missing_packages)}: `{SERVER_INSTALL}`")
    from cortexmlx.server.listening import open_listener

    return open_listener(host, port)


def log_request(form: LogFormat, request: LoggedRequest) -> None:
    """Print the log line of a request."""
    console.print_message(format_request(request, form, time.time()))


def log_event(form: LogFormat, text: str) -> None:
    """Print the log line of a server event."""
    console.print_message(format_event(text, form, time.time()))


def run_server(
    pool: ModelPool, application: Any, listener: socket.socket, grace: float, kept: str, *, has_keys: bool
) -> None:
    """Print where the server listens and what is `kept` on disk, and answer requests until the end."""
    from cortexmlx.server.listening import HttpServer

    listening = HttpServer(application, listener, grace, tell=console.print_message)
    for each in filter(None, (kept, *startup_lines(pool, listening.url, has_keys=has_keys))):
        console.print_message(each)
    header = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if has_keys else ""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello?"}]})
    console.print_message(
        f"  curl {listening.url}/v1/chat/completions{header} -H 'Content-Type: application/json' -d '{body}'"
    )
    listening.run()
    console.print_message("\nended")


def startup_lines(pool: ModelPool, url: str, *, has_keys: bool) -> Iterator[str]:
    """Yield the lines that a server prints when it begins: its address, its models, and their memory."""
    first, *other_models = pool.names
    first_step = f"put a key into {KEY_VARIABLE} and " if has_keys else ""
    watch = f"Watch it in a browser at {url}/ or {first_step}try:"
    if not other_models:
        lease = pool.acquire(first)
        kv = lease.engine.stats().kv_bytes_limit
        lease.release()
        yield (
            f"{url}/v1 serves {to_single_line(first)}: up to {pool.context_length(first):,} tokens, "
            f"{format_bytes(kv)} for keys and values. Ctrl-C ends it."
        )
        yield watch
        return
    yield f"{url}/v1 serves {len(pool.names)} models, which take up to {format_bytes(pool.memory or 0)} together:"
    for name in pool.names:
        load_state = "loaded" if pool.is_loaded(name) else "loaded when it is asked for"
        size, length = format_bytes(pool.model_memory(name)), pool.context_length(name)
        yield f"  {to_single_line(name)}: {size}, up to {length:,} tokens, {load_state}"
    yield f"Ctrl-C ends it. {watch}"


# The names of a server's models: from their folders, and from --alias.


@dataclass(frozen=True)
class ServedNames:
    """The names by which clients call the server's models."""

    models: Mapping[str, str]
    """The models as they were given, by their own names, in order."""
    aliases: Mapping[str, str]
    """Other names, each with the own name of its model."""

    def resolve(self, model: str, option: str) -> str:
        """Return the main name of a model that an option names by path, name or alias. Raises InvalidRequest."""
        for name, model_source in self.models.items():
            if model in (name, model_source):
                return name
        if model in self.aliases:
            return self.aliases[model]
        raise InvalidRequest(f"{option}: {model!r} is not among the models: {', '.join(map(repr, self.models))}")

    def group_adapters(self, adapters: Mapping[str, str | Path] | None) -> dict[str, dict[str, str | Path]]:
        """Return the adapters of each model. With several models, names are MODEL:NAME. Raises InvalidRequest."""
        adapters_by_model: dict[str, dict[str, str | Path]] = {}
        for name, folder in (adapters or {}).items():
            model, colon, adapter = name.rpartition(":")
            if not colon and len(self.models) > 1:
                raise InvalidRequest(
                    f"--adapters {name}={folder} does not say of which model: write MODEL:{name}=FOLDER"
                )
            main_name = self.resolve(model, "--adapters") if colon else next(iter(self.models))
            adapters_by_model.setdefault(main_name, {})[adapter] = folder
        return adapters_by_model


def make_names(models: Sequence[str], aliases: Sequence[str]) -> ServedNames:
    """Return the names of models. An alias is NAME=MODEL, or NAME if there is one model. Two models of one name need
    aliases, which are then their names. Raises InvalidRequest.
    """
    unique_models = list(dict.fromkeys(models))
    alias_models = dict(_parse_alias(alias, unique_models) for alias in aliases)
    if len(alias_models) < len(set(aliases)):
        raise InvalidRequest("--alias gives one name to two models")
    count = Counter(client_model_name(model) for model in unique_models)
    models_by_name: dict[str, str] = {}
    for model in unique_models:
        name = client_model_name(model)
        if count[name] > 1:
            name = next((alias for alias, aliased_model in alias_models.items() if aliased_model == model), name)
        if name in models_by_name:
            raise InvalidRequest(
                f"{models_by_name[name]!r} and {model!r} are both called {name!r}: give one another name with --alias "
                f"NAME={model}"
            )
        models_by_name[name] = model
    by_model = {model: name for name, model in models_by_name.items()}
    extra_aliases = {alias: by_model[model] for alias, model in alias_models.items() if by_model[model] != alias}
    if taken_name := next((alias for alias in extra_aliases if alias in models_by_name), None):
        raise InvalidRequest(
            f"--alias {taken_name}={models_by_name[extra_aliases[taken_name]]}: {models_by_name[taken_name]!r} is "
            f"called {taken_name!r}"
        )
    return ServedNames(models_by_name, extra_aliases)


def _parse_alias(alias: str, models: Sequence[str]) -> tuple[str, str]:
    """Return the name and the model of an --alias."""
    name, equals, model = alias.partition("=")
    if not equals and len(models) == 1:
        model = models[0]
    elif not equals:
        raise InvalidRequest(f"--alias {alias} does not say of which model: write {alias}=MODEL")
    if not name:
        raise InvalidRequest(f"--alias {alias} has no name: write NAME=MODEL")
    matches = [each for each in models if model == each] or [
        each for each in models if model == client_model_name(each)
    ]
    if len(matches) != 1:
        reason = "is not among the models" if not matches else "is the name of two models: give the path"
        raise InvalidRequest(f"--alias {alias}: {model!r} {reason}")
    return name, matches[0]
