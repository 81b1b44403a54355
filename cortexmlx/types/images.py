"""Where the images of a prompt are among its tokens, and at which positions its tokens are rotated. Without mlx.

A token that stands for a part of an image has no id of the vocabulary, but a negative number, made of what the image
and its processor are (`virtual_tokens`). So prompts with other images are other texts to all that compares, hashes and
stores tokens, and the same image in the same place is the same text, for the prefix cache, the disk tier and
conversations alike.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cortexmlx.types.arrays import IntArray, TokenList


class ImageWriter(Protocol):
    """Writes the images of messages into texts, and their tokens into prompts: see `vision/reader.py`."""

    def begin(self) -> None:
        """Begin the images of another prompt on this thread, and forget those of the prompt before."""

    def arrange(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its parts in the order in which the model's template writes them."""

    def write(self, part: Mapping[str, Any]) -> str:
        """Return the text that stands for the image in a message's part. Raises InvalidRequest if that is no image."""

    def prepare(self, part: Mapping[str, Any]) -> PreparedImage:
        """Prepare the image of a message's part, as `write` does. Raises InvalidRequest if that is no image."""

    def split(self, text: str) -> list[str | tuple[int, ...]] | None:
        """Return a text split at its images: texts, and the images' tokens between them; None without images."""

    def find_images(self, tokens: Sequence[int]) -> ImageLayout | None:
        """Return where the images are in a prompt's tokens; None if there are none. Raises InvalidRequest."""


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """An image as a model's preprocessor returns it: patches for the vision tower, and their grid."""

    key: bytes
    """A hash of its pixels and of what the processor made of them: the same key, the same features."""
    patches: npt.NDArray[np.float32]
    """`[patches, numbers]`, what the tower reads."""
    grid: tuple[int, int, int]
    """Its frames, and its patches from top to bottom and from left to right."""
    merged_grid: tuple[int, int, int]
    """Its frames, and its tokens from top to bottom and from left to right."""
    row_ends: tuple[int, int] | None = None
    """The token of the vocabulary that ends each of its rows, and that of its last row; None: rows have no ends."""

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Its token ids: virtual ones, which are negative, and those that end rows."""
        virtual, columns = virtual_tokens(self.key, math.prod(self.merged_grid)), self.merged_grid[2]
        if self.row_ends is None:
            return virtual
        rows = (virtual[at : at + columns] for at in range(0, len(virtual), columns))
        ended = [token for row in rows for token in (*row, self.row_ends[0])]
        return (*ended[:-1], self.row_ends[1])


def virtual_tokens(key: bytes, count: int) -> tuple[int, ...]:
    """Return `count` negative token numbers of an image: 31 bits each of a hash of its key."""
    stream = hashlib.shake_256(key).digest(4 * count)
    return tuple(-1 - (number >> 1) for (number,) in struct.iter_unpack("<I", stream))


@dataclass(frozen=True)
class PlacedImage:
    """An image in a prompt: its first token is the prompt's token `start`."""

    start: int
    image: PreparedImage

    @property
    def end(self) -> int:
        """The index of the token after the image."""
        return self.start + len(self.image.tokens)


@dataclass(frozen=True)
class FeaturePiece:
    """Tokens of an image in a step: the flat tokens `begin .. end` are the image's tokens from `first` on."""

    begin: int
    end: int
    image: PreparedImage
    first: int


class BidirectionalLayers(Enum):
    """In which layers attention within an image is bidirectional: its tokens also attend to its later ones."""

    NONE = "none"
    WINDOWED = "windowed"
    """Those with a window, which ends for such a token with its image."""
    ALL = "all"


@dataclass(frozen=True, eq=False)
class ImageLayout:
    """The images of a prompt, in order, and its positions `[3, tokens]`, by frame, height and width. `placeholder` is
    the token that stands for an image's tokens where only tokens of the vocabulary may be.
    """

    spans: tuple[PlacedImage, ...]
    positions: IntArray
    placeholder: int
    bidirectional: BidirectionalLayers = BidirectionalLayers.NONE

    @property
    def images(self) -> tuple[PreparedImage, ...]:
        """The images; one that is shown twice is there twice."""
        return tuple(span.image for span in self.spans)

    def shows(self, image: PreparedImage) -> bool:
        """Return whether an image is one of the prompt's."""
        return any(span.image.key == image.key for span in self.spans)

    @cached_property
    def shift(self) -> int:
        """The rotary position of a token after the prompt minus its index."""
        return int(self.positions.max()) + 1 - int(self.positions.shape[1])

    def positions_of(self, first: int, count: int) -> IntArray:
        """Return the rotary positions `[3, count]` of the tokens from `first` on, answer tokens included."""
        known = self.positions[:, first : first + count]
        later = np.arange(first + known.shape[1], first + count, dtype=np.int32) + self.shift
        return np.concatenate([known, np.broadcast_to(later, (3, len(later)))], axis=1).astype(np.int32)

    def feature_pieces(self, first: int, count: int, begin: int) -> list[FeaturePiece]:
        """Return the image pieces in `count` tokens from `first` on, which are a step's flat tokens from `begin` on."""
        pieces = []
        for span in self.spans:
            start, end = max(span.start, first), min(span.end, first + count)
            if start < end:
                pieces.append(FeaturePiece(begin + start - first, begin + end - first, span.image, start - span.start))
        return pieces

    def fit_to_whole_images(self, first: int, count: int) -> int:
        """Return how many tokens a step computes from `first` on: `count`, changed so that no image is cut whose tokens
        see later ones. It is less if such an image begins among these tokens, and more if they begin in one.
        """
        for span in self.spans if self.bidirectional is not BidirectionalLayers.NONE else ():
            if span.start < first + count < span.end:
                return (span.start if first < span.start else span.end) - first
        return count

    def tokens_before_missing_image(self, first: int, count: int, has_features: Callable[[PreparedImage], bool]) -> int:
        """Return how many of `count` tokens from `first` on come before an image without features. `has_features` is
        called with the images among these tokens, and with the next one.
        """
        for span in self.spans:
            if first < span.end and not has_features(span.image):
                return min(max(span.start - first, 0), count)
            if first + count <= span.start:
                break
        return count

    def attention_pieces(self, first: int, count: int, has_window: bool) -> Iterator[tuple[int, int, bool]]:
        """Yield the pieces of `count` tokens from `first` on that attention computes at once: (begin, end, whether its
        tokens see later ones). `has_window` says whether the layers have a window. An image is one piece.
        """
        here = self.bidirectional is BidirectionalLayers.ALL or (
            self.bidirectional is BidirectionalLayers.WINDOWED and has_window
        )
        begin, end = first, first + count
        for span in self.spans if here else ():
            if begin < span.end and span.start < end:
                if begin < span.start:
                    yield begin, span.start, False
                yield max(begin, span.start), span.end, True
                begin = span.end
        if begin < end:
            yield begin, end, False

    def replace_virtual_tokens(self, tokens: TokenList) -> list[int]:
        """Return tokens with the placeholder in place of each virtual token of an image."""
        return [int(token) if token >= 0 else self.placeholder for token in tokens]
