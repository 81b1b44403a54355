"""Which lines and branches of a kernel ran: told by a build that leaves a mark in every basic block."""

import mlx.core as mx
import pytest

from cortexmlx.metal.lab import sim
from cortexmlx.metal.lab.sim import settings
from cortexmlx.metal.lab.sim.judge import judge
from cortexmlx.metal.lab.sim.judge.coverage import Coverage, FileCoverage, kernels_of
from cortexmlx.metal.lab.sim.judge.mlx import gemv, scan

BODY = """
  uint i = thread_position_in_grid.x;
  if (i < 4) {
    y[i] = 1;
  } else if (limit[0] > 5) {
    y[i] = 2;
  } else {
    y[i] = 3;
  }
"""


def covered(name, limits, threads=8):
    """The coverage of BODY after one launch for each limit; each test needs a name of its own, because marks stay."""
    kernel = sim.metal_kernel(name=name, input_names=["limit"], output_names=["y"], source=BODY)
    coverage = Coverage()
    for limit in limits:
        with settings.recording(coalescing=False) as launches, settings.options(checked=False, coverage=True):
            (y,) = kernel(
                inputs=[mx.array([limit])],
                grid=(threads, 1, 1),
                threadgroup=(threads, 1, 1),
                output_shapes=[(threads,)],
                output_dtypes=[mx.int32],
            )
        assert y.tolist() == [1] * min(4, threads) + [2 if limit > 5 else 3] * (threads - 4)
        coverage.add(report.library for report in launches.launches)
    text = kernel.text([mx.array([1])], [mx.int32]).text
    numbers = {what: 1 + next(i for i, line in enumerate(text.splitlines()) if what in line) for what in WANTED}
    return coverage.files[f"custom:{name}"], numbers


WANTED = ("y[i] = 1", "y[i] = 2", "y[i] = 3", "if (i < 4)", "else if")


def test_a_line_that_no_thread_reached_is_missed():
    file, line = covered("cover_lines", [1])
    assert line["y[i] = 2"] in file.missed_lines
    assert not {line["y[i] = 1"], line["y[i] = 3"]} & set(file.missed_lines)
    assert {line["y[i] = 1"], line["y[i] = 3"]} <= {number for number, ran in file.lines.items() if ran}


def test_a_branch_that_went_one_way_is_missed_until_it_goes_the_other():
    file, line = covered("cover_branches_once", [1])
    assert file.missed_branches == [line["else if"]]
    assert sum(file.outcomes.values()) == 3 and len(file.outcomes) == 4
    file, _ = covered("cover_branches_twice", [1, 9])
    assert file.missed_branches == [] and file.missed_lines == []


def test_a_branch_without_an_else_has_two_outcomes():
    """The way around is an edge without a block of its own, which the compiler gives it."""
    file, line = covered("cover_around", [1], threads=4)
    assert line["if (i < 4)"] in file.missed_branches


def test_lines_of_a_header_are_those_of_its_file():
    case = next(case for case in scan.cases() if case.name == "strided_scan sum float 2x70x40")
    coverage = Coverage()
    with settings.recording(coalescing=False) as launches, settings.options(checked=False, coverage=True):
        case.run()
    coverage.add(report.library for report in launches.launches)
    first, last = kernels_of("mlx:scan.h")["strided_scan"]
    other, _ = kernels_of("mlx:scan.h")["contiguous_scan"]
    lines = coverage.files["mlx:scan.h"].lines
    assert any(first < line < last and ran for line, ran in lines.items())
    assert not any(other < line < first for line in lines), "nobody instantiated contiguous_scan"
    assert "mlx:scan.h" in coverage.table() and "1/2" in coverage.table()
    assert kernels_of("mlx:binary_ops.h") == {}


def test_an_argument_that_a_function_constant_leaves_out_does_not_stop_the_count():
    case = next(case for case in gemv.cases() if case.name == "gemv_wide half 2 of 64 to 5")
    assert judge(case, coverage=True).agrees


def test_the_table_lists_what_is_missed():
    coverage = Coverage()
    coverage.files["custom:x"] = FileCoverage(
        {1: True, 2: False, 3: False, 9: False}, {(1, 2, 0): True, (1, 2, 1): False}
    )
    text = coverage.table(missed=True)
    assert "1/4 25%" in text and "1/2 50%" in text
    assert "lines that never ran: 2-3 9" in text and "went one way: 1" in text


@pytest.mark.parametrize("checked", [True, False])
def test_other_builds_leave_no_marks(checked):
    kernel = sim.metal_kernel(name="no_marks", input_names=["limit"], output_names=["y"], source=BODY)
    with settings.recording() as launches, settings.options(checked=checked):
        kernel(
            inputs=[mx.array([1])],
            grid=(8, 1, 1),
            threadgroup=(8, 1, 1),
            output_shapes=[(8,)],
            output_dtypes=[mx.int32],
        )
    with pytest.raises(AttributeError):
        Coverage().add([launches.last.library])
