"""What is said of operations that only some lanes take part in: a fault where the result depends on it, else a note."""

import pytest

from cortexmlx.errors import KernelFault
from cortexmlx.metal.lab import sim
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; uint l = thread_index_in_simdgroup;\n"  # noqa: E741
AFTER = " threadgroup_barrier(mem_flags::mem_none);"
SEEDS = range(5)
TURNS = "y[i] = 0; for (uint k = 0; k < 4; k++) { y[i] += 1; if "
MEET = "threadgroup_barrier(mem_flags::mem_none); }"
SIMD_MEET = MEET.replace("threadgroup_b", "simdgroup_b")

# name -> (right, wrong, what the message must say): the right one has the same operations, met by all.
FAULTS = {
    "a sum in one branch": (
        "float v = simd_sum(x[i]); y[i] = l < 16 ? v : 0;",
        "y[i] = 0; if (l < 16) y[i] = simd_sum(x[i]);" + AFTER,
        ["lanes 0-15 meet in 'reduce' without lanes 16-31", 'line 10: "y[i] = 0; if (l < 16) y[i] = simd_sum'],
    ),
    "the same sum in both branches": (
        "y[i] = simd_sum(x[i]);",
        "if (l < 16) y[i] = simd_sum(x[i]); else y[i] = simd_sum(x[i]);",
        ["lanes 0-15 meet in 'reduce' without lanes 16-31"],
    ),
    "a prefix sum": (
        "y[i] = simd_prefix_inclusive_sum(l == 3 ? 0 : x[i]);",
        "y[i] = 0; if (l != 3) y[i] = simd_prefix_inclusive_sum(x[i]);" + AFTER,
        ["lanes 0-2, 4-31 meet in 'prefix' without lane 3"],
    ),
    "a vote": (
        "y[i] = simd_all(l < 40);",
        "y[i] = 0; if (l > 7) y[i] = simd_all(l < 40);" + AFTER,
        ["lanes 8-31 meet in 'vote' without lanes 0-7"],
    ),
    "a ballot": (
        "y[i] = float((ulong)simd_ballot(l < 4));",
        "y[i] = 0; if (l < 8) y[i] = float((ulong)simd_ballot(l < 4));" + AFTER,
        ["lanes 0-7 meet in 'vote' without lanes 8-31"],
    ),
    "who is first": (
        "y[i] = simd_broadcast_first(x[i]);",
        "y[i] = 0; if (l > 0) y[i] = simd_broadcast_first(x[i]);" + AFTER,
        ["lanes 1-31 meet in 'broadcast_first' without lane 0"],
    ),
    "a sum of a quad": (
        "y[i] = quad_sum(x[i]);",
        "y[i] = 0; if (l != 6) y[i] = quad_sum(x[i]);" + AFTER,
        ["meet in 'reduce' without lane 6"],
    ),
    "turns of different numbers": (
        "y[i] = 0; for (uint k = 0; k < 3; k++) y[i] += simd_sum(x[i]);",
        "y[i] = 0; for (uint k = 0; k < 1 + l / 16; k++) y[i] += simd_sum(x[i]);" + AFTER,
        ["lanes 16-31 meet in 'reduce' without lanes 0-15"],
    ),
    "a helper called by some": (
        "y[i] = total(x[i]);",
        "y[i] = 0; if (l < 16) y[i] = total(x[i]);" + AFTER,
        ["lanes 0-15 meet in 'reduce' without lanes 16-31", 'line 1: "float total'],
    ),
    "a barrier in different turns": (
        TURNS + "(k == 1) " + MEET,
        TURNS + "(k == l / 16) " + MEET,
        ["waits at a threadgroup_barrier", "waits or runs elsewhere"],
    ),
    "a barrier in different turns of two simdgroups": (
        TURNS + "(k == 1) " + MEET,
        TURNS + "(k == i / 32) " + MEET,
        ["waits at a threadgroup_barrier", "waits or runs elsewhere"],
    ),
    "a simdgroup barrier in different turns": (
        TURNS + "(k == 1) " + SIMD_MEET,
        TURNS + "(k == l / 16) " + SIMD_MEET,
        ["waits at a simdgroup_barrier"],
    ),
    "a barrier in a helper that two branches call": (
        "meet(); y[i] = 1;",
        "if (l < 16) { meet(); y[i] = 1; } else { meet(); y[i] = 2; }",
        ["waits at a threadgroup_barrier"],
    ),
    "a matrix product in both branches": (
        "simdgroup_float8x8 m(1.0f); simdgroup_multiply(m, m, m); y[i] = m.thread_elements()[0];",
        "simdgroup_float8x8 m(1.0f); if (l < 16) simdgroup_multiply(m, m, m); else simdgroup_multiply(m, m, m); "
        "y[i] = m.thread_elements()[0];",
        ["takes no part in the simdgroup operation"],
    ),
    "a broadcast of different lanes": (
        "y[i] = simd_shuffle(x[i], l / 16);",
        "y[i] = simd_broadcast(x[i], l / 16);",
        ["gives 'broadcast' 1", "gives it 0", "it must be the same in all lanes"],
    ),
    "a shift by different distances": (
        "y[i] = simd_shuffle_up(x[i], 1);",
        "y[i] = simd_shuffle_up(x[i], l < 20 ? 1 : 2);",
        ["gives 'shuffle_shift' 2", "gives it 1"],
    ),
    "a rotation by different distances": (
        "y[i] = simd_shuffle_rotate_down(x[i], 3);",
        "y[i] = simd_shuffle_rotate_down(x[i], l % 2 + 1);",
        ["gives 'shuffle_shift' 2"],
    ),
    "an exchange with different masks": (
        "y[i] = simd_shuffle_xor(x[i], 2);",
        "y[i] = simd_shuffle_xor(x[i], 1 + l / 16);",
        ["gives 'shuffle_xor' 2"],
    ),
    "different moduli": (
        "y[i] = simd_shuffle_and_fill_up(x[i], x[i], 1, 8);",
        "y[i] = simd_shuffle_and_fill_up(x[i], x[i], 1, l < 16 ? 8 : 16);",
        ["gives 'shuffle_shift' 1 (modulo 16)", "gives it 1 (modulo 8)"],
    ),
    "a broadcast of different lanes in a quad": (
        "y[i] = quad_broadcast(x[i], l / 4 % 4);",
        "y[i] = quad_broadcast(x[i], l % 2);",
        ["gives 'broadcast' 1", "gives it 0"],
    ),
}
HEADER = "float total(float x) { return simd_sum(x); }\nvoid meet() { threadgroup_barrier(mem_flags::mem_none); }\n"


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_every_seed(name):
    _, wrong, said = FAULTS[name]
    for seed in SEEDS:
        with sim.options(seed=seed), pytest.raises(KernelFault) as caught:
            launch(I + wrong, header=HEADER)
        for words in said:
            assert words in str(caught.value)


def test_the_right_kernels_have_no_fault_and_no_note():
    rights = "".join(f"{{ {right} }}\n" for right, *_ in FAULTS.values())
    for seed in SEEDS:
        with sim.options(seed=seed):
            _, report = launch(I + rights, header=HEADER)
        assert not report.notes


@pytest.mark.parametrize(
    ("name", "fault"),
    [("a sum in one branch", sim.Fault.DIVERGENT), ("a broadcast of different lanes", sim.Fault.NOT_UNIFORM)],
)
def test_what_is_declared_does_not_raise_and_is_reported(name, fault):
    with sim.options(allow=frozenset({fault})):
        y, report = launch(I + FAULTS[name][1], header=HEADER)
    assert {f.fault for f in report.findings} == {fault}
    if fault is sim.Fault.DIVERGENT:
        assert y.tolist()[:17] == [120] * 16 + [0] and report.findings[0].lanes == (0xFFFF, 0xFFFF0000)


def test_an_arithmetic_that_a_gpu_would_do_comes_out():
    """The sums of 0-15 and of 16-31, with every seed, checked or not."""
    for seed in SEEDS:
        with sim.options(seed=seed, checked=seed % 2 == 0, allow=frozenset({sim.Fault.DIVERGENT})):
            y, _ = launch(I + FAULTS["the same sum in both branches"][1], count=32, threadgroup=32)
        assert y.tolist() == [120] * 16 + [376] * 16


# name -> (body, notes): nothing of it raises.
FINE = {
    "lanes that have returned": ("if (l > 20) { y[i] = 0; return; } y[i] = simd_sum(1.0f);", 0),
    "a shuffle from a lane that is there": (
        "y[i] = 0; if (l < 16) y[i] = simd_shuffle(x[i], 3) + simd_shuffle_xor(x[i], 1) + simd_broadcast(x[i], 5);"
        + AFTER,
        3,
    ),
    "asking who is there": (
        "y[i] = 0; if (l > 3) y[i] = simd_is_first() + float((ulong)simd_active_threads_mask());" + AFTER,
        2,
    ),
    "a sum in one branch with nothing behind it": ("y[i] = 0; if (l < 16) y[i] = simd_sum(x[i]);", 1),
    "a vote behind a condition, with nothing behind it": ("y[i] = l > 7 && simd_all(l < 40);", 1),
    "turns of different numbers with nothing behind them": (
        "y[i] = 0; for (uint k = 0; k < 1 + l / 16; k++) y[i] += simd_sum(x[i]);",
        1,
    ),
    "a loop over the distinct values of a simdgroup": (
        "y[i] = 0; while (y[i] == 0) { int v = simd_broadcast_first(int(i) % 3); "
        "ulong who = ulong(simd_ballot(v == int(i) % 3)); if (v == int(i) % 3) y[i] = popcount(who); }",
        2,
    ),
    "quads that are whole": ("y[i] = 0; if (l < 8) y[i] = quad_sum(x[i]) + quad_broadcast(x[i], 1);" + AFTER, 0),
    "whole simdgroups apart": ("if (i < 32) y[i] = simd_sum(x[i]); else y[i] = simd_max(x[i]);" + AFTER, 0),
    "different turns of whole simdgroups": (
        "y[i] = 0; for (uint k = 0; k < 1 + i / 32; k++) y[i] += simd_sum(x[i]);" + AFTER,
        0,
    ),
}


@pytest.mark.parametrize("name", FINE)
def test_what_cannot_matter_is_only_noted(name):
    body, notes = FINE[name]
    for seed in range(4):
        with sim.options(seed=seed):
            _, report = launch(I + body)
        assert not report.findings
        assert len(report.notes) == notes
        for note in report.notes:
            assert note.fault is sim.Fault.DIVERGENT and note.line == 8 and note.lanes[0] & note.lanes[1] == 0


def test_lanes_that_never_were_are_not_missed():
    y, report = launch(I + "y[i] = simd_sum(x[i]);", count=50, threadgroup=50)
    assert y[49].item() == sum(range(32, 50)) and not report.notes
