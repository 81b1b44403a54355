"""docs/python-reference.md beside the code: every field, parameter and method is there, and none that is not."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import cortexmlx
from cortexmlx import Conversation, Engine, RequestHandle, SamplingParams, errors, stats

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "python-reference.md").read_text()
GUIDE = (DOCS / "python.md").read_text()
_NAME = re.compile(r"`([a-z_0-9]+)[`(]")

TABLES = ["TokenEvent", "Completion", "Usage", "Timings", "TokenLogprob", "Progress", "Perplexity", "ModelInfo"]
"""Classes whose fields have a table of their own."""

INSIDE = {
    "HostStats": "hosts",
    "Latency": "time_to_first_token",
    "RequestStats": "requests",
    "SpeculationStats": "speculation",
    "StoreStats": "kv_store",
    "UsageSample": "timeline",
}
"""Classes whose fields are listed in the row of a field that is one of them."""


def section(title: str) -> str:
    """The text below a heading, up to the next."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.M | re.S)
    assert found, f"no section {title!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The rows of the tables in a text, without heads and rules."""
    cells = [
        [cell.strip() for cell in re.split(r"(?<!`)\|", line.strip("| "))]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    return [row for row in cells if row[0] and set(row[0]) != {"-"}]


def names(row: list[str]) -> list[str]:
    return _NAME.findall(row[0])


def public(kind: Any) -> set[str]:
    """Fields and properties of a frozen class."""
    properties = {name for name, value in vars(kind).items() if isinstance(value, property) and name[0] != "_"}
    return properties | {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("name", TABLES)
def test_the_table_of_a_class_has_its_fields(name: str) -> None:
    listed = [field for row in rows(section(f"`{name}`")) for field in names(row)]
    assert sorted(listed) == sorted(public(getattr(cortexmlx, name)))


def test_the_table_of_the_statistics_has_its_fields_and_those_of_what_is_in_it() -> None:
    table = rows(section("`EngineStats`"))
    assert sorted(n for row in table for n in names(row)) == sorted(public(cortexmlx.EngineStats))
    for name, field in INSIDE.items():
        cell = next(row[1] for row in table if field in names(row))
        assert set(_NAME.findall(cell.partition(":")[2])) == public(getattr(cortexmlx, name)), name


def test_the_picture_of_the_arena_is_described_with_its_fields_and_states() -> None:
    text = section("Statistics")
    fields = public(cortexmlx.GroupBlocks) | public(cortexmlx.BlockMap) | {"count"}
    assert fields - set(_NAME.findall(text)) == set()
    assert set(re.findall(r"`([A-Z]+)`", text)) == set(cortexmlx.BlockState.__members__)


def test_the_parameters_of_the_engine_have_their_defaults() -> None:
    table = {name: row[1] for row in rows(section("Engine")) if len(row) == 3 for name in names(row)}
    table.pop("parameter", None)
    parameters = {n: p.default for n, p in inspect.signature(Engine).parameters.items() if n != "model"}
    assert table.keys() == parameters.keys()
    for name, default in parameters.items():
        said = table[name].strip("`").strip('"')
        assert default is None or said == str(default), f"{name}: {said} instead of {default}"


def mentioned(text: str) -> set[str]:
    return {name for row in rows(text) for cell in row[:1] for name in _NAME.findall(cell)}


def test_every_method_of_the_engine_is_in_its_table_with_its_parameters() -> None:
    methods = {name for name in dir(Engine) if name[0] != "_"} | {"info"}
    text = section("Engine")
    listed = mentioned(text) - (set(inspect.signature(Engine).parameters) - methods)
    assert listed == methods
    said = re.search(r"`submit\(([^)]*)\)`", text)
    assert said and re.findall(r"\w+", said[1]) == [
        n for n in inspect.signature(Engine.submit).parameters if n != "self"
    ]


@pytest.mark.parametrize(("kind", "title"), [(Conversation, "`Conversation`"), (RequestHandle, "`RequestHandle`")])
def test_every_method_of_the_others_is_named(kind: type, title: str) -> None:
    # what the engine does with a handle
    engines = {"push", "fail", "advance", "abandon", "check_may_wait", "set_event_callback", "take", "wait"}
    methods = {name for name in dir(kind) if name[0] != "_"} - engines
    assert methods - set(_NAME.findall(section(title))) == set()


def test_every_sampling_parameter_is_named_and_every_error_too() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields - set(_NAME.findall(section("SamplingParams"))) == set()
    assert set(errors.__all__) - {"CortexError"} == set(
        re.findall(r"`(\w+)`", section("Errors").partition("\n\n")[0])
    ) - {"CortexError"} - {"KVBlockAllocator"}


def test_every_name_on_both_pages_that_looks_like_a_class_is_public() -> None:
    classes = set(re.findall(r"`([A-Z][a-zA-Z]+[a-z][a-zA-Z]*)`", PAGE + GUIDE))
    of_others = {"QuantizedKVCache", "LSEnvironment", "EnvironmentVariables"}
    assert classes - of_others - set(dir(builtins)) - {*cortexmlx.__all__, *errors.__all__, *stats.__all__} == set()
