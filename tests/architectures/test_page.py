"""The page docs/models.md has what was found of every model type that mlx-lm has, and nothing else."""

from __future__ import annotations

import re

from mlx_lm._version import __version__ as version

from tests.architectures.configurations import TYPES, modules, remapped
from tests.architectures.outcomes import Status, read_results
from tests.architectures.page import PAGE, page

TEXT = PAGE.read_text()


def rows(section: str) -> list[list[str]]:
    """The names in the first column of a section's table, row by row."""
    body = TEXT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in body.splitlines() if line.startswith("| `")]


def test_every_module_of_mlx_lms_that_is_a_model_has_a_configuration() -> None:
    types, helpers = modules()
    assert sorted(TYPES) == sorted(types)
    assert len(types) > 120 and "base" in helpers and "cache" in helpers


def test_the_page_is_made_from_the_results() -> None:
    assert page(read_results(), version) == TEXT, "make it with `python -m tests.architectures --write`"


def test_the_page_lists_each_type_and_each_other_name_once() -> None:
    served, refused = rows("Paged") + rows("One request at a time"), rows("Refused")
    assert sorted(name for row in served + refused for name in row) == sorted([*TYPES, *remapped()])
    names = {name for row in served for name in row} - remapped().keys()
    assert names == {n for n, found in read_results().items() if found.status is Status.SERVED}


def test_no_type_is_served_on_trust() -> None:
    """Who is served passed at least the batch and the fork, and everyone else is refused for a reason."""
    for name, found in read_results().items():
        if found.status is Status.SERVED:
            assert {"batch", "fork"} <= set(found.checks) and (found.kept or found.why), name
        else:
            assert found.status is Status.REFUSED and found.why, name
