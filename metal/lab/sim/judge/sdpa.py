"""MLX's vector attention kernels: one pass and two, all head dims, dtypes, masks and sinks."""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.metal.lab.sim.host import HostKernel, Output
from cortexmlx.metal.lab.sim.judge.cases import TOLERANCE, Case, Floats
from cortexmlx.metal.lab.sim.judge.mlx.calls import contiguous, i32
from cortexmlx.metal.lab.sim.judge.reference import METAL_NAMES, Array, AttentionProblem, from_bits, rounded

HEADERS = ("sdpa_vector.h",)
MASKS = ("none", "causal", "bool", "additive", "sinks")


class _Inputs:
    """Random q, k, v with one kind of mask: bits for the kernel, float64 for the reference."""

    def __init__(
        self, head_dim: int, dtype: mx.Dtype, kind: str, heads: int, kv_heads: int, length: int, total: int
    ) -> None:
        rng = np.random.default_rng(head_dim * 7 + length)

        def draw(*shape: int) -> tuple[Array, npt.NDArray[np.float64]]:
            return rounded(rng.standard_normal(shape), dtype)

        self.q, q = draw(1, heads, length, head_dim)
        self.k, k = draw(1, kv_heads, total, head_dim)
        self.v, v = draw(1, kv_heads, total, head_dim)
        self.sinks, sinks = draw(heads)
        self.additive, additive = draw(length, total)
        self.allowed = rng.random((length, total)) < 0.7
        self.allowed[:, 0] = True
        mask = {"bool": self.allowed, "additive": additive}.get(kind)
        self.problem = AttentionProblem(
            q, k, v, head_dim**-0.5, kind == "causal", mask, sinks if kind == "sinks" else None
        )
        self.constants = {
            "has_mask": kind in ("bool", "additive"),
            "bool_mask": kind == "bool",
            "float_mask": kind == "additive",
            "do_causal": kind == "causal",
            "has_sinks": kind == "sinks",
        }

    @property
    def masks(self) -> list[Array]:
        """Both kinds of mask, their strides by column, row and head, and the sinks."""
        return [self.allowed, self.additive, i32(1), i32(self.allowed.shape[1]), i32(0), self.sinks]


def _one_pass(head_dim: int, dtype: mx.Dtype, kind: str) -> tuple[Floats, Floats]:
    heads, kv_heads, length, total = 4, 2, 2, 77
    x = _Inputs(head_dim, dtype, kind, heads, kv_heads, length, total)
    kernel = HostKernel(HEADERS, "sdpa_vector", f"{METAL_NAMES[dtype]}, {head_dim}", x.constants)
    done = kernel(
        {
            0: x.q,
            1: x.k,
            2: x.v,
            3: Output(x.q.nbytes, x.q.itemsize),
            4: i32(heads // kv_heads),
            **dict(enumerate(contiguous(x.k, head_dim**-0.5), start=5)),
            **dict(enumerate(x.masks, start=11)),
            17: i32(heads),
        },
        (heads, length, 1),
        (1024, 1, 1),
    )
    return from_bits(done.outputs[0], x.q.shape, dtype), x.problem.solve()


def _two_pass(head_dim: int, dtype: mx.Dtype, kind: str) -> tuple[Floats, Floats]:
    heads, kv_heads, length, total, blocks = 4, 2, 2, 133, 32
    x = _Inputs(head_dim, dtype, kind, heads, kv_heads, length, total)
    name = METAL_NAMES[dtype]
    first = HostKernel(HEADERS, "sdpa_vector_2pass_1", f"{name}, {head_dim}", {**x.constants, "blocks": blocks})
    rows = heads * length
    partial = first(
        {
            0: x.q,
            1: x.k,
            2: x.v,
            3: Output(rows * blocks * head_dim * x.q.itemsize, x.q.itemsize),
            4: Output(rows * blocks * 4, 4),
            5: Output(rows * blocks * 4, 4),
            **dict(enumerate(contiguous(x.k, head_dim**-0.5), start=7)),
            **dict(enumerate(x.masks, start=13)),
        },
        (kv_heads, 1, blocks),
        (32, heads // kv_heads, length),
    ).outputs
    second = HostKernel(HEADERS, "sdpa_vector_2pass_2", f"{name}, {head_dim}", {})
    done = second(
        {
            0: partial[0].view(x.q.dtype),
            1: partial[1].view(np.float32),
            2: partial[2].view(np.float32),
            3: Output(x.q.nbytes, x.q.itemsize),
            4: i32(blocks),
        },
        (heads, length, 1),
        (1024, 1, 1),
    )
    return from_bits(done.outputs[0], x.q.shape, dtype), x.problem.solve()


def cases() -> Iterator[Case]:
    """Head dims 64, 96, 128 and 256; float, half and bfloat; every mask."""
    for title, run in (("sdpa_vector", _one_pass), ("sdpa_vector_2pass", _two_pass)):
        for head_dim in (64, 96, 128, 256):
            for dtype, name in METAL_NAMES.items():
                for kind in MASKS:
                    title_of_case = f"{title} {name} {head_dim} mask {kind}"
                    yield Case("MLX", title_of_case, partial(run, head_dim, dtype, kind), TOLERANCE[dtype])
