"""What a reader may know of earlier responses of the same client."""

from __future__ import annotations

from typing import Any, Protocol

Item = dict[str, Any]
"""An item of a response's input or output, as JSON."""


class EarlierResponse(Protocol):
    """A response that was kept."""

    def items(self) -> list[Item]:
        """Return what the model was given and wrote, up to the end of this response, without instructions."""


class Earlier(Protocol):
    """The kept responses of one client."""

    def response(self, id: str) -> EarlierResponse | None:
        """Return a kept response, or None."""

    def item(self, id: str) -> Item | None:
        """Return an item that the client sent or the model wrote, or None."""
