"""Which kernel serves a layer if another one is chosen, or may not serve."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from cortexmlx.attention import reference
from cortexmlx.attention.autotuning import TimedArena, TimedProblem
from cortexmlx.attention.backends import choose_backend
from cortexmlx.attention.decode_methods import (
    KERNEL_METHODS,
    MLX_METHODS,
    BatchClass,
    DecodeMethod,
    LayerAttention,
    SelectableBackend,
    SelectableKernels,
)
from cortexmlx.attention.metal import MetalAttention
from cortexmlx.autotune.job import CannotServe
from cortexmlx.kv.spec import KVSpec
from cortexmlx.metal.lab import sim
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.shape import Kernel
from support.kernels.broken_kernels import dropped

pytestmark = pytest.mark.lab  # kernels are executed


LAYER = LayerAttention("float32", 4, KVSpec(1, 64, 64, "float32"), 8, 0.125, None, None, False, None)
VARIANT = Variant("float32", "float32", 64, 64, 8, 4)


@pytest.fixture(autouse=True)
def fast() -> Any:
    """Accesses are judged elsewhere."""
    with sim.options(checked=False):
        yield


def choosing(attention: MetalAttention) -> SelectableBackend:
    return SelectableKernels(attention.methods, attention.attend, attention.decode)


@pytest.mark.parametrize(
    ("layer", "methods"),
    [
        (LAYER, (DecodeMethod.MATRIX, DecodeMethod.VECTOR)),
        (replace(LAYER, query_heads=1), (DecodeMethod.VECTOR, DecodeMethod.MATRIX)),
        (replace(LAYER, spec=KVSpec(1, 16, 16, "float32")), (DecodeMethod.VECTOR,)),
        (replace(LAYER, spec=KVSpec(1, 512, 512, "float32")), (DecodeMethod.WIDE,)),
        (replace(LAYER, spec=KVSpec(1, 80, 64, "float32", value_in_key=True)), ()),
        (replace(LAYER, spec=KVSpec(1, 18, 18, "float32")), ()),
    ],
)
def test_the_rules_kernel_comes_first_and_only_those_that_serve(
    layer: LayerAttention, methods: tuple[DecodeMethod, ...]
) -> None:
    backend = choosing(MetalAttention(sim.metal_kernel, check=False))
    assert backend.kernel_methods(layer) == methods
    assert backend.reproducible_method(layer) is (methods[0] if methods else DecodeMethod.ROWS)


def test_every_kernel_is_a_way() -> None:
    assert {kernel.value + " kernel" for kernel in Kernel} == {method.value for method in KERNEL_METHODS}
    assert set(KERNEL_METHODS) | set(MLX_METHODS) == set(DecodeMethod)


def test_each_way_computes_the_same() -> None:
    backend = choose_backend("sim").selectable
    assert backend is not None
    problem = TimedProblem(LAYER, BatchClass(4, 512), 2, 60, TimedArena())
    for method in (
        DecodeMethod.REFERENCE,
        DecodeMethod.MATRIX,
        DecodeMethod.VECTOR,
        DecodeMethod.GATHER,
        DecodeMethod.ROWS,
    ):
        problem.require_agreement(backend.attend_with(method, LAYER))


def test_a_kernel_that_its_self_check_refuses_cannot_serve_but_the_others_can() -> None:
    backend = choosing(MetalAttention(dropped("cortex_paged_matrix", zeros=True)))
    with pytest.raises(CannotServe, match="its decode launch was dropped"):
        backend.attend_with(DecodeMethod.MATRIX, LAYER)
    problem = TimedProblem(LAYER, BatchClass(4, 512), 2, 60, TimedArena())
    for method in (DecodeMethod.REFERENCE, DecodeMethod.VECTOR):
        problem.require_agreement(backend.attend_with(method, LAYER))


def test_a_chosen_kernel_that_is_refused_later_leaves_the_rules_choice(caplog: pytest.LogCaptureFixture) -> None:
    """Times on disk may be those of another day."""
    attention = MetalAttention(dropped("cortex_paged_decode", zeros=True))
    with caplog.at_level(logging.WARNING):
        served = attention.methods.select(VARIANT, DecodeMethod.VECTOR)
        attention.methods.select(VARIANT, DecodeMethod.VECTOR)
    assert isinstance(served, Variant) and served.kernel is Kernel.MATRIX
    assert caplog.text.count("is not computed by this kernel: its decode launch was dropped") == 1
    assert attention.notes() == ()


def test_a_variant_is_checked_once_until_a_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    from cortexmlx.attention import decode_methods

    real = decode_methods.check_decode
    monkeypatch.setattr(decode_methods, "check_decode", lambda *given: (checked.append(given[1]), real(*given))[1])
    attention = MetalAttention(sim.metal_kernel)
    backend = choosing(attention)
    for method in (DecodeMethod.MATRIX, DecodeMethod.VECTOR, DecodeMethod.MATRIX):
        backend.attend_with(method, LAYER)
    assert isinstance(attention.methods.select(VARIANT, None), Variant)
    assert isinstance(attention.methods.select(VARIANT, DecodeMethod.VECTOR), Variant)
    assert [variant.kernel for variant in checked] == [Kernel.MATRIX, Kernel.VECTOR]
    attention.reconsider()
    attention.methods.select(VARIANT, None)
    assert len(checked) == 3


def test_without_kernels_a_reproducible_backend_attends_row_by_row() -> None:
    attention = MetalAttention(dropped("cortex_", zeros=True))
    assert attention.methods.select(VARIANT, None) is reference.attend_rows
    attention.methods.choices.reproducible = True
    assert attention.methods.select(VARIANT, None) is MLX_METHODS[DecodeMethod.ROWS]
