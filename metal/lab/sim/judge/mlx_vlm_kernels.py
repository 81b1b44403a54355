"""Custom kernels of mlx-vlm on the simulator, against float64 NumPy: if it is installed or its wheel is on the path.

Its modules are executed alone, because the package imports what this project does not need. Judged are its image
kernels, the products with 1-bit weights, the FP8 round trip and the scores of a sparse indexer.
"""

import sys
from collections.abc import Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.metal.lab.sim.judge.cases import TOLERANCE, Case, Defect, Floats, Skipped
from cortexmlx.metal.lab.sim.judge.mlx_lm_kernels import pretend_metal
from cortexmlx.metal.lab.sim.report import Fault

Wide = npt.NDArray[np.float64]
PACKAGE = "mlx_vlm"


@cache
def executed(path: str) -> ModuleType:
    """Return one module of mlx-vlm by its path in the package, executed while MLX seems to have a GPU.

    Raises:
        ModuleNotFoundError: mlx-vlm is not there.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations or spec.loader is None:
        raise ModuleNotFoundError(f"{PACKAGE} is not installed")
    loader: Any = spec.loader
    file = Path(spec.submodule_search_locations[0], path)
    module = ModuleType(f"judged_{file.stem}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    with pretend_metal():
        exec(compile(loader.get_data(str(file)), str(file), "exec"), module.__dict__)
    return module


def _normal(seed: int, *shape: int) -> tuple[mx.array, Wide]:
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return mx.array(x), x.astype(np.float64)


def _float64(x: mx.array) -> Wide:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def _nearest(out_h: int, out_w: int) -> tuple[Floats, Floats]:
    module = executed("models/kernels.py")
    given, x = _normal(1, 2, 3, 8, 12)
    with pretend_metal():
        got = module.nearest_interpolate(given, size=(out_h, out_w))
    rows, columns = np.arange(out_h) * 8 // out_h, np.arange(out_w) * 12 // out_w
    return _float64(got), x[:, :, rows][:, :, :, columns]


def _cubic(t: float, a: float) -> float:
    """Return Keys' cubic kernel at `t`. `a` is -0.75 or, for Pillow, -0.5."""
    t = abs(t)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def _cubic_axis(size: int, out: int, smooth: bool) -> Wide:
    """Return the weights [out, size] of one axis. Each row sums to 1; places beyond the edge have no weight."""
    wide = max(size / out, 1.0) if smooth else 1.0
    places = (np.arange(out) + 0.5) * size / out - 0.5
    matrix = np.array([[_cubic((tap - at) / wide, -0.5 if smooth else -0.75) for tap in range(size)] for at in places])
    rows: Wide = matrix / matrix.sum(1, keepdims=True)
    return rows


def _bicubic(out_h: int, out_w: int, smooth: bool) -> tuple[Floats, Floats]:
    module = executed("models/kernels.py")
    given, x = _normal(2, 1, 2, 7, 9)
    with pretend_metal():
        got = module.bicubic_interpolate(given, size=(out_h, out_w), antialias=smooth)
    down, across = _cubic_axis(7, out_h, smooth), _cubic_axis(9, out_w, smooth)
    return _float64(got), np.einsum("ah,bchw,dw->bcad", down, x, across)


def _grid_sample(reach: float) -> tuple[Floats, Floats]:
    """Take bilinear samples at places in [-reach, reach] of an image that spans [-1, 1] and is zero outside."""
    module = executed("models/kernels.py")
    batch, high, wide = 2, 6, 7
    given, x = _normal(3, batch, high, wide, 3)
    places = np.random.default_rng(4).uniform(-reach, reach, (batch, 4, 5, 2)).astype(np.float32)
    with pretend_metal():
        got = module.grid_sample(given, mx.array(places))
    column = ((places[..., 0].astype(np.float64) + 1) * wide - 1) / 2
    row = ((places[..., 1].astype(np.float64) + 1) * high - 1) / 2
    around = np.pad(x, ((0, 0), (9, 9), (9, 9), (0, 0)))
    expected = np.zeros((batch, 4, 5, 3))
    for b in range(batch):
        for dy in (0, 1):
            for dx in (0, 1):
                y, z = np.floor(row[b]).astype(int) + dy, np.floor(column[b]).astype(int) + dx
                weight = (1 - np.abs(row[b] - y)) * (1 - np.abs(column[b] - z))
                expected[b] += weight[..., None] * around[b, y + 9, z + 9]
    return _float64(got), expected


def _separable() -> tuple[Floats, Floats]:
    module = executed("models/kernels.py")
    given, x = _normal(5, 2, 6, 8, 3)
    rng = np.random.default_rng(6)
    iy, ix = rng.integers(0, 6, (5, 4)).astype(np.int32), rng.integers(0, 8, (9, 3)).astype(np.int32)
    wy, wx = rng.standard_normal((5, 4)).astype(np.float32), rng.standard_normal((9, 3)).astype(np.float32)
    with pretend_metal():
        got = module.separable_interpolate(given, mx.array(iy), mx.array(wy), mx.array(ix), mx.array(wx))
    down = np.einsum("yk,nykwc->nywc", wy.astype(np.float64), x[:, iy])
    return _float64(got), np.einsum("xk,nyxkc->nyxc", wx.astype(np.float64), down[:, :, ix])


def _one_bit(rows: int, inputs: int, outputs: int, group: int, dtype: mx.Dtype) -> tuple[Floats, Floats]:
    module = executed("quantization/one_bit.py")
    rng = np.random.default_rng(7)
    flags = rng.integers(0, 2, (outputs, inputs))
    words = np.packbits(flags.astype(np.uint8), axis=1, bitorder="little").view(np.uint32)
    given, scales, biases = (
        mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
        for shape in ((rows, inputs), (outputs, inputs // group), (outputs, inputs // group))
    )
    with pretend_metal():
        got = module.one_bit_quantized_matmul(given, mx.array(words), scales, biases, group_size=group)
    weights = flags * np.repeat(_float64(scales), group, 1) + np.repeat(_float64(biases), group, 1)
    return _float64(got), _float64(given) @ weights.T


def _fp8() -> tuple[Floats, Floats]:
    module = executed("models/deepseek_v41/fakequant.py")
    given, x = _normal(8, 3, 128)
    with pretend_metal():
        got = module.fake_quant_fp8_ue8m0(given)
    blocks = x.reshape(3, 4, 32)
    scale = 2.0 ** np.ceil(np.log2(np.maximum(np.abs(blocks).max(-1, keepdims=True), 1e-4) / 448))
    v = np.clip(blocks / scale, -448, 448)
    step = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(np.abs(v), 1e-30))) - 3, -9)
    return _float64(got), (np.round(v / step) * step * scale).reshape(3, 128)


def _indexer() -> tuple[Floats, Floats]:
    module = executed("models/longcat_flash_sparse/indexer_kernel.py")
    q, wide_q = _normal(9, 2, 4, 3, 16)
    keys, wide_keys = _normal(10, 2, 300, 16)
    weights, wide_weights = _normal(11, 2, 3, 4)
    with pretend_metal():
        got = module.indexer_dense_scores(q, keys, weights, 0.25)
    scores = np.maximum(np.einsum("bhld,bnd->bhln", wide_q, wide_keys), 0.0)
    return _float64(got), np.einsum("bhln,blh->bln", scores, wide_weights) * 0.25


_READS_AROUND = Defect(
    Fault.OUT_OF_BOUNDS,
    "mlx-vlm's grid_sample reads the four neighbours of a place before it asks whether they lie in the image",
    stops=True,
)


def cases() -> Iterator[Case | Skipped]:
    """Yield the kernels whose entry point takes arrays; without the package, one Skipped."""
    if find_spec(PACKAGE) is None:
        yield Skipped("mlx-vlm", "all kernels", "mlx-vlm is not installed: `pip install mlx-vlm`, or --mlx-vlm WHEEL")
        return
    exact, close = TOLERANCE[mx.float32], TOLERANCE[mx.float32] * 8
    for size in ((4, 6), (16, 24)):
        yield Case("mlx-vlm", f"nearest_interpolate to {size}", partial(_nearest, *size), 0.0)
    for size, smooth in (((14, 18), False), ((11, 5), False), ((11, 5), True), ((3, 4), True)):
        title = f"bicubic_interpolate to {size}{' antialiased' if smooth else ''}"
        yield Case("mlx-vlm", title, partial(_bicubic, *size, smooth), close)
    yield Case("mlx-vlm", "grid_sample within the image", partial(_grid_sample, 0.8), close)
    yield Case("mlx-vlm", "grid_sample around the image", partial(_grid_sample, 1.5), close, defect=_READS_AROUND)
    yield Case("mlx-vlm", "separable_interpolate", _separable, close)
    yield Case("mlx-vlm", "deepseek_v41 fp8 round trip", _fp8, exact)
    yield Case("mlx-vlm", "longcat indexer scores", _indexer, close)
    for rows, inputs, outputs, dtype in (
        (1, 1024, 19, mx.float32),
        (3, 256, 16, mx.float16),
        (20, 512, 40, mx.float16),
        (33, 1024, 64, mx.float32),
    ):
        title = f"one_bit matmul {rows} of {inputs} to {outputs} {str(dtype).removeprefix('mlx.core.')}"
        run = partial(_one_bit, rows, inputs, outputs, 128, dtype)
        yield Case("mlx-vlm", title, run, TOLERANCE[dtype] * 4)
