"""Exit codes: errors and Ctrl-C end a command without a traceback."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import typer

from cortexmlx.cli.program import adapt_commands
from cortexmlx.cli.terminal import console
from cortexmlx.errors import CortexError

FAILED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141

Handler = Callable[[int, FrameType | None], Any] | int | None
"""A signal handler, as the standard library defines it."""


@contextlib.contextmanager
def exit_codes(debug: bool) -> Iterator[None]:
    """Turn the errors that end a command into a message on stderr and an exit code."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        console.silence_stdout()
        raise typer.Exit(BROKEN_PIPE) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (CortexError, MemoryError) as error:
        exit_failed(str(error) or type(error).__name__, debug)
    except OSError as error:
        exit_failed(_os_error_text(error), debug)
    except RuntimeError as error:
        if type(error) in (typer.Exit, typer.Abort):
            raise
        exit_unexpected(error, debug)
    except Exception as error:
        if hasattr(error, "exit_code"):  # wrong usage: typer prints it, with `Error: ` before it
            usage: Any = error
            text = usage.format_message().replace(": Value error, ", ": ")
            text = re.sub("Input should be (.+), unable to parse .*", r"it must be \1", text)  # pydantic's
            text = f"Error: {adapt_commands(text)}"
            message = console.wrap_for_terminal(text, sys.stderr).removeprefix("Error: ")
            usage.format_message = lambda: message
            raise
        exit_unexpected(error, debug)


def _os_error_text(error: OSError) -> str:
    """Return an operating system error in words."""
    if error.filename:
        return f"{error.strerror}: {error.filename}"
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the folder in which this shell is was deleted: cd to another one"
    return error.strerror or str(error)


def exit_unexpected(error: Exception, debug: bool) -> None:
    """Exit with an unexpected error: print its name, and how to see where it came from."""
    exit_failed(f"unexpected {type(error).__name__}: {error}. Run it again with --debug for the traceback.", debug)


def exit_failed(message: str, debug: bool) -> None:
    """Print what went wrong on stderr and exit with 1. With `debug`, the current exception's traceback comes first."""
    if debug:
        traceback.print_exc()
    console.print_error(message)
    raise typer.Exit(FAILED)


@contextlib.contextmanager
def exit_on_second_interrupt() -> Iterator[None]:
    """Let the first Ctrl-C raise KeyboardInterrupt. Another one meanwhile ends the process at once with 130."""

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, lambda *_: exit_immediately())
        raise KeyboardInterrupt

    with _install_handler(handle):
        yield


@contextlib.contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of this context. Only for short work."""
    pending_calls: list[tuple[int, FrameType | None]] = []
    old_handler: Handler = None
    try:
        with _install_handler(lambda *call: pending_calls.append(call)) as old_handler:
            yield
    finally:
        if pending_calls and callable(old_handler):
            old_handler(*pending_calls[0])


@contextlib.contextmanager
def _install_handler(handler: Callable[[int, FrameType | None], object]) -> Iterator[Handler]:
    """Set Ctrl-C's `handler` in this context; yield the old one. Only the main thread gets Ctrl-C: others set none."""
    try:
        old_handler = signal.signal(signal.SIGINT, handler)
    except ValueError:
        yield None
        return
    try:
        yield old_handler
    finally:
        signal.signal(signal.SIGINT, old_handler)


def exit_immediately(code: int = INTERRUPTED) -> NoReturn:
    """End the process without waiting for anything, with the terminal's cursor visible."""
    with contextlib.suppress(OSError):  # the terminal may have gone
        console.show_cursor()
    os._exit(code)
