"""Places: how many requests are open at once, shared among clients so that none locks the others out."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from cortexmlx.server.http import SMALL, Refused

SLOW_SECONDS = 5.0
"""A body that has been arriving for longer gives its place to another request of its client, if all are taken."""

BODIES = 16
"""Bodies of the greatest size that open requests may have in memory."""


class Places:
    """At most `most` open requests of `clients` clients. Half of the places are kept for single clients, as many for
    each. The other half is for whoever comes first. If there are too few to keep one for each, a client has half of
    them at most. Their bodies have at most `most_bytes` together, those of one client of several half of it. Small
    bodies are never refused.
    """

    def __init__(self, most: int, clients: int = 1, most_bytes: int = sys.maxsize) -> None:
        self._most = most
        self._others = max(0, clients - 1)
        shared = clients > 1
        self._own = most // (2 * clients) if shared else 0
        self._most_of_one = (most + 1) // 2 if shared and not self._own else most
        self._most_bytes = most_bytes
        self._most_bytes_of_one = most_bytes // 2 if shared else most_bytes
        self._open: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._slow: dict[Place, asyncio.Timeout] = {}

    @property
    def open(self) -> int:
        """How many requests are open."""
        return self._open.total()

    def take(self, client: str = "") -> Place:
        """Return a place for a request. Raises Refused if there is none for this client."""
        if not self._has_room(client) and not self._cut_a_slow_body(client):
            mine = self._open[client]
            whose = f"{mine} requests" if mine == self.open else f"{mine} requests of this key, and others,"
            raise _later(f"{whose} run or wait")
        self._open[client] += 1
        return Place(self, client)

    def _has_room(self, client: str) -> bool:
        mine, free = self._open[client], self._most - self.open
        if mine < self._own:
            return free > 0
        taken = sum(min(self._own, count) for other, count in self._open.items() if other != client)
        return free > self._own * self._others - taken and mine < self._most_of_one

    def _has_memory(self, client: str, more: int) -> bool:
        mine, all_bytes = self._bytes[client] + more, self._bytes.total() + more
        return mine <= self._most_bytes_of_one and all_bytes <= self._most_bytes

    def _cut_a_slow_body(self, client: str) -> bool:
        """End the oldest of this client's bodies that arrive slowly. Return whether there is one."""
        now = asyncio.get_running_loop().time()
        for place, limit in self._slow.items():
            if place.client == client and now - place.since >= SLOW_SECONDS:
                place.leave()
                limit.reschedule(now)
                return True
        return False


class Place:
    """The place of one request, until it is left."""

    def __init__(self, places: Places, client: str) -> None:
        self.client = client
        self.since = 0.0
        """When its body began to arrive, on the loop's clock."""
        self._places = places
        self._left = False
        self._size = 0

    @contextmanager
    def while_it_arrives(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Let the body of the request be cut with `limit` in this context, if it arrives slowly and others wait."""
        self.since = asyncio.get_running_loop().time()
        self._places._slow[self] = limit
        try:
            yield
        finally:
            self._places._slow.pop(self, None)

    def hold(self, size: int) -> None:
        """Say that the body has so many bytes by now. Raises Refused if bodies take too much memory."""
        if self._left:
            return
        while size > SMALL and not self._places._has_memory(self.client, size - self._size):
            if not self._places._cut_a_slow_body(self.client):
                raise _later("the bodies of other requests take the memory that there is for them")
        if not self._left:
            self._places._bytes[self.client] += size - self._size
            self._size = size

    def leave(self) -> None:
        """Leave it. Safe to call again."""
        if not self._left:
            self._left = True
            self._places._slow.pop(self, None)
            self._places._open[self.client] -= 1
            self._places._bytes[self.client] -= self._size
            if not self._places._open[self.client]:
                del self._places._open[self.client], self._places._bytes[self.client]

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()


def _later(why: str) -> Refused:
    return Refused(429, f"{why}: come again later", "overloaded", {"retry-after": "1"})
