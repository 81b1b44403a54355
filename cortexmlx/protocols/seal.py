"""Seal: proves to a later request that a text came from this server, and was written for the same client."""

from __future__ import annotations

import base64
import binascii
import hmac
from hashlib import sha256

_BYTES = 32
"""The length of a signature (HMAC-SHA256)."""


class Seal:
    """Signs the texts of one client. A signature holds as long as the secret does, and for no other client.

    Texts are signed, not hidden: whoever has a sealed text can read it.
    """

    def __init__(self, secret: bytes, client: str) -> None:
        self._key = hmac.digest(secret, client.encode("utf-8", "surrogatepass"), sha256)

    def sign(self, text: str) -> str:
        """Return a signature, in ASCII."""
        return base64.b64encode(self._signed(text.encode("utf-8", "surrogatepass"))).decode()

    def holds(self, text: str, signature: str) -> bool:
        """Whether a signature is that of the text."""
        return hmac.compare_digest(self.sign(text).encode(), signature.encode("utf-8", "surrogatepass"))

    def wrap(self, text: str) -> str:
        """Return the text with its signature, as one ASCII text."""
        data = text.encode("utf-8", "surrogatepass")
        return base64.b64encode(self._signed(data) + data).decode()

    def unwrap(self, sealed: str) -> str | None:
        """Return the text that was wrapped, or None if it was not wrapped by this seal."""
        try:
            whole = base64.b64decode(sealed, validate=True)
        except (ValueError, binascii.Error):
            return None
        signature, data = whole[:_BYTES], whole[_BYTES:]
        if not hmac.compare_digest(signature, self._signed(data)):
            return None
        return data.decode("utf-8", "surrogatepass")

    def _signed(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, sha256)
