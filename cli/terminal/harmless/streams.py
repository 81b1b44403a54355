"""stdout and stderr of a command: on a terminal, whoever writes there writes harmless text.

Only `cortexmlx.cli.terminal` writes control sequences, past the guard (`unguarded`).
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

from cortexmlx.cli.terminal.harmless.characters import harmless


class Guarded(io.TextIOBase):
    """A text stream that writes harmless text to the stream `below`. It has no `buffer`: bytes would pass by."""

    def __init__(self, below: TextIO) -> None:
        self.below = below

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream below."""
        return self.below.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """What becomes of characters that the encoding lacks."""
        return self.below.errors

    def isatty(self) -> bool:
        """As the stream below."""
        return self.below.isatty()

    def fileno(self) -> int:
        """The descriptor of the stream below."""
        return self.below.fileno()

    def writable(self) -> bool:
        """It is for writing."""
        return True

    def flush(self) -> None:
        """Flush the stream below."""
        self.below.flush()

    def close(self) -> None:
        """The stream below belongs to others, and stays open."""

    def write(self, text: str) -> int:
        """Write the text without what a terminal would obey."""
        self.below.write(harmless(text))
        return len(text)


def unguarded(stream: TextIO) -> TextIO:
    """Return the stream that takes control sequences: for this package, and for nothing that others wrote."""
    return stream.below if isinstance(stream, Guarded) else stream


@contextmanager
def guarded_streams() -> Iterator[None]:
    """In this context stdout and stderr are guarded where they are terminals. Files and pipes get all text as it is."""
    before = sys.stdout, sys.stderr
    for name in ("stdout", "stderr"):
        stream: TextIO = getattr(sys, name)
        if stream.isatty() and not isinstance(stream, Guarded):
            setattr(sys, name, cast(TextIO, Guarded(stream)))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
