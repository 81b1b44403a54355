"""The study of schemas: each is refused by name, or answered and judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine, FinishReason, SamplingParams, StructuredOutput
from cortexmlx.bench.studies.structured import maskbench

SMALL = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
UNIQUE = {"type": "array", "uniqueItems": True}
ENDLESS = {"type": "array", "items": {"type": "integer"}, "minItems": 1000}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, schema in enumerate((SMALL, UNIQUE, ENDLESS, SMALL, UNIQUE)):
        (tmp_path / f"s{number}.json").write_text(json.dumps({"schema": schema, "tests": []}))
    return tmp_path


def test_every_schema_is_counted_once(
    folder: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(maskbench, "TOKENS", 60)
    with Engine(tiny("llama"), kv_memory="8MB", max_rows=4) as engine:
        outcome = maskbench.run(engine, folder, 1)
    assert (outcome.schemas, outcome.ended, outcome.cut.keys()) == (5, 2, {"s2"})
    assert outcome.refused == dict.fromkeys(("s1", "s4"), 'Unimplemented keys: ["uniqueItems"]')
    assert not outcome.invalid and not outcome.failed
    lines = list(outcome.lines())
    assert lines[0] == "5 schemas: 3 enforced, 2 refused by name"
    assert lines[2] == "2 of 3 answers end within 60 tokens (66.7%); 0 failed"
    assert lines[3].split(maxsplit=1)[0] == "1" and "cut in" in lines[3]


def test_every_second_one(folder: Path) -> None:
    assert [name for name, _ in maskbench.schemas_in(folder, 2)] == ["s0", "s2", "s4"]


def test_an_answer_that_is_not_valid_is_named_with_its_keyword(tiny: Any) -> None:
    with Engine(tiny("llama"), kv_memory="8MB") as engine:
        answer = engine.generate("x", structured=SMALL, max_tokens=60)
    assert answer.finish_reason is FinishReason.STOP
    outcome = maskbench.Outcome(schemas=2)
    maskbench.take(outcome, "good", SMALL, answer)
    maskbench.take(outcome, "bad", {"type": "object", "maxProperties": 0}, answer)
    assert outcome.invalid == {"bad": "maxProperties at $"}
    assert list(outcome.lines())[-1] == "  bad: maxProperties at $"
    assert maskbench.judged(SMALL, "{").startswith("it is no JSON")


@pytest.mark.parametrize("plain", [False, True])
def test_forms_are_closed_and_compact_unless_it_is_plain(
    plain: bool, tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.json").write_text(json.dumps({"schema": {"properties": {"a": {}}}, "tests": []}))
    asked: list[SamplingParams] = []
    with Engine(tiny("llama"), kv_memory="8MB") as engine:
        submit = engine.submit
        monkeypatch.setattr(maskbench, "TOKENS", 8)
        monkeypatch.setattr(
            engine, "submit", lambda p, params, **how: (asked.append(params), submit(p, params, **how))[1]
        )
        maskbench.run(engine, tmp_path, 1, plain)
    ((form, penalty),) = [(params.form, params.repetition_penalty) for params in asked]
    assert form == StructuredOutput.json({"properties": {"a": {}}}, closed=not plain, compact=not plain)
    assert (penalty == 1.0) is plain


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"a": "' + "".join(map(str, range(200))), "a text"),
        ('{"a": ["\\"]", "' + "no" * 200, "a text, in a loop"),
        ('{"a": {"b": 1}, "c": 0.' + "3" * 200, "a number, in a loop"),
        ('{"a": [' + '"x{", ' * 100 + '"x', "an array, in a loop"),
        ('[{"a": {}}, {' + ", ".join(f'"p{n}": {n}' for n in range(100)), "an object"),
        ("[" + '{"a": [1, 2]}, ' * 100 + '{"a": [', "an array, in a loop"),
        ('{"a": "b', "an object"),
    ],
)
def test_what_a_document_is_cut_in(text: str, place: str) -> None:
    assert maskbench.cut_place(text) == place
