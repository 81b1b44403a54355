"""Metadata of a reply that every protocol needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cortexmlx.protocols.request import Request
from cortexmlx.protocols.seal import Seal
from cortexmlx.types.progress import Progress

Body = dict[str, Any]
"""A JSON object."""

TokenBytes = Callable[[int], bytes]
"""A function from a token id to its bytes: `Engine.token_bytes`."""

Keep = Callable[[Request, Body], None]
"""What keeps a reply."""


@dataclass(frozen=True)
class ReplyInfo:
    """The fields that every body and every chunk of one reply repeats."""

    id: str
    """The id without the protocol's prefix."""
    model: str
    created: int
    """Seconds since 1970."""
    token_bytes: TokenBytes
    repeatable: bool = False
    """Whether to leave out what differs from run to run: how many tokens were cached, drafted and accepted."""
    seal: Seal | None = None
    """What proves to this client's later requests that thoughts are the model's own; None: nothing does."""
    keep: Keep | None = None
    """Called with a request and the whole body of its reply, before the end of the reply is sent; None: nothing is
    kept.
    """
    progress: Callable[[], Progress | None] = lambda: None
    """Returns how far the prompt is, with its tokens and those that were cached; None: it has not begun."""
