"""A layer's outputs with what adapters add, judged by float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.execution.adapters import SlotTable, make_route

INS, OUTS = 12, 20


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def pairs(ranks: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(numbers(INS, r, seed=r), numbers(r, OUTS, seed=r + 100)) for r in ranks]


def table(ranks: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> SlotTable:
    made = SlotTable(INS, OUTS, 8, dtype)
    for slots, (a, b) in enumerate(pairs(ranks), 1):
        made.append(slots, a, b)
    return made


def wanted(ranks: tuple[int, ...], slots: list[int], x: np.ndarray, out: np.ndarray) -> np.ndarray:
    result = out.astype(np.float64)
    for token, slot in enumerate(slots):
        if slot:
            a, b = pairs(ranks)[slot - 1]
            result[token] += x[token].astype(np.float64) @ a.astype(np.float64) @ b.astype(np.float64)
    return result


SLOTS = {
    "one": [2] * 5,
    "mixed": [0, 1, 1, 3, 2, 0],
    "long runs": [1, 3, *[2] * 40, *[0] * 30, *[1] * 9, 3],
}


@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("shape", ["tokens", "flat", "row"])
def test_each_token_gets_its_own_product(name: str, shape: str) -> None:
    ranks, slots = (3, 8, 5), SLOTS[name]
    x, out = numbers(len(slots), INS, seed=1), numbers(len(slots), OUTS, seed=2)
    axes = {"tokens": (len(slots), 1), "flat": (len(slots),), "row": (1, len(slots))}[shape]
    route = make_route(np.array(slots, np.int32))
    assert route is not None
    got = table(ranks).add_products(route, mx.array(x).reshape(*axes, INS), mx.array(out).reshape(*axes, OUTS))
    assert got.shape == (*axes, OUTS)
    assert np.allclose(np.array(got).reshape(-1, OUTS), wanted(ranks, slots, x, out), atol=1e-4)


def test_an_output_keeps_its_type() -> None:
    slots, x, out = [1, 2, 2], numbers(3, INS), numbers(3, OUTS)
    for same in (slots, [2, 2, 2]):
        route = make_route(np.array(same, np.int32))
        assert route is not None
        got = table((3, 8)).add_products(route, mx.array(x).astype(mx.bfloat16), mx.array(out).astype(mx.bfloat16))
        assert got.dtype == mx.bfloat16
        assert np.allclose(np.array(got.astype(mx.float32)), wanted((3, 8), same, x, out), atol=0.3)


def test_the_last_slot_takes_the_place_of_one_that_goes() -> None:
    made, x, out = table((3, 8, 5)), numbers(2, INS), np.zeros((2, OUTS), np.float32)
    before = made.nbytes
    made.copy_slot(3, 1)
    assert made.slots == 4, "until all tables have it, the last one is where it was, too"
    made.keep_first(3)
    route = make_route(np.array([1, 2], np.int32))
    assert route is not None and made.nbytes == before * 3 // 4
    got = made.add_products(route, mx.array(x), mx.array(out))
    assert np.allclose(np.array(got), wanted((5, 8), [1, 2], x, out), atol=1e-4)


def test_a_slot_that_nobody_uses_gives_way_to_the_next() -> None:
    made, x, out = table((3, 8)), numbers(1, INS), np.zeros((1, OUTS), np.float32)
    made.append(2, *pairs((5,))[0])
    route = make_route(np.array([2], np.int32))
    assert route is not None and made.slots == 3
    got = made.add_products(route, mx.array(x), mx.array(out))
    assert np.allclose(np.array(got), wanted((3, 5), [2], x, out), atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.append(3, *pairs((3,))[0]),
        lambda made: made.keep_first(2),
        lambda made: made.copy_slot(2, 1),
    ],
)
def test_a_change_for_which_memory_is_refused_leaves_a_table_as_it_was(
    change: Callable[[SlotTable], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, x, out = table((3, 8)), numbers(2, INS), np.zeros((2, OUTS), np.float32)

    def refusing(*arrays: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 5 bytes")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(mx, "eval", refusing)
        change(made)
    route = make_route(np.array([1, 2], np.int32))
    assert route is not None and made.slots == 3
    got = made.add_products(route, mx.array(x), mx.array(out))
    assert np.allclose(np.array(got), wanted((3, 8), [1, 2], x, out), atol=1e-4)


def test_views_share_the_tables_memory() -> None:
    mx.eval(mx.zeros(1))
    before = mx.get_active_memory()
    made = SlotTable(512, 512, 64, mx.float32)
    for seed in range(3):
        made.append(1 + seed, numbers(512, 64, seed=seed), numbers(64, 512, seed=seed))
    mx.eval(made.a, made.b)
    assert mx.get_active_memory() - before < 1.2 * made.nbytes
    made.keep_first(2)
    assert mx.get_active_memory() - before < 1.2 * made.nbytes
