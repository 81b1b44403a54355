"""docs/structured.md: its lines of a batch are requests, and its limits are those of the code."""

from __future__ import annotations

import json

from cortexmlx.protocols import simple
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.structured.output import MAX_CHARACTERS, MAX_CHOICES, MAX_PATTERN_CHARACTERS, StructuredOutput
from cortexmlx.types.sampling_params import SamplingParams
from support.pages import blocks, read

PAGE = "docs/structured.md"


def test_the_lines_of_the_page_are_requests_with_forms() -> None:
    (block,) = (block for block in blocks("jsonl") if block.page == PAGE)
    asked = [simple.read(json.loads(line), RequestDefaults(SamplingParams())) for line in block.text.splitlines()]
    assert [each.params.form for each in asked] == [StructuredOutput.choice(["yes", "no"]), StructuredOutput.json()]


def test_the_page_has_the_limits() -> None:
    assert all(f"{limit:,}" in read(PAGE) for limit in (MAX_CHARACTERS, MAX_CHOICES, MAX_PATTERN_CHARACTERS))
