"""Listener: the controller's listening sockets, to which the workers of one epoch connect. Without mlx."""

from __future__ import annotations

import ipaddress
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cortexmlx.distributed.links.handshake import (
    ConnectionPurpose,
    HandshakeError,
    HandshakeFault,
    HandshakeSide,
    Hello,
    Identity,
    admit_worker,
    check_key,
    describe_difference,
)
from cortexmlx.distributed.links.link import DEFAULT_LIMITS, LinkLimits, WorkerLink
from cortexmlx.errors import HostLost, HostRefused

_log = logging.getLogger(__name__)

Address = tuple[str, int]
"""An IP address or host name, and a port."""

HANDSHAKE_SECONDS = 5.0
"""A handshake that takes longer is refused."""
PENDING_CONNECTIONS = 64
"""How many unknown connections may be open. One more sends the oldest away: a worker needs milliseconds, and tries
again.
"""
TICK_SECONDS = 0.1
"""The longest time between two calls of `check`."""
PAUSE_SECONDS = 0.01


@dataclass(slots=True)
class _HalfLink:
    """A worker's connection for messages, while the one for heartbeats is still missing."""

    connection: socket.socket
    host: str
    session: bytes
    deadline: float


class Listener:
    """Accepts one link from each rank of one epoch. Its ports close when `accept` ends: nobody can connect later."""

    def __init__(
        self,
        key: bytes,
        epoch: int,
        ranks: int,
        identity: Identity,
        allowed_addresses: Sequence[str],
        *,
        names: Sequence[str] | None = None,
        bind: Sequence[str] = ("127.0.0.1",),
        limits: LinkLimits = DEFAULT_LIMITS,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        """Listen.

        `key`: 32 random bytes (`handshake.new_key`).
        `epoch`: the number of this start of the group.
        `ranks`: the number of workers.
        `identity`: what must be equal on both sides: {"cortexmlx": "0.5.0", "mlx": "0.31.1", "weights": "..."}.
        `allowed_addresses`: IP addresses or networks ("10.0.0.0/24") of the workers. Others are closed at once.
        `names`: the workers by rank, as a user would name them. By default the addresses that they connect from.
        `bind`: addresses of this machine, each with a port of its own that the system chooses.

        Raises HostRefused if an address is none, or none of this machine.
        """
        check_key(key)
        self._key = key
        self._epoch = epoch
        self._ranks = ranks
        self._identity = dict(identity)
        self._allowed_networks = [_parse_network(text) for text in allowed_addresses]
        self._names = names
        self._limits = limits
        self._handshake_seconds = handshake_seconds
        self._visitors: dict[PendingConnection, None] = {}
        """In the order of their arrival."""
        self._halves: dict[int, _HalfLink] = {}
        self._links: dict[int, WorkerLink] = {}
        self._mismatch_reason: str | None = None
        """Why a worker that knows the key can never be part of this group."""
        self._logged_faults: set[HandshakeFault] = set()
        self._state = threading.Lock()
        self._is_accepting = False
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._server_sockets: list[socket.socket] = []
        try:
            self._server_sockets.extend(_listening_socket(address) for address in bind)
        except BaseException:
            self.close()
            raise
        self.addresses: list[Address] = [server_socket.getsockname()[:2] for server_socket in self._server_sockets]
        """Where workers can connect, in the order of `bind`."""

    def accept(self, deadline: float, *, check: Callable[[], None] | None = None) -> list[WorkerLink]:
        """Wait until `deadline` (of `time.monotonic`) for all ranks, and return their links by rank. If one of them is
        lost later, all of them are, for the same reason: no rank can go on without the others.

        `check` is called several times a second. It may raise, for example because a worker's process ended.

        Raises HostRefused if a worker has another identity; HostLost if ranks are missing at the deadline, if one that
        was here is lost, or if the listener was closed.
        """
        with self._state:
            if self._closed or self._is_accepting:
                raise HostLost("this listener has served its epoch: make a new one, with a new epoch")
            self._is_accepting = True
        try:
            self._await_all(deadline, check)
            links = [self._links[rank] for rank in range(self._ranks)]
            _lose_together(links)
            return links
        except BaseException:
            for link in self._links.values():
                link.close()
            raise
        finally:
            with self._state:
                self._closed = True
                self._close_all()

    def close(self) -> None:
        """Stop listening. A thread in `accept` raises HostLost soon. Safe to call again."""
        with self._state:
            self._closed = True
            if not self._is_accepting:
                self._close_all()

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _await_all(self, deadline: float, check: Callable[[], None] | None) -> None:
        """Handle connections until all ranks have joined. Raises as `accept` says."""
        for server_socket in self._server_sockets:
            server_socket.setblocking(False)
            self._selector.register(
                server_socket, selectors.EVENT_READ, partial(self._accept_connection, server_socket)
            )
        while len(self._links) < self._ranks:
            if self._closed:
                raise HostLost("the listener was closed before all workers had joined")
            if check is not None:
                check()
            for link in self._links.values():
                if link.loss_reason is not None:
                    raise HostLost(f"{link.loss_reason}, before all workers had joined", host=link.name)
            now = time.monotonic()
            if now >= deadline:
                raise self._missing_error()
            self._drop_late(now)
            for event, _ in self._selector.select(min(TICK_SECONDS, deadline - now)):
                event.data()
                if self._mismatch_reason is not None:
                    raise HostRefused(self._mismatch_reason)

    def _missing_error(self) -> HostLost:
        """Return the error that names the ranks that did not join in time."""
        missing_ranks = [rank for rank in range(self._ranks) if rank not in self._links]
        names = ", ".join(self._worker_name(rank) for rank in missing_ranks)
        return HostLost(
            f"{len(missing_ranks)} of {self._ranks} workers did not join in time: {names}. See what they print, and "
            f"whether they can reach {', '.join(f'{host}:{port}' for host, port in self.addresses)}",
            host=self._worker_name(missing_ranks[0]),
        )

    def _drop_late(self, now: float) -> None:
        """Refuse connections whose handshake is late, and workers whose second connection is late."""
        for visitor in [visitor for visitor in self._visitors if now >= visitor.deadline]:
            self._refuse(visitor, HandshakeError(HandshakeFault.SLOW))
        for rank, half in list(self._halves.items()):
            if now >= half.deadline:
                self._drop_half(rank, half)

    # -- strangers ----------------------------------------------------------------------------------------------------

    def _accept_connection(self, server_socket: socket.socket) -> None:
        """Accept a connection on a listening socket, and begin its handshake if its address is allowed."""
        try:
            connection, address = server_socket.accept()
        except OSError:  # It went away already, or this process may open no more files now.
            time.sleep(PAUSE_SECONDS)
            return
        host = address[0]
        if not self._is_allowed(host):
            connection.close()
            self._log_once(host, HandshakeError(HandshakeFault.ADDRESS))
            return
        if len(self._visitors) >= PENDING_CONNECTIONS:
            oldest_visitor = next(iter(self._visitors))
            self._refuse(oldest_visitor, HandshakeError(HandshakeFault.CROWD, f"{PENDING_CONNECTIONS} are allowed"))
        deadline = time.monotonic() + self._handshake_seconds
        visitor = PendingConnection(
            connection, host, deadline, admit_worker(self._key, partial(self._why_refused, host))
        )
        self._visitors[visitor] = None
        self._selector.register(connection, selectors.EVENT_READ, partial(self._continue_handshake, visitor))

    def _continue_handshake(self, visitor: PendingConnection) -> None:
        """Continue a handshake with what has arrived. Take the worker in if the handshake is complete."""
        if visitor not in self._visitors:
            return  # Refused by an earlier event of this round.
        try:
            hello = visitor.read_hello()
        except HandshakeError as error:
            self._refuse(visitor, error)
        except OSError:
            self._refuse(visitor, HandshakeError(HandshakeFault.LEFT))
        else:
            if hello is not None:
                self._stop_watching(visitor)
                self._add_worker(visitor, hello)

    def _refuse(self, visitor: PendingConnection, error: HandshakeError) -> None:
        """Close a connection, and log why."""
        self._stop_watching(visitor)
        visitor.connection.close()
        self._log_once(visitor.host, error)

    def _stop_watching(self, visitor: PendingConnection) -> None:
        """Stop watching a connection whose handshake is over."""
        del self._visitors[visitor]
        self._selector.unregister(visitor.connection)

    def _log_once(self, host: str, error: HandshakeError) -> None:
        """Log why a connection was refused, once for each kind of reason."""
        if error.kind not in self._logged_faults:
            self._logged_faults.add(error.kind)
            _log.warning("refused a connection from %s: %s. More like it are refused without a word.", host, error)

    def _is_allowed(self, host: str) -> bool:
        """Return whether an address is one of the workers' hosts."""
        address: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(host)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._allowed_networks)

    # -- workers ------------------------------------------------------------------------------------------------------

    def _why_refused(self, host: str, hello: Hello, identity: Identity) -> str | None:
        """Return why a worker that knows the key is refused; None if it is accepted."""
        if hello.epoch != self._epoch:
            return f"its group of epoch {hello.epoch} was given up, and this is epoch {self._epoch}"
        if hello.rank >= self._ranks:
            return f"there is no rank {hello.rank} in a group of {self._ranks}"
        if hello.rank in self._links:
            return f"rank {hello.rank} is here already"
        if different := describe_difference(self._worker_name(hello.rank, host), identity, self._identity):
            self._mismatch_reason = different
            return different
        if hello.purpose is ConnectionPurpose.HEARTBEATS:
            half = self._halves.get(hello.rank)
            if half is None or half.session != hello.session:
                return f"rank {hello.rank} is here already, or its first connection is gone"
        return None

    def _add_worker(self, visitor: PendingConnection, hello: Hello) -> None:
        """Keep an accepted worker's connection. Make the worker's link if both connections are there."""
        rank, connection = hello.rank, visitor.connection
        if hello.purpose is ConnectionPurpose.MESSAGES:
            if rank in self._halves:  # A worker that began again.
                self._drop_half(rank, self._halves[rank])
            deadline = time.monotonic() + self._handshake_seconds
            self._halves[rank] = half = _HalfLink(connection, visitor.host, hello.session, deadline)
            # A worker says nothing until its link is complete. So what can be read is its end.
            self._selector.register(connection, selectors.EVENT_READ, partial(self._drop_half, rank, half))
        else:
            half = self._halves.pop(rank)
            self._selector.unregister(half.connection)
            self._links[rank] = WorkerLink(
                half.connection, connection, self._worker_name(rank, half.host), self._limits
            )

    def _drop_half(self, rank: int, half: _HalfLink) -> None:
        """Close the connection of a worker whose other connection is still missing."""
        if self._halves.get(rank) is half:
            del self._halves[rank]
            self._selector.unregister(half.connection)
            half.connection.close()

    def _worker_name(self, rank: int, host: str | None = None) -> str:
        """Return a worker's name for people."""
        if self._names is not None:
            return self._names[rank]
        return f"rank {rank}" if host is None else f"{host} (rank {rank})"

    def _close_all(self) -> None:
        """Close all sockets except those of links."""
        for visitor in list(self._visitors):
            visitor.connection.close()
        for half in self._halves.values():
            half.connection.close()
        for server_socket in self._server_sockets:
            server_socket.close()
        self._visitors.clear()
        self._halves.clear()
        self._selector.close()


def _parse_network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Parse an IP address or network. Raises HostRefused."""
    try:
        return ipaddress.ip_network(text.partition("%")[0], strict=False)
    except ValueError as error:
        raise HostRefused(f"{text!r} is no IP address or network: {error}") from error


def _listening_socket(address: str) -> socket.socket:
    """Return a socket that listens on an address of this machine. Raises HostRefused."""
    try:
        family, kind, protocol, _, socket_address = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        server_socket = socket.socket(family, kind, protocol)
    except OSError as error:
        raise HostRefused(f"cannot listen on {address}: {error}") from error
    try:
        server_socket.bind(socket_address)
        server_socket.listen(socket.SOMAXCONN)
    except OSError as error:
        server_socket.close()
        raise HostRefused(f"cannot listen on {address}: {error}. It must be an address of this machine") from error
    return server_socket


def _lose_together(links: Sequence[WorkerLink]) -> None:
    """Make all links fail as soon as one of them is lost."""

    def fail_all(error: HostLost) -> None:
        for link in links:
            link.fail(error)

    for link in links:
        link.when_lost(fail_all)


# Pending connections: a connection to the controller whose other side is not known yet.


class PendingConnection:
    """A connection to the controller in its handshake, on a non-blocking socket. It holds a few kilobytes at most."""

    def __init__(self, connection: socket.socket, host: str, deadline: float, talk: HandshakeSide[Hello]) -> None:
        """`deadline`: of `time.monotonic`, for the whole handshake, however often something comes."""
        connection.setblocking(False)
        self.connection = connection
        self.host = host
        self.deadline = deadline
        self._talk = talk
        self._read = b""
        self._wanted_count = 0
        self._hello: Hello | None = None
        self._advance(None)

    def read_hello(self) -> Hello | None:
        """Continue with what has arrived. Return the worker's hello once complete. Raises HandshakeError, OSError."""
        while self._hello is None:
            try:
                # Never more than is wanted: what follows the handshake belongs to the link.
                data = self.connection.recv(self._wanted_count - len(self._read))
            except BlockingIOError:
                return None
            if not data:
                raise HandshakeError(HandshakeFault.LEFT)
            self._read += data
            if len(self._read) == self._wanted_count:
                wanted_bytes, self._read = self._read, b""
                self._advance(wanted_bytes)
        return self._hello

    def _advance(self, received: bytes | None) -> None:
        """Pass the bytes that the handshake waits for to it, and send its reply."""
        try:
            wish = next(self._talk) if received is None else self._talk.send(received)
            while isinstance(wish, bytes):
                # It fits into the empty send buffer of the system, or the other side plays games.
                if self.connection.send(wish) < len(wish):
                    raise HandshakeError(HandshakeFault.SLOW)
                wish = next(self._talk)
            self._wanted_count = wish
        except BlockingIOError:
            raise HandshakeError(HandshakeFault.SLOW) from None
        except StopIteration as end:
            self._hello = end.value
