"""Which layers the kernel writes the tail of, and that it leaves what the layers' own operations leave. The layers are
mlx-lm's, of many families; what is not just norm, rotation and write is left to MLX.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.qwen3_next import Qwen3NextRMSNormGated
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE, Llama3RoPE, YarnRoPE

from cortexmlx.attention.mlx_lm_hook import CustomHandle, LayerCache, install_attention_hook
from cortexmlx.attention.tail_write import IN_PLACE_METHODS, TailWriter, TrackedArray, WrittenTail
from cortexmlx.metal.lab import sim
from support.kernels.broken_kernels import damaged, dropped

pytestmark = pytest.mark.lab  # kernels are executed


ROWS, COLUMNS, HIDDEN = 3, 8, 48
POSITIONS = np.array([0, 7, 130], np.int32)
COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "vocab_size": 10,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


class Layer(nn.Module):
    """An attention of its own: `change` may do anything to the rotated queries and keys before they are stored."""

    def __init__(self, rope: Any, change: Callable[..., Any] = lambda q, k: (q, k), key_rope: Any = None) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HIDDEN, n * 12) for n in (4, 2, 2))
        self.rope, self.key_rope, self.change = rope, rope if key_rope is None else key_rope, change

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        q, k, v = (
            p(x).reshape(*x.shape[:2], -1, 12).transpose(0, 2, 1, 3) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rotate(q, k, cache.offset)
        keys, values = cache.update_and_fetch(k, v.astype(self.v_proj.weight.dtype))
        sdpa = import_module("mlx_lm.models.base").scaled_dot_product_attention
        return sdpa(self.late(q), keys, values, cache=cache, scale=1.0, mask=None)  # type: ignore[no-any-return]

    def rotate(self, q: mx.array, k: mx.array, offset: mx.array) -> tuple[mx.array, mx.array]:
        changed: tuple[mx.array, mx.array] = self.change(self.rope(q, offset=offset), self.key_rope(k, offset=offset))
        return changed

    def late(self, q: mx.array) -> mx.array:
        """The queries once the keys are stored."""
        return q


def layer_of(family: str, **changes: Any) -> nn.Module:
    """The first attention of an mlx-lm model with random weights."""
    module = import_module(f"mlx_lm.models.{family}")
    args = module.ModelArgs.from_dict(COMMON | {"model_type": family} | changes)
    mx.random.seed(3)
    made = [m for m in module.Model(args).modules() if hasattr(m, "rope") and callable(m)][-1]
    made.update({k: v for k, v in made.parameters().items() if isinstance(v, mx.array)})
    return made  # type: ignore[no-any-return]


class Handle(CustomHandle):
    """Keeps the queries of a layer, as a backend would take them."""

    dtype = mx.float32

    def __init__(self, written: WrittenTail | None) -> None:
        self.written = written
        self.queries: mx.array

    def astype(self, _: mx.Dtype) -> Any:
        return self

    def attend(self, queries: mx.array, scale: float, score_term: mx.array | None) -> mx.array:
        assert score_term is None
        self.queries = queries if self.written is None else self.written.replace_queries(queries)
        return mx.zeros(queries.shape, queries.dtype)


def steps(layer: nn.Module, writer: TailWriter | None) -> tuple[list[np.ndarray], list[bool]]:
    """Two decode steps: the queries, and the keys and values of the new column; and whether the writer wrote them."""
    install_attention_hook()
    random, out, by_kernel = np.random.default_rng(1), [], []
    tail: Any = None
    for column in range(2):
        handle: Any = None

        def fetch(_: int, keys: mx.array, values: mx.array | None, column: int = column) -> Handle:
            nonlocal handle, tail
            written = None if writer is None else writer.write(keys, values, tail if column else None)
            handle = Handle(written)
            new = (keys, values) if written is None else [a[:, :, column : column + 1] for a in written.tail]
            tail = None if written is None else written.tail
            out.extend(np.array(a.astype(mx.float32)) for a in new)
            return handle

        positions = mx.array(POSITIONS + column)
        cache = LayerCache(0, fetch)
        cache.begin(positions)
        if writer is not None:
            writer.begin(positions, POSITIONS + column, COLUMNS, column)
        layer(mx.array(random.standard_normal((ROWS, 1, HIDDEN)).astype(np.float32)), cache=cache)
        out.append(np.array(handle.queries.astype(mx.float32)))
        by_kernel.append(handle.written is not None)
    return out, by_kernel


def both(make: Callable[[], nn.Module]) -> tuple[bool, float, TailWriter]:
    """Whether the kernel wrote the steps of a layer, the largest difference from MLX's operations, and the writer."""
    wanted, _ = steps(make(), None)
    layer, writer = make(), TailWriter(sim.metal_kernel, check=False)
    writer.track_model(layer)
    got, by_kernel = steps(layer, writer)
    assert by_kernel[0] == by_kernel[1]
    return by_kernel[0], max(float(np.abs(a - b).max()) for a, b in zip(got, wanted, strict=True)), writer


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
PLAIN_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1,
    "mscale_all_dim": 1,
}


@pytest.mark.parametrize(
    ("family", "changes", "norms"),
    [
        ("llama", {}, 0),
        ("llama", {"rope_scaling": LLAMA3}, 0),
        ("qwen2", {"rope_traditional": True}, 0),
        ("qwen3", {}, 2),
        ("qwen3", {"rope_scaling": PLAIN_YARN}, 2),
        ("gemma3_text", {"query_pre_attn_scalar": 12}, 2),
        ("olmo2", {}, 0),  # its norms are over all heads, and stay MLX's
        (
            "granite",
            {"attention_multiplier": 0.1, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
            | {"logits_scaling": 1.0, "attention_bias": True, "mlp_bias": False},
            0,
        ),
        ("stablelm", {"use_qkv_bias": False, "partial_rotary_factor": 0.5, "rope_pct": 0.5}, 0),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_layers_of_many_families_are_written_by_the_kernel(family: str, changes: dict[str, Any], norms: int) -> None:
    fused, error, writer = both(lambda: layer_of(family, **changes))
    assert fused and error < 2e-5
    [variant] = writer._approvals
    assert variant.query_norm + variant.key_norm == norms and writer.notes() == ()


def test_what_one_launch_cannot_compute_is_left_to_mlx() -> None:
    """Keys of other frequencies, and values or norms of another type."""
    ropes = [Llama3RoPE(12, 512, base=base, scaling_config=LLAMA3) for base in (1e4, 1e6)]
    apart, halves, normed = Layer(ropes[0], key_rope=ropes[1]), Layer(nn.RoPE(12)), layer_of("qwen3")
    halves.v_proj.set_dtype(mx.float16)
    normed.q_norm.set_dtype(mx.float16)
    for layer, norms in ((apart, None), (halves, None), (normed, [(False, True)])):
        fused, error, writer = both(lambda made=layer: made)  # type: ignore[misc]
        assert error < 2e-5 and (not fused or [(v.query_norm, v.key_norm) for v in writer._approvals] == norms)


def _in_place(array: mx.array) -> mx.array:
    array *= 2.0
    return array


def _one_number(array: mx.array) -> mx.array:
    array[0, 0, 0, 3] = 9.0
    return array


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k: (q, k * 2.0),
        lambda q, k: (q, _in_place(k)),
        lambda q, k: (q, _one_number(k)),
        lambda q, k: (_in_place(q), k),
        lambda q, k: (q, mx.fast.rms_norm(k, None, 1e-5)),
        lambda q, k: (q, q[:, :2]),
    ],
    ids=[
        "keys scaled",
        "keys changed in place",
        "a key's number set",
        "queries changed in place",
        "norm after",
        "slices",
    ],
)
def test_what_is_done_after_the_rotation_is_left_to_mlx(change: Any) -> None:
    fused, error, _ = both(lambda: _seeded(lambda: Layer(nn.RoPE(12), change)))
    assert not fused and error == 0.0


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    mx.random.seed(5)
    return make()


def test_queries_that_are_changed_after_the_write_are_the_models() -> None:
    class Late(Layer):
        def late(self, q: mx.array) -> mx.array:
            q *= 3.0
            return q

    fused, error, _ = both(lambda: _seeded(lambda: Late(nn.RoPE(12))))
    assert fused and error < 2e-5


def test_what_is_changed_in_place_before_or_after_the_rotation_is_what_is_rotated() -> None:
    class Before(Layer):
        def rotate(self, q: mx.array, k: mx.array, offset: mx.array) -> tuple[mx.array, mx.array]:
            q *= 0.5
            turned = super().rotate(q, k, offset)
            q += 7.0
            k += 9.0
            return turned

    fused, error, _ = both(lambda: _seeded(lambda: Before(nn.RoPE(12))))
    assert fused and error < 2e-5


@pytest.mark.parametrize(
    "rope",
    [
        lambda: YarnRoPE(12, scaling_factor=8.0),
        lambda: DynamicNTKScalingRoPE(12, 512, False, 10000.0, 2.0),
        lambda: type("Own", (nn.RoPE,), {})(12),
    ],
    ids=["yarn that scales", "dynamic", "a class of its own"],
)
def test_a_rotation_that_is_not_known_is_left_to_mlx(rope: Callable[[], nn.Module]) -> None:
    if type(rope()) is DynamicNTKScalingRoPE:
        writer = TailWriter(sim.metal_kernel, check=False)
        layer = Layer(rope())
        kind = type(layer.rope)
        writer.track_model(layer)
        assert type(layer.rope) is kind
        return
    fused, error, _ = both(lambda: _seeded(lambda: Layer(rope())))
    assert not fused and error == 0.0


def test_a_norm_that_is_called_with_a_gate_computes_what_it_did() -> None:
    """Qwen3-Next's norm is an RMSNorm only without its gate; other models' have no other name for it."""
    norm, writer = Qwen3NextRMSNormGated(12), TailWriter(sim.metal_kernel, check=False)
    x, gate = mx.random.normal((2, 3, 12), key=mx.random.key(0)), mx.random.normal((2, 3, 12), key=mx.random.key(1))
    alone, gated = norm(x), norm(x, gate)
    writer.track_model(norm)
    assert type(norm) is not Qwen3NextRMSNormGated
    writer.begin(mx.array(POSITIONS), POSITIONS, COLUMNS, 0)
    assert mx.array_equal(norm(x), alone) and isinstance(norm(x), TrackedArray)
    for out in (norm(x, gate), norm(x, gate=gate)):
        assert mx.array_equal(out, gated) and not isinstance(out, TrackedArray)


def test_modules_that_no_write_could_use_are_let_go_after_a_step() -> None:
    layer, writer = Layer(nn.RoPE(12), lambda q, k: (q, k * 1.0)), TailWriter(sim.metal_kernel, check=False)
    writer.track_model(layer)
    assert type(layer.rope) is not nn.RoPE
    steps(layer, writer)
    assert type(layer.rope) is nn.RoPE
    used = Layer(Llama3RoPE(12, scaling_config=LLAMA3))
    writer.track_model(used)
    steps(used, writer)
    assert type(used.rope) is not Llama3RoPE and isinstance(used.rope, Llama3RoPE)


def test_a_first_step_that_fails_before_its_layers_lets_no_module_go() -> None:
    layer, writer = Layer(nn.RoPE(12)), TailWriter(sim.metal_kernel, check=False)
    writer.track_model(layer)
    writer.begin(mx.array(POSITIONS), POSITIONS, COLUMNS, 0)
    writer.end()  # as `ModelRunner.forget` does, when memory was refused
    assert steps(layer, writer)[1] == [True, True]


def test_queries_that_are_rotated_in_another_shape_are_left_to_mlx() -> None:
    class Flat(Layer):
        def rotate(self, q: mx.array, k: mx.array, offset: mx.array) -> tuple[mx.array, mx.array]:
            flat = self.rope(q[:, 0], offset=offset)
            return mx.repeat(flat[:, None], 4, 1), self.rope(k, offset=offset)

    fused, error, _ = both(lambda: _seeded(lambda: Flat(nn.RoPE(12))))
    assert not fused and error == 0.0


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (damaged(lambda a: a + 0.01), "differs from attention in float64 by 0.01"),
        (dropped("cortex_tail_write"), "its tail launch was dropped"),
    ],
    ids=["damaged", "dropped"],
)
def test_a_kernel_that_is_wrong_is_not_used_and_a_note_says_so(factory: Any, says: str) -> None:
    wanted, _ = steps(_seeded(lambda: Layer(nn.RoPE(12))), None)
    layer, writer = _seeded(lambda: Layer(nn.RoPE(12))), TailWriter(factory)
    writer.track_model(layer)
    got, by_kernel = steps(layer, writer)
    assert not any(by_kernel) and all(np.array_equal(a, b) for a, b in zip(got, wanted, strict=True))
    [note] = writer.notes()
    assert says in note


def test_a_kernel_that_is_right_passes_its_check() -> None:
    writer = TailWriter(sim.metal_kernel)
    layer = _seeded(lambda: layer_of("qwen3"))
    writer.track_model(layer)
    assert steps(layer, writer)[1] == [True, True] and writer.notes() == ()


def test_every_change_in_place_is_forgotten() -> None:
    """MLX has no other operator that changes an array in place."""
    own = {name for name in dir(mx.array) if name.startswith("__i")} - {
        "__init__",
        "__init_subclass__",
        "__invert__",
        "__iter__",
        "__int__",
        "__index__",
    }
    assert own | {"__setitem__"} == set(IN_PLACE_METHODS)
    assert TrackedArray(mx.zeros(3)).origin is None
