"""What is kept of a block, and the proof that it is that."""

from __future__ import annotations

import numpy as np
import pytest

from cortexmlx.disk.segments import Record, compute_proof, decode_record, layout_of, layout_text, parse_layout
from support.store.records import record, same


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<u2", "<u4", "<i4", "|u1", "|i1", "|b1", "<i8", "<i2"])
def test_a_record_comes_back_from_its_bytes_as_it_was(dtype: str) -> None:
    numbers = np.arange(24).astype(dtype).reshape(2, 3, 4)
    kept = Record(b"k" * 16, (5, 6, 7), (numbers, numbers[:, :, ::2], numbers[:0]))
    arrays = kept.stored_arrays()
    data = b"".join(array.tobytes() for array in arrays)
    assert len(data) == kept.nbytes
    back = decode_record(kept.key, parse_layout(layout_text(layout_of(arrays))), data)
    assert same(back, Record(kept.key, kept.tokens, tuple(np.ascontiguousarray(a) for a in kept.arrays)))


def test_every_part_of_a_record_is_in_its_proof() -> None:
    arrays = record(1).stored_arrays()
    layout, data = layout_of(arrays), b"".join(a.tobytes() for a in arrays)
    turned = ((layout[0][0], layout[0][1]), ("F32", (3, 2, 8, 4)), layout[2])
    right = compute_proof(b"s" * 32, b"k" * 16, layout, [data])
    assert right == compute_proof(b"s" * 32, b"k" * 16, layout, arrays), "in whatever pieces"
    others = [
        compute_proof(b"t" * 32, b"k" * 16, layout, [data]),
        compute_proof(b"s" * 32, b"l" * 16, layout, [data]),
        compute_proof(b"s" * 31, b"s" + b"k" * 16, layout, [data]),
        compute_proof(b"s" * 32, b"k" * 16, turned, [data]),
        *(
            compute_proof(b"s" * 32, b"k" * 16, layout, [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]])
            for i in range(0, len(data), 97)
        ),
    ]
    assert right not in others and len(set(others)) == len(others)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[1]", '[["F64",[1]]]', '[["F32",[-1]]]', '[["F32",[99999999999]]]', "[" * 9999]
)
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no layout"):
        parse_layout(text)


def test_bytes_that_do_not_fit_the_layout_are_refused() -> None:
    arrays = record(1).stored_arrays()
    layout, data = layout_of(arrays), b"".join(a.tobytes() for a in arrays)
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(ValueError, match="a record of"):
            decode_record(b"k" * 16, layout, wrong)
