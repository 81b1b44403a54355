"""Channel: one connection between the controller and a worker. Without mlx."""

from __future__ import annotations

from typing import Protocol

Message = bytes | bytearray | memoryview


class Channel(Protocol):
    """A connection that carries whole messages both ways, in order. One thread may send while another receives."""

    name: str
    """The other side, as a user would name it: a host, and the rank there."""

    @property
    def loss_reason(self) -> str | None:
        """Why the connection is lost or closed; None while it works. It is known before `receive` has raised."""

    @property
    def processor_seconds(self) -> float | None:
        """CPU seconds of the other side's process, as of its newest heartbeat; None if unknown."""

    @property
    def silent_seconds(self) -> float:
        """Seconds since the other side's newest heartbeat arrived."""

    def send(self, message: Message) -> None:
        """Send a message. Returns when the system has taken it. Raises HostLost."""

    def receive(self, timeout: float | None = None) -> bytes:
        """Wait for the next message, at most `timeout` seconds. Raises HostLost if none came, or if none can come."""

    def close(self) -> None:
        """End the connection; the other side's calls raise HostLost. Safe to call again."""
