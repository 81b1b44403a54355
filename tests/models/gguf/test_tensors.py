"""Tensors from the file into MLX: rounded once and nowhere else, in the asked order, and never twice in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cortexmlx.errors import ModelNotFound
from cortexmlx.models.gguf.file import TensorInfo, read_gguf_header
from cortexmlx.models.gguf.tensors import PACKED_TYPES, UNPACKED_TYPES, PackedArrays, TensorFiles, read_float32_tensor
from support.gguf.blocks import decode_blocks, random_blocks
from support.gguf.writer import encode, write_gguf
from support.patience import PATIENCE


def stored(path: Path, type_name: str, shape: tuple[int, ...], data: bytes) -> TensorInfo:
    return read_gguf_header(write_gguf(path / "a.gguf", {}, {"w": (type_name, shape, data)})).tensors["w"]


def test_bfloat16_does_not_pass_through_float16(tmp_path: Path) -> None:
    import mlx.core as mx

    values = np.array([1e30, -3e-30, 70000.0, 1.0078125], np.float64)
    info = stored(tmp_path, "BF16", (4,), encode(values, "BF16"))
    for dtype in (mx.bfloat16, mx.float32):
        found = TensorFiles().read(info, dtype)
        assert found.dtype == dtype
        bits = np.array(found.astype(mx.float32)).view("<u4")
        assert np.array_equal(bits, values.astype("<f4").view("<u4") >> 16 << 16)


@pytest.mark.parametrize("type_name", sorted(UNPACKED_TYPES))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_mlx_cannot_pack_is_rounded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_name: str, dtype: str
) -> None:
    import mlx.core as mx

    monkeypatch.setattr("cortexmlx.models.gguf.tensors.PIECE_BYTES", 1000)
    data = random_blocks(np.random.default_rng(2), type_name, 64 * 512, 1.0)
    found = TensorFiles().read(stored(tmp_path, type_name, (64, 512), data), getattr(mx, dtype))
    exact = mx.array(decode_blocks(data, type_name).astype(np.float32)).reshape(64, 512)
    assert mx.array_equal(found, exact.astype(getattr(mx, dtype))).item()


@pytest.mark.parametrize("type_name", sorted(PACKED_TYPES))
def test_scales_are_as_narrow_as_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_name: str) -> None:
    import mlx.core as mx

    monkeypatch.setattr("cortexmlx.models.gguf.tensors.PIECE_BYTES", 1000)
    data = random_blocks(np.random.default_rng(3), type_name, 3 * 16 * 512, 1.0)
    info = stored(tmp_path, type_name, (3, 16, 512), data)
    wanted = decode_blocks(data, type_name).astype(np.float32).reshape(3, 16, 512)
    for dtype in (mx.float16, mx.bfloat16):
        found = TensorFiles().read(info, dtype)
        assert isinstance(found, PackedArrays)
        fine = type_name in ("Q4_K", "Q5_K") or (dtype == mx.bfloat16 and type_name != "MXFP4")
        assert found.scales.dtype == (mx.uint8 if type_name == "MXFP4" else mx.float32 if fine else dtype)
        wide = [a if a is None or a.dtype == mx.uint8 else a.astype(mx.float32) for a in (found.scales, found.biases)]
        values = mx.dequantize(found.weight, *wide, 32, found.bits, found.mode, dtype=mx.float32)
        assert np.array_equal(np.array(values), wanted)


def test_a_bias_beyond_float16_keeps_its_tensor_in_float32(tmp_path: Path) -> None:
    import mlx.core as mx

    data = b"".join(np.float16(scale).tobytes() + bytes(range(32)) for scale in (1.0, 1000.0))
    found = TensorFiles().read(stored(tmp_path, "Q8_0", (2, 32), data), mx.float16)
    assert found.biases.dtype == found.scales.dtype == mx.float32
    assert found.biases.tolist() == [[-128.0], [-128000.0]]


@pytest.mark.parametrize("type_name", ["F32", "Q4_1", "Q6_K"])
def test_rows_come_in_the_asked_order(tmp_path: Path, type_name: str) -> None:
    import mlx.core as mx

    data = random_blocks(np.random.default_rng(4), "Q6_K", 6 * 512, 1.0) if type_name == "Q6_K" else None
    data = data or encode(np.random.default_rng(4).normal(size=(6, 512)), type_name)
    info = stored(tmp_path, type_name, (6, 512), data)
    order = [3, 1, 0, 2, 5, 4]
    plain, found = (TensorFiles().read(info, mx.float32, rows) for rows in (None, order))
    if isinstance(found, PackedArrays):
        assert mx.array_equal(found.weight, plain.weight[mx.array(order)]).item()
        assert mx.array_equal(found.biases, plain.biases[mx.array(order)]).item()
    else:
        assert mx.array_equal(found, plain[mx.array(order)]).item()


def test_small_tensors_are_numbers(tmp_path: Path) -> None:
    assert read_float32_tensor(stored(tmp_path, "F32", (3,), np.array([1, 2.5, -3], "<f4").tobytes())) == [
        1.0,
        2.5,
        -3.0,
    ]


def test_a_file_that_has_gone_is_not_found(tmp_path: Path) -> None:
    info = stored(tmp_path, "F32", (3,), bytes(12))
    info.path.unlink()
    with pytest.raises(ModelNotFound, match=r"a\.gguf"):
        TensorFiles().read(info, None)


PEAK = """
import resource, sys, threading, time
from pathlib import Path
import mlx.core as mx
from cortexmlx.models.gguf.file import read_gguf_header
from cortexmlx.models.gguf.tensors import TensorFiles

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

files, header = TensorFiles(), read_gguf_header(Path(sys.argv[1]))
mx.eval(mx.zeros(1))
before, kept, peak, done = held(), [], 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, held())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
for info in header.tensors.values():
    kept.append(files.read(info, mx.float16))
done = True
watcher.join()
print(peak - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel what the process holds")
@pytest.mark.parametrize(("type_name", "in_memory"), [("Q8_0", 36 / 34), ("Q4_K", 192 / 144), ("Q6_K", 512 / 210)])
def test_loading_takes_the_memory_of_the_model_and_of_one_tensor(
    tmp_path: Path, type_name: str, in_memory: float
) -> None:
    count, shape = 16, (4096, 2048)
    data = random_blocks(np.random.default_rng(5), type_name, shape[0] * shape[1], 1.0)
    path = write_gguf(tmp_path / "big.gguf", {}, {f"w{i}": (type_name, shape, data) for i in range(count)})
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-2000:]
    size, peak = path.stat().st_size, int(done.stdout)
    loaded = size * in_memory
    print(f"{type_name}: file {size / 1e6:.0f} MB, loaded {loaded / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
    assert peak < loaded * (1 + 2 / count) + 48e6
