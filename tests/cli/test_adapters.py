"""--adapters: names and folders, as they are typed."""

from __future__ import annotations

import pytest
import typer

from cortexmlx.cli.adapters import adapters_of


def test_each_adapter_has_a_name_and_a_folder() -> None:
    assert adapters_of(None) is None and adapters_of([]) is None
    given = ["sql=a", "poems=b=c", "base:sql=a", "sql=a"]
    assert adapters_of(given) == {"sql": "a", "poems": "b=c", "base:sql": "a"}


@pytest.mark.parametrize(
    ("given", "says"),
    [(["sql"], "'sql' is no NAME=FOLDER"), (["=a"], "no NAME"), (["sql="], "no NAME"), (["a=x", "a=y"], "is x and y")],
)
def test_wrong_use_is_told(given: list[str], says: str) -> None:
    with pytest.raises(typer.BadParameter, match=says):
        adapters_of(given)
