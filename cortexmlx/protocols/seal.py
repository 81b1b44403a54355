"""Seal: signs texts for a client, so that a later request can prove that this server wrote them for it."""

from __future__ import annotations

import base64
import binascii
import hmac
from hashlib import sha256

_SIGNATURE_BYTES = 32
"""The length of a signature (HMAC-SHA256)."""


class Seal:
    """Signs texts for one client (HMAC), and verifies them when they come back. A signature holds as long as the
    secret does, and for no other client.

    Texts are signed, not hidden: whoever has a sealed text can read it.
    """

    def __init__(self, secret: bytes, client: str) -> None:
        self._key = hmac.digest(secret, client.encode("utf-8", "surrogatepass"), sha256)

    def sign(self, text: str) -> str:
        """Return the signature of a text, in base64."""
        return base64.b64encode(self._signature(text.encode("utf-8", "surrogatepass"))).decode()

    def verify(self, text: str, signature: str) -> bool:
        """Whether a signature is that of the text."""
        return hmac.compare_digest(self.sign(text).encode(), signature.encode("utf-8", "surrogatepass"))

    def wrap(self, text: str) -> str:
        """Return a text together with its signature, as one base64 text."""
        data = text.encode("utf-8", "surrogatepass")
        return base64.b64encode(self._signature(data) + data).decode()

    def unwrap(self, sealed_text: str) -> str | None:
        """Return the text that `wrap` was given, or None if the signature is not from this seal."""
        try:
            signed_data = base64.b64decode(sealed_text, validate=True)
        except (ValueError, binascii.Error):
            return None
        signature, data = signed_data[:_SIGNATURE_BYTES], signed_data[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(data)):
            return None
        return data.decode("utf-8", "surrogatepass")

    def _signature(self, data: bytes) -> bytes:
        """Return the HMAC of bytes."""
        return hmac.digest(self._key, data, sha256)
