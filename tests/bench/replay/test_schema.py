"""Answers of a schema have the tokens that forced tokens leave."""

from __future__ import annotations

import json

import jsonschema
import pytest

from cortexmlx import CortexError, Engine
from cortexmlx.bench.replay.runs import make_workload, measure_workloads
from cortexmlx.bench.replay.schema import RECORD, apply_forced_tokens
from cortexmlx.bench.replay.texts import AnswerKind, ReplayText, make_text


def test_an_answer_says_the_same_with_the_tokens_of_its_schema(model: str) -> None:
    with Engine(model) as engine:
        text = make_text(AnswerKind.SCHEMA, 3, 600, engine.encode)
        forced = apply_forced_tokens(text, engine)
        said = engine.decode(forced.answer)
        assert said and engine.decode(text.answer).startswith(said)
        assert apply_forced_tokens(forced, engine).answer[:100] == forced.answer[:100] and forced.prompt == text.prompt
        first, _ = json.JSONDecoder().raw_decode(said[1:])
    jsonschema.validate(first, RECORD)


def test_both_engines_write_it_and_the_one_with_drafts_finds_its_keys(model: str) -> None:
    with (
        Engine(model, max_rows=2, speculate=False, forced_tokens=False) as plain,
        Engine(model, max_rows=2) as speculating,
    ):
        [found] = measure_workloads(
            plain, speculating, [make_workload(AnswerKind.SCHEMA, 1, 2, 60, plain)], lambda what: None
        )
    assert not found.plain_runs[0].drafts.drafted
    forced = found.speculating_runs[0].drafts.sources["forced"]
    assert forced.drafted == forced.accepted


def test_a_text_that_does_not_follow_the_schema_is_refused(model: str) -> None:
    with Engine(model) as engine, pytest.raises(CortexError, match=r"does not follow its schema at .name"):
        apply_forced_tokens(ReplayText((1,), tuple(engine.encode('[{"name":1}]'))), engine)
