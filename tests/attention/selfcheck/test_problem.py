"""The problems of the self-check: their answers against the tests' own float64 attention, and what they contain."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention.selfcheck_problems import (
    PIECES,
    PREFILL_WINDOW,
    WINDOW,
    make_decode_problem,
    make_prefill_problem,
)
from cortexmlx.metal.prefill import PrefillVariant
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.work import PREFILL_ITEM, SMALL, WORK_ITEM
from support.kernels.paged_problem import Options, Row, answer

VARIANT = Variant("float16", "float16", 16, 32, 8, 3)
SHAPES = [
    VARIANT,
    Variant("float32", "float32", 16, 16, 32, 1, sinks=True),
    Variant("bfloat16", "bfloat16", 24, 16, 16, 5, softcap=True),
    Variant("bfloat16", "bfloat16", 64, 32, 16, 5, latent=True),
    Variant("float32", "float32", 16, 16, 32, 2, sinks=True, alibi=True),
]


def numbers(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("v", SHAPES, ids=lambda v: v.label)
def test_the_answer_is_attention_over_what_tables_and_plan_name(v: Variant, window: int | None) -> None:
    """The rows are read back out of the arrays that the kernels get, and answered by the tests' judge."""
    problem = make_decode_problem(v, window)
    given = problem.inputs
    queries, keys, tail_keys = (numbers(a) for a in (given.queries, given.keys, given.tail_keys))
    values, tail_values = (
        own[..., : v.value_dim] if a is None else numbers(a)
        for own, a in ((keys, given.values), (tail_keys, given.tail_values))
    )
    assert v.latent == (given.values is None) == (given.tail_values is None)
    tables = np.array(given.tables)
    flat = np.array(given.plan)
    items = flat[4 * len(queries) :][: 4 * problem.items].view(WORK_ITEM)
    rows = []
    for r, query in enumerate(queries):
        mine = items[items["row"] == r]
        arena, last = int(mine["arena_tokens"][0]), int(mine["last"].max())
        position = np.arange(arena)
        slots = tables[r, position // v.block_size] * v.block_size + position % v.block_size
        columns = slice(0, last - arena)
        rows.append(
            Row(
                query[:, 0],
                np.concatenate([keys[:, slots], tail_keys[r][:, columns]], axis=1),
                np.concatenate([values[:, slots], tail_values[r][:, columns]], axis=1),
            )
        )
    sinks = np.array(given.sinks)[: queries.shape[1]] if v.sinks else None
    slopes = np.array(given.slopes)[: queries.shape[1]] if v.alibi else None
    scale, softcap = np.array(given.factors)
    wanted = answer(v, rows, Options(window, float(scale), float(softcap) if v.softcap else None, sinks, slopes))
    assert problem.expected.dtype == np.float64 and np.isfinite(wanted).all()
    np.testing.assert_allclose(problem.expected[:, :, 0], wanted, rtol=1e-12, atol=1e-12)


def test_what_no_row_holds_is_poison() -> None:
    given = make_decode_problem(VARIANT, None).inputs
    for array in (given.keys, given.values, given.tail_keys, given.tail_values):
        assert array is not None and np.isnan(numbers(array)).any()
    spare = int(np.array(given.tables).max()) * VARIANT.block_size
    block = numbers(given.keys)[:, spare : spare + VARIANT.block_size]
    assert block.size and np.isnan(block).all(), "the block that fills up the tables is there, and nobody's"


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("sinks", [False, True])
def test_no_input_is_so_small_that_mlx_would_compile_another_kernel(group: int, sinks: bool) -> None:
    given = make_decode_problem(replace(VARIANT, group=group, sinks=sinks), None).inputs
    arrays = {name: array for name, array in vars(given).items() if name not in ("factors", "scales", "biases")}
    assert all(array.size >= SMALL for array in (*arrays.values(), *given.scales, *given.biases))


@pytest.mark.parametrize("window", [None, PREFILL_WINDOW])
@pytest.mark.parametrize("v", [v for v in SHAPES if not (v.alibi or v.latent)], ids=lambda v: v.label)
def test_the_answer_of_prefill_is_attention_over_what_plan_and_tables_name(v: Variant, window: int | None) -> None:
    """Every query's tokens are read back out of the arrays that the kernel gets, and answered by the tests' judge."""
    shape = {name: getattr(v, name) for name in PrefillVariant.__dataclass_fields__}
    v = PrefillVariant(**shape)
    problem = make_prefill_problem(v, window)
    given = problem.inputs
    queries, keys, values, tables = (numbers(a) for a in (given.queries, given.keys, given.values, given.tables))
    scale, softcap = numbers(given.factors)
    sinks = numbers(given.sinks)[: queries.shape[1]] if v.sinks else None
    options = Options(scale=float(scale), softcap=float(softcap) or None, sinks=sinks)
    answered = 0
    for item in np.array(given.plan)[: len(PREFILL_ITEM) * problem.items].view(PREFILL_ITEM):
        for token in range(item["begin"], item["end"]):
            seen = np.arange(max(0, token + 1 - item["reach"]), token + 1)
            slots = (tables[item["blocks"] + seen // v.block_size] * v.block_size + seen % v.block_size).astype(int)
            row = Row(queries[item["origin"] + token, :, 0], keys[:, slots], values[:, slots])
            wanted = problem.expected[item["origin"] + token, :, 0]
            assert np.abs(answer(v, [row], options)[0] - wanted).max() < 1e-12
            answered += 1
    assert answered == sum(end - first for first, end in PIECES) == len(queries)
    assert np.isnan(keys).any() and np.isnan(values).any(), "what is not seen is poison"
