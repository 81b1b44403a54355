"""Listener: the controller's door, where the workers of one epoch connect. Without mlx."""

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
    Hello,
    Identity,
    Purpose,
    StrangerError,
    StrangerKind,
    Talk,
    admit,
    check_key,
    difference,
)
from cortexmlx.distributed.links.link import DEFAULT_LIMITS, Link, LinkLimits
from cortexmlx.errors import HostLost, HostRefused

_log = logging.getLogger(__name__)

Address = tuple[str, int]
"""An IP address or host name, and a port."""

HANDSHAKE_SECONDS = 5.0
"""A handshake that takes longer is refused."""
VISITORS = 64
"""How many unknown connections may be open. One more sends the oldest away: a worker needs milliseconds, and tries
again.
"""
TICK_SECONDS = 0.1
"""The longest time between two calls of `check`."""
PAUSE_SECONDS = 0.01


@dataclass(slots=True)
class _HalfLink:
    """A worker whose connection for messages is here, and whose connection for heartbeats is not."""

    connection: socket.socket
    host: str
    session: bytes
    deadline: float


class Listener:
    """Takes one link for each rank of one epoch. Closes its ports when `accept` ends: nobody can knock while the group
    works.
    """

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
        self._allowed = [_network(text) for text in allowed_addresses]
        self._names = names
        self._limits = limits
        self._handshake_seconds = handshake_seconds
        self._visitors: dict[Visitor, None] = {}
        """In the order of their arrival."""
        self._halves: dict[int, _HalfLink] = {}
        self._links: dict[int, Link] = {}
        self._unfit: str | None = None
        """Why a worker that knows the key can never be part of this group."""
        self._logged: set[StrangerKind] = set()
        self._state = threading.Lock()
        self._accepting = False
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._doors: list[socket.socket] = []
        try:
            self._doors.extend(_door(address) for address in bind)
        except BaseException:
            self.close()
            raise
        self.addresses: list[Address] = [door.getsockname()[:2] for door in self._doors]
        """Where workers can connect, in the order of `bind`."""

    def accept(self, deadline: float, *, check: Callable[[], None] | None = None) -> list[Link]:
        """Wait until `deadline` (of `time.monotonic`) for all ranks, and return their links by rank. If one of them is
        lost later, all of them are, for the same reason: no rank can go on without the others.

        `check` is called several times a second. It may raise, for example because a worker's process ended.

        Raises HostRefused if a worker has another identity; HostLost if ranks are missing at the deadline, if one that
        was here is lost, or if the listener was closed.
        """
        with self._state:
            if self._closed or self._accepting:
                raise HostLost("this listener has served its epoch: make a new one, with a new epoch")
            self._accepting = True
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
                self._release()

    def close(self) -> None:
        """Stop listening. A thread in `accept` raises HostLost soon. Safe to call again."""
        with self._state:
            self._closed = True
            if not self._accepting:
                self._release()

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _await_all(self, deadline: float, check: Callable[[], None] | None) -> None:
        for door in self._doors:
            door.setblocking(False)
            self._selector.register(door, selectors.EVENT_READ, partial(self._open_door, door))
        while len(self._links) < self._ranks:
            if self._closed:
                raise HostLost("the listener was closed before all workers had joined")
            if check is not None:
                check()
            for link in self._links.values():
                if link.lost is not None:
                    raise HostLost(f"{link.lost}, before all workers had joined", host=link.name)
            now = time.monotonic()
            if now >= deadline:
                raise self._missing()
            self._drop_late(now)
            for event, _ in self._selector.select(min(TICK_SECONDS, deadline - now)):
                event.data()
                if self._unfit is not None:
                    raise HostRefused(self._unfit)

    def _missing(self) -> HostLost:
        missing = [rank for rank in range(self._ranks) if rank not in self._links]
        names = ", ".join(self._name(rank) for rank in missing)
        return HostLost(
            f"{len(missing)} of {self._ranks} workers did not join in time: {names}. See what they print, and whether "
            f"they can reach {', '.join(f'{host}:{port}' for host, port in self.addresses)}",
            host=self._name(missing[0]),
        )

    def _drop_late(self, now: float) -> None:
        for visitor in [visitor for visitor in self._visitors if now >= visitor.deadline]:
            self._refuse(visitor, StrangerError(StrangerKind.SLOW))
        for rank, half in list(self._halves.items()):
            if now >= half.deadline:
                self._drop_half(rank, half)

    # -- strangers ----------------------------------------------------------------------------------------------------

    def _open_door(self, door: socket.socket) -> None:
        try:
            connection, address = door.accept()
        except OSError:  # It went away already, or this process may open no more files now.
            time.sleep(PAUSE_SECONDS)
            return
        host = address[0]
        if not self._is_allowed(host):
            connection.close()
            self._log_once(host, StrangerError(StrangerKind.ADDRESS))
            return
        if len(self._visitors) >= VISITORS:
            oldest = next(iter(self._visitors))
            self._refuse(oldest, StrangerError(StrangerKind.CROWD, f"{VISITORS} are allowed"))
        deadline = time.monotonic() + self._handshake_seconds
        visitor = Visitor(connection, host, deadline, admit(self._key, partial(self._judge, host)))
        self._visitors[visitor] = None
        self._selector.register(connection, selectors.EVENT_READ, partial(self._listen_to, visitor))

    def _listen_to(self, visitor: Visitor) -> None:
        if visitor not in self._visitors:
            return  # Refused by an earlier event of this round.
        try:
            hello = visitor.read()
        except StrangerError as error:
            self._refuse(visitor, error)
        except OSError:
            self._refuse(visitor, StrangerError(StrangerKind.LEFT))
        else:
            if hello is not None:
                self._forget(visitor)
                self._welcome(visitor, hello)

    def _refuse(self, visitor: Visitor, error: StrangerError) -> None:
        self._forget(visitor)
        visitor.connection.close()
        self._log_once(visitor.host, error)

    def _forget(self, visitor: Visitor) -> None:
        del self._visitors[visitor]
        self._selector.unregister(visitor.connection)

    def _log_once(self, host: str, error: StrangerError) -> None:
        if error.kind not in self._logged:
            self._logged.add(error.kind)
            _log.warning("refused a connection from %s: %s. More like it are refused without a word.", host, error)

    def _is_allowed(self, host: str) -> bool:
        address: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(host)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._allowed)

    # -- workers ------------------------------------------------------------------------------------------------------

    def _judge(self, host: str, hello: Hello, identity: Identity) -> str | None:
        """Why a worker that knows the key is refused, or None."""
        if hello.epoch != self._epoch:
            return f"its group of epoch {hello.epoch} was given up, and this is epoch {self._epoch}"
        if hello.rank >= self._ranks:
            return f"there is no rank {hello.rank} in a group of {self._ranks}"
        if hello.rank in self._links:
            return f"rank {hello.rank} is here already"
        if different := difference(self._name(hello.rank, host), identity, self._identity):
            self._unfit = different
            return different
        if hello.purpose is Purpose.HEARTBEATS:
            half = self._halves.get(hello.rank)
            if half is None or half.session != hello.session:
                return f"rank {hello.rank} is here already, or its first connection is gone"
        return None

    def _welcome(self, visitor: Visitor, hello: Hello) -> None:
        rank, connection = hello.rank, visitor.connection
        if hello.purpose is Purpose.MESSAGES:
            if rank in self._halves:  # A worker that began again.
                self._drop_half(rank, self._halves[rank])
            deadline = time.monotonic() + self._handshake_seconds
            self._halves[rank] = half = _HalfLink(connection, visitor.host, hello.session, deadline)
            # A worker says nothing until its link is complete. So what can be read is its end.
            self._selector.register(connection, selectors.EVENT_READ, partial(self._drop_half, rank, half))
        else:
            half = self._halves.pop(rank)
            self._selector.unregister(half.connection)
            self._links[rank] = Link(half.connection, connection, self._name(rank, half.host), self._limits)

    def _drop_half(self, rank: int, half: _HalfLink) -> None:
        if self._halves.get(rank) is half:
            del self._halves[rank]
            self._selector.unregister(half.connection)
            half.connection.close()

    def _name(self, rank: int, host: str | None = None) -> str:
        if self._names is not None:
            return self._names[rank]
        return f"rank {rank}" if host is None else f"{host} (rank {rank})"

    def _release(self) -> None:
        for visitor in list(self._visitors):
            visitor.connection.close()
        for half in self._halves.values():
            half.connection.close()
        for door in self._doors:
            door.close()
        self._visitors.clear()
        self._halves.clear()
        self._selector.close()


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text.partition("%")[0], strict=False)
    except ValueError as error:
        raise HostRefused(f"{text!r} is no IP address or network: {error}") from error


def _door(address: str) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        door = socket.socket(family, kind, protocol)
    except OSError as error:
        raise HostRefused(f"cannot listen on {address}: {error}") from error
    try:
        door.bind(where)
        door.listen(socket.SOMAXCONN)
    except OSError as error:
        door.close()
        raise HostRefused(f"cannot listen on {address}: {error}. It must be an address of this machine") from error
    return door


def _lose_together(links: Sequence[Link]) -> None:
    def fail_all(error: HostLost) -> None:
        for link in links:
            link.fail(error)

    for link in links:
        link.when_lost(fail_all)


# Visitor: a connection to the controller whose other side is not known yet.


class Visitor:
    """Carries the bytes of one handshake, on a non-blocking socket. It holds a few kilobytes at most."""

    def __init__(self, connection: socket.socket, host: str, deadline: float, talk: Talk[Hello]) -> None:
        """`deadline`: of `time.monotonic`, for the whole handshake, however often something comes."""
        connection.setblocking(False)
        self.connection = connection
        self.host = host
        self.deadline = deadline
        self._talk = talk
        self._read = b""
        self._wanted = 0
        self._hello: Hello | None = None
        self._advance(None)

    def read(self) -> Hello | None:
        """Go on with what has arrived. Return the hello if the handshake is complete. Raises StrangerError, OSError."""
        while self._hello is None:
            try:
                # Never more than is wanted: what follows the handshake belongs to the link.
                data = self.connection.recv(self._wanted - len(self._read))
            except BlockingIOError:
                return None
            if not data:
                raise StrangerError(StrangerKind.LEFT)
            self._read += data
            if len(self._read) == self._wanted:
                whole, self._read = self._read, b""
                self._advance(whole)
        return self._hello

    def _advance(self, given: bytes | None) -> None:
        try:
            wish = next(self._talk) if given is None else self._talk.send(given)
            while isinstance(wish, bytes):
                # It fits into the empty send buffer of the system, or the other side plays games.
                if self.connection.send(wish) < len(wish):
                    raise StrangerError(StrangerKind.SLOW)
                wish = next(self._talk)
            self._wanted = wish
        except BlockingIOError:
            raise StrangerError(StrangerKind.SLOW) from None
        except StopIteration as end:
            self._hello = end.value
