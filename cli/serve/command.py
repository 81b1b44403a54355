"""`cortexmlx serve`: a model for every program that speaks the OpenAI API or Anthropic's."""

from __future__ import annotations

import importlib.util
import json
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cortexmlx.cli import engine as engines
from cortexmlx.cli import options
from cortexmlx.cli.prompts import checked
from cortexmlx.cli.serve.keys import KEY, keys_in
from cortexmlx.cli.serve.log import LogFormat, line_of
from cortexmlx.cli.serve.secret import kept_secret
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import in_a_line
from cortexmlx.errors import CortexError
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.protocols.request import Defaults
from cortexmlx.sampling_params import SamplingParams
from cortexmlx.server.settings import LOOPBACK
from cortexmlx.server.web.logged import Logged
from cortexmlx.serving.config import EngineConfig

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


@options.takes_sampling(without=("stop", "schema", "regex", "choice"), max_tokens=None)
@options.takes_engine(stored=True)
def serve(
    context: typer.Context,
    model: options.Model = None,
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
        typer.Option("--cors", metavar="ORIGIN", help="Web pages that may ask; * for all.", show_default=False),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="NAME", help="Another name of the model.", show_default=False),
    ] = None,
    any_name: Annotated[bool, typer.Option("--any-name", help="Answer under every model name.")] = False,
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
    options are for what a request does not set; without them, the model's makers' recommendation holds.
    """
    keys = keys_in(key_file)
    if host not in LOOPBACK and not keys and not insecure:
        raise typer.BadParameter(
            f"{host} can be reached from other machines: give keys (--api-key-file FILE or {KEY}), or --insecure",
            param_hint="--host",
        )
    if host in LOOPBACK and insecure:
        raise typer.BadParameter(f"{host} is reached from this machine only", param_hint="--insecure")
    listener = listening_socket(host, port)
    from cortexmlx.server import ServerSettings, app

    variables = options.template_vars(template_var, think)
    named = options.model_name(model, model_option)
    with listener, engines.open_engine(replace(config, model=named)) as engine:
        engines.tell(engine)
        checked(engine, variables)
        recommended: dict[str, Any] = {"max_tokens": None, **dict(engine.info.sampling)}
        usually = SamplingParams(**{**recommended, **options.given_sampling(context, params)})
        settings = ServerSettings(
            keys=keys,
            hosts=("*",) if insecure else LOOPBACK,
            origins=tuple(cors or ()),
            names=tuple(alias or ()),
            any_name=any_name,
            max_open=max_open,
            timeout=timeout,
            log=None if log_format is LogFormat.none else partial(tell, log_format),
            secret=kept_secret(),
            defaults=Defaults(usually, variables),
        )
        listen(engine, app(engine, settings), listener, grace, keyed=bool(keys))


def listening_socket(host: str, port: int) -> socket.socket:
    """Return the socket of the server, before the model is loaded. Raises CortexError if it cannot be had, or if what
    a server needs is not installed.
    """
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise CortexError(f"{' and '.join(missing)} not installed: pip install 'cortexmlx[server]'")
    from cortexmlx.server.web.listening import bound

    return bound(host, port)


def tell(form: LogFormat, logged: Logged) -> None:
    """Print the line of a request."""
    console.tell(line_of(logged, form, time.time()))


def listen(engine: Engine, application: Any, listener: socket.socket, grace: float, *, keyed: bool) -> None:
    """Say where the server is, and answer until the end."""
    from cortexmlx.server.web.listening import Listening

    listening = Listening(application, listener, grace)
    stats = engine.stats()
    console.tell(
        f"{listening.url}/v1 serves {in_a_line(engine.info.name)}: up to {engine.longest_request:,} tokens, "
        f"{format_bytes(stats.kv_bytes_limit)} for keys and values. Ctrl-C ends it. Try:"
    )
    header = f" -H 'Authorization: Bearer ${KEY}'" if keyed else ""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello?"}]})
    console.tell(f"  curl {listening.url}/v1/chat/completions{header} -H 'Content-Type: application/json' -d '{body}'")
    listening.run()
    console.tell("\nended: no request is running")
