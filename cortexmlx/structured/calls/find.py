"""Find the format in which a model writes calls, by its chat template and its vocabulary."""

from __future__ import annotations

from collections.abc import Container

from cortexmlx.structured.calls import literals
from cortexmlx.structured.calls.format import CallFormat
from cortexmlx.structured.calls.json_formats import (
    DEEPSEEK,
    HARMONY_CALL,
    HARMONY_CHANNEL,
    KIMI,
    LLAMA_PYTHON,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALL_ID,
    MISTRAL_CALLS,
    OPEN,
    Harmony,
    Hermes,
    Kimi,
    Llama,
    MistralList,
    MistralTags,
    deepseek_format,
)
from cortexmlx.structured.calls.literals import Braces, Pythonic
from cortexmlx.structured.calls.tagged import GLM, LONGCAT, MINICPM, MINIMAX, MUSE, QWEN_CODER, Tagged

_TAGGED = (
    (MINIMAX, (MINIMAX.section,)),
    (MUSE, (MUSE.section,)),
    (LONGCAT, (LONGCAT.call,)),
    (GLM, (GLM.key,)),
    (MINICPM, (MINICPM.call, MINICPM.key)),
)
"""Formats with the texts of a chat template that each is recognised by."""


def find_format(template: str, vocabulary: Container[str]) -> CallFormat | None:
    """Find the tool call format of a model by its chat template and special tokens; None if it is unknown."""

    def template_has(*texts: str) -> bool:
        return all(text in template for text in texts)

    if HARMONY_CALL in vocabulary and HARMONY_CHANNEL in vocabulary:
        return Harmony()
    if template_has(DEEPSEEK):
        return deepseek_format(fenced=template_has("```json"))
    if template_has(MISTRAL_CALLS):
        return MistralTags(with_id=template_has(MISTRAL_CALL_ID)) if template_has(MISTRAL_ARGUMENTS) else MistralList()
    if template_has(literals.GEMMA, literals.GEMMA_END):
        return Braces("Gemma 4", literals.GEMMA, literals.GEMMA_END, '<|"|>')
    if template_has(literals.FUNCTION_GEMMA):
        return Braces("FunctionGemma", literals.FUNCTION_GEMMA, "<end_function_call>", "<escape>")
    if template_has(KIMI):
        return Kimi()
    if tags := next((tags for tags, texts in _TAGGED if template_has(*texts)), None):
        return Tagged(tags)
    if template_has(literals.PYTHONIC) or template_has("<|tool_list_start|>"):
        return Pythonic()
    if template_has(f"{OPEN}\\n<function=") or template_has(f"{OPEN}\n<function="):
        return Tagged(QWEN_CODER)
    if template_has(OPEN, '"name') and not template_has("<tool_calls>"):
        return Hermes()
    if template_has('"name":', '"parameters":') and (LLAMA_PYTHON in vocabulary or template_has("<|eot_id|>")):
        return Llama()
    return Pythonic() if literals.PYTHONIC in vocabulary and literals.PYTHONIC_END in vocabulary else None
