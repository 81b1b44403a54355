"""Channels within one process: what a link does, without sockets."""

from __future__ import annotations

import queue

from cortexmlx.distributed.channel import Message
from cortexmlx.errors import HostLost
from support.patience import PATIENCE


class QueueChannel:
    """One end of a connection. `sent` has what went out of it, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sent: list[bytes] = []
        self.processor_seconds: float | None = None
        self.silent_seconds = 0.0
        self.other: QueueChannel
        self._arrived: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closed = False

    def send(self, message: Message) -> None:
        """As `Channel.send`."""
        if self._closed:
            raise self._error()
        self.sent.append(bytes(message))
        self.other.arrive(self.sent[-1])

    def arrive(self, message: bytes) -> None:
        """Let this end receive a message, as if the other one had sent it."""
        self._arrived.put(message)

    @property
    def loss_reason(self) -> str | None:
        """As `Channel.loss_reason`."""
        return "closed" if self._closed else None

    def receive(self, timeout: float | None = None) -> bytes:
        """As `Channel.receive`."""
        message = self._arrived.get(timeout=PATIENCE if timeout is None else timeout)
        if message is None:
            self._arrived.put(None)
            raise self._error()
        return message

    def close(self) -> None:
        """As `Channel.close`."""
        for end in (self, self.other):
            end._closed = True
            end._arrived.put(None)

    def _error(self) -> HostLost:
        return HostLost("the connection is closed", host=self.name)


def channel_pair(name: str) -> tuple[QueueChannel, QueueChannel]:
    """The controller's end of a connection to a worker of that name, and the worker's."""
    ours, theirs = QueueChannel(name), QueueChannel("controller")
    ours.other, theirs.other = theirs, ours
    return ours, theirs
