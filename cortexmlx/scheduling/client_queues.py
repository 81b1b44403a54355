"""Client queues: the waiting jobs of each client, and the clients in the order of their turns. Without mlx."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from cortexmlx.scheduling.fair_share import Client, FairShare
from cortexmlx.scheduling.job import Job

T = TypeVar("T")
Order = tuple[float, int]

_FEW = 16
"""How many removed things a heap may always keep."""


class Ordered(Generic[T]):
    """Things by their order. No two things have the same order, but a thing may come back with the order of its removed
    entry; then the later entry counts.

    It is a heap. Removed things stay in it until they come to the top, or make up half of it. So `add` and `remove`
    cost O(log n) on average, wherever the thing is, and `first` costs O(1).
    """

    def __init__(self) -> None:
        self._orders: dict[T, Order] = {}
        self._heap: list[tuple[Order, int, T]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._orders)

    def __iter__(self) -> Iterator[T]:
        """Yield all things, in no particular order."""
        return iter(self._orders)

    @property
    def first(self) -> T:
        """The thing that comes first. There must be one."""
        return self._heap[0][2]

    def add(self, order: Order, thing: T) -> None:
        """Add a thing at its place. A thing that is here already moves there."""
        self._orders[thing] = order
        self._added += 1
        heappush(self._heap, (order, self._added, thing))
        self._tidy()

    def remove(self, thing: T) -> None:
        """Remove a thing."""
        del self._orders[thing]
        self._tidy()

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._orders) + _FEW:
            self._heap = [(order, i, thing) for i, (thing, order) in enumerate(self._orders.items())]
            heapify(self._heap)
        while self._heap and self._orders.get(self._heap[0][2]) != self._heap[0][0]:
            heappop(self._heap)


class ClientQueues:
    """The waiting jobs. Each client has a queue, ordered by priority and age, and `turns` orders the queues. A queue
    can be passed over as a whole, however long it is.
    """

    def __init__(self, turns: FairShare) -> None:
        self._turns = turns
        self._lines: dict[Client, Ordered[Job]] = {}
        self._heads: Ordered[Client] = Ordered()
        self._passed: list[Client] = []

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Job]:
        """Yield all jobs, in no particular order."""
        return (job for line in self._lines.values() for job in line)

    @property
    def first(self) -> Job | None:
        """The first job of the client whose turn it is, without clients that are passed over; None if there is none."""
        return self._lines[self._heads.first].first if self._heads else None

    def add(self, job: Job) -> None:
        """Put a job at its place in its client's queue."""
        line = self._lines.get(job.client)
        if line is None:
            line = self._lines[job.client] = Ordered()
            self._heads.add(self._turns.place(job.client), job.client)
        line.add(job.order, job)

    def remove(self, job: Job) -> None:
        """Take a job out of its client's queue, at whatever place it is."""
        line = self._lines[job.client]
        line.remove(job)
        if not line:
            self._heads.remove(job.client)
            del self._lines[job.client]

    def move(self, client: Client) -> None:
        """Move a client's queue to its place after the client's account has changed. No client may be passed over
        now.
        """
        if client in self._lines:
            self._heads.add(self._turns.place(client), client)

    def pass_over(self, client: Client) -> None:
        """Leave a client's whole queue out until `bring_back`. Costs O(log clients)."""
        self._heads.remove(client)
        self._passed.append(client)

    def bring_back(self) -> None:
        """End all calls of `pass_over`."""
        for client in self._passed:
            self._heads.add(self._turns.place(client), client)
        self._passed.clear()
