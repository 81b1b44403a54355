"""From an instruction to the line of the kernel's text."""

import pytest

from cortexmlx.errors import KernelFault
from support.sim_tools import launch


def test_a_fault_names_the_line_that_it_quotes():
    with pytest.raises(KernelFault, match=r'line \d+: "y\[i\] = x\[i \+ 1\];"'):
        launch("uint i = thread_position_in_grid.x;\n\n  y[i] = x[i + 1];\n")
