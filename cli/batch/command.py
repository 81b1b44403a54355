"""`cortexmlx batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from cortexmlx.cli import engine as engines
from cortexmlx.cli import options
from cortexmlx.cli.batch import resume as resuming
from cortexmlx.cli.batch.input import BatchReader
from cortexmlx.cli.batch.output import BatchWriter
from cortexmlx.cli.batch.progress import Progress
from cortexmlx.cli.batch.resume import RunIdentity
from cortexmlx.cli.batch.run import BatchRun
from cortexmlx.cli.generate import as_prompt
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import FAILED
from cortexmlx.errors import InvalidRequest
from cortexmlx.request import SamplingParams
from cortexmlx.serving.config import EngineConfig


class Format(str, Enum):
    """How to read the input."""

    auto = "auto"
    jsonl = "jsonl"
    lines = "lines"


@options.takes_sampling(without=("presence_penalty", "frequency_penalty"))
@options.takes_engine(stored=True)
def batch(
    positional: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] IN", help="The model, as for generate, and the file: JSONL, plain lines, or -."
        ),
    ],
    model_option: options.ModelOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT", help="Default: stdout.", show_default=False)
    ] = None,
    ordered: Annotated[
        bool, typer.Option("--ordered/--unordered", help="In the order of IN, or as they finish.")
    ] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Go on: leave out what OUT holds already.")] = False,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="With --resume: ask again what failed.")] = False,
    input_format: Annotated[Format, typer.Option("--format", help="How to read IN.")] = Format.auto,
    system: options.System = None,
    *,
    params: SamplingParams,
    raw: Annotated[
        bool, typer.Option("--raw/--chat", help="Prompts as they are, or through the chat template.")
    ] = False,
    config: EngineConfig,
) -> None:
    """Answer every request of a file: one JSON record each, in input order.

    IN is OpenAI batch JSONL (custom_id, url, body), simple JSONL (prompt or messages, optional id and sampling
    parameters) or plain lines. A line that is no request becomes an error record with its line number. Every record is
    on disk before the next. Exit code: 0 all good, 1 if a record is an error, 130 on Ctrl-C, what has finished kept.
    """
    if len(positional) > 2:
        raise typer.BadParameter(f"{len(positional)} arguments, but MODEL and IN are two: {' '.join(positional)}")
    *before, source = positional
    model = options.model_name(before[0] if before else None, model_option)
    if (resume or retry_errors) and (output is None or not resume):
        raise typer.BadParameter("--resume needs -o OUT, and --retry-errors needs --resume")
    kv = (config.kv_bits, config.kv_group_size, config.keep)
    identity = RunIdentity(model, source, system, raw, params, config.adapter, *kv)
    with opened(source, output) as lines, engines.open_engine(replace(config, model=model)) as engine:
        engines.tell(engine)
        reader = BatchReader(lines, params, jsonl=is_jsonl(source, input_format), raw=raw)
        done = begin(output, identity, resume=resume, retry_errors=retry_errors)
        writer = BatchWriter(output, append=resume)
        run = BatchRun(
            engine,
            resuming.remaining(reader, done),
            writer.write,
            lambda text: as_prompt(engine, text, system, raw=False),
            rows=config.max_rows,
            ordered=ordered,
        )
        try:
            with Progress(engine, run, total=count_lines(source, done), live=output is not None):
                run.run()
        finally:
            writer.close()
            report(run, writer, reader)
    if writer.failed:
        raise typer.Exit(FAILED)


@contextmanager
def opened(source: str, output: Path | None) -> Iterator[BinaryIO]:
    """The input's lines as bytes. Raises before anything is loaded if either file cannot be used."""
    if output is not None and output.is_dir():
        raise InvalidRequest(f"{output} is a folder: give -o a file")
    if output is not None and not output.absolute().parent.is_dir():
        raise InvalidRequest(f"no folder {output.absolute().parent} to write {output.name} into")
    if source == "-":
        yield sys.stdin.buffer
        return
    path = Path(source)
    if output is not None and output.exists() and path.exists() and output.samefile(path):
        raise InvalidRequest(f"{source} is both input and output: give -o another name")
    with path.open("rb") as file:
        yield file


def is_jsonl(source: str, input_format: Format) -> bool | None:
    """True for JSON lines, False for plain ones, None to look at the first line."""
    if input_format is not Format.auto:
        return input_format is Format.jsonl
    return True if Path(source).suffix.lower() in (".jsonl", ".ndjson", ".json") else None


def begin(output: Path | None, identity: RunIdentity, *, resume: bool, retry_errors: bool) -> Counter[str | int]:
    """Make the output ready; returns the ids whose records it keeps."""
    if output is None:
        return Counter()
    if resume:
        return resuming.resume(output, identity, retry_errors=retry_errors)
    resuming.start(output, identity)
    return Counter()


def count_lines(source: str, done: Counter[str | int]) -> int | None:
    """Requests of a regular file that are still to be answered, for the progress; None for a pipe."""
    path = Path(source)
    if source == "-" or not path.is_file():
        return None
    with path.open("rb") as file:
        return max(sum(1 for line in file if line.strip()) - done.total(), 0)


def report(run: BatchRun, writer: BatchWriter, reader: BatchReader) -> None:
    """The last lines on stderr: what was done, and what in the input had no meaning."""
    if reader.ignored:
        keys = ", ".join(f"{key} ({count}x)" for key, count in sorted(reader.ignored.items()))
        console.note(f"ignored keys: {keys}")
    answered, seconds = writer.written - writer.failed, run.seconds
    rate = f", {run.tokens / seconds:.1f} tok/s" if run.tokens else ""
    console.note(f"{answered} answered, {writer.failed} failed, {run.tokens} tokens in {seconds:.1f} s{rate}")
