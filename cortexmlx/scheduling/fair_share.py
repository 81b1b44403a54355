"""Fair shares: the tokens that each client has had, which decide whose turn it is. Without mlx."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from cortexmlx.scheduling.job import Job

QUANTUM = 32
"""Tokens that each waiting client may still have before a new client. It must be above 0: otherwise a stream of new
clients could keep an older one waiting for ever.
"""

ADVANCE = 256
"""Tokens of an answer that are charged when it begins, since its length is unknown. Without an advance, many answers
could begin at the price of one long prompt. Unused tokens are paid back.
"""

Client = str | None
Place = tuple[int, int]
"""A client's place among the waiting clients: its tokens, then the number of its arrival."""


@dataclass(slots=True)
class _Account:
    """The account of one client."""

    tokens: int
    """Tokens that it has had, on a scale that all clients share."""
    number: int
    """The number of its arrival."""
    requests: int = 0
    """How many of its requests wait, parked ones included."""
    rows: int = 0
    """How many of its requests run."""
    owed: bool = False
    """Whether it is idle, has had more than others, and is therefore in the heap of such clients."""


class FairShare:
    """The accounts of the clients.

    The client with the fewest tokens is next: a deficit round robin, whose deficit is the distance to the others. A
    request costs the prompt tokens that must be computed and the tokens of its answer. `now` is the account of the
    client that was served last. A client without requests begins again at `now + QUANTUM` tokens, so it cannot save
    up turns. If it has had more than that, it keeps its own account. Accounts of idle clients are dropped as soon as
    they make no difference, and all accounts when no request waits or runs.
    """

    def __init__(self) -> None:
        self.now = 0
        self._accounts: dict[Client, _Account] = {}
        self._owed: list[tuple[int, int, Client]] = []
        self._arrivals = 0
        self._open = 0

    def __len__(self) -> int:
        """Return how many accounts are kept."""
        return len(self._accounts)

    def tokens(self, client: Client) -> int:
        """Return the tokens that a waiting or running client has had."""
        return self._accounts[client].tokens

    def place(self, client: Client) -> Place:
        """Return the place of a waiting or running client."""
        account = self._accounts[client]
        return account.tokens, account.number

    def arrive(self, job: Job) -> None:
        """Note that a job waits, for the first time or because it lost its row.

        A job that lost its row has had its turn, so it brings its client to the front. What it did not generate is paid
        back.
        """
        account = self._accounts.setdefault(job.client, _Account(0, 0))
        if job.generation:
            self._pay(job, job.price + job.generated)
            account.rows -= 1
            self._open -= 1
        if not account.requests:
            self._arrivals += 1
            account.number = self._arrivals
            account.tokens = max(account.tokens, self.now + (0 if job.generation else QUANTUM))
        account.requests += 1
        self._open += 1

    def withdraw(self, job: Job) -> None:
        """Note that a waiting job has ended."""
        self._accounts[job.client].requests -= 1
        self._one_request_less(job.client)

    def begin(self, job: Job) -> None:
        """Note that a waiting job got a row. Its client pays for the prompt tokens that are not cached, and an
        advance.
        """
        account = self._accounts[job.client]
        self.now = max(self.now, account.tokens)
        account.requests -= 1
        account.rows += 1
        if not job.generation:
            job.price = len(job.tokens) - job.num_computed_tokens
        self.settle(job)
        self._drop_equal()

    def settle(self, job: Job) -> bool:
        """Charge what a running job has generated beyond what is paid. Return whether that was anything."""
        return self._pay(job, job.price + max(job.generated, _advance(job)))

    def end(self, job: Job) -> None:
        """Note that a running job has ended. What it did not generate is paid back."""
        self._pay(job, job.price + job.generated)
        self._accounts[job.client].rows -= 1
        self._one_request_less(job.client)

    def clear(self) -> None:
        """Forget all accounts."""
        self.now = self._open = 0
        self._accounts.clear()
        self._owed.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError if an account is lost, or kept for nothing."""
        assert self._open == sum(a.requests + a.rows for a in self._accounts.values()), "requests were counted wrongly"
        assert self._open or not self._accounts, "accounts are kept while nobody waits or runs"
        assert {client for *_, client in self._owed} == {c for c, a in self._accounts.items() if a.owed}
        for client, account in self._accounts.items():
            idle = not account.requests and not account.rows
            assert account.owed or not idle, f"the account of {client} is kept for nothing"

    def _pay(self, job: Job, total: int) -> bool:
        due, job.paid = total - job.paid, total
        self._accounts[job.client].tokens += due
        return due != 0

    def _one_request_less(self, client: Client) -> None:
        """Note that one of a client's requests has ended."""
        self._open -= 1
        if not self._open:
            self.clear()
        elif not self._accounts[client].owed:
            self._drop_or_owe(client)

    def _drop_equal(self) -> None:
        """Drop the accounts of idle clients that are no higher than that of a new client."""
        while self._owed and self._owed[0][0] <= self.now + QUANTUM:
            *_, client = heappop(self._owed)
            self._accounts[client].owed = False
            self._drop_or_owe(client)

    def _drop_or_owe(self, client: Client) -> None:
        """If a client is idle, drop its account, or keep it until the others have had as much."""
        account = self._accounts[client]
        if account.requests or account.rows:
            return
        if account.tokens <= self.now + QUANTUM:
            del self._accounts[client]
        else:
            account.owed = True
            self._arrivals += 1
            heappush(self._owed, (account.tokens, self._arrivals, client))


def size(job: Job) -> int:
    """Return the tokens that a job needs to begin: its own, cached or not, and those of its answer that are charged in
    advance.
    """
    return len(job.tokens) + max(0, _advance(job) - job.generated)


def _advance(job: Job) -> int:
    return min(ADVANCE, job.max_new_tokens)


# Client queues: the waiting jobs of each client, and the clients in the order of their turns.


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
