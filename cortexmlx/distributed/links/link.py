"""WorkerLink: a channel between the controller and a worker over TCP. Without mlx.

What a link protects: who may join. Both sides prove that they know the group's key before anything else is read
(`handshake.py`). What it does not protect: nothing is encrypted, and nobody notices if a machine on the way changes
bytes. MLX's own collectives, which carry the numbers of the model, are as open, so TLS here would close the smaller of
two doors. Use hosts only on a network that you trust.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from io import BytesIO

from cortexmlx.distributed.channel import Message
from cortexmlx.errors import HostLost

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """When the other side of a link counts as lost."""

    silence_seconds: float = 7.0
    """Without any heartbeat for so long, the other side is lost."""
    beat_seconds: float = 0.5
    """Time between two heartbeats of this side."""
    stall_seconds: float = 60.0
    """The other side is lost if it takes nothing of a message for so long, although its heartbeats come. A worker takes
    nothing while it computes a step.
    """
    message_bytes: int = 256 << 20
    """The largest message. A larger one is refused before memory is allocated for it."""


DEFAULT_LIMITS = LinkLimits()

LAST_MESSAGES_SECONDS = 1.0
"""How long messages that came before the other side ended may still be received."""


class WorkerLink:
    """A channel between controller and worker over two TCP connections: one for messages, one for heartbeats.

    A thread of its own sends the heartbeats, so a worker inside a long `mx.eval` is alive. Once lost or closed, a link
    stays so: every call raises HostLost. Calls are safe on any thread.
    """

    def __init__(
        self, messages: socket.socket, pulse: socket.socket, name: str, limits: LinkLimits = DEFAULT_LIMITS
    ) -> None:
        """Take over two connected sockets. `name` is the other side, as a user would name it."""
        self.name = name
        self._sockets = (messages, pulse)
        for connection in self._sockets:
            with contextlib.suppress(OSError):  # If it is broken already, its first use will tell.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.limits = limits
        self.processor_seconds: float | None = None
        """CPU seconds of the other side's process, as of its newest heartbeat; None if unknown."""
        self._last_heartbeat_time = time.monotonic()
        self._process = os.getpid()
        self._stream = FrameStream(messages, limits.message_bytes)
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._state = threading.RLock()
        """Reentrant, because a signal's handler may close the link."""
        self._loss_reason: str | None = None
        self._lost_host = name
        self._closed_here = False
        self.ended_there = False
        """Whether the link is lost because the other side ended it, and not because this side did."""
        self._actions: list[Callable[[HostLost], None]] = []
        self._watcher = threading.Thread(target=self._run_heartbeats, name=f"heartbeats of {name}", daemon=True)
        self._watcher.start()

    def send(self, message: Message) -> None:
        """Implement `Channel.send`. Messages of several threads do not mix."""
        view = memoryview(message)
        body = view.cast("B") if view.nbytes else memoryview(b"")
        with self._hold_direction(self._send_lock):
            self._stream.send(body, self.limits.stall_seconds)

    def receive(self, timeout: float | None = None) -> bytes:
        """Implement `Channel.receive`. A `timeout` ends the link: a late answer would be taken for the next.

        Messages that came before the other side ended are received first.
        """
        with self._hold_direction(self._receive_lock):
            return self._stream.receive(timeout)

    def close(self) -> None:
        """Implement `Channel.close`. Threads that wait in `send` or `receive` raise HostLost."""
        if os.getpid() != self._process:
            for connection in self._sockets:  # Only the child's copies. A shutdown would end the parent's link.
                connection.close()
            return
        self._mark_lost(f"the link to {self.name} was closed on this side", closed_here=True)
        if threading.current_thread() is not self._watcher:
            self._watcher.join(timeout=1.0)

    def fail(self, error: HostLost) -> None:
        """Mark this link as lost, since another host is: `error`. All calls raise the same, even those that wait."""
        self._mark_lost(str(error), host=error.host)

    @property
    def loss_reason(self) -> str | None:
        """Why the link is lost or closed; None while it works."""
        return self._loss_reason

    @property
    def silent_seconds(self) -> float:
        """Seconds since the other side's newest heartbeat arrived."""
        return time.monotonic() - self._last_heartbeat_time

    def when_lost(self, action: Callable[[HostLost], None]) -> None:
        """Have `action` called once when the link is lost, even if no thread sends or receives. It is called on
        another thread, soon after `silence_seconds`; at once and on this thread if the link is lost already; not
        after this side's own `close`.
        """
        with self._state:
            if self._loss_reason is None:
                self._actions.append(action)
                return
        if not self._closed_here:
            action(self._loss_error())

    @contextlib.contextmanager
    def _hold_direction(self, direction: threading.Lock) -> Iterator[None]:
        """Hold one direction of the link while the body sends or receives. If anything ends the body early, an
        interrupt too, half a frame is left behind, so the link is marked as lost.
        """
        if os.getpid() != self._process:
            raise HostLost(f"the link to {self.name} stayed in process {self._process}, the parent", host=self.name)
        with direction:
            if self._loss_reason is not None:
                raise self._loss_error()
            try:
                yield
            except (StreamBroken, OSError) as error:
                reason = str(error) if isinstance(error, StreamBroken) else f"can no longer be reached: {error}"
                ended_there = reason == ENDED or not isinstance(error, StreamBroken)
                self._mark_lost(f"{self.name} {reason}", ended_there=ended_there)
                raise self._loss_error() from error
            except BaseException:
                self._mark_lost(f"the link to {self.name} was interrupted in the middle of a message")
                raise

    def _loss_error(self) -> HostLost:
        """Return the error that every call on the lost link raises."""
        return HostLost(self._loss_reason or "", host=self._lost_host)

    def _mark_lost(
        self, reason: str, *, host: str | None = None, closed_here: bool = False, ended_there: bool = False
    ) -> None:
        """Mark the link as lost, unless it is already, and wake all threads that wait for it."""
        with self._state:
            if self._loss_reason is not None:
                return
            self._loss_reason, self._lost_host = reason, host or self.name
            self._closed_here, self.ended_there = closed_here, ended_there
            for connection in self._sockets:  # Wakes all threads that wait for them.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _run_heartbeats(self) -> None:
        """Exchange heartbeats until the link is lost, then call its actions and close it: the target of the thread."""
        reason = self._await_loss()
        self._mark_lost(reason, ended_there=reason.endswith(ENDED))
        with self._state:
            actions, self._actions = self._actions, []
        for action in [] if self._closed_here else actions:
            try:
                action(self._loss_error())
            except Exception:
                _log.exception("the action for the loss of %s failed", self.name)
        # The system may give the number of a closed socket to a new one at once, so nobody may be using these.
        with self._send_lock, self._receive_lock, self._state:
            for connection in self._sockets:
                connection.close()

    def _await_loss(self) -> str:
        """Exchange heartbeats until the link is lost. Return why."""
        limits = self.limits
        try:
            loss = beat_until_lost(self._sockets[1], limits.beat_seconds, limits.silence_seconds, self._note_heartbeat)
        except Exception as error:
            return f"{self.name} can no longer be watched: {error!r}"
        if loss is HeartbeatLoss.SILENT:
            return (
                f"{self.name} sent no heartbeat for {limits.silence_seconds:g} s: "
                "it hangs, was stopped, or the network is cut"
            )
        self._await_last_messages()
        return f"{self.name} {ENDED}"

    def _note_heartbeat(self, processor_seconds: float) -> None:
        """Note when the newest heartbeat came, and the processor time in it."""
        self.processor_seconds, self._last_heartbeat_time = processor_seconds, time.monotonic()

    def _await_last_messages(self) -> None:
        """Wait until all that arrived was received: the last message may be the reason why the other side ended."""
        deadline = time.monotonic() + LAST_MESSAGES_SECONDS
        while self._loss_reason is None and time.monotonic() < deadline:
            try:
                if not self._sockets[0].recv(1, socket.MSG_PEEK):
                    return
            except BlockingIOError:
                pass
            except OSError:
                return
            time.sleep(0.01)


# FrameStream: whole messages over a non-blocking stream socket.
#
# A frame is the message's length in eight bytes, big-endian, and the message.


HEADER = struct.Struct(">Q")

ENDED = "ended or closed its connection"


class StreamBroken(Exception):
    """The connection can carry no more frames. The text says why, after the name of the other side."""


class FrameStream:
    """Sends and receives whole messages over a non-blocking socket. One thread may send while another receives.

    After any exception the stream is at an unknown place in a frame, and must not be used again.
    """

    def __init__(self, connection: socket.socket, max_message_bytes: int) -> None:
        """`max_message_bytes`: bytes of the largest message, in both directions."""
        connection.setblocking(False)
        self._connection = connection
        self._max_message_bytes = max_message_bytes
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(connection, select.POLLOUT)

    def send(self, body: memoryview, stall_seconds: float) -> None:
        """Send message `body`, one-dimensional bytes. Raises StreamBroken if nothing is taken for `stall_seconds`."""
        if len(body) > self._max_message_bytes:
            raise StreamBroken(f"would get a message of {len(body)} bytes, and {self._max_message_bytes} are allowed")
        parts = [memoryview(HEADER.pack(len(body))), body]
        while parts:
            try:
                sent_count = self._connection.sendmsg(parts)
            except BlockingIOError:
                if not self._writable.poll(stall_seconds * 1000):
                    raise StreamBroken(f"took nothing of a message for {stall_seconds:g} s") from None
                continue
            while parts and sent_count >= len(parts[0]):
                sent_count -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent_count:]

    def receive(self, timeout: float | None) -> bytes:
        """Wait for a whole message, at most `timeout` seconds. Raises StreamBroken."""
        deadline = None if timeout is None else time.monotonic() + timeout
        header = bytearray(HEADER.size)
        self._receive_into(memoryview(header), timeout, deadline)
        (length,) = HEADER.unpack(header)
        if length > self._max_message_bytes:
            raise StreamBroken(f"announced a message of {length} bytes, and {self._max_message_bytes} are allowed")
        # BytesIO gives a writable view of its bytes, and then the bytes themselves: a message is never copied.
        buffer = BytesIO(bytes(length))
        with buffer.getbuffer() as view:
            self._receive_into(view, timeout, deadline)
        return buffer.getvalue()

    def _receive_into(self, view: memoryview, timeout: float | None, deadline: float | None) -> None:
        """Fill `view`. Raises StreamBroken at `deadline` (`timeout` is for its text), or if the connection ends."""
        position = 0
        while position < len(view):
            try:
                count = self._connection.recv_into(view[position:])
            except BlockingIOError:
                remaining_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
                if not self._readable.poll(remaining_ms):
                    raise StreamBroken(f"sent no whole message within {timeout:g} s") from None
                continue
            if not count:
                raise StreamBroken(ENDED)
            position += count


# Heartbeats over a connection of their own, so that no large message delays them.
#
# A heartbeat is the processor time that its process has used so far: eight bytes, big-endian, in milliseconds.


BEAT = struct.Struct(">Q")


class HeartbeatLoss(Enum):
    """Why heartbeats stopped."""

    SILENT = auto()
    """No heartbeat came in time."""
    ENDED = auto()
    """The connection ended, or this side shut it down."""


def beat_until_lost(
    pulse: socket.socket,
    beat_seconds: float,
    silence_seconds: float,
    on_heartbeat: Callable[[float], None] = lambda processor_seconds: None,
) -> HeartbeatLoss:
    """Send a heartbeat each `beat_seconds`, until none came for `silence_seconds` or the connection ended. Return
    which it was. Call `on_heartbeat` with the processor seconds in each heartbeat that comes.
    """
    pulse.setblocking(False)
    unsent, rest = b"", b""
    readable = select.poll()
    readable.register(pulse, select.POLLIN)
    last_beat_time = next_beat = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= next_beat:
            next_beat = now + beat_seconds
            unsent = unsent or BEAT.pack(int(1000 * time.process_time()))
            try:
                unsent = unsent[pulse.send(unsent) :]
            except BlockingIOError:
                pass  # It takes no heartbeats, so it will send none.
            except OSError:
                return HeartbeatLoss.ENDED
        # The clock is read before the socket: if this process was stopped itself, the heartbeats of that time count.
        silent = now - last_beat_time >= silence_seconds
        if readable.poll(max(0.0, min(next_beat, last_beat_time + silence_seconds) - now) * 1000):
            try:
                data = pulse.recv(4096)
            except OSError:
                return HeartbeatLoss.ENDED
            if not data:
                return HeartbeatLoss.ENDED
            last_beat_time = time.monotonic()
            rest += data
            if complete_size := len(rest) // BEAT.size * BEAT.size:
                on_heartbeat(BEAT.unpack(rest[complete_size - BEAT.size : complete_size])[0] / 1000)
                rest = rest[complete_size:]
        elif silent:
            return HeartbeatLoss.SILENT
