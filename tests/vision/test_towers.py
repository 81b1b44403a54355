"""The vision towers of Qwen and Pixtral are what transformers' own torch classes say (`record.py` recorded it), in
every stored layout and in pieces.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from cortexmlx.vision import towers
from support.models.draft_heads import pack, rounded
from support.models.recorded_towers import converted, difference, features, read, tensors_of

NAMES = ("qwen3_vl", "qwen3_5", "mistral3", "llava")


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)


@pytest.mark.parametrize("name", NAMES)
def test_features_are_those_of_transformers_from_every_layout_and_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tensors = tensors_of(name)
    bare = {path.removeprefix("model."): value for path, value in tensors.items()}
    for stored in (tensors, bare, converted(tensors)):
        assert difference(name, read(tmp_path, name, stored)) < 1e-4
    whole = features(name, read(tmp_path, name, tensors))
    for products in (1, 50_000):  # of a row, and of some
        monkeypatch.setattr(towers, "MAX_PRODUCTS", products)
        assert difference(name, read(tmp_path, name, tensors), whole) < 1e-5


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_packed_tower_computes_what_its_rounded_weights_compute(tmp_path: Path, name: str) -> None:
    packed = pack(converted(tensors_of(name)), lambda path: 4)
    assert sum(path.endswith(".scales") for path in packed) > 8
    wanted = features(name, read(tmp_path, name, rounded(tensors_of(name), lambda path: 4)))
    for keep_packed in (True, False):
        tower = read(tmp_path, name, packed, keep_packed=keep_packed)
        assert difference(name, tower, wanted) < 1e-4 and difference(name, tower) > 1e-2
        assert towers.count_weights(tower) == towers.count_weights(read(tmp_path, name, tensors_of(name)))


@pytest.mark.parametrize(("name", "numbers"), [("qwen3_vl", 96), ("mistral3", 48)])
def test_every_piece_takes_bounded_work_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, numbers: int
) -> None:
    tower = read(tmp_path, name, tensors_of(name))
    monkeypatch.setattr(towers, "MAX_PRODUCTS", 1 << 19)
    rows = []
    for part in tower.see(mx.zeros((1024, numbers)), (1, 32, 32)):
        mx.eval(mx.zeros(1))
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(part)
        rows.append(len(part[0]))
        assert mx.get_peak_memory() - before < 2e6  # all scores at once are 8.4e6 bytes, all states in a block 1e6
    assert 3 < (1 << 19) // (32 * numbers) <= 350 and max(rows) <= (1 << 19) // (32 * numbers)
    assert rows[-2] < 100, "also the patches, and what joins them in the end"
