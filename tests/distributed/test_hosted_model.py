"""A model whose parts are in workers: how their memory is divided, and what an app sees of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.core.config import EngineConfig
from cortexmlx.distributed.hosted_model import HostedModel
from cortexmlx.errors import HostRefused, InvalidRequest
from cortexmlx.kv.sizing import bytes_per_token
from support.hosts.local_group import LocalGroup, LosingRunner


class Copies(LocalGroup):
    """Several workers with the whole model each. The first one computes."""

    own: tuple[dict[str, Any], ...] = ({}, {})
    """What differs from the first worker's `RankInfo`, for each."""

    def open(self) -> None:
        super().open()
        self.infos = tuple(replace(self.infos[0], **each) for each in self.own)
        self.names = tuple(f"worker {rank}" for rank in range(len(self.own)))

    reopen = open

    def make_runners(self, parts: Any) -> Any:
        self.parts = parts
        return LosingRunner(super().make_runners((self._mode.groups,)), self)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> Callable[..., tuple[HostedModel, Copies]]:
    """A function that opens a model on workers on some machines."""

    def make(machines: tuple[str, ...], *own: dict[str, Any], **config: Any) -> tuple[HostedModel, Copies]:
        made: list[Copies] = []

        def group(*args: Any) -> Copies:
            made.append(Copies(*args))
            made[0].machines, made[0].own = machines, own or ({},) * len(machines)
            return made[0]

        monkeypatch.setattr("cortexmlx.distributed.hosted_model.HostGroup", group)
        model = HostedModel(EngineConfig(str(tiny("llama")), hosts=2, **config), lambda call: None)
        return model, made[0]

    return make


def test_workers_on_one_machine_share_its_memory(opened: Callable[..., tuple[HostedModel, Copies]]) -> None:
    settings: dict[str, Any] = {"max_rows": 4, "block_size": 8}
    memory = {"memory_bytes": 1 << 20}
    apart, _ = opened(("a", "b"), memory, memory, **settings)
    beside, _ = opened(("a", "a"), memory, memory, **settings)
    half, _ = opened(("a", "b"), memory, {"memory_bytes": 1 << 19}, **settings)
    assert apart.blocks[0] > 1.5 * beside.blocks[0] and beside.blocks == half.blocks


def test_the_model_is_told_once_and_its_keys_are_those_of_all_workers(
    opened: Callable[..., tuple[HostedModel, Copies]],
) -> None:
    model, group = opened(("a", "b"))
    one = group.infos[0]
    assert (model.info.weight_bytes, model.info.parameters) == (one.whole_bytes, one.whole_parameters)
    assert model.info.kv_bytes_per_token == 2 * bytes_per_token(one.groups)
    assert model.info.notes == ("a note of the worker", "2 workers: worker 0; worker 1")


def test_a_folder_for_blocks_is_not_used_and_that_is_said(
    opened: Callable[..., tuple[HostedModel, Copies]], tmp_path: Path
) -> None:
    model, _ = opened(("a", "b"), kv_store=tmp_path / "kv")
    assert model.disk is None and not (tmp_path / "kv").exists()
    assert any("nothing goes to the KV store: with hosts" in note for note in model.info.notes)


def test_a_memory_that_a_machine_does_not_have_is_refused_with_its_name(
    opened: Callable[..., tuple[HostedModel, Copies]],
) -> None:
    memory = {"memory_bytes": 100 << 20}
    opened(("a", "b"), memory, memory, kv_memory=60 << 20)
    with pytest.raises(InvalidRequest, match="more than a has: 100 MiB"):
        opened(("a", "a"), memory, memory, kv_memory=60 << 20)
    model, _ = opened(("a", "b"), memory, {"memory_bytes": 60 << 20}, kv_memory=60 << 20)
    assert any(note.startswith("KV memory may grow to 60 MiB") and "b has" in note for note in model.info.notes)


def test_the_longer_tail_needs_a_gpu_in_every_worker(opened: Callable[..., tuple[HostedModel, Copies]]) -> None:
    heavy = {"weight_bytes": 1 << 24, "backend": "metal"}
    both, _ = opened(("a", "b"), heavy, heavy)
    one, _ = opened(("a", "b"), heavy, heavy | {"backend": "reference"})
    cache = both.make_cache(both.blocks)
    assert both.make_scheduler(cache).config.long_tail_rows > 0
    assert one.make_scheduler(cache).config.long_tail_rows == 0


def test_workers_with_another_model_than_before_are_refused(
    opened: Callable[..., tuple[HostedModel, Copies]],
) -> None:
    model, group = opened(("a", "b"))
    model.restart_workers()
    assert group.epoch == 2
    groups = group.infos[0].groups
    group.own = ({}, {"groups": tuple(replace(g, layers=(*g.layers, 7)) for g in groups)})
    with pytest.raises(HostRefused, match="another model now"):
        model.restart_workers()


def test_a_group_that_cannot_be_used_is_ended(
    opened: Callable[..., tuple[HostedModel, Copies]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[LocalGroup] = []
    monkeypatch.setattr(LocalGroup, "close", lambda self: ended.append(self))
    with pytest.raises(InvalidRequest, match="holds no block"):
        opened(("a", "b"), kv_memory=100)
    assert len(ended) == 1


def test_pins_need_a_prefix_cache(opened: Callable[..., tuple[HostedModel, Copies]]) -> None:
    opened(("a", "b"))[0].check_pins()
    with pytest.raises(InvalidRequest, match="nothing to pin"):
        opened(("a", "b"), prefix_cache=False)[0].check_pins()
