"""What is kept of a compiler's result: read back as written, refused if it is something else, unused if it is stale."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.metal.cost.arithmetic import mlx_decode, paged_decode, paged_matrix
from cortexmlx.metal.cost.compiled import (
    OURS,
    SELECTIONS,
    CompiledKernel,
    Record,
    UnusableRecord,
    keep,
    kept_record,
    make_record,
    read_record,
    texts,
    work,
)
from cortexmlx.metal.cost.cycles import Kind
from cortexmlx.metal.cost.kernels import candidates
from cortexmlx.metal.cost.sheet import SHAPES, WIDE_SHAPES
from cortexmlx.metal.shape import Kernel
from cortexmlx.metal.vector import VectorGeometry

COUNTS = {
    **{
        "fma": 8.0,
        "float": 13.0,
        "integer": 4.5,
        "convert": 0.25,
        "move": 1.0,
        "control": 2.0,
        "wait": 1.5,
        "spill": 0.5,
    },
    **{"shuffle": 4.0, "reduce": 1.0, "matrix": 0, "device load": 2.0, "device store": 0, "threadgroup": 0},
}
RESULT: dict[str, Any] = {
    "mesa": "1.2.3",
    "llvm": 15,
    "kernels": [
        {
            "kernel": OURS,
            "name": "a variant",
            "resident_threads": 512,
            "spills": 2,
            "fills": 3,
            "per_token_head": COUNTS,
        },
        {"kernel": "paged_reduce", "name": "a variant", "instructions": 50, "per_token_head": None},
    ],
}


def test_a_record_is_read_as_it_was_kept(tmp_path: Path) -> None:
    source, target = tmp_path / "agx.json", tmp_path / "compiled.json"
    source.write_text(json.dumps(RESULT))
    record = keep(source, target)
    assert read_record(target.read_text()) == record
    assert record.compiler == "Mesa 1.2.3, LLVM 15"
    assert [(k.kernel, k.name) for k in record.kernels] == [(OURS, "a variant")], "without loops there is no token"
    assert (record.kernels[0].threads, record.kernels[0].spills) == (512, 2 + 3)


def test_a_kernel_whose_text_has_changed_is_not_found() -> None:
    record = make_record(RESULT)
    assert record.stale() == [] and record.find(OURS, "a variant") is not None
    assert record.find(OURS, "another") is None
    changed = replace(record, texts={**texts(), "paged_decode.metal": "0" * 64})
    assert changed.stale() == ["paged_decode.metal"]
    assert changed.find(OURS, "a variant") is None


@pytest.mark.parametrize(
    "result",
    [
        {},
        [],
        {**RESULT, "kernels": [{"kernel": "k", "name": "n"}]},
        {**RESULT, "kernels": [{"kernel": "k", "name": "n", "per_token_head": {"fma": 1.0}}]},
        {**RESULT, "kernels": [{**RESULT["kernels"][0], "per_token_head": {**COUNTS, "texture": 1.0}}]},
        {**RESULT, "kernels": [{**RESULT["kernels"][0], "spills": None}]},
    ],
)
def test_what_is_no_result_is_refused(result: Any) -> None:
    with pytest.raises(UnusableRecord):
        make_record(result)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"compiler": "c", "texts": {}, "kernels": [{"name": "n"}]}'])
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(UnusableRecord):
        read_record(text)


def test_work_is_of_all_heads_with_exponentials_and_selections_apart() -> None:
    kernel = CompiledKernel(OURS, "a variant", 512, 0, COUNTS)
    assert work(kernel, 4, exponents=8.0, shuffles=6.0) == {
        Kind.ARITHMETIC: 4 * (8 + 13 + 4.5) - 8 - 6 * SELECTIONS,
        Kind.CONVERT: 1.0,
        Kind.MOVE: 4.0,
        Kind.CONTROL: 4 * 3.5,
        Kind.LOAD: 2.0,
        Kind.EXPONENT: 8.0,
    }


def _kept() -> Record:
    record = kept_record()
    if record.stale():
        pytest.skip(f"changed since it was compiled: {', '.join(record.stale())}")
    return record


def test_the_kept_record_has_every_shape_of_the_sheet() -> None:
    record = _kept()
    both = [candidate for variant in SHAPES for candidate in candidates(variant)]
    assert len(both) == 2 * len(SHAPES)
    assert all(record.find(v.geometry.name, v.label) for v in (*both, *WIDE_SHAPES))
    kernels = ("sdpa_vector", "sdpa_vector_2pass_1", "sdpa_vector_2pass_1_gqa")
    assert all(record.find(kernel, f"float16, head_dim {dim}") for kernel in kernels for dim in (64, 128))


def test_the_compiler_does_at_least_the_arithmetic_of_the_text() -> None:
    """Two ways to count, and neither knows of the other: floats and products, per token and head."""
    record = _kept()
    floats = ("fma", "float")
    for variant in (candidate for shape in SHAPES for candidate in candidates(shape)):
        found, vector = record.find(variant.geometry.name, variant.label), VectorGeometry(variant)
        if variant.kernel is Kernel.MATRIX:
            wanted = paged_matrix(variant)[Kind.ARITHMETIC] / variant.group
        else:
            wanted = paged_decode(variant)[Kind.ARITHMETIC] / (vector.tile * vector.tiles)
        assert found is not None
        # Selections are integer comparisons there: of exchanged sums, of a score and a weight, of what is live.
        of_step = 2 * (vector.ahead - 1) + 2 * vector.tile - 1
        selections = of_step / vector.ahead / vector.tile + 2 / 32
        assert sum(found.per_token_head[f] for f in floats) + selections >= 0.95 * wanted
        assert found.per_token_head["integer"] >= selections
    for dim in (64, 128, 256):
        found = record.find("sdpa_vector_2pass_1", f"float16, head_dim {dim}")
        text = mlx_decode(dim, 1)
        assert found is not None
        assert sum(found.per_token_head[f] for f in floats) == pytest.approx(sum(text.values()), abs=1.0)
