"""The judge as a whole: our kernels, MLX's headers, the command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from cortexmlx.metal.checked import CHECKED
from cortexmlx.metal.lab.kernel_files import kernel_texts
from cortexmlx.metal.lab.legal import Complaint, Language, complaints
from cortexmlx.metal.lab.legal.__main__ import main
from cortexmlx.metal.lab.sim.toolchain import mlx_headers
from support.kernels.legal_tools import kernel

KERNELS = mlx_headers() / "mlx/backend/metal/kernels"


@cache
def texts_of_every_variant() -> list[str]:
    """What MLX would compile for each variant of `doctor`: decode, reduce, and the launch that does both."""
    return list({kernel.text: None for variant in CHECKED for kernel in kernel_texts(variant)})


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_every_variant_of_our_kernels_is_legal(every: int) -> None:
    """The quick test takes one of 23 texts, and so kernels, dims and numbers of query heads in turn; each text is read
    at one level of the language, in turn.
    """
    texts = texts_of_every_variant()
    assert len(texts) > len(CHECKED)
    for place, text in enumerate(texts[::every]):
        assert complaints(text, list(Language)[place % 2]) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("const device T* from, uint lane", "const T* from, uint lane"),
        ("out[h][n] = 0.0f;", "out[h][n] = 0.0; long long never = 0;"),
        ("simd_shuffle_xor(new_max, ushort(mask))", "simd_shuffle_xor(long(new_max), ushort(mask))"),
        ("fast::exp(max_score - new_max)", "std::exp(max_score - new_max)"),
        ("static constexpr constant int COUNT", "static constexpr int COUNT"),
        ("attended[d] = T(", "attended[d] = ("),
    ],
)
def test_a_fault_in_our_kernels_is_found(right: str, wrong: str) -> None:
    """The last is right in float32 and float16, and wrong in bfloat16 alone."""
    assert any(right in text and complaints(text.replace(right, wrong)) for text in texts_of_every_variant())


def test_complaints_come_in_the_order_of_lines() -> None:
    found = complaints(kernel("int a = 1ll;\ndouble d = 1;\ngoto end;\nend:;"))
    assert [c.line for c in found] == sorted(c.line for c in found)
    assert len(found) >= 3


def test_the_example_of_the_package_is_true() -> None:
    text = "[[kernel]] void k(device float* x [[buffer(0)]]) { double d = 1; }"
    assert complaints(text) == [Complaint(1, "Metal has no double")]


def test_the_command_prints_each_complaint_with_its_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = tmp_path / "right.metal", tmp_path / "wrong.metal"
    right.write_text(kernel("x[i] = 1;"))
    wrong.write_text(kernel("double d = 1;\nauto f = [](int v) { return v; };"))
    assert main([str(right)]) == 0
    assert capsys.readouterr().out == ""
    assert main([str(right), str(wrong)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{wrong}:3: Metal has no double (Metal 3.1, 4.0)",
        f"{wrong}:4: Metal 3.1 has no lambdas (Metal 3.1)",
    ]
    assert main([]) == 2


# ---- MLX's headers: they compile on every Mac, so whatever is said about them is a false alarm -----------------------

STANDALONE = {"bf16", "complex", "defines", "logging", "utils"}


def preamble_of(name: str) -> str:
    """What MLX compiles before a header that does not include all it needs."""
    needed = [] if name in STANDALONE else ["bf16"] if name == "bf16_math" else ["utils"]
    for pattern, headers in (
        ("quantized|steel/gemm/kernels|gather", ["steel/gemm/gemm", "quantized_utils"]),
        ("(?:quantized|steel/gemm/kernels).*nax", ["steel/gemm/gemm_nax"]),
        ("steel/conv", ["steel/defines"]),
        ("steel/conv/kernels|general", ["steel/conv/conv", "steel/conv/params"]),
        ("reduc|scatter", ["atomic"]),
        ("reduc(?!tion/ops)|scatter", ["reduction/ops"]),
        ("searchsorted", ["sort"]),
    ):
        needed += headers if re.search(pattern, name) else []
    return "".join(f'#include "mlx/backend/metal/kernels/{n}.h"\n' for n in needed if n != name)


def headers_of_mlx() -> Iterator[tuple[str, str, tuple[Language, ...]]]:
    """(name, text, languages): the kernels for the matrix units of macOS 26 need its language."""
    for path in sorted(KERNELS.rglob("*.h")):
        name = path.relative_to(KERNELS).with_suffix("").as_posix()
        late = "nax" in name
        yield name, path.read_text(), (Language.METAL_4_0,) if late else tuple(Language)


QUICK = {"atomic", "complex", "sdpa_vector", "sort", "steel/attn/mma"}


def assert_no_false_alarm(names: set[str] | None) -> int:
    lines = 0
    for name, text, languages in headers_of_mlx():
        if names is None or name in names:
            for language in languages:
                assert complaints(text, language, preamble_of(name)) == [], name
            lines += text.count("\n")
    return lines


def test_no_false_alarm_on_some_of_mlx() -> None:
    assert assert_no_false_alarm(QUICK) > 2500


@pytest.mark.slow
def test_no_false_alarm_on_all_of_mlx() -> None:
    assert assert_no_false_alarm(None) > 34000


INSTANCES = {
    "sdpa_vector": ("sdpa_vector<{T}, 128, 128>", "sdpa_vector_2pass_1<{T}, 64, 64>", "sdpa_vector_2pass_2<{T}, 256>"),
    "softmax": ("softmax_single_row<{T}, float>", "softmax_looped<{T}, float>"),
    "quantized": ("affine_qmv_fast<{T}, 64, 4, false>", "affine_qmm_t<{T}, 64, 4, true, false>"),
    "steel/attn/kernels/steel_attention": ("attention<{T}, 32, 32, 64, 64, 4, 1, bool, float>",),
    "steel/gemm/kernels/steel_gemm_fused": ("gemm<{T}, 64, 64, 16, 2, 2, false, true, float>",),
    "scan": ("contiguous_scan<{T}, {T}, CumSum<{T}>, 4, true, false>",),
    "logsumexp": ("logsumexp<{T}, float>",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTANCES)
def test_no_false_alarm_on_instances_of_mlxs_kernels(name: str) -> None:
    text = (KERNELS / f"{name}.h").read_text() + "\n"
    for dtype in ("float", "half", "bfloat16_t"):
        for instance in (pattern.format(T=dtype) for pattern in INSTANCES[name]):
            text += f'template [[host_name("k")]] [[kernel]] decltype({instance}) {instance};\n'
    for language in Language:
        assert complaints(text, language, preamble_of(name)) == []
