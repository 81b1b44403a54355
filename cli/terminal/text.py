"""Text from arguments and pipes, repaired where bytes are not text, and text for printing: short names, durations,
JSON.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import stat
import sys
from typing import Any

from cortexmlx.cli.terminal import console

REPLACEMENT = "\ufffd"
_PATIENCE_SECONDS = 1.0
_SURROGATE = re.compile("[\ud800-\udfff]")


def clean_argument(argument: str, source: str = "the prompt") -> str:
    """Return a command line argument with U+FFFD for its broken UTF-8, which arrives as lone surrogates (PEP 383)."""
    return decode_text(argument.encode("utf-8", "surrogateescape"), source)


def decode_text(data: bytes, source: str) -> str:
    """Decode bytes as text; drop a byte order mark. NULs and broken UTF-8 become U+FFFD, with a note on stderr."""
    text = data.decode("utf-8-sig", "replace").replace("\0", REPLACEMENT)
    broken_count = text.count(REPLACEMENT) - data.count(REPLACEMENT.encode())
    if broken_count:
        console.print_note(f"{broken_count} x NUL or broken UTF-8 in {source}, replaced by {REPLACEMENT}")
    return text


def read_stdin() -> str:
    """Return all of stdin without its last newline. If a pipe stays silent, say so in a note: it looks like a hang."""
    if not sys.stdin.isatty() and not select.select([sys.stdin], [], [], _PATIENCE_SECONDS)[0]:
        console.print_note("waiting for the prompt on stdin ...")
    return decode_text(sys.stdin.buffer.read(), "stdin").removesuffix("\n")


def stdin_is_piped() -> bool:
    """Return whether stdin is a file or a pipe: not a terminal, /dev/null, or the socket that some programs use."""
    try:
        mode = stat.S_IFMT(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):  # closed, or replaced by an object without a descriptor
        return False
    return mode in (stat.S_IFREG, stat.S_IFIFO)


def shorten_start(text: str, width: int) -> str:
    """Return `text` in at most `width` characters. Its end is kept, because models' names differ there."""
    return text if len(text) <= width else "…" + text[len(text) - max(width - 1, 0) :]


def format_duration(seconds: float) -> str:
    """Return a time such as `42 s`, `3:05` minutes or `1:02:30` hours."""
    total_seconds = round(seconds)
    if total_seconds < 60:
        return f"{total_seconds} s"
    minutes, rest = divmod(total_seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def gather_prompt(arguments: list[str]) -> str:
    """Return the prompt: the text piped into stdin, then the arguments, separated by blank lines. `-` means stdin."""
    parts = [read_stdin() if a == "-" else clean_argument(a) for a in arguments]
    if "-" not in arguments and stdin_is_piped():
        parts.insert(0, read_stdin())
    return "\n\n".join(part for part in parts if part)


def to_json(record: Any) -> str:
    """Return a result as JSON. Infinity (of a token that a model never writes) becomes null. Half of a surrogate pair,
    which UTF-8 cannot hold, is written as an escape: an id may have one.
    """
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_without_infinity(record), ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _without_infinity(value: Any) -> Any:
    """Return a JSON value with infinite and NaN numbers replaced by None."""
    if isinstance(value, dict):
        return {key: _without_infinity(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
