"""Link: a channel between the controller and a worker over TCP. Without mlx.

What a link protects: who may join. Both sides prove that they know the group's key before anything else is read
(`handshake.py`). What it does not protect: nothing is encrypted, and nobody notices if a machine on the way changes
bytes. MLX's own collectives, which carry the numbers of the model, are as open. So use hosts on a network that you
trust. TLS would protect the smaller half of what is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cortexmlx.errors import HostLost
from cortexmlx.hosts.channel import Message


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """When the other side of a link counts as lost."""

    silence_seconds: float = 7.0
    """Without any heartbeat for so long, the other side is lost."""
    beat_seconds: float = 0.5
    """Time between two heartbeats of this side."""
    stall_seconds: float = 30.0
    """The other side is lost if it takes nothing of a message for so long, although it is alive."""
    message_bytes: int = 256 << 20
    """The largest message. A larger one is refused before memory is allocated for it."""


class Link:
    """A channel over two connections: one for messages, one for heartbeats.

    Once lost or closed, a link stays so: every call raises HostLost. Safe to use from several threads.
    """

    name: str

    def send(self, message: Message) -> None: ...

    def receive(self, timeout: float | None = None) -> bytes:
        """As `Channel.receive`. If `timeout` passes, the link is given up: a late answer would be taken for the next."""
        ...

    def close(self) -> None: ...

    @property
    def lost(self) -> str | None:
        """Why the link is lost or closed, or None."""
        ...

    def when_lost(self, action: Callable[[HostLost], None]) -> None:
        """Call `action` once, on another thread, when the link is lost: within `silence_seconds`, even if no thread
        sends or receives. Not called for this side's own `close`. Called at once if the link is lost already.
        """
        ...
