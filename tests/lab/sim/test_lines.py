"""From an instruction to the line of the kernel's text."""

import pytest

from cortexmlx.errors import KernelFault
from cortexmlx.metal.lab.sim.lines import line_of
from support.kernels.sim_tools import launch


def test_a_fault_names_the_line_that_it_quotes():
    with pytest.raises(KernelFault, match=r'line \d+: "y\[i\] = x\[i \+ 1\];"'):
        launch("uint i = thread_position_in_grid.x;\n\n  y[i] = x[i + 1];\n")


def test_the_line_is_that_of_the_statement_in_a_kernel_of_many():
    for at in (1, 7, 30):
        lines = [f"float v{n} = x[{n}];" for n in range(40)]
        lines[at] = "y[0] = x[1000];"
        with pytest.raises(KernelFault, match=r'line \d+: "y\[0\] = x\[1000\];"'):
            launch("\n".join(lines))


def test_a_file_without_a_line_table_has_no_answer(tmp_path):
    for name, content in {"empty.so": b"", "mach.so": b"\xcf\xfa\xed\xfe" + bytes(100)}.items():
        path = tmp_path / name
        path.write_bytes(content)
        assert line_of(path, 1234) is None
