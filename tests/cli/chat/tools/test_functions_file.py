"""A file of functions: which are tools, and what is said of a file that has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortexmlx.cli.chat.tools.functions_file import load_tools
from cortexmlx.errors import InvalidRequest

GOOD = '''
from dataclasses import dataclass
from json import dumps
import beside_it

@dataclass
class Place:
    city: str

def weather(place: Place) -> str:
    """The weather."""
    return dumps(place.city) + beside_it.TEXT

async def later(number: int = 1) -> int:
    """Later."""
    return number

def _helper(x): ...
'''


def test_functions_that_the_file_defines_are_its_tools(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("TEXT = 'é'\n")
    (tmp_path / "mine.py").write_text(GOOD)
    weather, later = load_tools(tmp_path / "mine.py")
    assert (weather.name, weather.description, later.name) == ("weather", "The weather.", "later")
    assert weather.schema["$defs"]["Place"]["properties"] == {"city": {"type": "string"}}
    assert weather.function is not None


def test_a_file_may_name_its_tools(tmp_path: Path) -> None:
    path = tmp_path / "named"
    path.write_text(
        GOOD.replace("import beside_it", "from os.path import basename").replace(" + beside_it.TEXT", "")
        + "\n__all__ = ['later']\n"
    )
    assert [tool.name for tool in load_tools(path)] == ["later"], "also without .py in its name"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "missing.py is not a file: tools are the functions of a Python file"),
        ("", "has no functions: define one with type hints"),
        ("def _f(): ...\nfrom os.path import basename", "has no functions"),
        ("def f(:", "is no Python file: line 1: "),
        ("\0", "source code string cannot contain null bytes"),
        ("import not_installed_here", "cannot be imported: ModuleNotFoundError: No module named 'not_installed_here'"),
        ("exit(3)", "cannot be imported: SystemExit: 3"),
        ("raise ValueError", "cannot be imported: ValueError$"),
        ("def f(x): ...", r"its parameter 'x' has no type hint \(a function whose name begins with _ is no tool\)"),
        ("__all__ = ['g']", "`__all__` names 'g', which the file does not have"),
        ("__all__ = 'g'", "`__all__` is 'g', but must be a list of names"),
        ("__all__ = ['f']\nf = 3", "a tool is 3, but must be a function"),
        ("def auto(): ...", "a tool is called 'auto', which is a `tool_choice`"),
    ],
)
def test_a_file_without_tools_says_why(text: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / ("missing.py" if text is None else "file.py")
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidRequest, match=says):
        load_tools(path)
    with pytest.raises(InvalidRequest, match="is not a file"):
        load_tools(tmp_path)
