"""The format of a model's calls is found by its chat template, and reads what that template writes."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.models.tokenizers.templates import find_call_format, render_template
from cortexmlx.structured.calls.find import find_format
from cortexmlx.structured.calls.format import AllowedCalls
from cortexmlx.structured.output import Thoughts
from support.models import tool_templates as templates
from support.tool_calls import GOOD, SEVERAL, TOOLS, Case, read, said

NONE: frozenset[str] = frozenset()
GPT_OSS = frozenset({"<|channel|>", "<|call|>", "<|constrain|>"})

FAMILIES: tuple[tuple[str, str, frozenset[str]], ...] = (
    ("Hermes", templates.HERMES, NONE),
    ("Qwen3-Coder", templates.QWEN_CODER, NONE),
    ("Llama 3", templates.LLAMA, NONE),
    ("Mistral list", templates.MISTRAL_LIST, NONE),
    ("Mistral", templates.MISTRAL_TAGS, NONE),
    ("Mistral", templates.MISTRAL_IDS, NONE),
    ("harmony", templates.HARMONY, GPT_OSS),
    ("DeepSeek", templates.DEEPSEEK_V3, NONE),
    ("DeepSeek", templates.DEEPSEEK_V31, NONE),
    ("GLM", templates.GLM, NONE),
    ("MiniMax M2", templates.MINIMAX, NONE),
    ("Kimi K2", templates.KIMI, NONE),
    ("LFM2", templates.LFM, NONE),
)


def history(case: Case) -> list[dict[str, Any]]:
    calls = [
        {"id": f"abcdefg{number:02}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(case.calls)
    ]
    return [{"role": "user", "content": "Go"}, {"role": "assistant", "content": said(case), "tool_calls": calls}]


def written(template: str, case: Case) -> str:
    """What a template writes for an assistant's message with calls, up to the end of its turn."""
    options = {"add_generation_prompt": False}
    tools = [tool.as_mapping() for tool in TOOLS]
    whole, before = (
        render_template(template, messages, tools, options) for messages in (history(case), history(case)[:1])
    )
    before, whole = before.rstrip("\n"), whole.rstrip("\n")
    for end in ("<|im_start|>assistant", "<|start_header_id|>assistant<|end_header_id|>", "<｜Assistant｜>"):
        before, whole = before.removesuffix(end), whole.removesuffix(end)
    before, whole = before.removesuffix("<|assistant|>"), whole.removesuffix("<|assistant|>")
    before, whole = before.removesuffix("<|start|>assistant"), whole.removesuffix("<|start|>assistant")
    assert whole.startswith(before)
    answer = whole[len(before) :]
    heads = ("<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<｜assistant｜>")
    for head in (*heads, "<|assistant|>", "<|start|>assistant"):
        answer = answer.removeprefix(head)
    for tail in ("\n", "<|im_end|>", "<|eot_id|>", "</s>", "<|call|>"):
        answer = answer.removesuffix(tail)
    return answer


@pytest.mark.parametrize(("name", "template", "vocabulary"), FAMILIES)
def test_each_family_is_recognised_and_reads_what_its_template_writes(
    name: str, template: str, vocabulary: frozenset[str]
) -> None:
    found = find_format(template, vocabulary)
    assert found is not None and found.name == name
    cases = [*GOOD, *(SEVERAL if found.parallel and name != "Llama 3" else ())]
    if name in ("harmony", "Llama 3"):
        cases = [case for case in cases if not case.text]
    if name == "MiniMax M2":
        cases = [case for case in cases if "</parameter>" not in str(case)]
    assert len(cases) >= 28
    for case in cases:
        result = read(found, [written(template, case)])
        assert result.calls == case.calls, written(template, case)
        assert result.text == said(case)


@pytest.mark.parametrize(
    ("name", "marks"),
    [
        ("MiniMax M2", "<minimax:tool_call>"),
        ("Muse Spark", "<atem:function_calls>"),
        ("LongCat", "<longcat_tool_call> <longcat_arg_key>"),
        ("GLM", "<tool_call> <arg_key>"),
        ("MiniCPM 5", '<function name="f"><param name="p">'),
        ("Gemma 4", "<|tool_call>call: <tool_call|>"),
        ("FunctionGemma", "<start_function_call>call:"),
        ("LFM2", "<|tool_list_start|>"),
    ],
)
def test_a_format_is_recognised_by_its_marks(name: str, marks: str) -> None:
    found = find_format(marks, NONE)
    assert found is not None and found.name == name
    for options, held in (({}, False), ({"choice": "required"}, True), ({"parallel": False}, True)):
        assert AllowedCalls(found, TOOLS, **options).is_enforced is held  # type: ignore[arg-type]
    lfm = find_format("", {"<|tool_call_start|>": 7, "<|tool_call_end|>": 8})
    assert lfm is not None and lfm.name == "LFM2"


class Tokenizer:
    """A tokenizer with a template."""

    _chat_template = None

    def __init__(self, template: Any, *tokens: str) -> None:
        self.chat_template = template
        self._tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self._tokens)}


def test_a_template_that_reads_no_tools_has_no_format() -> None:
    assert find_call_format(Tokenizer(templates.TOOLLESS)) is None
    assert find_call_format(Tokenizer(None)) is None
    assert find_call_format(Tokenizer("{% if %}")) is None
    assert find_call_format(Tokenizer(templates.UNKNOWN)) is None
    assert find_format("{% set open = tag ~ '<tool_call>' %}{{ open }}<invoke name=\"f\">", NONE) is None, "MiniMax M3"
    assert find_format('within <tool_call></tool_call>: <tool_calls>[{"name": <name>}]', NONE) is None, "Apriel 1.5"


def test_a_template_for_tools_goes_before_the_default() -> None:
    found = find_call_format(Tokenizer({"default": templates.TOOLLESS, "tool_use": templates.HERMES}))
    assert found is not None and found.name == "Hermes"


def test_a_vocabulary_alone_tells_gpt_oss() -> None:
    found = find_call_format(Tokenizer(templates.UNKNOWN, "<|channel|>", "<|call|>"))
    assert found is not None and found.name == "harmony"
    thoughts = found.adapt_thoughts(Thoughts("<|channel|>analysis<|message|>", "long", skip_text="other"))
    assert thoughts is not None and (thoughts.close, thoughts.skip_text) == ("<|end|><|start|>assistant", "")
