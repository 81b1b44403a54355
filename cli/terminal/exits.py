"""Exit codes: errors and Ctrl-C end a command without a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import typer

from cortexmlx.cli.terminal import console
from cortexmlx.errors import CortexError

FAILED, SLOWER, INTERRUPTED, BROKEN_PIPE = 1, 3, 130, 141

Handler = Callable[[int, FrameType | None], Any] | int | None
"""Of a signal, as the standard library has it."""


@contextlib.contextmanager
def exit_codes(debug: bool) -> Iterator[None]:
    """Turn whatever ends a command into a message on stderr and an exit code."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        console.silence_stdout()
        raise typer.Exit(BROKEN_PIPE) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (CortexError, MemoryError) as error:
        fail(str(error) or type(error).__name__, debug)
    except OSError as error:
        fail(f"{error.strerror}: {error.filename}" if error.filename else str(error), debug)
    except RuntimeError as error:
        if type(error) in (typer.Exit, typer.Abort):
            raise
        fail_unexpectedly(error, debug)
    except Exception as error:
        if hasattr(error, "exit_code"):  # wrong usage: typer prints it
            _break_at_words(error)
            raise
        fail_unexpectedly(error, debug)


def _break_at_words(usage: Any) -> None:
    """typer writes `Error: ` and the message of wrong usage in one line."""
    before = "Error: "
    said = console.at_words(before + usage.format_message(), sys.stderr).removeprefix(before)
    usage.format_message = lambda: said


def fail_unexpectedly(error: Exception, debug: bool) -> None:
    """For errors that nobody planned: name them, and say how to see where they came from."""
    fail(f"unexpected {type(error).__name__}: {error}. Run it again with --debug for the traceback.", debug)


def fail(message: str, debug: bool) -> None:
    """Say what went wrong on stderr, with `debug` after the traceback of the current exception, and exit with 1."""
    if debug:
        traceback.print_exc()
    console.error(message)
    raise typer.Exit(FAILED)


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """The first Ctrl-C raises KeyboardInterrupt; one more while that unwinds ends the process at once with 130."""

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, lambda *_: leave_now())
        raise KeyboardInterrupt

    with _handled_by(handle):
        yield


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """What is done in this context is done as a whole: Ctrl-C comes behind it. For moments."""
    came: list[tuple[int, FrameType | None]] = []
    before: Handler = None
    try:
        with _handled_by(lambda *call: came.append(call)) as before:
            yield
    finally:
        if came and callable(before):
            before(*came[0])


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], object]) -> Iterator[Handler]:
    """Ctrl-C is what `handler` says, instead of the one that is yielded. Not the main thread, which alone is
    interrupted: whoever runs the command there keeps the handler.
    """
    try:
        before = signal.signal(signal.SIGINT, handler)
    except ValueError:
        yield None
        return
    try:
        yield before
    finally:
        signal.signal(signal.SIGINT, before)


def leave_now(code: int = INTERRUPTED) -> NoReturn:
    """End the process without waiting for anything, with the terminal's cursor visible."""
    with contextlib.suppress(OSError):  # the terminal may have gone
        console.show_cursor()
    os._exit(code)
