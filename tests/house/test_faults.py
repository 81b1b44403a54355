"""Every fault of `tests/faults` can still be planted, and the tests that are to notice it exist."""

from __future__ import annotations

import json
from pathlib import Path

from tests.faults import __main__ as tool
from tests.faults import identity
from tests.faults.planted import Fault

ROOT = Path(__file__).resolve().parents[2]
READERS = [Fault(**e) for path in (ROOT / "tests/faults").glob("*.json") for e in json.loads(path.read_text())]


def test_every_fault_names_text_that_is_in_its_file_once() -> None:
    rooms = [each for room in tool.ROOMS for each in room.FAULTS]
    faults = [*tool.KERNELS, *identity.FAULTS, *rooms, *READERS]
    assert len(faults) > 300
    counts = {fault.name: (fault.file, (ROOT / fault.file).read_text().count(fault.old)) for fault in faults}
    assert {name: found for name, found in counts.items() if found[1] != 1} == {}


def test_the_tests_that_judge_a_fault_exist() -> None:
    tests = (*tool.TESTS, *(name for room in tool.ROOMS for name in room.TESTS))
    assert [name for name in tests if not (ROOT / "tests" / name).exists()] == []
