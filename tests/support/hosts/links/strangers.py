"""What strangers and workers do at the door of a group, byte by byte."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable

from cortexmlx.distributed.links.handshake import ConnectionPurpose, Hello, introduce_worker
from support.hosts.links.peers import IDENTITY, Group
from support.patience import PATIENCE


def open_sockets() -> set[tuple[int, int]]:
    """The sockets of this process, by number and inode: those of other tests may go at any time."""
    found = set()
    for number in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # the listing's own
            status = os.fstat(number)
            if stat.S_ISSOCK(status.st_mode):
                found.add((number, status.st_ino))
    return found


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it."""
    connection.settimeout(PATIENCE)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def say(what: bytes) -> Callable[[Group], None]:
    def knock(group: Group) -> None:
        with socket.create_connection(group.address) as connection:
            connection.sendall(what)
            assert is_closed(connection)

    return knock


def shake_hands(
    connection: socket.socket, group: Group, purpose: ConnectionPurpose, session: bytes = bytes(16)
) -> bytes:
    """Do as a worker of rank 0 does, and return what it said."""
    talk = introduce_worker(group.key, Hello(purpose, 0, group.epoch, session), IDENTITY)
    connection.settimeout(PATIENCE)
    said = b""
    with contextlib.suppress(StopIteration):
        wish = next(talk)
        while True:
            if isinstance(wish, bytes):
                said += wish
                connection.sendall(wish)
                wish = next(talk)
            else:
                wish = talk.send(connection.recv(wish, socket.MSG_WAITALL))
    return said
