"""`cortexmlx cache`: show, clear, export and import the KV blocks on disk, and say why prompts were computed again."""

from __future__ import annotations

import http.client
import json
import os
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import HTTPError, URLError

import typer

from cortexmlx.cli import engine as engines
from cortexmlx.cli import options
from cortexmlx.cli.files.outputs import check_output
from cortexmlx.cli.serve.keys import KEY_VARIABLE, RUNNING_URL, ask_server, server_url
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.core.config import EngineConfig
from cortexmlx.disk.folder import SECRET, absolute_path, default_folder, remove_transcripts, transcript_sizes
from cortexmlx.disk.stored_prefix import export_prefix, find_prefix, import_prefix, list_prefixes, remove_prefix
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.kv.sizing import format_bytes

if TYPE_CHECKING:
    from cortexmlx.disk.segment_store import SegmentStore


def cache(
    context: typer.Context,
    kv_store: options.KVStore = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of it.")] = False,
    remove: Annotated[
        str | None, typer.Option("--remove", metavar="NAME", help="Forget this beginning.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON record.")] = False,
) -> None:
    """Show what chats, batches and servers keep on disk: keys and values of texts, by model.

    A text that begins like an earlier one is read from there instead of being computed. The files are their owner's
    alone, and hold the tokens of the texts. Other programs may go on while they are removed.
    """
    if (subcommand := context.invoked_subcommand) is not None:
        if kv_store is not None or clear or remove is not None or as_json:
            raise typer.BadParameter(f"options of `cache {subcommand}` come after its name")
        return
    folder = Path(os.path.expanduser(kv_store)) if kv_store else default_folder()
    if remove is not None and (clear or as_json):
        raise typer.BadParameter("it goes without --clear and --json", param_hint="--remove")
    holds_store = is_store(folder)  # raises for what cannot be one
    if remove is not None:
        remove_prefix(folder, remove)
        console.print_result(f"prefix {to_single_line(remove)}: removed. Its keys and values go as the folder fills")
        return
    if clear and kv_store and not folder.exists():
        raise CortexError(f"there is no folder {folder}, so nothing was removed")
    freed_bytes, models = 0, dict[str, tuple[int, int]]()
    if holds_store:
        with open_store(folder, 0) as store:
            try:
                freed_bytes = store.clear() + remove_transcripts(folder) if clear else 0
                for each in folder.glob("*.prefix") if clear else ():
                    each.unlink(missing_ok=True)
            except OSError as error:
                raise CortexError(f"{folder} cannot be cleared: {error.strerror or error}") from error
            for segment in store.segments():
                size, records = models.get(segment.model, (0, 0))
                models[segment.model] = (size + segment.bytes, records + segment.records)
            if foreign_bytes := store.foreign_bytes():
                models["(another version)"] = (foreign_bytes, 0)
        if transcript_bytes := sum(transcript_sizes(folder).values()):
            models["(conversations of servers)"] = (transcript_bytes, 0)
    if clear:
        record = json.dumps({"path": str(folder), "freed": freed_bytes})
        console.print_result(record if as_json else f"{format_bytes(freed_bytes)} removed")
        return
    print_store(folder, models, as_json)
    for prefix in () if as_json else list_prefixes(folder):
        name, model = to_single_line(prefix.name), to_single_line(prefix.model)
        console.print_result(f"  prefix {name}: {len(prefix.tokens):,} tokens of {model}")


def is_store(folder: Path) -> bool:
    """Return whether the folder holds a KV store. Checked first, since opening a store would create one."""
    from cortexmlx.disk.index import INDEX_NAME
    from cortexmlx.disk.segments import SEGMENT_NAME

    try:
        return any(name in (SECRET, INDEX_NAME) or SEGMENT_NAME.fullmatch(name) for name in os.listdir(folder))
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise CortexError(f"{folder} is no folder") from None
    except OSError as error:
        raise CortexError(f"{folder} cannot be used: {error.strerror or error}") from error


def print_store(folder: Path, models: dict[str, tuple[int, int]], as_json: bool) -> None:
    """Print the store's folder, and the bytes and blocks of each model in it."""
    total = sum(size for size, _ in models.values())
    if as_json:
        each = [{"model": model, "bytes": size, "blocks": blocks} for model, (size, blocks) in models.items()]
        console.print_result(json.dumps({"path": str(folder), "bytes": total, "models": each}))
        return
    missing = "" if folder.exists() else ": there is no such folder"
    console.print_result(f"{to_single_line(str(folder))}  {format_bytes(total)}{missing}")
    models = {to_single_line(model): totals for model, totals in models.items()}
    width = max(map(len, models), default=0)
    for model, (size, blocks) in sorted(models.items(), key=lambda each: -each[1][0]):
        block_text = f"  {blocks:,} blocks" if blocks else ""
        console.print_result(f"  {model:<{width}}  {format_bytes(size):>9}{block_text}")


_SECONDS = 10.0
"""How long the server may take."""


def why(
    url: Annotated[str, typer.Option("--url", metavar="URL", help="The server.")] = RUNNING_URL,
    count: Annotated[int, typer.Option("--last", "-n", metavar="N", min=1, help="The last N prompts.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
) -> None:
    """Ask a running server why it computed prompts again: the first difference, and how many tokens it cost.

    It tells of the prompts of the same key only, which it takes from CORTEXMLX_API_KEY. The last 20 are remembered.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    reports = fetch_reports(url, key)[:count]
    if as_json:
        console.print_result(json.dumps(reports, indent=2))
        return
    if not reports:
        console.print_note(f"the server remembers no prompt{' of this key' * bool(key)}")
    for report in reversed(reports):
        when = time.strftime("%H:%M:%S", time.localtime(report["time"]))
        console.print_result(
            f"{when} · {to_single_line(report['model'])} · prompt {report['prompt_tokens']:,} tokens: "
            f"{report['memory_tokens']:,} found in memory, {report['disk_tokens']:,} on disk"
        )
        console.print_result(f"  {to_single_line(report['text'])}")


def fetch_reports(url: str, key: str) -> list[dict[str, Any]]:
    """Return a server's reports on prompts of the client with this API key, the newest first. Raises CortexError."""
    try:
        reports = ask_server(server_url(url), "/cache/why", key, seconds=_SECONDS)["reports"]
        return [dict(report) for report in reports]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        if isinstance(error, HTTPError) and error.code == 401:
            fault = "does not know your key" if key else "wants a key"
            raise CortexError(f"the server at {url} {fault}: put one of its keys into {KEY_VARIABLE}") from None
        reason = error.reason if isinstance(error, URLError) and not isinstance(error, HTTPError) else error
        raise CortexError(
            f"no server of cortexmlx explains its cache at {url} ({type(reason).__name__}): start one with `cortexmlx "
            "serve`, or give its address (--url)"
        ) from error


UNSUPPORTED_OPTIONS = ("draft", "keep_first", "keep_last", "speculate", "no_kv_store", *options.PER_REQUEST)


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
    check_output(file, "FILE")
    if file.exists() and not zipfile.is_zipfile(file):
        raise InvalidRequest(f"{file} cannot be written: it is another file, so give FILE another name")
    if messages is None:
        with open_store(absolute_path(config.kv_store or default_folder()), config.store_bytes) as store:
            prefix = find_prefix(store.path, name)
            size, tokens = export_prefix(store, prefix, file), len(prefix.tokens)
    else:
        prompt, tools = read_messages(messages)
        config = replace(config, model=options.model_name(None, model_option))
        with engines.open_engine(config) as engine:
            try:
                with engine.pin(prompt, name=name, tools=tools) as pin:
                    size, tokens = pin.export(file), pin.tokens
            except KeyboardInterrupt:
                console.print_note(f"stopped: {file} was not written. The same command begins again")
                raise
    console.print_result(
        f"{to_single_line(name)}: {tokens:,} tokens, {format_bytes(size)}, written to {to_single_line(str(file))}"
    )


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
    """Put the keys and values of a file into the folder of chats and servers, for prompts with that beginning.

    Without -m, no model is loaded, and whatever has the same model, adapter, precision and versions finds them. With -m
    and the options of its engine, a file that this engine could not use is refused. Only import files of people whom
    you trust: a forged one makes wrong answers.
    """
    folder = absolute_path(config.kv_store or default_folder())
    if model_option is not None:
        with engines.open_engine(replace(config, model=model_option)) as engine:
            pin = engine.import_pin(file, name=name, client=client)
            name, tokens, model = pin.name or "", pin.tokens, engine.info.name
    else:
        with open_store(folder, config.store_bytes) as store:
            prefix = import_prefix(store, file, name, client)
        name, tokens, model = prefix.name, len(prefix.tokens), prefix.model
    console.print_result(to_single_line(f"{name}: {tokens:,} tokens of {model}, into {folder}"))


@contextmanager
def open_store(folder: Path, limit: int) -> Iterator[SegmentStore]:
    """Yield the store in a folder, of at most `limit` bytes when something is added. Raises CortexError."""
    from cortexmlx.disk.segment_store import SegmentStore

    try:
        store = SegmentStore(folder, limit)
    except OSError as error:
        raise CortexError(f"{folder} cannot be used: {error.strerror or error}") from error
    store.open()
    try:
        yield store
    finally:
        store.close()


def read_messages(path: Path) -> tuple[list[Any], list[Any]]:
    """Return the messages of a JSON file, and its tools. Raises InvalidRequest."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidRequest(f"there is no file {path}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} cannot be read as JSON: {error}") from error
    body = body if isinstance(body, dict) else {"messages": body}
    messages, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(messages, list) or not messages or not isinstance(tools, list):
        raise InvalidRequest(f"{path} has no messages: give a JSON list of them, or an object with `messages`")
    return messages, tools
