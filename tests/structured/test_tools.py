"""Tools and their calls, as apps, templates and models write them."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest

from cortexmlx import InvalidRequest, SamplingParams
from cortexmlx.structured.functions import call_function
from cortexmlx.structured.tools import MAX_TOOLS, Tool, ToolCall, check_tool_choice, read_tools, result_message

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def of(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def test_a_tool_is_read_and_written_as_in_the_openai_api() -> None:
    tool = Tool.of(WEATHER)
    assert tool.as_mapping() == WEATHER
    assert Tool.of(tool) is tool
    assert Tool.of(tool.as_mapping()) == tool
    assert hash(tool) == hash(Tool.of(WEATHER))
    assert Tool.of(of(strict=True)).as_mapping()["function"]["strict"] is True


def test_the_order_of_properties_stays() -> None:
    names = ["z", "a", "m", "é"]
    tool = Tool.of(of(parameters={"type": "object", "properties": {name: {} for name in names}}))
    assert list(tool.schema["properties"]) == names


def test_missing_parts_have_defaults() -> None:
    tool = Tool.of({"function": {"name": "now", "description": None, "parameters": None, "strict": None}})
    assert (tool.description, tool.schema, tool.strict) == ("", {"type": "object"}, False)
    assert Tool.of(of(parameters={"properties": {}})).schema["type"] == "object"


STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("parameters", "schema"),
    [
        ([], {}),
        ({"type": "object", "properties": []}, {"properties": {}}),
        ({"type": ["object", "null"], "properties": {"a": []}}, {"properties": {"a": {}}}),
        ({"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}, {"properties": {"a": STRING}}),
        ({"properties": None, "required": None}, {}),
        ({"properties": {"a": {"type": ["STRING", "null"]}}}, {"properties": {"a": {"type": ["string", "null"]}}}),
        (
            {"properties": {"a": {**STRING, "required": True, "default": None}}, "required": {}},
            {"properties": {"a": {**STRING, "default": None}}},
        ),
        (
            {"properties": {"a": {"items": {"properties": []}}}, "$defs": []},
            {"properties": {"a": {"items": {"properties": {}}}}, "$defs": {}},
        ),
        (
            {"properties": {"a": {"anyOf": [{"type": "INTEGER"}], "description": None}}},
            {"properties": {"a": {"anyOf": [{"type": "integer"}]}}},
        ),
        (
            {"properties": {"type": {"enum": ["OBJECT", None]}, "required": STRING}},
            {"properties": {"type": {"enum": ["OBJECT", None]}, "required": STRING}},
        ),
    ],
)
def test_schemas_are_read_as_their_writers_mean_them(parameters: Any, schema: Any) -> None:
    assert Tool.of(of(parameters=parameters)).schema == {"type": "object", **schema}
    with pytest.raises(InvalidRequest, match="must be the schema of an object"):
        Tool.of(of(parameters={"type": "objekt"}))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3, "a tool is 3, but must be a function, or a mapping"),
        ({"type": "web_search"}, "a tool has the type 'web_search', but only functions are served"),
        ({"type": "function"}, "a tool has no `function`"),
        ({"type": "function", "name": "f"}, "a tool has 'name', but only `type` and `function`"),
        (of(returns={}), "a tool's function has 'returns', but only name, description, parameters, strict"),
        (of(name=None), "a tool's name is None"),
        (of(name=""), "a tool's name is ''"),
        (of(name="two words"), "a tool's name is 'two words'"),
        (of(name="a\nb"), "a tool's name is"),
        (of(name="x" * 129), "a tool's name is"),
        (of(name="auto"), "is called 'auto', which is a `tool_choice`"),
        (of(description=3), "the description of the tool 'f' is 3"),
        (of(description="\ud800"), "the description of the tool 'f'"),
        (of(strict="yes"), "`strict` of the tool 'f' is 'yes'"),
        (of(parameters=[1]), "the parameters of the tool 'f' are [1]"),
        (of(parameters={"type": "string"}), "must be the schema of an object"),
        (of(parameters={"properties": [1]}), "the `properties` of the tool 'f' must be an object"),
        (of(parameters={"required": "a"}), "`required` of the tool 'f' is 'a', but must be a list of texts"),
        (of(parameters={"required": ["a", 1]}), "`required` of the tool 'f' is"),
        (of(parameters={"default": float("nan")}), "cannot be written as JSON"),
        (of(parameters={"default": {1}}), "cannot be written as JSON"),
        (of(parameters={"default": "\x00\ud800"}), "hold a NUL or half of a surrogate pair"),
    ],
)
def test_what_is_no_tool_is_refused_by_name(value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Tool.of(value)
    assert says in str(refused.value)
    assert refused.value.field == "tools"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("weather", "tools is 'weather', but must be a list"),
        ({"a": 1}, "but must be a list"),
        ([WEATHER, WEATHER], "two tools are called 'weather'"),
        ([of(name=f"f{n}") for n in range(MAX_TOOLS + 1)], "tools has 513 tools, but must have at most 512"),
        ([of(description="x" * (1 << 20))], "but must have at most 1,048,576"),
    ],
)
def test_what_is_no_list_of_tools_is_refused(value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_tools(value)
    assert says in str(refused.value)


def forecast(city: str, days: int = 3, *, unit: Literal["C", "F"] = "C") -> dict[str, object]:
    """Return the forecast
    of a city.

    It is made up.

    Args:
        city: Its name,
            with the country.
        days (int): How many days.
    """
    return {"city": city, "days": days, "unit": unit}


def test_a_function_is_a_tool() -> None:
    tool = Tool.of(forecast)
    assert tool.as_mapping()["function"] == {
        "name": "forecast",
        "description": "Return the forecast of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name, with the country."},
                "days": {"type": "integer", "description": "How many days.", "default": 3},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    }
    assert tool.function is forecast
    assert call_function(forecast, '{"city": "Rome"}') == '{"city":"Rome","days":3,"unit":"C"}'
    assert call_function(forecast, '{"city": "Rome", "days": "x"}').startswith("Error: days: ")
    assert call_function(forecast, '{"town": "Rome"}').startswith("Error: ")


def test_a_function_without_type_hints_is_refused_by_name() -> None:
    def guess(city, days: int = 1) -> str:  # type: ignore[no-untyped-def]
        return "sun"

    with pytest.raises(InvalidRequest, match="the function guess cannot be a tool: its parameter 'city' has no type"):
        Tool.of(guess)


def test_a_choice_fits_the_tools() -> None:
    tools = read_tools([WEATHER])
    for choice in ("auto", "none", "required", "weather"):
        check_tool_choice(choice, tools)
    for choice, offered in (("now", tools), ("", tools), (None, tools), ("required", ()), ("weather", ())):
        with pytest.raises(InvalidRequest) as refused:
            check_tool_choice(choice, offered)
        assert refused.value.field == "tool_choice"


def test_the_parameters_of_a_request_hold_tools() -> None:
    params = SamplingParams(tools=[WEATHER], tool_choice="weather")
    assert params.offered == (Tool.of(WEATHER),)
    assert params == SamplingParams(tools=(Tool.of(WEATHER),), tool_choice="weather")
    hash(params)
    with pytest.raises(InvalidRequest, match="tool_choice is 'x', but must be auto, none, required or the name"):
        SamplingParams(tools=[WEATHER], tool_choice="x")
    with pytest.raises(InvalidRequest, match="parallel_tool_calls is 'no'"):
        SamplingParams(parallel_tool_calls="no")  # type: ignore[arg-type]


# Calls as chat templates read them.


CALL = ToolCall("call_1", "f", '{"b": 1, "a": {"c": [null, "é"]}}')


def test_a_template_gets_the_arguments_as_an_object_in_their_order() -> None:
    called = CALL.as_mapping()
    assert called["id"] == "call_1" and called["type"] == "function"
    assert called["function"] == {"name": "f", "arguments": {"b": 1, "a": {"c": [None, "é"]}}}
    assert list(CALL.values) == ["b", "a"]


def test_whole_numbers_of_any_length_are_read() -> None:
    call = ToolCall("call_1", "f", f'{{"a": {"1" * 5000}, "b": -{"1" * 5000}, "c": {"1" * 4000}}}')
    assert call.values == {"a": math.inf, "b": -math.inf, "c": int("1" * 4000)}


def test_a_result_names_its_call() -> None:
    assert result_message(CALL, "42") == {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "42"}
