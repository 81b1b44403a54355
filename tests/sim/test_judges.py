"""The simulator judged by kernels that are right on Apple hardware: MLX's and mlx-lm's (all of them: `-m slow`)."""

import pytest

from cortexmlx.metal import sim
from cortexmlx.metal.sim.judge import Case, all_cases, judge

CASES = {f"{case.group}: {case.name}": case for case in all_cases() if isinstance(case, Case)}
QUICK = [
    "MLX: sdpa_vector float 64 mask causal",
    "MLX: sdpa_vector bfloat16_t 128 mask sinks",
    "MLX: sdpa_vector_2pass half 96 mask bool",
    "MLX: sdpa_vector_2pass float 256 mask additive",
    "MLX: steel_attention half 64 (4x1) 37x61 mask causal",
    "MLX: softmax_looped float 5000",
    "MLX: logsumexp bfloat16_t 1000",
    "mlx-lm: gated_delta packed float",
    "mlx-lm: ssm_update bfloat",
    "mlx-lm: rwkv7 wkv7 float",
    "mlx-lm: bitlinear scale float",
    "mlx-lm: qk_norm_rope offset per row float",
    "mlx-lm: post_expert_norm_combine float",
    "mlx-lm: rms_norm_sigmoid_gate bfloat",
    "mlx-lm: norm_add_norm scaled float",
    "mlx-lm: kl loss float",
    "mlx-lm: js loss gradient float",
    "mlx-lm: expert_routing",
    "mlx-lm: deepseek_v41 sinkhorn",
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


def test_every_metal_kernel_of_mlx_lm_is_in_the_table():
    """One use more in a later mlx-lm is one to judge: the uses are counted where they are written."""
    from importlib.util import find_spec
    from pathlib import Path

    folder = Path(find_spec("mlx_lm").origin).parent
    uses = {path.stem: path.read_text().count("metal_kernel(") for path in folder.rglob("*.py")}
    assert {name: count for name, count in uses.items() if count} == {
        "qk_norm": 1,
        "expert_routing": 1,
        "qk_norm_rope": 1,
        "post_expert_norm_combine": 1,
        "rms_norm_sigmoid_gate": 1,
        "norm_add_norm": 3,
        "rwkv7": 1,
        "kimi_k3": 1,
        "gated_delta": 3,
        "ssm": 1,
        "deepseek_v41": 1,
        "bitlinear_layers": 1,
        "losses": 4,
    }


def test_a_wrong_kernel_would_not_agree():
    """The judge can say no: the expected result, shifted by one key."""
    case = CASES["MLX: sdpa_vector float 64 mask causal"]

    def off_by_one():
        simulated, expected = case.run()
        return simulated, expected * 1.001

    assert not judge(Case(case.group, case.name, off_by_one, case.tolerance)).agrees
