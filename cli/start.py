"""How a command starts and ends: environment, errors and Ctrl-C become exit codes, never a traceback."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

import typer

from cortexmlx.cli import console
from cortexmlx.errors import CortexError

FAILED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141

MLX_ENVIRONMENT = {
    # Metal commits a command buffer once the buffers bound to it pass this size. Every layer binds its slabs of the
    # KV arena, which would end a command buffer at each layer: count operations only, as without an arena.
    "MLX_MAX_MB_PER_BUFFER": "1000000",
}
QUIET_LIBRARIES = {"HF_HUB_VERBOSITY": "error", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "true"}


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 (failed), 2 (wrong usage), 130 (Ctrl-C), 141 (nobody reads)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for name, value in {**MLX_ENVIRONMENT, **QUIET_LIBRARIES}.items():
        os.environ.setdefault(name, value)
    debug = "--debug" in arguments
    if debug:  # accepted anywhere on the line, understood by the top command
        arguments = ["--debug", *(a for a in arguments if a != "--debug")]
    log_to_stderr(debug)
    console.harden_streams()

    from cortexmlx.cli.app import app

    with interrupts():
        try:
            app(arguments, prog_name="cortexmlx")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0
    return 0


class OneLine(logging.Formatter):
    """A log record as one line, without the traceback that it may carry."""

    def format(self, record: logging.LogRecord) -> str:
        """`cortexmlx: message`."""
        return f"{record.name}: {record.getMessage()}"


def log_to_stderr(debug: bool) -> None:
    """Warnings as single lines; with `debug` with their tracebacks, and all that cortexmlx itself has to say."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s") if debug else OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("cortexmlx").setLevel(logging.DEBUG if debug else logging.WARNING)
    logging.getLogger("huggingface_hub").setLevel(logging.WARNING if debug else logging.ERROR)


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
            raise
        fail_unexpectedly(error, debug)


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

    try:
        before = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread: whoever runs the command there keeps the handler
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def leave_now() -> None:
    """End the process without waiting for anything, with the terminal's cursor visible."""
    console.show_cursor()
    os._exit(INTERRUPTED)
