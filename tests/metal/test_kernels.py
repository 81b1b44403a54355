"""What stands between MLX's generated signature and the kernels' bodies."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.metal.kernels import DecodeInputs, DecodeKernels, kernel_text
from cortexmlx.metal.lab import sim
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.shape import Kernel
from cortexmlx.metal.vector import VectorGeometry
from cortexmlx.metal.work import ROW_ITEMS, WORK_ITEM, make_work_list, pad_tables


@pytest.mark.parametrize("batch", [1, 9])
@pytest.mark.parametrize("forced", list(Kernel), ids=lambda kernel: kernel.value)
def test_the_simulator_runs_the_text_that_mlx_compiles(
    batch: int, forced: Kernel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    v = Variant("bfloat16", "bfloat16", 64, 64, 32, 3, softcap=True, sinks=True, alibi=True, forced_kernel=forced)
    work = make_work_list(np.full(batch, 40, np.int32), 0, AttentionWindow(), 256)
    arrays = [mx.zeros((batch, 6, 1, 64), mx.bfloat16)]
    arrays += [mx.zeros((2, 64, 64), mx.bfloat16)] * 2 + [mx.zeros((batch, 2, 16, 64), mx.bfloat16)] * 2
    arrays += [mx.array(pad_tables(np.zeros((batch, 2), np.int32))), mx.array(work.plan), mx.ones(2)]
    arrays += [mx.zeros(6), mx.zeros(8)]

    def printed(factory: Any, run: Any) -> str:
        kernels = DecodeKernels(lambda **options: partial(factory(**options), verbose=True))
        capfd.readouterr()
        run(lambda *inputs: kernels(v, work.items, DecodeInputs(*inputs)))
        return capfd.readouterr().out

    theirs = printed(mx.fast.metal_kernel, lambda call: mx.export_function(str(tmp_path / "call"), call, *arrays))
    assert theirs.count("[[kernel]] void") == 2
    assert printed(sim.metal_kernel, lambda call: call(*arrays)) == theirs


@pytest.mark.parametrize("name", ["paged_decode.metal", "paged_matrix.metal", "paged_reduce.metal"])
def test_the_text_of_a_kernel_needs_no_file_beside_it(name: str) -> None:
    text = kernel_text(name)
    assert '#include "' not in text
    assert text.count("struct Partial {") == 1


def test_the_work_list_has_the_same_fields_on_both_sides() -> None:
    """The kernels read NumPy's records as structs: each field of an item, by its name, is where NumPy put it."""
    row, item = np.array([(3, 4, 5, 6)], ROW_ITEMS), np.array([(7, 8, 9, 10)], WORK_ITEM)
    plan = np.concatenate([row.view(np.int32), item.view(np.int32), np.zeros(8, np.int32)])
    structs = VectorGeometry.entry.partition("constexpr")[0]
    kernel = sim.metal_kernel(
        name="fields",
        input_names=["plan"],
        output_names=["found"],
        source=structs
        + """
  const device RowItems& row = *(const device RowItems*)plan;
  const device WorkItem& item = *(const device WorkItem*)((const device RowItems*)plan + 1);
  found[0] = row.first_item; found[1] = row.items; found[2] = row.start; found[3] = row.end;
  found[4] = item.row; found[5] = item.first; found[6] = item.last; found[7] = item.arena_tokens;
""",
    )
    (found,) = kernel(
        inputs=[mx.array(plan)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(8,)],
        output_dtypes=[mx.int32],
    )
    assert found.tolist() == list(range(3, 11))
