"""MLX's matrix-vector products: rows, columns, several vectors at once, gathered batches, alpha and beta."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from cortexmlx.metal.lab.judge.cases import TOLERANCE, Defect, Floats, KernelCase
from cortexmlx.metal.lab.judge.launches import (
    BF16,
    F16,
    FLOATS,
    NAMES,
    Array,
    ResultArray,
    draw,
    f32,
    i32,
    i64,
    launch,
    u32,
)
from cortexmlx.metal.lab.sim.report import Fault


@dataclass(frozen=True)
class Blocks:
    """How a threadgroup is divided: simdgroups (b), their lanes (s), a lane's numbers (t), by rows (m), columns (n)."""

    bm: int
    bn: int
    sm: int
    sn: int
    tm: int
    tn: int

    @property
    def text(self) -> str:
        return f"{self.bm}, {self.bn}, {self.sm}, {self.sn}, {self.tm}, {self.tn}"

    def outputs(self, transposed: bool) -> int:
        """Return the outputs of a threadgroup."""
        return self.bn * self.sn * self.tn if transposed else self.bm * self.sm * self.tm


ROWS = (Blocks(1, 8, 1, 32, 4, 4), Blocks(1, 1, 8, 4, 1, 4), Blocks(4, 1, 1, 32, 4, 4), Blocks(8, 1, 1, 32, 4, 4))
COLUMNS = (Blocks(1, 2, 8, 4, 4, 4), Blocks(1, 2, 8, 4, 4, 1), Blocks(1, 4, 8, 4, 4, 4), Blocks(1, 16, 4, 8, 4, 4))
"""ROWS and COLUMNS are the blocks that MLX instantiates for the two directions."""


def _product(
    transposed: bool, blocks: Blocks, dtype: mx.Dtype, inputs: int, outputs: int, axpby: bool, strided: bool
) -> tuple[Floats, Floats]:
    """Run one product. `strided` batches have two axes, and take the kernel that looks up their strides."""
    batch = 2
    shape = (batch, inputs, outputs) if transposed else (batch, outputs, inputs)
    m_bits, m = draw(1, shape, dtype)
    v_bits, v = draw(2, (batch, inputs), dtype)
    c_bits, c = draw(3, (batch, outputs), dtype)
    alpha, beta = (0.5, 2.0) if axpby else (1.0, 0.0)
    template = f"{NAMES[dtype]}, {blocks.text}, {str(strided).lower()}, {str(axpby).lower()}"

    def strides(size: int) -> Array:
        return i64(0, size) if strided else i64(size)

    buffers: dict[int, Array | ResultArray] = {
        0: m_bits,
        1: v_bits,
        2: c_bits,
        3: ResultArray((batch, outputs), dtype),
        4: i32(inputs),
        5: i32(outputs),
        6: i32(shape[-1]),
        7: f32(alpha),
        8: f32(beta),
        9: i32(2 if strided else 1),
        10: i32(1, batch) if strided else i32(batch),
        11: strides(inputs),
        12: strides(inputs * outputs),
        13: strides(outputs),
        14: i32(1),
    }
    (y,) = launch(
        "gemv.h",
        "gemv_t" if transposed else "gemv",
        template,
        buffers,
        groups=(-(-outputs // blocks.outputs(transposed)), 1, batch),
        threadgroup=(32, blocks.bn, blocks.bm),
    )
    product = np.einsum("bio,bi->bo" if transposed else "boi,bi->bo", m, v)
    return y, alpha * product + beta * c


def _gathered(transposed: bool, dtype: mx.Dtype, inputs: int, outputs: int) -> tuple[Floats, Floats]:
    blocks = COLUMNS[0] if transposed else ROWS[2]
    shape = (3, inputs, outputs) if transposed else (3, outputs, inputs)
    m_bits, m = draw(4, shape, dtype)
    v_bits, v = draw(5, (4, inputs), dtype)
    which_v, which_m = np.array([3, 0, 1, 3, 2]), np.array([2, 2, 0, 1, 0])
    count = len(which_v)
    (y,) = launch(
        "gemv.h",
        "gemv_t_gather" if transposed else "gemv_gather",
        f"{NAMES[dtype]}, {blocks.text}",
        {
            0: m_bits,
            1: v_bits,
            3: ResultArray((count, outputs), dtype),
            4: i32(inputs),
            5: i32(outputs),
            6: i32(shape[-1]),
            7: f32(1.0),
            8: f32(0.0),
            9: i32(1),
            10: i32(count),
            11: i64(1, 1),
            12: i32(1),
            13: i32(4),
            14: i64(inputs),
            15: i32(1),
            16: i32(3),
            17: i64(inputs * outputs),
            18: u32(*which_v),
            19: u32(*which_m),
        },
        groups=(-(-outputs // blocks.outputs(transposed)), 1, count),
        threadgroup=(32, blocks.bn, blocks.bm),
    )
    return y, np.einsum("bio,bi->bo" if transposed else "boi,bi->bo", m[which_m], v[which_v])


def _wide(dtype: mx.Dtype, vectors: int, inputs: int, outputs: int, lanes: int, axpby: bool) -> tuple[Floats, Floats]:
    batch, per_group = 2, min(vectors, 3)
    m_bits, m = draw(6, (batch, outputs, inputs), dtype)
    v_bits, v = draw(7, (batch, vectors, inputs), dtype)
    c_bits, c = draw(8, (batch, vectors, outputs), dtype)
    buffers: dict[int, Array | ResultArray] = {
        0: m_bits,
        1: v_bits,
        3: ResultArray((batch, vectors, outputs), dtype),
        4: i32(inputs),
        5: i32(outputs),
        6: i32(vectors),
        7: i32(inputs),
        8: i32(inputs),
        11: i32(1),
        12: i32(batch),
        13: i64(vectors * inputs),
        14: i64(inputs * outputs),
    }
    alpha, beta = (0.5, 2.0) if axpby else (1.0, 0.0)
    if axpby:
        buffers |= {2: c_bits, 9: f32(alpha), 10: f32(beta), 15: i64(vectors * outputs), 16: i32(outputs), 17: i32(1)}
    (y,) = launch(
        "gemv.h",
        "gemv_wide",
        f"{NAMES[dtype]}, {per_group}, {lanes}",
        buffers,
        groups=(1, -(-outputs // 4), batch),
        threadgroup=(32, lanes // 8, 1),
        constants={"gemv_wide_do_axpby": axpby},
    )
    return y, alpha * np.einsum("boi,bvi->bvo", m, v) + beta * c


_SOME_WAIT = Defect(
    Fault.BARRIER_DIVERGENCE,
    "MLX's gemv with several simdgroups a row has its barrier where only the first lane of each row comes by, and "
    "gemv_t has barriers (of no memory) behind the return of lanes beyond the last column",
    stops=True,
)
_LANES_GONE = Defect(
    Fault.INACTIVE_LANE,
    "MLX's gemv shifts sums down from lanes that have returned: rows beyond the last; what they give is not used",
)


def _known(transposed: bool, blocks: Blocks, outputs: int) -> Defect | None:
    if transposed:
        return _SOME_WAIT if outputs % blocks.outputs(transposed) else None
    if blocks.bn > 1:
        return _SOME_WAIT
    return _LANES_GONE if blocks.sm > 1 and outputs % (blocks.sm * blocks.tm) else None


def cases() -> Iterator[KernelCase]:
    """Yield all blocks that MLX instantiates, with sizes that fill the blocks and sizes that do not."""
    for dtype in FLOATS:
        name, tolerance = NAMES[dtype], TOLERANCE[dtype]
        for transposed, cuts in ((False, ROWS), (True, COLUMNS)):
            kernel = "gemv_t" if transposed else "gemv"
            for blocks in cuts:
                for inputs, outputs in ((256, 128), (131, 37)):
                    run = partial(_product, transposed, blocks, dtype, inputs, outputs, False, False)
                    title = f"{kernel} {name} {inputs} to {outputs} in {blocks.text.replace(', ', '.')}"
                    yield KernelCase("MLX", title, run, tolerance * 2, defect=_known(transposed, blocks, outputs))
            for outputs in (37, 64):
                run = partial(_product, transposed, cuts[2], dtype, 131, outputs, True, True)
                title = f"{kernel} {name} 131 to {outputs} strided, alpha and beta"
                yield KernelCase("MLX", title, run, tolerance * 2, defect=_known(transposed, cuts[2], outputs))
                run = partial(_gathered, transposed, dtype, 131, outputs)
                known = _known(transposed, COLUMNS[0] if transposed else ROWS[2], outputs)
                yield KernelCase("MLX", f"{kernel}_gather {name} 131 to {outputs}", run, tolerance * 2, defect=known)
    for dtype in (F16, BF16):
        for vectors, inputs, outputs, lanes, axpby in (
            (3, 1024, 9, 32, False),
            (5, 260, 70, 16, True),
            (2, 64, 5, 16, False),
        ):
            title = f"gemv_wide {NAMES[dtype]} {vectors} of {inputs} to {outputs}{' alpha and beta' if axpby else ''}"
            run = partial(_wide, dtype, vectors, inputs, outputs, lanes, axpby)
            yield KernelCase("MLX", title, run, TOLERANCE[dtype] * 2)
