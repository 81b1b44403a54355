"""join: a worker's way to its controller. Without mlx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cortexmlx.hosts.link import Link, LinkLimits
from cortexmlx.hosts.listener import Address


def join(
    addresses: Sequence[Address],
    key: bytes,
    epoch: int,
    rank: int,
    identity: Mapping[str, str],
    *,
    deadline: float,
    limits: LinkLimits = LinkLimits(),  # noqa: B008
) -> Link:
    """Connect to the controller at one of `addresses`, again and again until `deadline` (of `time.monotonic`).

    Raises HostRefused if the controller refuses this worker or has another key, HostLost if none can be reached.
    """
    ...


def end_process_when_lost(link: Link, *, grace: float = 3.0) -> None:
    """End this process `grace` seconds after `link` is lost, if it did not end by itself. A worker calls this after
    `join`: a rank that waits in a collective cannot be interrupted, and must not outlive its controller.
    """
