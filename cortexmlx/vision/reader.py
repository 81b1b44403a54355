"""ImageReader: turns the images in messages into tokens. Any thread may use it."""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from cortexmlx.errors import InvalidRequest, OutOfMemory
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.protocols.images import MAX_IMAGES, decode_image
from cortexmlx.types.images import BidirectionalLayers, ImageLayout, PlacedImage, PreparedImage
from cortexmlx.vision.images import ImageProcessor, ImageSource, open_image
from cortexmlx.vision.qwen import rope_positions

MAX_TOKENS = 64 * 65
"""How many tokens an image has at most: some 4 million pixels, and 100 MB while it is prepared. Larger ones are made
smaller. A makers' own limit may be four times as much; Pixtral's is this one.
"""

REMEMBERED_BYTES = 256 << 20
"""Prepared images of so many bytes are remembered, the latest ones: a conversation shows its images in every turn."""

PROMPT_BYTES = 512 << 20
"""How many bytes the prepared images of a prompt may have together: a small file may hold a large image."""

OPEN_BYTES = 1 << 30
"""How many bytes the prepared images of all open prompts may have together."""


class ImageReader:
    """Puts a prompt's images into its tokens: prepares them with `processor`, and writes a mark for each into the text.
    When the text is tokenized, `split` replaces the marks by the images' tokens.

    `open_mark` and `close_mark` are what the model's template writes around an image. `placeholder` is the token that
    the template writes in its place, and `row_ends` are those that end its rows and its last row. `has_axes` says
    whether its tokens turn by three positions. `shows_image_first`: of one text and one image, the image comes first.
    `trims_texts`: the template trims each text beside an image. `bidirectional` says in which layers an image's tokens
    see its later ones.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        placeholder: int,
        open_mark: str = "<|vision_start|>",
        close_mark: str = "<|vision_end|>",
        *,
        row_ends: tuple[int, int] | None = None,
        has_axes: bool = True,
        shows_image_first: bool = False,
        trims_texts: bool = False,
        bidirectional: BidirectionalLayers = BidirectionalLayers.NONE,
    ) -> None:
        self._processor = processor
        self._trims_texts, self._bidirectional = trims_texts, bidirectional
        self._placeholder = placeholder
        self._around = open_mark, close_mark
        self._row_ends, self._has_axes, self._shows_image_first = row_ends, has_axes, shows_image_first
        self._lock = threading.Lock()
        nonce = secrets.token_hex(8)  # no text of a user looks like a mark
        self._mark = f"\ue000{nonce}:{{}}\ue001"
        self._pattern = re.compile(f"\ue000{nonce}:([0-9a-f]{{64}})\ue001")
        self._by_source: OrderedDict[bytes, PreparedImage] = OrderedDict()
        self._by_key: WeakValueDictionary[str, PreparedImage] = WeakValueDictionary()
        self._by_first_token: WeakValueDictionary[int, PreparedImage] = WeakValueDictionary()
        self._preparing = threading.Lock()
        self._thread = threading.local()

    def begin(self) -> None:
        """Begin to write the images of a prompt on this thread."""
        self._thread.written = []

    def arrange(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its parts in the order and form in which the model's chat template writes them."""
        content = message.get("content")
        if not (self._shows_image_first or self._trims_texts) or not isinstance(content, (list, tuple)):
            return message
        shows = [isinstance(part, Mapping) and part.get("type") in ("image", "image_url") for part in content]
        if self._trims_texts:
            return {**message, "content": list(map(_trim, content))} if any(shows) else message
        return {**message, "content": [content[1], content[0]]} if shows == [False, True] else message

    def write(self, part: Mapping[str, Any]) -> str:
        """Return the mark that stands for the image of a message's part. Raises InvalidRequest if the part has none, or
        if the prompt's images are too large together, and OutOfMemory if those of all open prompts are.
        """
        image = self.prepare(part)
        written: list[PreparedImage] = self._thread.written  # what is forgotten meanwhile is not lost
        written.append(image)
        if _bytes_of(written) > PROMPT_BYTES:
            raise InvalidRequest(
                f"the prompt's images are too large together: the first {len(written)} take more than "
                f"{format_bytes(PROMPT_BYTES)} when they are prepared. Show fewer of them, or smaller ones"
            )
        if self._by_key.get(image.key.hex()) is not image:
            raise OutOfMemory(
                f"the images of all open prompts take more than {format_bytes(OPEN_BYTES)} when they are prepared. "
                "Wait for some of them to end, or show smaller ones"
            )
        return self._mark.format(image.key.hex())

    def prepare(self, part: Mapping[str, Any]) -> PreparedImage:
        """Prepare the image of a message's part, and remember it if there is room. Raises InvalidRequest if the part
        has none.
        """
        source = _source_of(part)
        digest = hashlib.sha256(source).digest() if isinstance(source, bytes) else None
        with self._lock:
            image = None if digest is None else self._by_source.get(digest)
            if image is not None and digest is not None:
                self._by_source.move_to_end(digest)
        if image is None:
            with self._preparing:  # one at a time: a large one takes 1 GB meanwhile
                made = self._processor.make_patches(open_image(source))
            frames, rows, columns = made.grid
            grid = frames, rows // made.merge, columns // made.merge
            image = PreparedImage(made.digest, made.patches, made.grid, grid, self._row_ends)
            image = self._remember(digest or made.digest, image)
        return image

    def _remember(self, source: bytes, image: PreparedImage) -> PreparedImage:
        """Remember an image under the hash `source`; or instead an image that is known already, with the same key.
        Return the remembered image, or `image` itself if there is no room to remember it.
        """
        with self._lock:
            if _bytes_of([image, *self._by_key.values()]) > OPEN_BYTES:
                self._by_source.clear()  # what nobody shows at the moment is gone with it
                if _bytes_of([image, *self._by_key.values()]) > OPEN_BYTES:
                    return image
            image = self._by_key.setdefault(image.key.hex(), image)
            self._by_first_token[image.tokens[0]] = self._by_source[source] = image
            while len(self._by_source) > 1 and _bytes_of(self._by_source.values()) > REMEMBERED_BYTES:
                self._by_source.popitem(last=False)
        return image

    def split(self, text: str) -> list[str | tuple[int, ...]] | None:
        """Split a text at its marks. Return the parts: texts, and in the place of marks the tokens of images. The first
        part is a text. Return None for a text without marks.
        """
        parts = self._pattern.split(text)
        if len(parts) == 1:
            return None
        before, after = self._around  # templates would trim what is white in them
        parts[::2] = [
            f"{after * (i > 0)}{part}{before * (2 * i + 1 < len(parts))}" for i, part in enumerate(parts[::2])
        ]
        with self._lock:
            return [self._by_key[part].tokens if index % 2 else part for index, part in enumerate(parts)]

    def find_images(self, tokens: Sequence[int]) -> ImageLayout | None:
        """Return where the images are in a prompt's tokens; None if there are none. Raises InvalidRequest for too many
        images, and for negative token ids that belong to no image.
        """
        spans = tuple(self._find_spans(tokens))
        if not spans:
            return None
        if len(spans) > MAX_IMAGES:
            raise InvalidRequest(f"the prompt has {len(spans)} images, but {MAX_IMAGES} is the most: leave some out")
        positions = rope_positions(len(tokens), spans if self._has_axes else ())[0]
        return ImageLayout(spans, positions, self._placeholder, self._bidirectional)

    def _find_spans(self, tokens: Sequence[int]) -> Iterator[PlacedImage]:
        index = 0
        while (start := next((i for i in range(index, len(tokens)) if tokens[i] < 0), None)) is not None:
            with self._lock:
                image = self._by_first_token.get(tokens[start])
            index = start + (0 if image is None else len(image.tokens))
            if image is None or tuple(tokens[start:index]) != image.tokens:
                raise InvalidRequest(f"token id {tokens[start]} is outside the vocabulary")
            yield PlacedImage(start, image)


def _trim(part: Any) -> Any:
    """Return a message's part without white space around its text."""
    if isinstance(part, str):
        return part.strip()
    text = part.get("text") if isinstance(part, Mapping) else None
    return {**part, "text": text.strip()} if isinstance(text, str) else part


def _bytes_of(images: Iterable[PreparedImage]) -> int:
    """Return the bytes of prepared images, each counted once."""
    return sum({image.key: image.patches.nbytes for image in images}.values())


def _source_of(part: Mapping[str, Any]) -> ImageSource:
    """Return the image of a message's part: its `image` value, or the bytes of its data URL. Raises InvalidRequest."""
    image: Any = part.get("image")
    if image is None:
        try:
            return decode_image(part)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), field="image_url") from None
    return bytes(image) if isinstance(image, (bytearray, memoryview)) else image
