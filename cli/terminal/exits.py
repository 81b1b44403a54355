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

from cortexmlx.cli.program import fit_commands
from cortexmlx.cli.terminal import console
from cortexmlx.errors import CortexError

FAILED, SLOWER, INTERRUPTED, BROKEN_PIPE = 1, 3, 130, 141

Handler = Callable[[int, FrameType | None], Any] | int | None
"""A signal handler, as the standard library defines it."""


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
        fail(_of_the_system(error), debug)
    except RuntimeError as error:
        if type(error) in (typer.Exit, typer.Abort):
            raise
        fail_unexpectedly(error, debug)
    except Exception as error:
        if hasattr(error, "exit_code"):  # wrong usage: typer prints it
            _break_at_words(error)
            raise
        fail_unexpectedly(error, debug)


def _of_the_system(error: OSError) -> str:
    if error.filename:
        return f"{error.strerror}: {error.filename}"
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the folder in which this shell is was deleted: cd to another one"
    return str(error)


def _break_at_words(usage: Any) -> None:
    """Format typer's `Error: ` and its message of wrong usage in lines."""
    before = "Error: "
    said = console.at_words(before + fit_commands(usage.format_message()), sys.stderr).removeprefix(before)
    usage.format_message = lambda: said


def fail_unexpectedly(error: Exception, debug: bool) -> None:
    """Report an unexpected error: its name, and how to see where it came from."""
    fail(f"unexpected {type(error).__name__}: {error}. Run it again with --debug for the traceback.", debug)


def fail(message: str, debug: bool) -> None:
    """Print what went wrong on stderr and exit with 1. With `debug`, the traceback of the current exception comes
    first.
    """
    if debug:
        traceback.print_exc()
    console.error(message)
    raise typer.Exit(FAILED)


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Let the first Ctrl-C raise KeyboardInterrupt. Another Ctrl-C while that unwinds ends the process at once with
    130.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, lambda *_: leave_now())
        raise KeyboardInterrupt

    with _handled_by(handle):
        yield


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of this context. Only for short work."""
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
    """Handle Ctrl-C by `handler` in this context, and yield the old handler. Only the main thread is interrupted, so
    other threads keep the program's own handler.
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
