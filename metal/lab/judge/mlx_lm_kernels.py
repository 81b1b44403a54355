"""Every `mx.fast.metal_kernel` of the installed mlx-lm, run on the simulator and compared with plain MLX."""

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


def _sinkhorn() -> tuple[Floats, Floats]:
    module = simulated("mlx_lm.models.deepseek_v41")
    comb = mx.softmax(_draw(8)(2, 5, 4, 4), axis=-1) + 1e-6
    eps = mx.array([1e-6])
    with pretend_metal():
        got = module._sinkhorn(comb, iters=5, eps=eps)
    return _joined([(got, module._sinkhorn(comb, iters=5, eps=eps))])


def _bitlinear(invert: bool, dtype: mx.Dtype) -> tuple[Floats, Floats]:
    module = simulated("mlx_lm.models.bitlinear_layers")
    rows, inputs, outputs = 3, 256, 16
    layer = module.BitLinear(inputs, outputs, bias=False, invert_weight_scales=invert)
    ternary = mx.random.randint(0, 3, (4, outputs // 4, inputs), key=mx.random.key(9))
    layer.weight = sum(ternary[i] * 4**i for i in range(4)).astype(mx.uint8)
    layer.weight_scale = mx.array([1.7]).astype(dtype)
    x = _draw(10, dtype)(rows, inputs)
    weight = (ternary.reshape(outputs, inputs) - 1).astype(mx.float32)
    scale = layer.weight_scale.astype(mx.float32)
    expected = (x.astype(mx.float32) @ weight.T) * (1 / scale if invert else scale)
    return _joined([(layer(x), expected)])


def _loss(kind: str, dtype: mx.Dtype) -> tuple[Floats, Floats]:
    module = simulated("mlx_lm.tuner.losses")
    draw = _draw(11, dtype)
    q, p = draw(3, 5001, scale=2.0), draw(3, 5001, scale=2.0)
    wide_q, wide_p = q.astype(mx.float32), p.astype(mx.float32)
    plain = importlib.import_module("mlx_lm.tuner.losses")
    function = getattr(plain, f"{kind}_div_loss")
    expected = function(wide_q, wide_p)
    with pretend_metal():
        got = getattr(module, f"_{kind}_div_loss")(q, p)
    return _joined([(got[0] if kind == "js" else got, expected)])


def _loss_gradient(kind: str, dtype: mx.Dtype) -> tuple[Floats, Floats]:
    module = simulated("mlx_lm.tuner.losses")
    plain = importlib.import_module("mlx_lm.tuner.losses")
    draw = _draw(12, dtype)
    q, p, cotangent = draw(2, 5001, scale=2.0), draw(2, 5001, scale=2.0), draw(2)
    function = getattr(plain, f"{kind}_div_loss")

    def weighted(logits: mx.array) -> mx.array:
        return mx.sum(function(logits, p.astype(mx.float32)) * cotangent.astype(mx.float32))

    expected = mx.grad(weighted)(q.astype(mx.float32))
    inputs = [q, p, cotangent]
    if kind == "js":
        logq, logp = nn.log_softmax(q.astype(mx.float32)), nn.log_softmax(p.astype(mx.float32))
        middle = mx.logaddexp(logq, logp) - np.log(2.0)
        inputs.append((mx.exp(logq) * (logq - middle)).sum(-1).astype(dtype))
    kernel = getattr(module, f"_{kind}_backward_kernel")
    got = kernel(
        inputs=inputs,
        output_shapes=[q.shape],
        output_dtypes=[dtype],
        template=[("T", dtype), ("V", q.shape[-1])],
        grid=(1024, 2, 1),
        threadgroup=(1024, 1, 1),
    )[0]
    return _joined([(got, expected)])


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


def _expert_routing() -> tuple[Floats, Floats]:
    module = simulated("mlx_lm.kernels.expert_routing")
    draw = _draw(15)
    logits, bias = draw(4, 60), draw(60, scale=0.01)
    found, weights = module.expert_routing(logits, bias, top_k=6, multiplier=1.3, score_eps=1e-9, route_scale=2.5)
    scores = mx.sigmoid(logits * 1.3)
    expected = mx.argsort(-(scores + bias), axis=-1)[:, :6]
    chosen = mx.take_along_axis(scores, expected, axis=-1)
    return _joined([(found, expected), (weights, chosen / (chosen.sum(-1, keepdims=True) + 1e-9) * 2.5)])


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


_UNORDERED = (
    "mlx-lm's loss kernels reuse threadgroup memory after a barrier that orders none, or after none at all: "
    "right while simdgroups keep pace, so they run in lockstep and their races are let pass"
)


def cases() -> Iterator[KernelCase]:
    """Yield all twenty uses, in every variant that compiles to another text."""
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
        for invert in (False, True):
            title = f"bitlinear {'inverted scale' if invert else 'scale'} {name}"
            yield KernelCase("mlx-lm", title, partial(_bitlinear, invert, dtype), tolerance)
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
        for kind in ("kl", "js"):
            yield KernelCase("mlx-lm", f"{kind} loss {name}", partial(_loss, kind, dtype), tolerance, _UNORDERED)
            yield KernelCase(
                "mlx-lm", f"{kind} loss gradient {name}", partial(_loss_gradient, kind, dtype), tolerance, _UNORDERED
            )
    yield KernelCase("mlx-lm", "expert_routing", _expert_routing, TOLERANCE[mx.float32])
    yield KernelCase("mlx-lm", "deepseek_v41 sinkhorn", _sinkhorn, TOLERANCE[mx.float32])
