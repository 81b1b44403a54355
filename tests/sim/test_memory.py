"""Where simulated buffers and stacks lie: whoever leaves them ends the launch and not the process."""

import pytest

from cortexmlx.errors import KernelFault
from cortexmlx.metal import sim
from support.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741


@pytest.mark.parametrize("checked", [True, False])
def test_a_thread_that_outgrows_its_stack_ends_the_launch_and_not_the_process(checked):
    body = I + "float a[40000]; for (uint k = 0; k < 40000; k++) a[k] = x[k % 64]; y[i] = a[i * 7];"
    with sim.options(checked=checked), pytest.raises(KernelFault, match="its own variables do not fit"):
        launch(body)
    launch(I + "y[i] = x[i];")


def test_unmapped_memory_ends_an_unchecked_launch_and_not_the_process():
    with sim.options(checked=False), pytest.raises(KernelFault, match="unmapped memory"):
        launch(I + "y[i] = *(const device float*)(ulong(x[0]) * 8 + 16);")
    with sim.options(checked=False), pytest.raises(KernelFault, match="arithmetic fault"):
        launch(I + "y[i] = 100 / int(x[i]);")
