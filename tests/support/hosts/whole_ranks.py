"""Ranks in this process that each have the whole model, so that they need no collectives: a RemoteRunner with them does
what one runner does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.core.threads import MlxTask
from cortexmlx.distributed.messages import RankInfo, RankOptions
from cortexmlx.distributed.rank import OpenedRank
from cortexmlx.distributed.rank_server import serve
from cortexmlx.distributed.remote_runner import RemoteRunner
from cortexmlx.errors import HostLost
from cortexmlx.execution.execution_modes import ExecutionMode, PagedMode, choose_execution_mode
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.kv.spec import LayerGroup
from cortexmlx.models import load_model
from support.hosts.channels import QueueChannel, channel_pair
from support.models.tiny import VOCAB


class WholeModel:
    """A rank that has all of a model."""

    def __init__(self, options: RankOptions) -> None:
        loaded = load_model(options.model)
        self._mode: ExecutionMode = choose_execution_mode(loaded.model, options.kv_bits, options.kv_group_size)
        self._backend = self._mode.choose_backend(options.attention)
        self._block_size = options.block_size
        self.info = RankInfo(
            self._mode.groups,
            VOCAB,
            loaded.context_length,
            loaded.weight_bytes,
            loaded.parameters,
            loaded.dtype,
            loaded.name,
            str(loaded.config["model_type"]),
            loaded.notes,
            loaded.identity,
            1 << 30,
            self._backend.name,
            loaded.weight_bytes,
            loaded.parameters,
        )

    def make_runner(self, groups: Sequence[LayerGroup]) -> ModelRunner:
        """As `OpenedRank.make_runner`."""
        assert tuple(groups) == self._mode.groups
        runner = ORIGINAL(self._mode, self._block_size, VOCAB, self._backend)
        assert isinstance(runner, ModelRunner)
        return runner


ORIGINAL: Callable[..., Any] = PagedMode.make_runner


class Ranks:
    """Some ranks on threads of this process, and the controller's ends of their channels."""

    def __init__(self, count: int, open_rank: Callable[[int, RankOptions], OpenedRank]) -> None:
        self.names = [f"rank {rank}" for rank in range(count)]
        pairs = [channel_pair(name) for name in self.names]
        self.channels = [ours for ours, _ in pairs]
        self._tasks = [
            MlxTask(
                lambda raised, rank=rank, theirs=theirs: serve_until_lost(
                    theirs, lambda options: open_rank(rank, options)
                )
            )
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for task in self._tasks:
            task.start()
        self.runner = RemoteRunner(self.channels, self.names)

    def close(self) -> None:
        """Have all end, and wait until they have."""
        self.runner.close()
        for task in self._tasks:
            task.join()


def serve_until_lost(channel: QueueChannel, open_rank: Callable[[RankOptions], OpenedRank]) -> None:
    try:
        serve(channel, open_rank)
    except HostLost:
        channel.close()


class Changed(WholeModel):
    """A rank whose runner is changed when it is made."""

    def __init__(self, options: RankOptions, change: Callable[[ModelRunner], object]) -> None:
        super().__init__(options)
        self._change = change

    def make_runner(self, groups: Sequence[LayerGroup]) -> ModelRunner:
        """As `OpenedRank.make_runner`."""
        runner = super().make_runner(groups)
        assert isinstance(runner, ModelRunner)
        self._change(runner)
        return runner


Change = Callable[[ModelRunner], object]


def changed(changes: dict[int, Change]) -> Callable[[int, RankOptions], OpenedRank]:
    """What opens ranks, of which some have their runners changed."""
    return lambda rank, options: Changed(options, changes[rank]) if rank in changes else WholeModel(options)


def options_for(model: Path, **given: Any) -> RankOptions:
    """Options with which tests open a tiny model."""
    plain: dict[str, Any] = {
        "adapter": None,
        "dequantize": False,
        "kv_bits": None,
        "kv_group_size": None,
        "block_size": 8,
        "attention": "reference",
        "reproducible": False,
        "max_rows": 4,
        "prefill_budget": 32,
    }
    return RankOptions(model=str(model), **plain | given)


@contextmanager
def engines_on_ranks(
    count: int,
    model: Path,
    open_rank: Callable[[int, RankOptions], OpenedRank] = lambda rank, options: WholeModel(options),
    **options: Any,
) -> Iterator[list[Ranks]]:
    """Cores that are made in this context run the model on so many ranks. The list has the ranks of each core."""
    made: list[Ranks] = []
    lock = threading.Lock()

    def runner(mode: PagedMode, block_size: int, vocab_size: int, backend: Any) -> RemoteRunner:
        ranks = Ranks(count, open_rank)
        with lock:
            made.append(ranks)
        ranks.runner.open(options_for(model, block_size=block_size, **options))
        ranks.runner.make_runners([mode.groups] * count)
        mode._runner = ranks.runner  # type: ignore[assignment]
        return ranks.runner

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PagedMode, "make_runner", runner)
        try:
            yield made
        finally:
            for ranks in made:
                ranks.close()
