"""What runs, and that an option which says nothing to it is refused."""

from __future__ import annotations

import inspect

import pytest
import typer

from cortexmlx.cli.bench.command import bench
from cortexmlx.cli.bench.sections import TAKEN, Section, Suite, check_options, sections


def test_every_option_is_taken_by_some_section_or_by_all() -> None:
    parameters = set(inspect.signature(bench).parameters)
    assert set(TAKEN) <= parameters
    assert parameters - set(TAKEN) == {"ctx", "output", "save", "compare", "plot", "against", "suite", "speculate"}


def test_suites_are_made_of_sections() -> None:
    assert sections(Suite.basic, False) == [Section.ROWS] and sections(Suite.basic, True) == [Section.RATIOS]
    assert sections(Suite.trace, True) == [Section.TRACE]
    assert len(sections(Suite.all, False)) == 5


@pytest.mark.parametrize(("suite", "against"), [(Suite.serving, False), (Suite.pool, True), (Suite.kernel, True)])
def test_what_needs_a_peer_or_has_none_is_refused(suite: Suite, against: bool) -> None:
    with pytest.raises(typer.BadParameter):
        sections(suite, against)


@pytest.mark.parametrize(
    ("names", "suite", "against"),
    [
        (["batch"], Suite.serving, True),
        (["depth"], Suite.trace, True),
        (["case"], Suite.basic, False),
        (["model"], Suite.pool, False),
        (["requests"], Suite.basic, False),
        (["prompt"], Suite.serving, True),
        (["kv_bits"], Suite.kernel, False),
        (["hosts"], Suite.basic, True),
        (["hosts"], Suite.trace, True),
    ],
)
def test_an_option_that_says_nothing_is_refused(names: list[str], suite: Suite, against: bool) -> None:
    with pytest.raises(typer.BadParameter):
        check_options(names, sections(suite, against), suite, against)


def test_what_says_something_is_not() -> None:
    check_options(["batch", "depth", "save"], [Section.ROWS], Suite.basic, False)
    check_options(["hosts"], sections(Suite.all, False), Suite.all, False)
    names = [name for name in TAKEN if name != "hosts"]
    check_options(names, [Section.ROWS, *sections(Suite.all, True)], Suite.all, True)
