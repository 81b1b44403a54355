"""Where simulated buffers and stacks lie: whoever leaves them ends the launch and not the process."""

import ctypes
import itertools
import mmap
from pathlib import Path

import pytest

from cortexmlx.errors import KernelFault
from cortexmlx.metal.lab import sim
from cortexmlx.metal.lab.sim.buffers import RELEASE_ABOVE, SLOT, STACK_BYTES, device_memory
from support.kernels.sim_tools import launch

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


def test_buffers_lie_gigabytes_apart_and_what_is_released_reads_as_zeros():
    memory = device_memory()
    assert memory is device_memory(), "one for the process"
    with memory.lock:
        places = [memory.place(slot) for slot in range(3)]
        assert places == [memory.place(slot) for slot in range(3)]
        assert all(place % mmap.PAGESIZE == 0 for place in places)
        assert min(abs(a - b) for a, b in itertools.combinations(places, 2)) >= SLOT // 2
        size = RELEASE_ABOVE + 1
        ctypes.memset(places[0] + size - 1, 7, 1)
        memory.release(0, size)
        assert ctypes.string_at(places[0] + size - 1, 1) == b"\0"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux shows its maps there")
def test_no_stack_reaches_another():
    memory = device_memory()
    assert memory.stacks % mmap.PAGESIZE == 0
    lowest = {memory.stacks + thread * STACK_BYTES for thread in range(3)}
    maps = Path("/proc/self/maps").read_text().splitlines()
    guards = [line for line in maps if int(line.split("-")[0], 16) in lowest]
    assert [line.split()[1] for line in guards] == ["---p"] * 3
