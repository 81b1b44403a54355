"""`cortexmlx eval`: the perplexity of a model on a text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cortexmlx.cli import engine as engines
from cortexmlx.cli import options
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import INTERRUPTED
from cortexmlx.cli.terminal.text import format_duration, to_json
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import format_bytes

if TYPE_CHECKING:
    from cortexmlx.perplexity import Perplexity

ROWS = 4
"""Windows that are computed at a time."""

UNSUPPORTED_OPTIONS = (*options.PER_REQUEST, *options.STORE, "draft", "keep_first", "keep_last", "speculate")
"""Options that do not apply: a text is scored whole, no two windows begin alike, and nothing is generated."""

MAX_TEXT_BYTES = 64 << 20
"""Bytes of the longest file. A longer file takes days, and its tokens take as much memory as a small model."""


@options.add_engine_options(excluded=UNSUPPORTED_OPTIONS, max_rows=ROWS, prefix_cache=False)
def evaluate(
    positional: Annotated[
        list[str],
        typer.Argument(metavar="[MODEL] FILE", help="The model, as for generate, and a text in UTF-8, or -."),
    ],
    model_option: options.ModelOption = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", "-c", metavar="N", min=2, help="Tokens of a window: 2048, or what fits.", show_default=False
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride", metavar="N", min=1, help="Tokens that a window scores: half of it.", show_default=False
        ),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    config: EngineConfig,
) -> None:
    """Measure the perplexity of a text: how well a model predicts it, such as with and without packed weights.

    Windows of --context tokens, each token scored once: in the first window all, in each other one the next --stride
    tokens, behind those before them. Every window begins with the beginning-of-text token where the tokenizer writes
    one; else the very first token is not scored. The text is taken as it is, without the chat template. Ctrl-C gives
    what is known so far.
    """
    if len(positional) > 2:
        raise typer.BadParameter(f"{len(positional)} arguments, but MODEL and FILE are two: {' '.join(positional)}")
    *model_args, source = positional
    config = replace(config, model=options.model_name(model_args[0] if model_args else None, model_option))
    text = read_text(source)
    results: list[Perplexity] = []
    interrupted = False
    with engines.open_engine(config) as engine:
        engines.print_notes(engine)
        try:
            with progress_bar() as show:

                def on_window(so_far: Perplexity) -> None:
                    results[:] = [so_far]
                    show(so_far)

                engine.perplexity(text, context=context, stride=stride, on_window=on_window)
        except KeyboardInterrupt:
            interrupted = True
    for result in results:
        console.print_result(to_json(result_json(result)) if as_json else result_text(result))
    if interrupted and not results:
        console.print_note(
            "stopped before the first window was scored: nothing is known yet. A smaller -c tells sooner"
        )
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def read_text(source: str) -> str:
    """Return a file's text. Raises InvalidRequest if it is no text, empty or too long, OSError if it cannot be read."""
    name = "stdin" if source == "-" else source
    if source == "-":
        data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    else:
        with Path(source).open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise InvalidRequest(
            f"{name} has more than {format_bytes(MAX_TEXT_BYTES)}, which would take very long: score a part of it, "
            "such as `head -c 1000000 FILE | cortexmlx eval MODEL -`"
        )
    if b"\0" in data:
        raise InvalidRequest(f"{name} is no text: it has a NUL at byte {data.index(0)}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is no text in UTF-8: byte {error.start} is {data[error.start]:#04x}") from None
    if not text.strip():
        raise InvalidRequest(f"{name} is empty: there is nothing to score")
    return text


@contextmanager
def progress_bar() -> Iterator[Callable[[Perplexity], None]]:
    """Show a progress bar with the perplexity so far, on a terminal."""
    if not console.is_terminal(sys.stderr):
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), MofNCompleteColumn())
    with Progress(*columns, console=console.stderr(), transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def show(result: Perplexity) -> None:
            description = f"perplexity {result.perplexity:.4f} · {result.tokens_per_second:.0f} tok/s"
            if result.windows >= 2 * ROWS:  # windows end together, and the first ones wait for what is prepared once
                seconds_left = result.seconds / result.windows * (result.all_windows - result.windows)
                description += f" · {format_duration(seconds_left)} left"
            bar.update(task, description=description, total=result.all_windows, completed=result.windows)

        try:
            yield show
        finally:
            with console.PRINTING:
                bar.stop()


def result_json(result: Perplexity) -> dict[str, object]:
    """Return the perplexity as a JSON object, for `--json`."""
    return {
        "perplexity": result.perplexity,
        "bits_per_token": result.bits_per_token,
        "bits_per_byte": result.bits_per_byte,
        "complete": result.windows == result.all_windows,
        "tokens_per_second": result.tokens_per_second,
        **asdict(result),
    }


def result_text(result: Perplexity) -> str:
    """Return the perplexity as text for the terminal."""
    complete = result.windows == result.all_windows
    window_count = f"{result.windows}" if complete else f"{result.windows} of {result.all_windows}"
    figures = [
        ("perplexity", f"{result.perplexity:.4f}" + ("" if complete else " so far")),
        ("bits per token", f"{result.bits_per_token:.4f}"),
        ("bits per byte", f"{result.bits_per_byte or 0:.4f}"),
        ("scored", f"{result.tokens:,} of {result.text_tokens:,} tokens, {result.text_bytes or 0:,} bytes"),
        ("windows", f"{window_count} of {result.context:,} tokens, stride {result.stride:,}"),
        (
            "computed",
            f"{result.computed_tokens:,} tokens in {result.seconds:.1f} s, {result.tokens_per_second:.0f} tok/s",
        ),
    ]
    return "\n".join(f"{name:<16}{value}" for name, value in figures)
