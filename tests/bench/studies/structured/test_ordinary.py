"""Ordinary schemas: an answer counts that ended and fits, and the starter model's answers nearly all do."""

from __future__ import annotations

import json

import pytest

from cortexmlx import Completion, Engine, FinishReason, Timings, Usage
from cortexmlx.bench.studies.structured import ordinary
from cortexmlx.cli.files.schema_file import form_of_schema


def test_an_answer_is_whole_if_it_ended_and_fits_the_schema_as_it_was_typed() -> None:
    def answer(text: str, reason: FinishReason) -> Completion:
        return Completion(text, (), reason, Usage(1, 1, 0), Timings(0, 0, 0, 0, 0))

    assert ordinary.whole("reason", answer('{"answer": "no", "reason": "x", "more": 1}', FinishReason.STOP))
    assert not ordinary.whole("reason", answer('{"answer": "no", "reason": "x"}', FinishReason.LENGTH))
    assert not ordinary.whole("reason", answer('{"answer": "perhaps", "reason": "x"}', FinishReason.STOP))
    for _, schema in ordinary.ORDINARY.values():
        assert form_of_schema(json.dumps(schema)) != form_of_schema(json.dumps(schema), is_open=True)


@pytest.mark.slow
@pytest.mark.model
def test_nearly_all_answers_of_the_starter_model_are_whole() -> None:
    with Engine("smollm2", kv_memory="1GB", max_rows=ordinary.ROWS) as engine:
        whole = [ordinary.whole(name, answer) for name, _, answer in ordinary.run(engine)]
    assert sum(whole) >= 0.85 * len(whole)
