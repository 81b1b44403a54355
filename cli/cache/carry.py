"""`cortexmlx cache export` and `import`: carry the keys and values of a beginning of prompts in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cortexmlx.cli import engine as engines
from cortexmlx.cli import options
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.core.config import EngineConfig
from cortexmlx.disk.folder import absolute_path
from cortexmlx.disk.stored_prefix import export_prefix, find_prefix, import_prefix
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.kv.sizing import format_bytes

if TYPE_CHECKING:
    from cortexmlx.disk.segment_store import SegmentStore

UNSUPPORTED_OPTIONS = ("draft", "keep_first", "keep_last", "speculate", *options.PER_REQUEST)


@options.add_engine_options(has_store=True, excluded=UNSUPPORTED_OPTIONS)
def export(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is called.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    messages: Annotated[
        Path | None,
        typer.Option(
            "--messages",
            metavar="JSON",
            help="Messages, or a body of the OpenAI API with tools, to compute.",
            show_default=False,
        ),
    ] = None,
    model_option: options.ModelOption = None,
    *,
    config: EngineConfig,
) -> None:
    """Write a beginning of prompts with its keys and values to a file, for `cortexmlx cache import`.

    NAME is one that `engine.pin` or an earlier export or import has kept in the folder. With --messages, the model
    (-m) computes the beginning of every prompt that continues these messages, and keeps it under NAME. A prompt finds
    it only with the same model, adapter, --kv-bits and --block-size, and the same versions.
    """
    if messages is None:
        with open_store(config) as store:
            prefix = find_prefix(store.path, name)
            size, tokens = export_prefix(store, prefix, file), len(prefix.tokens)
    else:
        prompt, tools = read_messages(messages)
        config = replace(config, model=options.model_name(None, model_option))
        with engines.open_engine(config) as engine, engine.pin(prompt, name=name, tools=tools) as pin:
            size, tokens = pin.export(file), pin.tokens
    console.print_result(f"{to_single_line(name)}: {tokens:,} tokens, {format_bytes(size)}")


@options.add_engine_options(has_store=True, excluded=UNSUPPORTED_OPTIONS)
def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of `cortexmlx cache export`.")],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Call it NAME.", show_default=False)
    ] = None,
    client: Annotated[
        str | None,
        typer.Option("--client", metavar="NAME", help="For this client of a server with keys.", show_default=False),
    ] = None,
    model_option: options.ModelOption = None,
    *,
    config: EngineConfig,
) -> None:
    """Put the keys and values of a file into the folder of chats and servers, where prompts that begin so find them.

    Without -m, no model is loaded, and whatever has the same model, adapter, precision and versions finds them. With -m
    and the options of its engine, a file that this engine could not use is refused. Only import files of people whom
    you trust: a forged one makes wrong answers.
    """
    if model_option is not None:
        with engines.open_engine(replace(config, model=model_option)) as engine:
            pin = engine.import_pin(file, name=name, client=client)
            console.print_result(f"{to_single_line(pin.name or '')}: {pin.tokens:,} tokens")
        return
    with open_store(config) as store:
        prefix = import_prefix(store, file, name, client)
    console.print_result(
        f"{to_single_line(prefix.name)}: {len(prefix.tokens):,} tokens of {to_single_line(prefix.model)}"
    )


@contextmanager
def open_store(config: EngineConfig) -> Iterator[SegmentStore]:
    """Yield the store of the command's folder. Raises CortexError."""
    from cortexmlx.disk.segment_store import SegmentStore

    if config.kv_store is None:
        raise typer.BadParameter("it is the folder that is read or written", param_hint="--no-kv-store")
    try:
        store = SegmentStore(absolute_path(config.kv_store), config.store_bytes)
        store.open()
        try:
            yield store
        finally:
            store.close()
    except OSError as error:
        raise CortexError(str(error)) from error


def read_messages(path: Path) -> tuple[list[Any], list[Any]]:
    """Return the messages of a JSON file, and its tools. Raises InvalidRequest."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} cannot be read as JSON: {error}") from error
    body = body if isinstance(body, dict) else {"messages": body}
    messages, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(messages, list) or not messages or not isinstance(tools, list):
        raise InvalidRequest(f"{path} has no messages: give a JSON list of them, or an object with `messages`")
    return messages, tools
