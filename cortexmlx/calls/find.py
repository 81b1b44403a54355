"""Find the format in which a model writes calls, by its chat template and its vocabulary."""

from __future__ import annotations

from collections.abc import Container

from cortexmlx.calls import deepseek, harmony, llama, mistral
from cortexmlx.calls.deepseek import DeepSeek
from cortexmlx.calls.foreign import Foreign
from cortexmlx.calls.format import CallFormat
from cortexmlx.calls.harmony import Harmony
from cortexmlx.calls.hermes import OPEN, Hermes
from cortexmlx.calls.llama import Llama
from cortexmlx.calls.mistral import MistralList, MistralTags
from cortexmlx.calls.qwen_coder import QwenCoder

_FOREIGN = (
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("glm47", ("<arg_key>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minicpm5", ('<function name="', '<param name="')),
    ("muse_spark", ("<atem:function_calls>",)),
)
"""The modules of mlx-lm's parsers that are used, each with the texts of a chat template that it is recognised by."""


def format_of(template: str, vocabulary: Container[str]) -> CallFormat | None:
    """Return the format of a model's calls, or None if it is not known."""

    def has(*texts: str) -> bool:
        return all(text in template for text in texts)

    if harmony.CALL in vocabulary and harmony.CHANNEL in vocabulary:
        return Harmony()
    if has(deepseek.CALLS_BEGIN):
        return DeepSeek(fenced=has("```json"))
    if has(mistral.TRIGGER):
        return MistralTags(with_id=has(mistral.CALL_ID)) if has(mistral.ARGUMENTS) else MistralList()
    if foreign := next((module for module, texts in _FOREIGN if has(*texts)), None):
        return Foreign(foreign)
    if has(f"{OPEN}\\n<function=") or has(f"{OPEN}\n<function="):
        return QwenCoder()
    if has(OPEN):
        return Hermes()
    if has('"name":', '"parameters":') and (llama.PYTHON in vocabulary or has("<|eot_id|>")):
        return Llama()
    return None
