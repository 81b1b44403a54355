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

    def has(*texts: str) -> bool:
        return all(text in template for text in texts)

    if HARMONY_CALL in vocabulary and HARMONY_CHANNEL in vocabulary:
        return Harmony()
    if has(DEEPSEEK):
        return deepseek_format(fenced=has("```json"))
    if has(MISTRAL_CALLS):
        return MistralTags(with_id=has(MISTRAL_CALL_ID)) if has(MISTRAL_ARGUMENTS) else MistralList()
    if has(literals.GEMMA, literals.GEMMA_END):
        return Braces("Gemma 4", literals.GEMMA, literals.GEMMA_END, '<|"|>')
    if has(literals.FUNCTION_GEMMA):
        return Braces("FunctionGemma", literals.FUNCTION_GEMMA, "<end_function_call>", "<escape>")
    if has(KIMI):
        return Kimi()
    if tags := next((tags for tags, texts in _TAGGED if has(*texts)), None):
        return Tagged(tags)
    if has(literals.PYTHONIC) or has("<|tool_list_start|>"):
        return Pythonic()
    if has(f"{OPEN}\\n<function=") or has(f"{OPEN}\n<function="):
        return Tagged(QWEN_CODER)
    if has(OPEN, '"name') and not has("<tool_calls>"):
        return Hermes()
    if has('"name":', '"parameters":') and (LLAMA_PYTHON in vocabulary or has("<|eot_id|>")):
        return Llama()
    return Pythonic() if literals.PYTHONIC in vocabulary and literals.PYTHONIC_END in vocabulary else None
