"""What a response's writer and its keeper need to know of the request."""

from __future__ import annotations

from dataclasses import dataclass, field

from cortexmlx.protocols.earlier import EarlierResponse
from cortexmlx.protocols.reply import Body
from cortexmlx.protocols.request import Request
from cortexmlx.protocols.responses.offered import Offered


@dataclass(frozen=True)
class Details:
    """What only responses have."""

    offered: Offered = field(default_factory=Offered)
    items: tuple[Body, ...] = ()
    """The items of `input`, as they are kept. They have no ids yet, unless the client gave them."""
    previous: EarlierResponse | None = None
    """The response that this one continues."""
    store: bool = False
    """Whether to keep the response."""
    sealed: bool = False
    """Whether thoughts are written as `encrypted_content`, too."""


def details_of(request: Request) -> Details:
    """Return the details of a request."""
    return request.details if isinstance(request.details, Details) else Details()
