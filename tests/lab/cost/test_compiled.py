"""What is kept of a compiler's result: read back as written, refused if it is something else, unused if it is stale."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.metal.lab.cost.choice import candidates, compiled, shapes
from cortexmlx.metal.lab.cost.compiled import (
    CompilerRecord,
    UnusableRecord,
    make_record,
    packaged_record,
    read_record,
    texts,
    write_record,
)
from cortexmlx.metal.rules import HALVES, VARIANTS
from cortexmlx.metal.shape import DTYPES, Kernel

OURS = "paged_decode"
COUNTS = {"fma": 8.0, "float": 13.0, "integer": 4.5, "shuffle": 4.0, "matrix": 0}
RESULT: dict[str, Any] = {
    "mesa": "1.2.3",
    "llvm": 15,
    "kernels": [
        {
            "kernel": OURS,
            "name": "a variant",
            "half_registers": 120,
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
    record = write_record(source, target)
    assert read_record(target.read_text()) == record
    assert record.compiler == "Mesa 1.2.3, LLVM 15"
    [kernel] = record.kernels
    assert (kernel.kernel, kernel.name) == (OURS, "a variant"), "without loops there is no token"
    assert (kernel.half_registers, kernel.resident_threads, kernel.spills) == (120, 512, 2 + 3)
    assert kernel.per_token_head == {"fma": 8.0, "float": 13.0, "integer": 4.5, "shuffle": 4.0}


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
        {**RESULT, "kernels": [{**RESULT["kernels"][0], "per_token_head": 3}]},
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


def _kept() -> CompilerRecord:
    record = packaged_record()
    if record.stale():
        pytest.skip(f"changed since it was compiled: {', '.join(record.stale())}")
    return record


def test_the_kept_record_has_every_shape_of_the_choice_and_every_variant_of_doctor() -> None:
    _kept()
    assert [v.label for shape in shapes(*DTYPES) for v in candidates(shape) if compiled(v) is None] == []
    assert [v.label for v in VARIANTS if compiled(v) is None] == []


def test_no_kernel_that_serves_spills_in_float16_or_bfloat16() -> None:
    _kept()
    served = {*VARIANTS, *shapes(*DTYPES)}
    assert {v.dtype for v in served} == {"float16", "bfloat16", "float32"}
    assert [v.label for v in served if (kernel := compiled(v)) is None or kernel.spills] == []


def test_a_matrix_kernel_has_the_products_that_its_tiles_need() -> None:
    """For 8 tokens and 8 queries one product for 8 numbers of a key and of a value each: of that a token is an 8th."""
    _kept()
    for v in shapes(*DTYPES):
        kernel = compiled(v)
        if v.kernel.value == "matrix" and v.kv_bits is None:
            assert kernel is not None
            heads, parts = min(8, v.group), v.geometry.parts
            wanted = (v.key_dim + v.value_dim / parts) / 8 / 8 / heads
            assert kernel.per_token_head["matrix"] == pytest.approx(wanted, abs=0.01), v.label


def threads_held(register_threads: int, threads: int, memory: int) -> int:
    """Threads of whole threadgroups in a core of an M1: by its registers, and by its 60 KB of threadgroup memory."""
    return min(register_threads // threads, 60 * 1024 // memory) * threads


def test_a_core_never_holds_fewer_threads_than_with_several_tiles_or_parts_in_a_threadgroup_of_256() -> None:
    """And where its registers are not for 512 threads, it holds more: with 16 heads of 128, and for values in parts."""
    _kept()
    gained = set()
    for v in {*VARIANTS, *shapes(*DTYPES)}:
        kernel, g = compiled(v), v.geometry
        if g.threadgroups > 1 and v.kernel is not Kernel.WIDE:
            assert kernel is not None
            held = threads_held(kernel.resident_threads, g.threads, g.threadgroup_bytes)
            assert held >= kernel.resident_threads // 256 * 256, v.label
            if held > kernel.resident_threads // 256 * 256:
                gained.add((v.dtype, v.key_dim, v.group))
    assert {(t, dim, 16) for t in HALVES for dim in (112, 128, 192, 256)} <= gained
    assert {("bfloat16", 192, 8), ("bfloat16", 256, 8)} <= gained
