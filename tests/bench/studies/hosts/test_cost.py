"""The cost model: its count of collectives against mlx-lm's classes, its arithmetic against figures by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.bench.studies.hosts import cost
from cortexmlx.bench.studies.hosts.cost import CHIPS, LINKS, Chip, ModelSize, NetworkLink
from cortexmlx.models import load_model
from support.models.tiny import write_tiny
from support.pages import read

FAST = Chip("fast", 1e12)
RING = NetworkLink("ring", 1e-3, 1e9, ring=True)
MESH = NetworkLink("mesh", 1e-3, 1e9, ring=False)
SMALL = ModelSize("small", 10, 1000, 8e9, 1e9, 9e9)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_token_takes_two_collectives_in_each_layer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one for its choice, which `SharedSamplerFactory` adds."""
    model = load_model(str(write_tiny(tmp_path / kind, kind))).model
    layers = len(model.layers)
    model.shard(mx.distributed.init())
    seen: list[Any] = []
    plain = mx.distributed.all_sum

    def counted(x: mx.array, **options: Any) -> mx.array:
        seen.append(x.shape)
        return plain(x, **options)

    monkeypatch.setattr(mx.distributed, "all_sum", counted)
    mx.eval(model(mx.array([[1]])))
    assert len(seen) + 1 == cost.count_collectives(layers) and layers > 1


def test_a_ring_passes_and_a_mesh_exchanges_once() -> None:
    assert RING.all_reduce_seconds(4, 2000) == pytest.approx(6 * (1e-3 + 500 / 1e9))
    assert MESH.all_reduce_seconds(4, 2000) == pytest.approx(1e-3 + 6000 / 1e9)


def test_a_token_is_what_is_read_the_layers_and_the_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "BITS", 8)
    monkeypatch.setattr(cost, "REACHED", 0.5)
    monkeypatch.setattr(cost, "LAYER_SECONDS", 1e-4)
    assert cost.one_host_seconds(SMALL, FAST) == pytest.approx(9e9 / 0.5e12 + 10 * 1e-4)
    two = (4e9 + 1e9) / 0.5e12 + 10 * 1e-4 + 21 * (1e-3 + 2000 / 1e9 + 1e-5)
    assert cost.tensor_parallel_seconds(SMALL, FAST, MESH, 2, 1e-5) == pytest.approx(two)
    handed = 2 * (1e-3 + 2000 / 1e9 + 1e-5) + MESH.all_reduce_seconds(3, 2000) + MESH.all_reduce_seconds(3, 4) + 2e-5
    assert cost.pipeline_seconds(SMALL, FAST, MESH, 3, 1e-5) == pytest.approx(9e9 / 0.5e12 + 10 * 1e-4 + handed)


@pytest.mark.parametrize("hosts", [2, 4])
def test_the_break_even_is_where_both_take_as_long(hosts: int) -> None:
    chip, link = CHIPS[1], LINKS[2]
    size = cost.break_even_size(chip, link, hosts, 4e-6)
    assert size is not None
    for share, faster in ((0.8, False), (1.25, True)):
        model = cost.dense_model(share * size)
        assert (
            cost.tensor_parallel_seconds(model, chip, link, hosts, 4e-6) < cost.one_host_seconds(model, chip)
        ) == faster
    assert cost.break_even_size(chip, NetworkLink("slow", 1.0, 1e9, ring=True), hosts, 0.0) is None
    assert cost.break_even_size(chip, NetworkLink("free", 0.0, 1e18, ring=False), hosts, 0.0) == 1e8


def test_the_page_has_the_figures_of_the_model() -> None:
    rows = re.findall(r"^\| (Wi-Fi|10 Gb|TCP|RDMA).* \| (\S+) \| (\S+) \| (\S+) \|$", read("docs/hosts.md"), re.M)
    slow, fast = cost.CROSSING_SECONDS.values()
    said = [
        tuple(cost._format_billions(cost.break_even_size(chip, link, 2, crossing)) for chip in CHIPS)
        for link, crossing in (*((link, slow) for link in LINKS), (LINKS[-1], fast))
    ]
    assert [row[1:] for row in rows] == said
