"""`cortexmlx cache`: show and clear the KV blocks on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from cortexmlx.cli import options
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.disk.folder import SECRET, default_folder, remove_transcripts, transcript_sizes
from cortexmlx.disk.stored_prefix import list_prefixes
from cortexmlx.errors import CortexError
from cortexmlx.kv.sizing import format_bytes


def cache(
    context: typer.Context,
    kv_store: options.KVStore = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON record.")] = False,
) -> None:
    """Show what chats, batches and servers keep on disk: keys and values of texts, by model.

    A text that begins like an earlier one is read from there instead of being computed. The files are their owner's
    alone, and hold the tokens of the texts. Other programs may go on while they are removed.
    """
    from cortexmlx.disk.segment_store import SegmentStore

    if context.invoked_subcommand is not None:
        return
    folder = Path(os.path.expanduser(kv_store)) if kv_store else default_folder()
    if not is_store(folder):
        print_store(folder, {}, as_json)
        return
    try:
        segment_store = SegmentStore(folder, 0)
    except OSError as error:
        raise CortexError(f"{folder} cannot be used: {error}") from error
    segment_store.open()
    if clear:
        freed_bytes = segment_store.clear() + remove_transcripts(folder)
        for each in folder.glob("*.prefix"):
            each.unlink(missing_ok=True)
        segment_store.close()
        console.print_result(
            json.dumps({"path": str(folder), "freed": freed_bytes})
            if as_json
            else f"{format_bytes(freed_bytes)} removed"
        )
        return
    models: dict[str, tuple[int, int]] = {}
    for segment in segment_store.segments():
        size, records = models.get(segment.model, (0, 0))
        models[segment.model] = (size + segment.bytes, records + segment.records)
    if foreign_bytes := segment_store.foreign_bytes():
        models["(another version)"] = (foreign_bytes, 0)
    segment_store.close()
    if transcript_bytes := sum(transcript_sizes(folder).values()):
        models["(conversations of servers)"] = (transcript_bytes, 0)
    print_store(folder, models, as_json)
    for prefix in () if as_json else list_prefixes(folder):
        name, model = to_single_line(prefix.name), to_single_line(prefix.model)
        console.print_result(f"  prefix {name}: {len(prefix.tokens):,} tokens of {model}")


def is_store(folder: Path) -> bool:
    """Return whether the folder holds a KV store. Looking into any other folder must leave nothing there."""
    from cortexmlx.disk.index import INDEX_NAME
    from cortexmlx.disk.segments import SEGMENT_NAME

    try:
        return any(name in (SECRET, INDEX_NAME) or SEGMENT_NAME.fullmatch(name) for name in os.listdir(folder))
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise CortexError(f"{folder} is no folder") from None
    except OSError as error:
        raise CortexError(f"{folder} cannot be used: {error}") from error


def print_store(folder: Path, models: dict[str, tuple[int, int]], as_json: bool) -> None:
    """Print the store's folder, and the bytes and blocks of each model in it."""
    total = sum(size for size, _ in models.values())
    if as_json:
        each = [{"model": model, "bytes": size, "blocks": blocks} for model, (size, blocks) in models.items()]
        console.print_result(json.dumps({"path": str(folder), "bytes": total, "models": each}))
        return
    console.print_result(f"{to_single_line(str(folder))}  {format_bytes(total)}")
    models = {to_single_line(model): totals for model, totals in models.items()}
    width = max(map(len, models), default=0)
    for model, (size, blocks) in sorted(models.items(), key=lambda each: -each[1][0]):
        block_text = f"  {blocks:,} blocks" if blocks else ""
        console.print_result(f"  {model:<{width}}  {format_bytes(size):>9}{block_text}")
