"""`cortexmlx embed`: a file of texts in, a file of embeddings out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cortexmlx.cli import engine as engines
from cortexmlx.cli import options
from cortexmlx.cli.embed.files import EmbedFiles, EmbedSettings
from cortexmlx.cli.embed.run import EmbedRun, TextLine, count_texts, read_texts
from cortexmlx.cli.files.outputs import STDOUT, choose_mode, output_path
from cortexmlx.cli.files.source import InputFormat, InputKind, is_jsonl, open_ahead, open_lines
from cortexmlx.cli.files.status_line import StatusLine
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import FAILED
from cortexmlx.cli.terminal.text import format_duration
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import EmbeddingRefused, InvalidRequest
from cortexmlx.protocols.openai.embeddings import read_dimensions, read_prompt_name

if TYPE_CHECKING:
    from cortexmlx.engine import Engine
    from cortexmlx.types.embeddings import EmbeddingInfo

INPUT_KIND = InputKind("embed", "an object with a text", "a text")

UNSUPPORTED_OPTIONS = (*options.PER_REQUEST, "draft", "keep_first", "keep_last", "speculate")
"""Options that do not apply: nothing is generated, and a text is computed whole."""


@options.add_engine_options(excluded=UNSUPPORTED_OPTIONS)
def embed(
    positional: Annotated[
        list[str],
        typer.Argument(metavar="MODEL IN", help="An embedding model, and the file: JSONL, plain lines, or -."),
    ],
    model_option: options.ModelOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help="A .jsonl or .npy; default, and -: stdout.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", metavar="NAME", help="Which of the model's prompts goes before each text.", show_default=False
        ),
    ] = None,
    dimensions: Annotated[
        int | None,
        typer.Option(
            "--dimensions",
            metavar="N",
            min=1,
            help="Numbers of each vector: the model's, or fewer.",
            show_default=False,
        ),
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut off texts that are too long.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on: leave out what OUT holds already.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Begin again, and lose what OUT holds.")] = False,
    input_format: Annotated[InputFormat, typer.Option("--format", help="How to read IN.")] = InputFormat.auto,
    *,
    config: EngineConfig,
) -> None:
    """Compute the embedding of every text of a file, in input order.

    IN is JSONL, an object with a text (or input) and perhaps an id on each line, or plain lines. OUT is JSONL, or
    NumPy's .npy (a row for each text). A line without a text becomes an error record, or a row of NaN. Rows are on disk
    soon after they are computed. Exit code: 0 all good, 1 if a text has no embedding, 130 on Ctrl-C, what has finished
    kept.
    """
    if len(positional) > 2:
        raise typer.BadParameter(f"{len(positional)} arguments, but MODEL and IN are two: {' '.join(positional)}")
    *model_args, source = positional
    if not model_args and model_option is None:
        raise typer.BadParameter("give an embedding model, and a file or - after it", param_hint="MODEL IN")
    model = options.model_name(model_args[0] if model_args else None, model_option)
    out = output_path(output)
    mode = choose_mode(out, resume=resume, retry_errors=False, force=force)
    shape = EmbedSettings(model, None if config.adapter is None else str(config.adapter), prompt, dimensions, truncate)
    settings = replace(shape, kv_bits=config.kv_bits, kv_group_size=config.kv_group_size)
    with open_lines(source, input_format, INPUT_KIND) as lines, EmbedFiles(out, source, mode) as files:
        files.check_settings(settings)
        total = _count_total(source)
        jsonl = is_jsonl(source, input_format)
        if total is not None and files.previous_rows >= total and files.previous_rows:
            finish_complete_run(files, read_texts(lines, jsonl), settings)
            return
        with engines.open_engine(replace(config, model=model)) as engine:
            engines.print_notes(engine)
            info = _embedding_info(engine)
            read_prompt_name(prompt, info)
            read_dimensions(dimensions, info)
            embed_texts = partial(engine.embed, prompt=prompt, dimensions=dimensions, truncate=truncate)
            name = prompt or info.default_prompt
            instruction = None if name is None else info.prompts[name]
            numbers = dimensions or info.dimensions
            longest_text = info.max_tokens if truncate else None
            run_settings = replace(
                settings, weights=engine.info.identity, instruction=instruction, longest_text=longest_text
            )
            files.open(run_settings, numbers)
            run = EmbedRun(embed_texts, files.append)
            has_prompt = prompt is not None
            texts = _skip_done(read_texts(lines, jsonl, engine.info.vocab_size, has_prompt=has_prompt), files)
            try:
                with StatusLine(lambda: progress_line(run, files, total), live=out != STDOUT):
                    run.run(texts)
            finally:
                print_summary(run, files, total)
    if files.rows.failed:
        raise typer.Exit(FAILED)


def finish_complete_run(files: EmbedFiles, texts: Iterator[TextLine | None], settings: EmbedSettings) -> None:
    """Check and report a run whose rows all exist already, without loading a model."""
    for _ in _skip_done(texts, files):
        pass
    files.open_rows(None)
    print_done_before(files)
    if files.rows.failed:
        raise typer.Exit(FAILED)


def progress_line(run: EmbedRun, files: EmbedFiles, total: int | None) -> str:
    """Return the status line of a run: rows done and speed."""
    done_count, elapsed = files.previous_rows + run.done, run.seconds
    parts = [
        f"{done_count}/{total} done" if total is not None else f"{done_count} done",
        *([f"{run.failed} failed"] if run.failed else []),
        f"{(run.tokens - run.cached) / elapsed:.0f} tok/s",
    ]
    if total is not None and run.done:
        parts.append(f"{format_duration(elapsed / run.done * max(total - done_count, 0))} left")
    return " · ".join(parts)


def print_summary(run: EmbedRun, files: EmbedFiles, total: int | None) -> None:
    """Print the run's summary on stderr: rows done now, done before, and left."""
    print_done_before(files)
    rate = f", {(run.tokens - run.cached) / run.seconds:.1f} tok/s" if run.tokens else ""
    cached = f", {run.cached} of them from the cache" if run.cached else ""
    embedded_count = run.done - run.failed
    console.print_note(
        f"{embedded_count} embedded, {run.failed} failed, {run.tokens} tokens in {run.seconds:.1f} s{rate}{cached}"
    )
    remaining = 0 if total is None else total - files.previous_rows - run.done
    if remaining > 0 and files.is_resumable:
        console.print_note(f"{remaining} left: the same command with --resume goes on")


def print_done_before(files: EmbedFiles) -> None:
    """Print how many rows existed before this run."""
    if files.previous_rows:
        console.print_note(f"{files.previous_rows} were there already")


def _skip_done(texts: Iterator[TextLine | None], files: EmbedFiles) -> Iterator[TextLine | None]:
    """Yield the texts that have no row yet. Raises InvalidRequest if a text that has one was changed."""
    text_count = 0
    for line in texts:
        if line is not None:
            text_count += 1
            if text_count <= files.previous_rows:
                files.check_line(text_count - 1, line)
                continue
        yield line
    if text_count < files.previous_rows:
        raise InvalidRequest(
            f"the input has changed: it has {text_count:,} texts, and OUT {files.previous_rows:,} rows: use the same "
            "input, or --force to begin again"
        )


def _count_total(source: str) -> int | None:
    """Return how many texts a regular file has; None for a pipe."""
    with open_ahead(source) as file:
        return None if file is None else count_texts(file)


def _embedding_info(engine: Engine) -> EmbeddingInfo:
    """Return how the model makes vectors. Raises EmbeddingRefused, with the reason, if it makes none."""
    info = engine.info.embedding
    if info is None:
        engine.embed([])  # it says why
        raise EmbeddingRefused(f"{engine.info.name} is no embedding model")
    return info
