"""What the controller and a worker say about the disk tier, as plain data without mlx.

A piece is named by its key (`DiskTier.piece_key`). Each rank keeps its own part of a piece, under a key of its own. So
`AnyTold` of a rank is about parts; the controller concludes what all ranks have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cortexmlx.errors import HostLost
from cortexmlx.kv.prefix import Key
from cortexmlx.types.arrays import IntArray

NAME_BYTES = 15
"""Bytes of a piece's key that all ranks share. The last byte of a part's key is the number of its rank, so that ranks
of one machine can share a folder.
"""


TOO_MUCH = "more came than the disk takes"
"""Why parts are not written if too many wait: no fault of the disk."""


def part_key(piece: Key, rank: int) -> Key:
    """Return the key of a rank's part of a piece."""
    return piece[:NAME_BYTES] + rank.to_bytes(1, "little")


# -- calls ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Join:
    """Tell the identity of the part. Answered by Joined."""


@dataclass(frozen=True)
class Keep:
    """`PieceStore.keep`. Answered by Kept or Refused."""

    group: int
    targets: Sequence[int]
    keys: Sequence[Key]
    tokens: IntArray
    """`[pieces, block_size]`"""


@dataclass(frozen=True)
class ReadPieces:
    """Read parts of pieces, in order, up to the first that cannot be had. They stay with the rank until `DropReads`.
    HasRead tells when they are there.
    """

    number: int
    """Names the read. No other read has the same."""
    keys: Sequence[Key]
    groups: Sequence[int]
    """The group of each piece, or `STATE`."""
    tokens: IntArray
    """`[pieces, block_size]`"""
    seconds: float
    """How long reading may take."""


@dataclass(frozen=True)
class DropReads:
    """Drop what was read, or is being read."""

    numbers: Sequence[int]


@dataclass(frozen=True)
class LookAgain:
    """Look for what other processes have written."""


@dataclass(frozen=True)
class FlushStore:
    """Write what waits, in at most so many seconds. Answered by whether it is written."""

    seconds: float


# -- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joined:
    """What a rank knows of its store."""

    identity: bytes | None
    """Names everything that the part's keys and values depend on, except the tokens; None if it is not known."""
    why: str
    """Why it will never be known. Empty if it is known, or will be."""
    hashed: float
    """Which part of the weights is hashed, from 0 to 1."""


@dataclass(frozen=True)
class Kept:
    """Which of the pieces exist, and the bytes of their parts that are to be written now."""

    there: Sequence[bool]
    bytes: int


# -- what a rank tells by itself --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CanJoin:
    """`Join` has another answer now."""


@dataclass(frozen=True)
class IndexChanged:
    """Parts that are on the disk now and were not, and the other way round. At first the disk has none, as far as the
    controller knows.
    """

    added: Sequence[Key]
    removed: Sequence[Key]


@dataclass(frozen=True)
class Wrote:
    """So many parts, with so many bytes, do not wait any more."""

    parts: int
    bytes: int
    why: str
    """Why they are not written; empty if they are."""


@dataclass(frozen=True)
class HasRead:
    """The first `count` parts of a read are right, and with the rank."""

    number: int
    count: int
    bytes: int
    rate: float
    """How many bytes the rank reads per second."""
    slow: bool
    """Whether the disk is so slow that nobody should wait for it for a while."""


AnyTold = CanJoin | IndexChanged | Wrote | HasRead


@dataclass(frozen=True)
class RankPiece:
    """A piece that all ranks have read, by its read and its index there: the content of a load in the controller."""

    read: int
    index: int
    held: object = field(default=None, compare=False, repr=False)
    """Keeps the ranks' parts alive: it is not sent."""

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Raises HostLost: the arrays are with the ranks."""
        raise HostLost("a piece of the disk tier was asked for in a process that does not have it")
