"""serve: a worker's loop. It carries out the controller's calls with a real runner, one after the other. Without mlx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from cortexmlx.execution.boundary import RankRunner
from cortexmlx.hosts.channel import Channel
from cortexmlx.hosts.options import RankInfo, RankOptions
from cortexmlx.kv.spec import LayerGroup


class OpenedRank(Protocol):
    """A worker's part of a model, loaded."""

    info: RankInfo

    def arrange(self, groups: Sequence[LayerGroup]) -> RankRunner:
        """Return the runner of this part. `groups` are those of all ranks, in one order, with this rank's layers in
        each: it may have none of some group.
        """


OpenRank = Callable[[RankOptions], OpenedRank]
"""Loads this rank's part of a model."""


def serve(channel: Channel, open_rank: OpenRank) -> None:
    """Carry out the controller's calls until it asks to close. Raises HostLost if the controller is lost."""
    raise NotImplementedError
