"""Tiny models with random weights that call tools: a chat template and the tokens of a format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.models import tool_templates as templates
from support.models.thinking import write_thinking

TOKENS = {
    "hermes": (templates.HERMES, ("<tool_call>", "</tool_call>")),
    "qwen coder": (templates.QWEN_CODER, ("<tool_call>", "</tool_call>")),
    "llama": (templates.LLAMA, ("<|eot_id|>",)),
    "mistral": (templates.MISTRAL_TAGS, ("[TOOL_CALLS]", "[ARGS]")),
    "harmony": (
        templates.HARMONY,
        ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"),
    ),
    "deepseek": (
        templates.DEEPSEEK_V31,
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
    ),
    "plain tags": (templates.HERMES, ()),
    "kimi": (templates.KIMI, ()),
    "lfm": (templates.LFM, ("<|tool_call_start|>", "<|tool_call_end|>")),
    "gemma": (
        templates.HERMES + "{{ '<|tool_call><tool_call|>' if false }}",
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "toolless": (templates.TOOLLESS, ()),
}
"""Chat templates, each with the tokens that the vocabulary has for its tags."""


def write_calling(path: Path, kind: str, begin: str = "", **config: Any) -> Path:
    """A tiny model whose calls have this format. The prompt ends with `begin`."""
    template, tokens = TOKENS[kind]
    return write_thinking(path, template + begin, tokens, **{"max_position_embeddings": 4096, **config})
