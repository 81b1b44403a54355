"""Stores that overlap: only the bytes that another wrote are compared, and who agrees does not race.

The detector against an oracle, with atomics and barriers: `test_races_atomic.py`.
"""

import mlx.core as mx
import pytest

from cortexmlx.errors import KernelFault
from cortexmlx.metal.lab import sim
from support.kernels.sim_tools import launch


def test_of_a_wide_store_only_the_bytes_that_another_wrote_are_compared():
    """Two threadgroups have three bools in common, which are equal; each stores another one with them, at once."""
    source = """
uint from = threadgroup_position_in_grid.x;
bool all = values[from] != 0;
*(device Four*)(y + from) = Four{all, all, all, all};
"""
    header = "struct Four { bool a, b, c, d; };\n"
    kernel = sim.metal_kernel(
        name="overlapping", input_names=["values"], output_names=["y"], source=source, header=header
    )
    size = {"grid": (2, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(5,)], "output_dtypes": [mx.bool_]}
    for seed in range(4):
        with sim.options(seed=seed):
            (y,) = kernel(inputs=[mx.ones(8, dtype=mx.int32)], **size)
            with pytest.raises(KernelFault, match=r"(?s)race|wrote"):
                kernel(inputs=[mx.array([1, 0] * 4, dtype=mx.int32)], **size)
        assert y.tolist() == [True] * 5


# Threads that store the value that is there do not race: judged for each element of a large store on its own.

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
HEADER = "struct Three { float v[3]; }; struct Twelve { float v[12]; };\n"
SEEDS = range(5)
COPIED = mx.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7, 8, 99, 10, 11], dtype=mx.float32)

# Two threadgroups of one thread each. What they share, they agree on.
AGREE = {
    "the last element is the other's first": (
        "Three t = {{2.0f * i, 2.0f * i + 1, 2.0f * i + 2}}; *(device Three*)(y + 2 * i) = t;"
    ),
    "all of a large struct": "Twelve t; for (int k = 0; k < 12; k++) t.v[k] = k; *(device Twelve*)y = t;",
    "one struct after the other": "Three t = {{1, 2, 3}}; *(device Three*)y = t; *(device Three*)(y + 3) = t;",
}
# The same, but for one element far behind the first.
DISAGREE = {
    "the last element of a struct": "Three t = {{1, 2, 3.0f + i}}; *(device Three*)y = t;",
    "an element of a large struct that is copied": "*(device Twelve*)y = ((const device Twelve*)x)[i];",
    "an element of the second of two copies": "*(device Three*)y = *(const device Three*)x; "
    "*(device Three*)(y + 3) = *(const device Three*)(x + 3 + 6 * i);",
}


@pytest.mark.parametrize("name", AGREE)
def test_structs_that_agree_where_they_overlap_do_not_race(name):
    for seed in SEEDS:
        with sim.options(seed=seed):
            _, report = launch(I + AGREE[name], header=HEADER, count=2, threadgroup=1, outputs=14, init_value=-1)
        assert report.benign_races > 0


@pytest.mark.parametrize("name", DISAGREE)
def test_an_element_in_which_they_differ_is_a_race(name):
    for seed in SEEDS:
        with sim.options(seed=seed), pytest.raises(KernelFault, match=r"race: .*writes element"):
            launch(I + DISAGREE[name], header=HEADER, count=2, threadgroup=1, outputs=14, init_value=-1, x=COPIED)
