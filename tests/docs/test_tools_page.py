"""docs/tools.md: its lines of a batch are requests, its chat looks like that, and its limits are those of the code."""

from __future__ import annotations

import json
import re

from cortexmlx.cli.chat.talk import CONSENT, format_call
from cortexmlx.protocols import responses
from cortexmlx.protocols.openai import chat_completions
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.sessions.tool_rounds import MAX_ROUNDS
from cortexmlx.structured.functions import MAX_RESULT
from cortexmlx.structured.tools import MAX_CHARACTERS, MAX_TOOLS, ToolCall
from cortexmlx.types.sampling_params import SamplingParams
from support.pages import blocks, read

PAGE = "docs/tools.md"


def test_the_lines_of_the_page_are_requests_with_tools() -> None:
    (block,) = (block for block in blocks("jsonl") if block.page == PAGE)
    lines = [json.loads(line) for line in block.text.splitlines()]
    readers = {"/v1/chat/completions": chat_completions.read, "/v1/responses": responses.read}
    asked = [readers[line["url"]](line["body"], RequestDefaults(SamplingParams())).params for line in lines]
    names = [[tool.name for tool in each.offered] for each in asked]
    assert names == [["weather"], ["weather"], ["Person"]]
    assert [tool.strict for each in asked for tool in each.offered] == [True, True, False]
    assert [each.tool_choice for each in asked] == ["required", "auto", "Person"]
    assert [each.parallel_tool_calls for each in asked] == [True, False, True]


def test_the_chat_of_the_page_is_what_is_shown() -> None:
    (block,) = (block for block in blocks("text") if block.page == PAGE)
    call = ToolCall("1", "add_note", '{"name": "tomatoes", "text": "The tomatoes need water."}')
    assert f"  {format_call(call)}\n{CONSENT}y\n  = tomatoes is written\n" in block.text


def test_the_page_has_the_limits_and_counts_the_formats() -> None:
    text = read(PAGE)
    assert f"{MAX_TOOLS} tools" in text and f"{MAX_CHARACTERS:,}" in text and f"{MAX_RESULT:,} characters" in text
    assert f"{MAX_ROUNDS} by default" in text
    assert (
        len(
            re.findall(
                r"^\| .*\| (?:Qwen|Llama|Mistral|gpt|DeepSeek|GLM|Kimi|MiniMax|Gemma|LFM2|MiniCPM)", text, re.MULTILINE
            )
        )
        == 12
    )
