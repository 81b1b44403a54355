"""The list of kernels that are checked: every shader is on it, and on a GPU each agrees with float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cortexmlx import metal
from cortexmlx.cli.doctor import checks
from cortexmlx.matmul import selfcheck
from cortexmlx.metal.checked import CHECKED, CheckedKernel, select_quick
from cortexmlx.metal.kernels import KernelFactory, minify
from cortexmlx.metal.lab.kernel_files import kernel_texts
from cortexmlx.metal.lab.sim import metal_kernel
from cortexmlx.metal.matmul.shape import MATMULS, MatmulVariant
from cortexmlx.metal.prefill import PREFILL_VARIANTS
from cortexmlx.metal.rules import VARIANTS
from cortexmlx.metal.tail_write import WRITES

SHADERS = {path.name: minify(path.read_text()) for path in Path(str(metal.__file__)).parent.glob("shaders/*.metal")}


@pytest.mark.parametrize("variants", [CHECKED, select_quick()], ids=["all", "quick"])
def test_every_shader_is_checked(variants: Sequence[CheckedKernel]) -> None:
    texts = {kernel.text for variant in variants for kernel in kernel_texts(variant)}
    ends = {name: text.strip().rsplit("\n\n", 1)[-1] for name, text in SHADERS.items()}
    assert {name for name, end in ends.items() if any(end in text for text in texts)} == {*ends} and len(ends) > 6


FIRST = (VARIANTS[0], PREFILL_VARIANTS[0], WRITES[0], MATMULS[0])


def test_the_doctor_checks_them_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever shows progress sees each as it comes."""
    made: list[str] = []
    for name in ("check_decode", "check_prefill", "check_tail_write"):
        monkeypatch.setattr(f"cortexmlx.attention.selfcheck.{name}", lambda kernels, v: made.append(v.label) or v.label)
    monkeypatch.setattr(selfcheck, "check_matmul", lambda _, *product: made.append(MatmulVariant(*product).label))
    found = checks.check_kernels(metal_kernel, FIRST)
    assert next(found) == FIRST[0].label and len(made) == 1
    assert len([*found]) == 3 and made == [variant.label for variant in FIRST]


def test_a_quick_check_has_one_variant_of_every_kernel_and_dtype() -> None:
    quick = select_quick()
    assert len(quick) < len(CHECKED) / 5 and set(FIRST) <= set(quick) <= set(CHECKED)
    kinds = {(type(variant), variant.dtype) for variant in CHECKED}
    assert {(type(variant), variant.dtype) for variant in quick} == kinds


@pytest.mark.parametrize(
    "variant",
    [*FIRST, *(pytest.param(v, marks=pytest.mark.slow) for v in CHECKED if v not in FIRST)],
    ids=lambda variant: variant.label,
)
def test_it_agrees_with_float64(variant: CheckedKernel, factory: KernelFactory) -> None:
    """On a GPU all of them, by `-m metal`."""
    (check,) = checks.check_kernels(factory, (variant,))
    assert check.agrees, (check.outcome, check.message)
