"""The simulator judged by kernels that are right on Apple hardware: MLX's and mlx-lm's (all: `-m slow`)."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from cortexmlx.metal.lab import sim
from cortexmlx.metal.lab.judge import KernelCase, Skipped, all_cases, judge
from cortexmlx.metal.lab.judge.cases import Defect
from cortexmlx.metal.lab.judge.mlx_lm_kernels import WITHOUT_CASE
from cortexmlx.metal.lab.judge.quantized import packed, unpacked
from cortexmlx.metal.lab.judge.table import FAMILIES, kernels_of_the_wheel
from cortexmlx.metal.lab.sim.report import Fault

CASES = {f"{case.group}: {case.name}": case for case in all_cases() if isinstance(case, KernelCase)}
QUICK = [
    "MLX: sdpa_vector_2pass_1_gqa half 64 133 in 32",
    "MLX: sdpa_blocked_scale_copy float",
    "MLX: affine_qmm_t float 8 bits in 32 9 of 128 to 40",
    "MLX: sdpa_vector float 64 mask causal",
    "MLX: sdpa_vector_2pass half 96 mask bool",
    "MLX: steel_attention half 64 (4x1) 37x61 mask causal",
    "MLX: logsumexp bfloat16_t 1000",
    "mlx-lm: gated_delta packed float",
    "mlx-lm: ssm_update bfloat",
    "mlx-lm: qk_norm_rope offset per row float",
    "mlx-lm: norm_add_norm scaled float",
    "mlx-lm: kimi_k3 attention residuals bfloat",
]


def assert_agrees(case):
    verdict = judge(case)
    assert verdict.agrees, f"{verdict.error:.2e} of {case.tolerance:.0e} {verdict.problem}"


@pytest.mark.parametrize("name", QUICK)
def test_a_known_good_kernel_agrees(name):
    assert_agrees(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_the_whole_table_agrees(name):
    with sim.options(poison=True):
        assert_agrees(CASES[name])


def test_the_two_kernels_of_a_pair_must_agree_bitwise():
    """mlx-lm promises that its packed kernel equals the one with the written-out tree, bit for bit."""
    packed, tree = (CASES[f"mlx-lm: gated_delta {name} float"].run()[0] for name in ("packed", "xtree"))
    assert (packed == tree).all()


def test_every_metal_kernel_of_mlx_lm_is_judged_or_named():
    """One use more in a later mlx-lm is one to judge: the uses are counted where they are written."""
    folder = Path(find_spec("mlx_lm").origin).parent
    uses = {path.stem: path.read_text().count("metal_kernel(") for path in folder.rglob("*.py")}
    assert set(WITHOUT_CASE) <= {name for name, count in uses.items() if count}
    assert {name: count for name, count in uses.items() if count and name not in WITHOUT_CASE} == {
        "qk_norm": 1,
        "qk_norm_rope": 1,
        "post_expert_norm_combine": 1,
        "rms_norm_sigmoid_gate": 1,
        "norm_add_norm": 3,
        "rwkv7": 1,
        "kimi_k3": 1,
        "gated_delta": 3,
        "ssm": 1,
    }


def test_a_wrong_kernel_would_not_agree():
    """The judge can say no: the expected result, shifted by one key."""
    case = CASES["MLX: sdpa_vector float 64 mask causal"]

    def off_by_one():
        simulated, expected = case.run()
        return simulated, expected * 1.001

    assert not judge(KernelCase(case.group, case.name, off_by_one, case.tolerance)).agrees


def test_every_kernel_of_the_installed_mlx_is_judged_or_has_a_reason():
    """The first word of a case is the kernel's name; a kernel that a later MLX adds is one to judge."""
    cases = all_cases()
    named = {case.name.split()[0] for case in cases if isinstance(case, KernelCase)}
    named |= {"attention", "sdpa_vector_2pass_1", "sdpa_vector_2pass_2"}  # judged with others
    without = {case.name: case.reason for case in cases if isinstance(case, Skipped)}
    forgotten = {kernel for kernel in kernels_of_the_wheel() if kernel not in named and kernel not in without}
    assert not forgotten, f"neither judged nor listed in judge/table.py: {sorted(forgotten)}"
    assert not named & set(without), "judged, and listed as not judged"


def test_each_family_has_cases_and_no_two_cases_have_one_name():
    names = [f"{case.group}: {case.name}" for case in all_cases()]
    assert len(names) == len(set(names))
    for family, cases in FAMILIES.items():
        assert next(iter(cases()), None), f"the family {family} is empty"


def test_small_numbers_are_packed_from_the_lowest_bit():
    small = [1, 2, 3, 0, 7, 5, 0, 1]
    together = sum(number << 3 * place for place, number in enumerate(small))
    assert packed(np.array([small]), 3).tobytes() == together.to_bytes(3, "little")
    numbers = np.random.default_rng(0).integers(0, 64, (3, 16))
    assert (unpacked(packed(numbers, 6), 6) == numbers).all()


def case_with(run, **more):
    return KernelCase("test", "case", run, 0.0, **more)


def test_a_known_defect_excuses_its_own_fault_only():
    """A kernel whose fault is known to stop it agrees if that fault is reported, and not if another is."""
    beyond = CASES["MLX: affine_qmv_quad float 4 bits in 64 3 of 64 to 70"]
    assert judge(beyond).agrees
    assert not judge(case_with(beyond.run)).agrees
    assert not judge(case_with(beyond.run, defect=Defect(Fault.RACE, "another"))).agrees
