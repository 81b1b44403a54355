"""The start of a command: environment, log, and the command line itself."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import TextIO

from cortexmlx.cli.program import NAME, adapt_commands
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import BROKEN_PIPE, FAILED, INTERRUPTED, exit_on_second_interrupt
from cortexmlx.cli.terminal.harmless import filter_streams

MLX_ENVIRONMENT = {
    # MLX commits a command buffer once the arrays bound to it have so many Mi elements. Every layer binds its slabs of
    # the KV arena, which would end a command buffer at each layer: count operations only, as without an arena.
    "MLX_MAX_MB_PER_BUFFER": "1000000",
    # And once it has so many operations: 20 to 50 without this. A layer has about 20, and more than ten command buffers
    # in flight make the host wait. So a step of up to 50 layers is queued as a whole.
    "MLX_MAX_OPS_PER_BUFFER": "100",
}
QUIET_LIBRARIES = {"HF_HUB_VERBOSITY": "error", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "true"}


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 (failed), 2 (wrong usage), 130 (Ctrl-C), 141 (nobody reads)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for name, value in {**MLX_ENVIRONMENT, **QUIET_LIBRARIES}.items():
        os.environ.setdefault(name, value)
    for name in ("COLUMNS", "LINES"):  # a shell without a window may say 0, and rich takes "²" for digits
        if not re.fullmatch("[1-9][0-9]{0,4}", os.environ.get(name, "1")):
            del os.environ[name]
    for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"):  # MLX compiles there, and does not look for another folder
        if not os.path.isdir(os.environ.get(name, "/")):
            del os.environ[name]
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in ours
    if debug:  # accepted anywhere before a --, understood by the top command
        arguments = ["--debug", *(a for a in ours if a != "--debug"), *arguments[len(ours) :]]
    log_to_stderr(debug)
    console.harden_streams()
    with filter_streams(), exit_on_second_interrupt():
        try:
            from cortexmlx.cli.app import app

            try:
                app(arguments, prog_name=NAME)
            finally:
                sys.stdout.flush()
        except SystemExit as end:
            if isinstance(end.__context__, BrokenPipeError):  # rich, and typer for --help, end with 1
                console.silence_stdout()
                return BROKEN_PIPE
            return end.code if isinstance(end.code, int) else 0
        except KeyboardInterrupt:  # before there was a command to interrupt
            return INTERRUPTED
        except OSError as error:  # of --version or --help
            console.silence_stdout()
            if isinstance(error, BrokenPipeError):
                return BROKEN_PIPE
            console.print_error(f"stdout cannot be written: {error.strerror}")
            return FAILED
    return 0


class StderrHandler(logging.StreamHandler[TextIO]):
    """A log handler for the current stderr, which is a place above the status while an answer is on the screen."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one log record to the current stderr."""
        with console.PRINTING:
            self.stream = sys.stderr
            super().emit(record)


class OneLineFormatter(logging.Formatter):
    """Formats a log record as one line, without a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a log record as `cortexmlx: message`."""
        return f"{record.name}: {adapt_commands(record.getMessage())}"


def log_to_stderr(debug: bool) -> None:
    """Log warnings as single lines. With `debug`, log all messages of cortexmlx, with tracebacks."""
    handler = StderrHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s") if debug else OneLineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("cortexmlx").setLevel(logging.DEBUG if debug else logging.WARNING)
    logging.getLogger("huggingface_hub").setLevel(logging.WARNING if debug else logging.ERROR)
