"""RemoteRunner: a runner whose work is done by workers, each with its part of the model. Without mlx."""

from __future__ import annotations

from collections.abc import Sequence

from cortexmlx.hosts.channel import Channel
from cortexmlx.hosts.options import RankInfo, RankOptions
from cortexmlx.kv.spec import LayerGroup


class RemoteRunner:
    """Implements `execution.boundary.Runner` over one channel to each rank, rank 0 first. It is made, then `open` and
    `arrange` are called once each, then it is a Runner. Only the engine's thread may call it.
    """

    def __init__(self, channels: Sequence[Channel], names: Sequence[str]) -> None: ...

    def open(self, options: RankOptions) -> tuple[RankInfo, ...]:
        """Have every rank open its part. Return what each tells, by rank. Raises what a rank raises, with its name in
        front.
        """
        raise NotImplementedError

    def arrange(self, groups: Sequence[Sequence[LayerGroup]]) -> None:
        """Have every rank make its runner: `groups[rank]` are the groups of all ranks in one order, each with the
        layers that this rank has of it.
        """
        raise NotImplementedError
