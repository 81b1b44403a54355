"""The simulator judged by kernels that are right on Apple hardware: MLX's and mlx-lm's (all: `-m slow`)."""

import pytest

from cortexmlx.metal.lab import sim
from cortexmlx.metal.lab.judge import KernelCase, all_cases, judge
from cortexmlx.metal.lab.judge.cases import Defect
from cortexmlx.metal.lab.sim.report import Fault

CASES = {f"{case.group}: {case.name}": case for case in all_cases()}
QUICK = [
    "MLX: sdpa_vector_2pass_1_gqa half 64 133 in 32",
    "MLX: sdpa_blocked_scale_copy float",
    "MLX: affine_qmm_t float 8 bits in 32 9 of 128 to 40",
    "MLX: sdpa_vector float 64 mask causal",
    "MLX: sdpa_vector_2pass half 96 mask bool",
    "MLX: steel_attention half 64 (4x1) 37x61 mask causal",
    "mlx-lm: gated_delta packed float",
    "mlx-lm: ssm_update bfloat",
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


def test_a_wrong_kernel_would_not_agree():
    """The judge can say no: the expected result, shifted by one key."""
    case = CASES["MLX: sdpa_vector float 64 mask causal"]

    def off_by_one():
        simulated, expected = case.run()
        return simulated, expected * 1.001

    assert not judge(KernelCase(case.group, case.name, off_by_one, case.tolerance)).agrees


def test_a_known_defect_excuses_its_own_fault_only():
    """A kernel whose fault is known to stop it agrees if that fault is reported, and not if another is."""
    beyond = CASES["MLX: affine_qmv_quad float 4 bits in 64 3 of 64 to 70"]
    assert judge(beyond).agrees
    for defect in (None, Defect(Fault.RACE, "another")):
        assert not judge(KernelCase("test", "case", beyond.run, 0.0, defect)).agrees
