"""Fair shares: counts the tokens that each client has had, which decide whose turn it is. Without mlx."""

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
    """One client's token count, and how many of its requests wait and run."""

    tokens: int
    """Its place on a scale that all clients share: the tokens that it has had, and where it began, near `now`."""
    number: int
    """The number of its arrival."""
    requests: int = 0
    """How many of its requests wait, parked ones included."""
    rows: int = 0
    """How many of its requests run."""
    is_idle_debtor: bool = False
    """Whether it is idle, has had more than others, and is therefore in the heap of such clients."""


class FairShare:
    """Counts the tokens that each client was charged. The counts decide whose turn it is.

    The client with the fewest tokens is next: a deficit round robin, whose deficit is the distance to the others. A
    request costs the prompt tokens that must be computed and the tokens of its answer. `now` is how many tokens the
    account of the client that was served last had then. A client of which no request waits begins again at
    `now + QUANTUM` tokens, so it cannot save up turns. If it has had more than that, it keeps its own account. Accounts
    of idle clients are dropped as soon as they make no difference, and all accounts when no request waits or runs.
    """

    def __init__(self) -> None:
        self.now = 0
        self._accounts: dict[Client, _Account] = {}
        self._idle_debtors: list[tuple[int, int, Client]] = []
        self._arrivals = 0
        self._open = 0

    def __len__(self) -> int:
        """Return how many accounts are kept."""
        return len(self._accounts)

    def tokens(self, client: Client) -> int:
        """Return how many tokens a waiting or running client was charged."""
        return self._accounts[client].tokens

    def place(self, client: Client) -> Place:
        """Return the place of a waiting or running client in the order of turns."""
        account = self._accounts[client]
        return account.tokens, account.number

    def arrive(self, job: Job) -> None:
        """Count a job as waiting, for the first time or because it lost its row.

        A job that lost its row has had its turn, so it brings its client to the front. What it did not generate is paid
        back.
        """
        account = self._accounts.setdefault(job.client, _Account(0, 0))
        if job.generation:
            self._charge_up_to(job, job.price + job.num_generated)
            account.rows -= 1
            self._open -= 1
        if not account.requests:
            self._arrivals += 1
            account.number = self._arrivals
            account.tokens = max(account.tokens, self.now + (0 if job.generation else QUANTUM))
        account.requests += 1
        self._open += 1

    def withdraw(self, job: Job) -> None:
        """Remove a waiting job that has ended from its client's account."""
        self._accounts[job.client].requests -= 1
        self._close_request(job.client)

    def begin(self, job: Job) -> None:
        """Charge a job that got a row: for the prompt tokens that are not cached, and an advance for its answer."""
        account = self._accounts[job.client]
        self.now = max(self.now, account.tokens)
        account.requests -= 1
        account.rows += 1
        if not job.generation:
            job.price = len(job.tokens) - job.num_computed_tokens
        self.settle(job)
        self._drop_idle_accounts()

    def settle(self, job: Job) -> bool:
        """Charge a running job up to its generated tokens or its advance, whichever is more; return whether it owed."""
        return self._charge_up_to(job, job.price + max(job.num_generated, _advance_tokens(job)))

    def end(self, job: Job) -> None:
        """Remove a running job that has ended from its client's account, and pay back what it did not generate."""
        self._charge_up_to(job, job.price + job.num_generated)
        self._accounts[job.client].rows -= 1
        self._close_request(job.client)

    def clear(self) -> None:
        """Drop all accounts."""
        self.now = self._open = 0
        self._accounts.clear()
        self._idle_debtors.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError if an account is lost, or kept for nothing."""
        assert self._open == sum(a.requests + a.rows for a in self._accounts.values()), "requests were counted wrongly"
        assert self._open or not self._accounts, "accounts are kept while nobody waits or runs"
        assert {client for *_, client in self._idle_debtors} == {
            c for c, a in self._accounts.items() if a.is_idle_debtor
        }
        for client, account in self._accounts.items():
            idle = not account.requests and not account.rows
            assert account.is_idle_debtor or not idle, f"the account of {client} is kept for nothing"

    def _charge_up_to(self, job: Job, total: int) -> bool:
        """Charge a job's client, or pay back, until `total` tokens are paid. Return whether that changed anything."""
        charge, job.paid_tokens = total - job.paid_tokens, total
        self._accounts[job.client].tokens += charge
        return charge != 0

    def _close_request(self, client: Client) -> None:
        """Count one of a client's requests as ended."""
        self._open -= 1
        if not self._open:
            self.clear()
        elif not self._accounts[client].is_idle_debtor:
            self._drop_account_if_idle(client)

    def _drop_idle_accounts(self) -> None:
        """Drop the accounts of idle clients that were charged no more tokens than a new client begins with."""
        while self._idle_debtors and self._idle_debtors[0][0] <= self.now + QUANTUM:
            *_, client = heappop(self._idle_debtors)
            self._accounts[client].is_idle_debtor = False
            self._drop_account_if_idle(client)

    def _drop_account_if_idle(self, client: Client) -> None:
        """If a client is idle, drop its account, or keep it until the others were charged as many tokens."""
        account = self._accounts[client]
        if account.requests or account.rows:
            return
        if account.tokens <= self.now + QUANTUM:
            del self._accounts[client]
        else:
            account.is_idle_debtor = True
            self._arrivals += 1
            heappush(self._idle_debtors, (account.tokens, self._arrivals, client))


def tokens_to_begin(job: Job) -> int:
    """Return how many tokens a job takes up when it begins: its own, cached or not, and its answer's advance."""
    return len(job.tokens) + max(0, _advance_tokens(job) - job.num_generated)


def _advance_tokens(job: Job) -> int:
    """Return how many tokens of a job's answer are charged when it begins."""
    return min(ADVANCE, job.max_new_tokens)


# Client queues: the waiting jobs of each client, and the clients in the order of their turns.


T = TypeVar("T")
Order = tuple[float, int]

_MAX_STALE = 16
"""How many removed things a heap may always keep."""


class OrderedHeap(Generic[T]):
    """A heap of items by their order, from which any item can be removed. No two items have the same order, but an
    item may come back with the order of its removed entry; then the later entry counts.

    It is a heap. Removed things stay in it until they come to the top, or make up half of it. So `add` and `remove`
    cost O(log n) on average, wherever the thing is, and `first` costs O(1).
    """

    def __init__(self) -> None:
        self._orders: dict[T, Order] = {}
        self._heap: list[tuple[Order, int, T]] = []
        self._add_count = 0

    def __len__(self) -> int:
        return len(self._orders)

    def __iter__(self) -> Iterator[T]:
        """Yield all items, in no particular order."""
        return iter(self._orders)

    @property
    def first(self) -> T:
        """The item that comes first. There must be one."""
        return self._heap[0][2]

    def add(self, order: Order, item: T) -> None:
        """Add an item at the place of its `order`, or move it there if it is in the heap already."""
        self._orders[item] = order
        self._add_count += 1
        heappush(self._heap, (order, self._add_count, item))
        self._drop_stale()

    def remove(self, item: T) -> None:
        """Remove an item."""
        del self._orders[item]
        self._drop_stale()

    def _drop_stale(self) -> None:
        """Drop removed entries from the top of the heap, or all of them if they make up half of it."""
        if len(self._heap) > 2 * len(self._orders) + _MAX_STALE:
            self._heap = [(order, i, item) for i, (item, order) in enumerate(self._orders.items())]
            heapify(self._heap)
        while self._heap and self._orders.get(self._heap[0][2]) != self._heap[0][0]:
            heappop(self._heap)


class ClientQueues:
    """The waiting jobs: a queue per client, by priority and age. `turns` orders the queues; any can be passed over."""

    def __init__(self, turns: FairShare) -> None:
        self._turns = turns
        self._client_queues: dict[Client, OrderedHeap[Job]] = {}
        self._heads: OrderedHeap[Client] = OrderedHeap()
        self._passed_clients: list[Client] = []

    def __len__(self) -> int:
        return sum(map(len, self._client_queues.values()))

    def __iter__(self) -> Iterator[Job]:
        """Yield all jobs, in no particular order."""
        return (job for queue in self._client_queues.values() for job in queue)

    @property
    def first(self) -> Job | None:
        """The first job of the client whose turn it is; None if there is none. Passed-over clients do not count."""
        return self._client_queues[self._heads.first].first if self._heads else None

    def add(self, job: Job) -> None:
        """Put a job at its place in its client's queue."""
        queue = self._client_queues.get(job.client)
        if queue is None:
            queue = self._client_queues[job.client] = OrderedHeap()
            self._heads.add(self._turns.place(job.client), job.client)
        queue.add(job.order, job)

    def remove(self, job: Job) -> None:
        """Take a job out of its client's queue, at whatever place it is."""
        queue = self._client_queues[job.client]
        queue.remove(job)
        if not queue:
            self._heads.remove(job.client)
            del self._client_queues[job.client]

    def reorder_client(self, client: Client) -> None:
        """Put a client's queue at its new place after its account has changed. No client may be passed over now."""
        if client in self._client_queues:
            self._heads.add(self._turns.place(client), client)

    def pass_over(self, client: Client) -> None:
        """Leave a client's queue out of `first` until `bring_back`. Costs O(log clients)."""
        self._heads.remove(client)
        self._passed_clients.append(client)

    def bring_back(self) -> None:
        """Put the queues that were passed over back at their places."""
        for client in self._passed_clients:
            self._heads.add(self._turns.place(client), client)
        self._passed_clients.clear()
