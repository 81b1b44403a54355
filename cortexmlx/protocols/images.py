"""The images in a body: from a part of any protocol, with base64 text or a URL, to bytes for the engine.

A part of a body is JSON, so it has no bytes. Only bytes reach the engine: never a path or
a URL.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.error_text import add_note

CheckImage = Callable[[bytes], object]
"""Prepares the file of an image for the model. Raises InvalidRequest if it cannot be shown."""

ReadElsewhere = Callable[[str], bytes]
"""Returns the file that a URL or a path names. Raises InvalidRequest."""

MAX_IMAGES = 100
"""Images of a conversation: as many as Anthropic's API takes. The engine takes no more."""

ELSEWHERE_SECONDS = 30.0
"""Seconds that the images of a conversation may take that are not in the body. The last one may take longer."""

KINDS = ("image", "image_url", "input_image")
"""The types of parts that are images."""

_SEND = "send its bytes as base64"


@dataclass(frozen=True)
class ImageBytes:
    """The encoded image of a message's part."""

    data: bytes
    """The encoded file."""

    def to_part(self) -> dict[str, Any]:
        """Return the image as a message's part in the form that the engine reads."""
        return {"type": "image", "image": self.data}


class ImageParts:
    """Reads the image parts of one conversation for a model that sees."""

    def __init__(self, check: CheckImage, read_elsewhere: ReadElsewhere | None = None) -> None:
        """`read_elsewhere` reads images that are not in the body; None: they are refused."""
        self._check = check
        self._read_elsewhere = read_elsewhere
        self._count, self._seconds = 0, 0.0

    def read(self, part: Mapping[str, Any], path: str = "", *, strict: bool = False) -> ImageBytes | None:
        """Return a part's image. If it cannot be read, add a note and return None; if `strict`, raise InvalidRequest.

        Raises InvalidRequest for one more image than a prompt may have, before it is looked at.
        """
        if isinstance(part.get("image"), bytes):  # Anthropic's conversations are read twice
            return ImageBytes(part["image"])
        try:
            self._count += 1
            if self._count > MAX_IMAGES:
                strict = True
                raise InvalidRequest(f"the conversation has more than {MAX_IMAGES} images: leave some out")
            data = decode_image(part, self._read_elsewhere and self._read_in_time)
            self._check(data)
        except InvalidRequest as error:
            if strict:
                raise InvalidRequest(str(error), field=path or None) from None
            add_note("an image", f"an image in the conversation is not read, a line says that it was there: {error}")
            return None
        return ImageBytes(data)

    def _read_in_time(self, name: str) -> bytes:
        """Return the file that a URL or a path names. Raises InvalidRequest if earlier files took too long."""
        assert self._read_elsewhere is not None
        if self._seconds > ELSEWHERE_SECONDS:
            raise InvalidRequest(f"the conversation's images took more than {ELSEWHERE_SECONDS:g} seconds to fetch")
        begin = time.monotonic()
        try:
            return self._read_elsewhere(name)
        finally:
            self._seconds += time.monotonic() - begin


def decode_image(part: Mapping[str, Any], read_elsewhere: ReadElsewhere | None = None) -> bytes:
    """Return the encoded image of a part, as bytes. Raises InvalidRequest, which does not quote invalid base64."""
    text = _find_image_data(part, read_elsewhere)
    if isinstance(text, bytes):
        return text
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"the image is no base64 ({error}): {_SEND}") from None


def _find_image_data(part: Mapping[str, Any], read_elsewhere: ReadElsewhere | None) -> str | bytes:
    """Return the base64 text of an image part: OpenAI's `image_url`, Anthropic's `source`, or MCP's `data`; or the
    bytes of the file that its URL names.
    """
    source, url = part.get("source"), part.get("image_url")
    if isinstance(source, Mapping):
        if source.get("type") == "base64" and isinstance(source.get("data"), str):
            return str(source["data"])
        url = source.get("url")
    elif isinstance(part.get("data"), str):
        return str(part["data"])
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str):
        raise InvalidRequest(f"the image has no data, and files elsewhere are not fetched: {_SEND}")
    head, _, data = url.partition(",")
    if head[:5].lower() == "data:" and head[-7:].lower() == ";base64":
        return data
    if head[:5].lower() == "data:":
        raise InvalidRequest("the image's data URL is no base64: send `data:image/png;base64,...`")
    if read_elsewhere is not None:
        return read_elsewhere(url)
    raise InvalidRequest(
        f"the image's URL is not fetched: {_SEND}, or a data URL, `data:image/png;base64,...`. A server "
        "fetches only from hosts that its owner has listed"
    )
