"""The rows of an embedding file: one per text, in input order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cortexmlx.cli.embed.texts import TextLine
from cortexmlx.protocols.batch import INVALID_REQUEST, InvalidLine, LineStyle, error_record
from cortexmlx.protocols.openai.embeddings import encode_vector
from cortexmlx.protocols.request import Body

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class EmbeddingRow:
    """The embedding of one text, or why there is none."""

    line: TextLine
    vector: npt.NDArray[np.float32] | None
    """None: there is none."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    truncated: bool = False
    error: str = ""
    code: str = INVALID_REQUEST


class RowFile(Protocol):
    """A file that embedding rows are appended to."""

    @property
    def count(self) -> int:
        """The number of rows in the file."""

    @property
    def failed(self) -> int:
        """The number of rows without a vector."""

    def open(self, dimensions: int | None) -> None:
        """Lock the file, create it if missing, and cut off what is no whole row at its end. `dimensions` is the length
        of a vector; None: as its rows have. Raises CortexError.
        """

    def append(self, rows: Sequence[EmbeddingRow]) -> None:
        """Write rows and flush them to the disk. Raises CortexError."""

    def close(self) -> None:
        """Close the file."""


def row_record(row: EmbeddingRow) -> Body:
    """Return a row as JSON, without values that differ from run to run."""
    if row.vector is None:
        return error_record(InvalidLine(row.line.number, row.line.id, LineStyle.SIMPLE, row.error), row.error, row.code)
    record: Body = {"id": row.line.id, "embedding": encode_vector(row.vector, packed=False)}
    record["prompt_tokens"] = row.prompt_tokens
    return {**record, "truncated": True} if row.truncated else record
