"""The machine that a plan is for: what of a Mac's memory models may use, and how memory is written where it is sold."""

from __future__ import annotations

import pytest

from cortexmlx.cli.planning.machine import mac_with_memory, machine_phrase, parse_sold_memory, this_machine
from cortexmlx.errors import InvalidRequest
from cortexmlx.system.machine import memory_bytes, working_set_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "reported"),
    [(16, 10.67), (32, 21.33), (36, 27.0), (64, 48.0), (96, 72.0), (192, 144.0)],
)
def test_a_mac_lets_models_use_what_was_reported_of_it(memory: int, reported: float) -> None:
    """GiB that Metal recommended on Macs of these sizes, as llama.cpp prints it."""
    machine = mac_with_memory(memory * GIB)
    assert machine.memory == memory * GIB and machine.working_set / GIB == pytest.approx(reported, abs=0.01)
    assert not machine.on_cpu and not machine.is_local and machine_phrase(machine.is_local) == "such a Mac"


def test_this_machine_is_asked() -> None:
    here = this_machine()
    assert (here.memory, here.working_set, here.is_local) == (memory_bytes(), working_set_bytes(), True)


@pytest.mark.parametrize("text", ["64GB", "64gb", " 64 GB ", "64GiB", "64G", "0.0625TB", str(64 * GIB)])
def test_a_gigabyte_of_memory_is_sold_in_powers_of_two(text: str) -> None:
    assert parse_sold_memory(text) == 64 * GIB


@pytest.mark.parametrize("text", ["64", "0GB", "0", "-64GB", "", "lots", "512MB", "64 apples", "nan", "1e3GB"])
def test_what_is_no_macs_memory_is_refused_as_it_was_written(text: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{text!r} is no Mac's memory: write it like 64GB$"):
        parse_sold_memory(text)
