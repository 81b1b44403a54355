"""Python functions as tools: their schemas, and what the model reads of their results."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pydantic
import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.structured.functions import MAX_RESULT, call_function, call_function_async, describe_function
from cortexmlx.structured.tools import Tool


class Place(pydantic.BaseModel):
    """A place."""

    city: str
    country: str | None = None


def search(
    query: str,
    where: Place,
    kind: Literal["web", "news"] = "web",
    limit: Annotated[int, pydantic.Field(ge=1, le=50, description="how many")] = 10,
    tags: list[str] | None = None,
) -> str:
    """Search for pages.

    Only public ones.

    Args:
        query: what to search for,
            in any language
        limit (int): is described at the type
        tags: all of them
    """
    return f"{query} {where.city} {kind} {limit} {tags}"


def test_a_functions_hints_and_docstring_are_the_schema() -> None:
    name, description, schema = describe_function(search)
    assert (name, description) == ("search", "Search for pages.")
    properties = schema["properties"]
    assert schema["required"] == ["query", "where"] and schema["additionalProperties"] is False
    assert properties["query"] == {"type": "string", "description": "what to search for, in any language"}
    assert properties["kind"]["enum"] == ["web", "news"] and properties["kind"]["default"] == "web"
    assert properties["limit"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 50,
        "default": 10,
        "description": "how many",
    }
    assert properties["tags"]["description"] == "all of them"
    assert schema["$defs"]["Place"]["properties"]["city"] == {"type": "string"}


def test_arguments_are_the_types_that_the_function_asks_for() -> None:
    assert call_function(search, '{"query": "é", "where": {"city": "Rome"}, "tags": ["a"]}') == "é Rome web 10 ['a']"


def measure(
    limit: float = math.inf,
    unit: Annotated[str, pydantic.Field(alias="in")] = "m",
    digits: int = pydantic.Field(2, ge=0),
) -> str:
    return f"{limit} {unit} {digits}"


class Unsayable(Exception):
    def __str__(self) -> str:
        raise ValueError


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int = 1) -> int:
        """Add a number."""
        self.count += number
        return self.count

    async def __call__(self, number: int) -> int:
        return number + 1


async def later(number: int) -> dict[str, int]:
    """Do it later."""
    await asyncio.sleep(0)
    return {"number": number}


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    ("function", "name", "arguments", "result"),
    [
        (Counter().add, "add", "{}", "1"),
        (Counter().add, "add", '{"number": 5}', "5"),
        (Counter(), "Counter", '{"number": 5}', "6"),
        (later, "later", '{"number": 2}', '{"number":2}'),
        (functools.partial(later, number=3), "later", "{}", '{"number":3}'),
        (functools.partial(search, "x", kind="news"), "search", '{"where": {"city": "Oslo"}}', "x Oslo news 10 None"),
        (wrapped(search), "search", '{"query": "q", "where": {"city": "c"}}', "q c web 10 None"),
        (measure, "measure", '{"in": "km"}', "inf km 2"),
        (Place, "Place", '{"city": "Bonn"}', '{"city":"Bonn","country":null}'),
    ],
)
def test_everything_that_can_be_called_by_names(
    function: Callable[..., object], name: str, arguments: str, result: str
) -> None:
    assert Tool.of(function).name == name
    assert call_function(function, arguments) == result
    if not isinstance(getattr(function, "__self__", None), Counter):  # it counts
        assert asyncio.run(call_function_async(function, arguments)) == result


def raising(error: BaseException) -> Callable[[], object]:
    def fails() -> object:
        raise error

    return fails


cycle: list[object] = []
cycle.append(cycle)


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [
        (search, "{}", "Error: query: Field required; where: Field required"),
        (search, '{"query": 1, "where": {"city": "c"}}', "Error: query: Input should be a valid string"),
        (search, '{"query": "q", "where": {"city": "c"}, "other": 1}', "Error: other: Extra inputs are not permitted"),
        (search, '{"query": "q", "where": {"city": "c"}, "limit": 51}', "Error: limit: Input should be less than"),
        (measure, '{"digits": -1}', "Error: digits: Input should be greater"),
        (search, "[]", "Error: arguments: Input should be"),
        (search, "{", "Error: arguments: Invalid JSON"),
        (search, "[" * 100_000, "Error: arguments: Invalid JSON: recursion limit"),
        (raising(ValueError("a\nb")), "{}", "Error: ValueError: a\nb"),
        (raising(Unsayable()), "{}", "Error: Unsayable"),
        (raising(KeyError()), "{}", "Error: KeyError"),
        (raising(SystemExit(3)), "{}", "Error: SystemExit: 3"),
        (raising(RecursionError("deep")), "{}", "Error: RecursionError: deep"),
        (lambda: None, "{}", "null"),
        (lambda: float("inf"), "{}", '"Infinity"'),
        (lambda: dataclasses.make_dataclass("D", ["x"])(1), "{}", '{"x":1}'),
        (lambda: object, "{}", "<class 'object'>"),
        (lambda: cycle, "{}", "[[...]]"),
        (lambda: "half \ud83d \0", "{}", "half ? \ufffd"),
        (lambda: b"\xff", "{}", "b'\\xff'"),
    ],
)
def test_whatever_comes_of_a_call_is_a_text(function: Callable[..., object], arguments: str, says: str) -> None:
    result = call_function(function, arguments)
    assert result.startswith(says)
    assert asyncio.run(call_function_async(function, arguments)) == result


def test_a_long_result_is_cut_and_says_so() -> None:
    result = call_function(lambda: "x" * (MAX_RESULT + 5), "{}")
    assert result == "x" * MAX_RESULT + f"\n[cut: the result has {MAX_RESULT + 5:,} characters]"


def test_an_interrupt_is_no_result() -> None:
    with pytest.raises(KeyboardInterrupt):
        call_function(raising(KeyboardInterrupt()), "{}")


def test_a_coroutine_is_awaited_where_a_loop_runs_already() -> None:
    """As in a notebook, where `ask` is called without await."""

    async def notebook() -> str:
        return call_function(later, '{"number": 7}')

    assert asyncio.run(notebook()) == '{"number":7}'


def positional(x: int, /) -> None: ...
def starred(*xs: int) -> None: ...
def named(**xs: int) -> None: ...
def unhinted(x) -> None: ...  # type: ignore[no-untyped-def]
def unknown(x: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def unreadable(x: Callable[[], int]) -> None: ...
def unwritable(x: type(sys)) -> None: ...  # type: ignore[valid-type]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (positional, "its parameter 'x' is positional only"),
        (starred, "its parameter 'xs' takes any number of values"),
        (named, "its parameter 'xs' takes any names"),
        (unhinted, "its parameter 'x' has no type hint"),
        (unknown, "has a type hint that cannot be read: name 'Missing' is not defined"),
        (unreadable, "cannot be a tool: "),
        (unwritable, "cannot be a tool: "),
        (dict, "has no signature|cannot be a tool"),
    ],
)
def test_what_cannot_be_a_tool_is_named(function: Callable[..., object], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        describe_function(function)
