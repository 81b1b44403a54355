"""The `mx.fast.metal_kernel`s of the installed mlx-lm, run on the simulator and compared with plain MLX."""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from cortexmlx.metal.lab.judge.cases import TOLERANCE, Floats, KernelCase
from cortexmlx.metal.lab.sim.kernel import metal_kernel

Pair = tuple[mx.array, mx.array]

WITHOUT_CASE = ("bitlinear_layers", "deepseek_v41", "expert_routing", "losses")
"""mlx-lm's modules whose kernels are not judged: ternary weights, Sinkhorn steps, routing, training."""


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
def simulated(name: str) -> ModuleType:
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


def _draw(seed: int, dtype: mx.Dtype = mx.float32) -> Callable[..., mx.array]:
    keys = mx.random.split(mx.random.key(seed), 32)
    count = iter(range(32))

    def draw(*shape: int, scale: float = 1.0) -> mx.array:
        return (mx.random.normal(shape, key=keys[next(count)]) * scale).astype(dtype)

    return draw


def _joined(pairs: Sequence[Pair]) -> tuple[Floats, Floats]:
    """Join several outputs into one, each divided by its largest expected value."""
    got, wanted = [], []
    for simulated_array, expected in pairs:
        e = np.array(expected.astype(mx.float32)).astype(np.float64).reshape(-1)
        s = np.array(simulated_array.astype(mx.float32)).astype(np.float64).reshape(-1)
        size = max(float(np.abs(e).max(initial=0.0)), 1e-30)
        got.append(s / size)
        wanted.append(e / size)
    return np.concatenate(got), np.concatenate(wanted)


def _gated_delta(variant: str, dtype: mx.Dtype) -> tuple[Floats, Floats]:
    module = simulated("mlx_lm.models.gated_delta")
    batch, length, hk, hv, dk, dv = 2, 3, 2, 4, 128 if variant in ("packed", "xtree") else 64, 16
    draw = _draw(1, dtype)
    q, k, v = (
        draw(batch, length, hk, dk, scale=0.1),
        draw(batch, length, hk, dk, scale=0.1),
        draw(batch, length, hv, dv),
    )
    gate_shape = (batch, length, hv, dk) if variant.startswith("vector") else (batch, length, hv)
    gate = mx.sigmoid(draw(*gate_shape)).astype(mx.float32)
    beta = mx.sigmoid(draw(batch, length, hv))
    state = _draw(2)(batch, hv, dv, dk)
    mask = mx.array([[True, True, False], [True, True, True]]) if variant.endswith("masked") else None
    run = module.gated_delta_kernel_xtree if variant == "xtree" else module.gated_delta_kernel
    y, after = run(q, k, v, gate, beta, state, mask)
    wide = [x.astype(mx.float32) for x in (q, k, v, gate, beta)]
    expected_y, expected_after = module.gated_delta_ops(*wide, state, mask)
    if mask is not None:
        expected_y = mx.where(mask[..., None, None], expected_y, 0)
    return _joined([(y, expected_y), (after, expected_after)])


def _ssm(dtype: mx.Dtype) -> tuple[Floats, Floats]:
    module = simulated("mlx_lm.models.ssm")
    batch, heads, groups, head_dim, state_dim = 2, 4, 2, 16, 64
    draw = _draw(3, dtype)
    x = draw(batch, 1, heads, head_dim)
    a_log, b, c, d = draw(heads), draw(batch, 1, groups, state_dim), draw(batch, 1, groups, state_dim), draw(heads)
    dt, bias = draw(batch, 1, heads), draw(heads)
    state = _draw(4)(batch, heads, head_dim, state_dim).astype(dtype)
    limit = (0.001, 100.0)
    y, after = module.ssm_update_kernel(x, a_log, b, c, d, dt, bias, state, limit)
    wide = [z.astype(mx.float32) for z in (x, a_log, b, c, d, dt, bias, state)]
    expected_y, expected_after = module.ssm_attn(*wide, limit)
    return _joined([(y, expected_y), (after, expected_after)])


def _wkv7(dtype: mx.Dtype) -> tuple[Floats, Floats]:
    module = simulated("mlx_lm.models.rwkv7")
    batch, length, heads, dim = 2, 3, 2, 64
    draw = _draw(5, dtype)
    r, k, v, a, b = (draw(batch, length, heads, dim, scale=0.2) for _ in range(5))
    w = mx.sigmoid(draw(batch, length, heads, dim))
    state = _draw(6)(batch, heads, dim, dim).astype(dtype)
    y, after = module.wkv7_kernel(r, w, k, v, a, b, state)
    steps, expected_state = [], state.astype(mx.float32)
    for t in range(length):
        now = [z[:, t].astype(mx.float32) for z in (r, w, k, v, a, b)]
        out, expected_state = module._wkv7_step_ops(*now, expected_state)
        steps.append(out.squeeze(-1))
    return _joined([(y, mx.stack(steps, axis=1)), (after, expected_state)])


def _attention_residuals(dtype: mx.Dtype) -> tuple[Floats, Floats]:
    module = simulated("mlx_lm.models.kimi_k3")
    draw = _draw(7, dtype)
    blocks = module.ResidualBlocks(1e-5)
    for _ in range(3):
        blocks.append(draw(1, 2, 640))
    partial_sum, weights = draw(1, 2, 640), draw(640, scale=0.05)
    with pretend_metal():
        got = module._attn_res_mix(blocks, partial_sum, weights, 1e-5)
    return _joined([(got, module._attn_res_mix(blocks, partial_sum, weights, 1e-5, use_kernel=False))])


def _rms(x: mx.array, eps: float) -> mx.array:
    x = x.astype(mx.float32)
    return mx.multiply(x, mx.rsqrt(mx.square(x).mean(-1, keepdims=True) + eps))


def _heads(qkvg: mx.array, heads: int, kv_heads: int, dim: int, eps: float, scale: float) -> Pair:
    shape = qkvg.shape[:-1]
    q = qkvg[..., : heads * dim].reshape(*shape, heads, dim)
    k = qkvg[..., heads * dim : (heads + kv_heads) * dim].reshape(*shape, kv_heads, dim)
    return _rms(q, eps) * scale, _rms(k, eps)


def _qk_norm(dtype: mx.Dtype, dim: int) -> tuple[Floats, Floats]:
    module = simulated("mlx_lm.kernels.qk_norm")
    heads, kv_heads = 3, 2
    qkvg = _draw(13, dtype)(2, 3, 2 * (heads + kv_heads) * dim)
    got = module.qk_norm(qkvg, n_heads=heads, n_kv_heads=kv_heads, head_dim=dim, eps=1e-5, query_scale=0.3)
    return _joined(list(zip(got, _heads(qkvg, heads, kv_heads, dim, 1e-5, 0.3), strict=True)))


def _qk_norm_rope(dtype: mx.Dtype, batched: bool) -> tuple[Floats, Floats]:
    module = simulated("mlx_lm.kernels.qk_norm_rope")
    heads, kv_heads, dim = 3, 2, 64
    qkvg = _draw(14, dtype)(2, 3, 2 * (heads + kv_heads) * dim)
    offset = mx.array([5, 9]) if batched else 7
    got = module.qk_norm_rope(
        qkvg,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=dim,
        eps=1e-5,
        query_scale=0.3,
        rope_base=10000.0,
        offset=offset,
    )
    expected = [
        mx.fast.rope(x.swapaxes(1, 2), dim, traditional=True, base=10000.0, scale=1.0, offset=offset).swapaxes(1, 2)
        for x in _heads(qkvg, heads, kv_heads, dim, 1e-5, 0.3)
    ]
    return _joined(list(zip(got, expected, strict=True)))


def _expert_combine(dtype: mx.Dtype) -> tuple[Floats, Floats]:
    module = simulated("mlx_lm.kernels.post_expert_norm_combine")
    draw = _draw(16, dtype)
    experts, norm = draw(3, 4, 640), draw(640)
    weights = mx.softmax(_draw(17)(3, 4), axis=-1).astype(dtype)
    got = module.post_expert_norm_combine(experts, weights, norm_weight=norm, eps=1e-5)
    expected = (_rms(experts * norm.astype(mx.float32), 1e-5) * weights.astype(mx.float32)[..., None]).sum(-2)
    return _joined([(got, expected)])


def _norm_gate(dtype: mx.Dtype) -> tuple[Floats, Floats]:
    module = simulated("mlx_lm.kernels.rms_norm_sigmoid_gate")
    draw = _draw(18, dtype)
    x = draw(2, 3, 5, 96).swapaxes(1, 2)
    gate = draw(2, 3, 5 * 96 * 2)[..., ::2]
    got = module.rms_norm_sigmoid_gate(x, gate, eps=1e-5)
    normed = _rms(x, 1e-5).swapaxes(1, 2).reshape(2, 3, 5 * 96)
    return _joined([(got, normed * mx.sigmoid(gate.astype(mx.float32)))])


def _norm_add_norm(dtype: mx.Dtype, variant: str) -> tuple[Floats, Floats]:
    module = simulated("mlx_lm.kernels.norm_add_norm")
    width = 640
    draw, wide = _draw(19, dtype), _draw(20)
    branch, stream = draw(2, 3, width), wide(2, 3, width)
    alpha, beta = wide(width), wide(width)
    post = draw(width) if variant == "scaled" else None
    following = nn.RMSNorm(width, eps=1e-5)
    following.weight = wide(width)
    if variant == "pre_norm":
        got = module.pre_norm(stream, following, dtype=dtype)
        return _joined([(got, _rms(stream, 1e-5) * following.weight)])
    after, normed = module.norm_add_norm(
        branch,
        stream,
        alpha=alpha,
        beta=beta,
        post_weight=post,
        post_eps=1e-5,
        next_norm=None if variant == "last" else following,
    )
    scaled = branch if post is None else branch * post
    expected = alpha * stream + beta * _rms(scaled, 1e-5)
    if normed is None:
        return _joined([(after, expected)])
    return _joined([(after, expected), (normed, _rms(expected, 1e-5) * following.weight)])


def cases() -> Iterator[KernelCase]:
    """Yield the other uses, in every variant that compiles to another text."""
    both = ((mx.float32, "float"), (mx.bfloat16, "bfloat"))
    for dtype, name in both:
        tolerance = TOLERANCE[dtype] * 4
        for variant in ("generic", "masked", "vector", "vector masked", "xtree", "packed"):
            run = partial(_gated_delta, variant, dtype)
            yield KernelCase("mlx-lm", f"gated_delta {variant} {name}", run, tolerance)
        yield KernelCase("mlx-lm", f"ssm_update {name}", partial(_ssm, dtype), tolerance)
        yield KernelCase("mlx-lm", f"rwkv7 wkv7 {name}", partial(_wkv7, dtype), tolerance)
        yield KernelCase(
            "mlx-lm", f"kimi_k3 attention residuals {name}", partial(_attention_residuals, dtype), tolerance
        )
        for dim in (64, 80):
            yield KernelCase("mlx-lm", f"qk_norm {dim} {name}", partial(_qk_norm, dtype, dim), tolerance)
        for batched in (False, True):
            title = f"qk_norm_rope {'offset per row' if batched else 'one offset'} {name}"
            yield KernelCase("mlx-lm", title, partial(_qk_norm_rope, dtype, batched), max(tolerance, 2e-5))
        yield KernelCase("mlx-lm", f"post_expert_norm_combine {name}", partial(_expert_combine, dtype), tolerance)
        yield KernelCase("mlx-lm", f"rms_norm_sigmoid_gate {name}", partial(_norm_gate, dtype), tolerance)
        for variant in ("scaled", "plain", "last", "pre_norm"):
            yield KernelCase(
                "mlx-lm", f"norm_add_norm {variant} {name}", partial(_norm_add_norm, dtype, variant), tolerance
            )
