"""Which lanes meet in an operation: the simulator against a simdgroup in NumPy that runs under masks."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cortexmlx.metal.lab import sim
from support.effort import examples
from support.kernels.simt import (
    LANE,
    LANES,
    MEETINGS,
    VARIABLES,
    Assign,
    Call,
    If,
    Leave,
    Loop,
    Meet,
    Simdgroup,
    function_text,
)

SEEDS = 5


def run_in_simulator(helpers, programs, checked=True, seeds=range(SEEDS)):
    """The results [programs, lanes] of every seed."""
    header = "".join(function_text(f"helper{n}", body) for n, body in enumerate(helpers))
    header += "".join(function_text(f"program{n}", body) for n, body in enumerate(programs))
    calls = "".join(f"y[{n * LANES} + lane] = program{n}(lane * 7 + 3, lane);\n" for n in range(len(programs)))
    kernel = sim.metal_kernel(
        name="lanes",
        input_names=[],
        output_names=["y"],
        header=header,
        source="uint lane = thread_index_in_simdgroup;\n" + calls,
    )
    for seed in seeds:
        with sim.options(seed=seed, checked=checked, allow=frozenset({sim.Fault.DIVERGENT})):
            (y,) = kernel(
                inputs=[],
                grid=(LANES, 1, 1),
                threadgroup=(LANES, 1, 1),
                output_shapes=[(len(programs), LANES)],
                output_dtypes=[mx.uint32],
            )
        yield np.array(y)


def expected(helpers, programs):
    simdgroup, everybody = Simdgroup(helpers), np.ones(LANES, bool)
    return np.stack([simdgroup.call(body, LANE * 7 + 3, everybody) for body in programs])


def assert_as_a_simdgroup(helpers, programs, **how):
    wanted = expected(helpers, programs)
    for got in run_in_simulator(helpers, programs, **how):
        for n, body in enumerate(programs):
            np.testing.assert_array_equal(got[n], wanted[n], err_msg=function_text("program", body))


LANE_OF, X, Y = ("lane",), ("v", 0), ("v", 1)
SUM, FIRST, ACTIVE = "simd_sum({})", "simd_broadcast_first({})", "(({}) ^ uint((ulong)simd_active_threads_mask()))"
LOW, EVEN, FOURTH = ("<", LANE_OF, 16), ("==", ("&", LANE_OF, 1), 0), ("&", LANE_OF, 3)
SUM_OF_X = Meet(0, SUM, X)

HELPERS = (
    (SUM_OF_X,),
    (Leave("return", LOW), SUM_OF_X),
    (Loop("for", FOURTH, 3, (SUM_OF_X,)), Call(0, 0, X)),
)
CASES = {
    "the same sum in both branches": (If(LOW, (SUM_OF_X,), (SUM_OF_X,)),),
    "the same helper in both branches": (If(LOW, (Call(0, 0, X),), (Call(0, 0, X),)),),
    "a helper of a helper in both branches": (If(EVEN, (Call(0, 2, X),), (Call(0, 2, X),)),),
    "a helper behind a branch that is longer": (If(LOW, (SUM_OF_X, Meet(1, FIRST, X)), ()), Call(0, 0, ("+", X, Y))),
    "different numbers of turns": (Loop("for", FOURTH, 3, (SUM_OF_X,)), Meet(1, SUM, X), Assign(0, ("+", X, Y))),
    "a break in the middle": (
        Loop("while", 1, 5, (Assign(1, ("+", Y, 1)), Leave("break", ("==", Y, FOURTH)), SUM_OF_X)),
        Meet(0, SUM, X),
    ),
    "a continue that skips a turn": (
        Loop("while", 1, 4, (Assign(1, ("+", Y, 1)), Leave("continue", ("==", Y, FOURTH)), SUM_OF_X)),
        Meet(0, SUM, X),
    ),
    "a vote as the condition": (
        Assign(1, FOURTH),
        Loop("any", ("<", Y, 4), 6, (Assign(1, ("+", Y, 2)), Leave("continue", EVEN), SUM_OF_X)),
    ),
    "inner loops of different lengths": (
        Loop("for", 3, 3, (Loop("for", FOURTH, 3, (SUM_OF_X,)), Assign(0, ("+", X, LANE_OF)))),
        Meet(0, SUM, X),
    ),
    "an inner loop that only some enter": (
        Loop(
            "for", 2, 3, (If(EVEN, (Loop("do", ("<", Y, 9), 2, (SUM_OF_X,)),), (Meet(0, FIRST, X),)), Meet(0, SUM, X))
        ),
    ),
    "lanes that return early": (Leave("return", ("==", FOURTH, 2)), SUM_OF_X, Meet(0, ACTIVE, X)),
    "a helper from which lanes return early": (Call(0, 1, X), Meet(0, SUM, X)),
    "a do loop with continue": (
        Loop("do", ("<", ("&", X, 7), 6), 3, (SUM_OF_X, Leave("continue", EVEN), Meet(0, FIRST, ("+", X, LANE_OF)))),
    ),
}


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_lanes_meet_as_in_a_simdgroup(checked):
    """Every case by hand, one after the other in one kernel, compiled with -O1 and with -O2."""
    assert_as_a_simdgroup(HELPERS, tuple(CASES.values()), checked=checked)


def test_the_judge_itself_on_what_is_known():
    """120 is the sum of 0-15, 376 that of 16-31."""
    (both,) = expected(HELPERS, ((Assign(0, LANE_OF), *CASES["the same sum in both branches"]),))
    assert both.tolist() == [120] * 16 + [376] * 16


values = st.recursive(
    st.one_of(st.integers(0, 5), st.just(LANE_OF), st.builds(lambda n: ("v", n), st.integers(0, VARIABLES - 1))),
    lambda inner: st.tuples(st.sampled_from(["+", "*", "^", "&", "<", "=="]), inner, inner),
    max_leaves=4,
)
of_lanes = st.sampled_from(
    [LOW, EVEN, FOURTH, ("<", LANE_OF, 5), ("==", FOURTH, 2), ("&", X, 3), ("<", ("&", Y, 7), 4)]
)
conditions = st.one_of(of_lanes, of_lanes, values)
variables = st.integers(0, VARIABLES - 1)
meetings = st.builds(Meet, variables, st.sampled_from(sorted(MEETINGS)), values)


def bodies(depth, helpers, in_loop):
    ways = ["return", "break", "continue"] if in_loop else ["return"]
    kinds = [meetings, st.builds(Assign, variables, values), meetings]
    if helpers:
        kinds.append(st.builds(Call, variables, st.integers(0, helpers - 1), values))
    if depth:
        inside = bodies(depth - 1, helpers, in_loop)
        looped = bodies(depth - 1, helpers, True)
        kinds += [
            st.builds(If, conditions, inside, inside),
            st.builds(lambda condition, both: If(condition, both, both), conditions, inside),
            st.builds(Loop, st.sampled_from(["for", "while", "do", "any"]), conditions, st.integers(1, 3), looped),
            st.builds(Leave, st.sampled_from(ways), conditions),
        ]
    return st.lists(st.one_of(kinds), min_size=2, max_size=4).map(tuple)


whole = st.tuples(
    st.lists(bodies(1, 0, False), min_size=2, max_size=2).map(tuple),
    st.lists(bodies(3, 2, False), min_size=8, max_size=8).map(tuple),
    st.booleans(),
)
# Every attempt to make a failing example smaller is a compilation; the program that failed is in the message.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
UNHURRIED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@settings(max_examples=2, deadline=None, phases=PHASES, suppress_health_check=UNHURRIED)
@given(whole)
def test_random_programs_run_as_in_a_simdgroup(made):
    helpers, programs, checked = made
    assert_as_a_simdgroup(helpers, programs, checked=checked, seeds=range(4))


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None, phases=PHASES, suppress_health_check=UNHURRIED)
@given(whole)
def test_many_random_programs_run_as_in_a_simdgroup(made):
    helpers, programs, checked = made
    assert_as_a_simdgroup(helpers, programs, checked=checked, seeds=range(4))
