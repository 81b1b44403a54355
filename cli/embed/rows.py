"""Rows of a file of embeddings, one for each text, in the order of the texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cortexmlx.cli.embed.texts import TextLine
from cortexmlx.protocols.batch import INVALID, BadLine, Style, error_record
from cortexmlx.protocols.openai.embeddings import written
from cortexmlx.protocols.request import Body

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class Row:
    """The embedding of a text, or why there is none."""

    line: TextLine
    vector: npt.NDArray[np.float32] | None
    """None: there is none."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    truncated: bool = False
    error: str = ""
    code: str = INVALID


class Rows(Protocol):
    """A file of rows."""

    @property
    def count(self) -> int:
        """Rows that it holds."""

    @property
    def failed(self) -> int:
        """Those of them that have no vector."""

    def open(self, dimensions: int | None) -> None:
        """Lock the file, create it if it is missing, and cut off what is no whole row. `dimensions`: numbers of a
        vector; None: as many as its rows have. Raises CortexError.
        """

    def append(self, rows: Sequence[Row]) -> None:
        """Write rows, and bring them to the disk. Raises CortexError."""

    def finish(self) -> None:
        """Say that all rows are there. Raises CortexError."""

    def close(self) -> None:
        """Close the file."""


def record(row: Row, *, packed: bool) -> Body:
    """Return a row as JSON. It holds nothing that differs from run to run. `packed`: the vector is in base64."""
    if row.vector is None:
        return error_record(BadLine(row.line.number, row.line.id, Style.SIMPLE, row.error), row.error, row.code)
    said: Body = {"id": row.line.id, "embedding": written(row.vector, packed=packed)}
    said["prompt_tokens"] = row.prompt_tokens
    return {**said, "truncated": True} if row.truncated else said
