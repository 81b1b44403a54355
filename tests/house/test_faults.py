"""Every fault of `tests/faults` can still be planted, and the tests that are to notice it exist."""

from __future__ import annotations

import json
from pathlib import Path

from tests.faults import __main__ as tool
from tests.faults import identity, planted, products, structured, tools
from tests.faults.planted import Fault

ROOT = Path(__file__).resolve().parents[2]
READERS = [Fault(**e) for path in (ROOT / "tests/faults").glob("*.json") for e in json.loads(path.read_text())]


def test_every_fault_names_text_that_is_in_its_file_once() -> None:
    faults = [*planted.FAULTS, *identity.FAULTS, *products.FAULTS, *structured.FAULTS, *tools.FAULTS, *READERS]
    assert len(faults) > 300
    counts = {fault.name: (fault.file, (ROOT / fault.file).read_text().count(fault.old)) for fault in faults}
    assert {name: found for name, found in counts.items() if found[1] != 1} == {}


def test_the_tests_that_judge_a_fault_exist() -> None:
    assert [
        name
        for name in (*tool.TESTS, *products.TESTS, *structured.TESTS, *tools.TESTS)
        if not (ROOT / "tests" / name).exists()
    ] == []
