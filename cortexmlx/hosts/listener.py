"""Listener: the controller's door, where the workers of one epoch connect. Without mlx."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cortexmlx.hosts.link import Link, LinkLimits

Address = tuple[str, int]
"""An IP address or host name, and a port."""


class Listener:
    """Takes one link for each rank of one epoch. Closes its ports when `accept` returns or raises.

    `key`: 32 random bytes (`handshake.new_key()`).
    `epoch`: number of this start of the group.
    `ranks`: how many workers there are.
    `identity`: what must be equal on both sides, as name and value: {"cortexmlx": "0.5.0", "mlx": ..., "weights": ...}.
    `allowed_addresses`: IP addresses or networks ("10.0.0.0/24") of the workers; others are closed at once.
    `names`: how a user names each rank's host; by default the address that it connects from.
    `bind`: addresses of this machine to listen on, each with a port of its own that the system chooses.
    """

    def __init__(
        self,
        key: bytes,
        epoch: int,
        ranks: int,
        identity: Mapping[str, str],
        allowed_addresses: Sequence[str],
        *,
        names: Sequence[str] | None = None,
        bind: Sequence[str] = ("127.0.0.1",),
        limits: LinkLimits = LinkLimits(),  # noqa: B008
    ) -> None: ...

    addresses: list[Address]
    """Where workers can connect, in the order of `bind`."""

    def accept(self, deadline: float, *, check: Callable[[], None] | None = None) -> list[Link]:
        """Wait until `deadline` (of `time.monotonic`) for all ranks; return their links by rank.

        `check` is called several times a second and may raise, for example because a worker's process ended.
        Raises HostRefused if a worker with the key has another identity, HostLost if ranks are missing at the deadline.
        """
        ...

    def close(self) -> None:
        """Stop listening. A thread in `accept` raises HostLost. Safe to call again."""
