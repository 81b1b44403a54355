"""The `mx.fast.metal_kernel`s of mlx-lm's recurrent layers, run on the simulator and compared with plain MLX."""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType

import mlx.core as mx
import numpy as np

from cortexmlx.metal.lab.judge.cases import TOLERANCE, KernelCase, ResultAndExpected
from cortexmlx.metal.lab.sim.kernel import metal_kernel

Pair = tuple[mx.array, mx.array]


@contextmanager
def pretend_metal() -> Iterator[None]:
    """Make MLX seem to have a Metal GPU inside the block. Its custom kernels run on the simulator."""
    pretended = {"metal_kernel": metal_kernel, "is_available": lambda: True, "default_device": lambda: mx.gpu}
    owners = {"metal_kernel": mx.fast, "is_available": mx.metal, "default_device": mx}
    saved = {name: getattr(owner, name) for name, owner in owners.items()}
    for name, owner in owners.items():
        setattr(owner, name, pretended[name])
    try:
        yield
    finally:
        for name, owner in owners.items():
            setattr(owner, name, saved[name])


@cache
def load_simulated(name: str) -> ModuleType:
    """Return a fresh copy of an mlx-lm module with simulated kernels. The copy that others imported does not change."""
    real = importlib.import_module(name)
    parent, _, child = name.rpartition(".")
    there = getattr(sys.modules[parent], child)  # in `kernels`, a function of the module's name
    with pretend_metal():
        del sys.modules[name]
        try:
            return importlib.import_module(name)
        finally:
            sys.modules[name] = real
            setattr(sys.modules[parent], child, there)


def _make_drawer(seed: int, dtype: mx.Dtype = mx.float32) -> Callable[..., mx.array]:
    keys = mx.random.split(mx.random.key(seed), 32)
    count = iter(range(32))

    def draw(*shape: int, scale: float = 1.0) -> mx.array:
        return (mx.random.normal(shape, key=keys[next(count)]) * scale).astype(dtype)

    return draw


def _join_outputs(pairs: Sequence[Pair]) -> ResultAndExpected:
    """Join several outputs into one, each divided by its largest expected value."""
    got, wanted = [], []
    for simulated_array, expected in pairs:
        e = np.array(expected.astype(mx.float32)).astype(np.float64).reshape(-1)
        s = np.array(simulated_array.astype(mx.float32)).astype(np.float64).reshape(-1)
        size = max(float(np.abs(e).max(initial=0.0)), 1e-30)
        got.append(s / size)
        wanted.append(e / size)
    return np.concatenate(got), np.concatenate(wanted)


def _run_gated_delta(variant: str, dtype: mx.Dtype) -> ResultAndExpected:
    module = load_simulated("mlx_lm.models.gated_delta")
    batch, length, hk, hv, dk, dv = 2, 3, 2, 4, 128 if variant in ("packed", "xtree") else 64, 16
    draw = _make_drawer(1, dtype)
    q, k, v = (
        draw(batch, length, hk, dk, scale=0.1),
        draw(batch, length, hk, dk, scale=0.1),
        draw(batch, length, hv, dv),
    )
    gate_shape = (batch, length, hv, dk) if variant.startswith("vector") else (batch, length, hv)
    gate = mx.sigmoid(draw(*gate_shape)).astype(mx.float32)
    beta = mx.sigmoid(draw(batch, length, hv))
    state = _make_drawer(2)(batch, hv, dv, dk)
    mask = mx.array([[True, True, False], [True, True, True]]) if variant.endswith("masked") else None
    run = module.gated_delta_kernel_xtree if variant == "xtree" else module.gated_delta_kernel
    y, after = run(q, k, v, gate, beta, state, mask)
    wide = [x.astype(mx.float32) for x in (q, k, v, gate, beta)]
    expected_y, expected_after = module.gated_delta_ops(*wide, state, mask)
    if mask is not None:
        expected_y = mx.where(mask[..., None, None], expected_y, 0)
    return _join_outputs([(y, expected_y), (after, expected_after)])


def _run_ssm(dtype: mx.Dtype) -> ResultAndExpected:
    module = load_simulated("mlx_lm.models.ssm")
    batch, heads, groups, head_dim, state_dim = 2, 4, 2, 16, 64
    draw = _make_drawer(3, dtype)
    x = draw(batch, 1, heads, head_dim)
    a_log, b, c, d = draw(heads), draw(batch, 1, groups, state_dim), draw(batch, 1, groups, state_dim), draw(heads)
    dt, bias = draw(batch, 1, heads), draw(heads)
    state = _make_drawer(4)(batch, heads, head_dim, state_dim).astype(dtype)
    limit = (0.001, 100.0)
    y, after = module.ssm_update_kernel(x, a_log, b, c, d, dt, bias, state, limit)
    wide = [z.astype(mx.float32) for z in (x, a_log, b, c, d, dt, bias, state)]
    expected_y, expected_after = module.ssm_attn(*wide, limit)
    return _join_outputs([(y, expected_y), (after, expected_after)])


def _run_wkv7(dtype: mx.Dtype) -> ResultAndExpected:
    module = load_simulated("mlx_lm.models.rwkv7")
    batch, length, heads, dim = 2, 3, 2, 64
    draw = _make_drawer(5, dtype)
    r, k, v, a, b = (draw(batch, length, heads, dim, scale=0.2) for _ in range(5))
    w = mx.sigmoid(draw(batch, length, heads, dim))
    state = _make_drawer(6)(batch, heads, dim, dim).astype(dtype)
    y, after = module.wkv7_kernel(r, w, k, v, a, b, state)
    steps, expected_state = [], state.astype(mx.float32)
    for t in range(length):
        now = [z[:, t].astype(mx.float32) for z in (r, w, k, v, a, b)]
        out, expected_state = module._wkv7_step_ops(*now, expected_state)
        steps.append(out.squeeze(-1))
    return _join_outputs([(y, mx.stack(steps, axis=1)), (after, expected_state)])


def cases() -> Iterator[KernelCase]:
    """Yield the cases of each kernel: one for every variant with a text of its own."""
    for dtype, name in ((mx.float32, "float"), (mx.bfloat16, "bfloat")):
        tolerance = TOLERANCE[dtype] * 4
        for variant in ("generic", "masked", "vector", "vector masked", "xtree", "packed"):
            run = partial(_run_gated_delta, variant, dtype)
            yield KernelCase("mlx-lm", f"gated_delta {variant} {name}", run, tolerance)
        yield KernelCase("mlx-lm", f"ssm_update {name}", partial(_run_ssm, dtype), tolerance)
        yield KernelCase("mlx-lm", f"rwkv7 wkv7 {name}", partial(_run_wkv7, dtype), tolerance)
