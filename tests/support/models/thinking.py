"""Chat templates of models that think, in the few lines that matter, and tiny models that have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.models.tiny import EOS, write_tiny

_TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"

SWITCHED = (
    _TURNS + "{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Thinks by itself, unless it is told not to (Qwen3)."""

SET_FIRST = (
    "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    + _TURNS
    + "{% generation %}{{ 'on' if enable_thinking else 'off' }}{% endgeneration %}"
)
"""Has a default of its own (SmolLM3)."""

OTHER_NAME = _TURNS + "[assistant]{% if thinking %}<think>{% else %}</think>{% endif %}"
"""Its switch has another name (DeepSeek V3.1)."""

DEGREES = "effort: {{ reasoning_effort | default('medium') }}\n" + _TURNS + "[assistant]"
"""Has degrees instead of a switch (gpt-oss)."""


def write_thinking(path: Path, template: str, tokens: tuple[str, ...] = (), **config: Any) -> Path:
    """A tiny model of one layer with this chat template; `tokens` get the places of unused ones in its vocabulary."""
    write_tiny(path, "one layer", **config)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    unused = [name for name in vocabulary if name.startswith("<unused")]
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    for name, token in zip(unused, tokens, strict=False):
        number = vocabulary[token] = vocabulary.pop(name)
        tokenizer["added_tokens"].append({"id": number, "content": token, **kind})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def dictated(engine: Any, *texts: str, **params: Any) -> Any:
    """Sampling parameters with which a model writes a text and then ends its answer, whatever it would say. Of requests
    that share them, none may have a prompt as long as another's with a part of the answer. With several texts, each
    request gets the next one, and those after the last get the last.
    """
    import mlx.core as mx

    from cortexmlx import SamplingParams

    answers = [[*engine.encode(text), EOS] for text in texts]
    begun: dict[int, int] = {}
    said: dict[int, list[int]] = {}

    def dictate(tokens: mx.array, logits: mx.array) -> mx.array:
        size = tokens.size
        start = begun[size] = begun.get(size - 1, begun.get(size, size))
        ids = said.setdefault(start, answers[min(len(said), len(answers) - 1)])
        token = ids[min(size - start, len(ids) - 1)]
        return mx.where(mx.arange(logits.shape[-1]) == token, 0.0, -mx.inf)[None]

    return SamplingParams(**{"max_tokens": max(map(len, answers)), "logits_processors": [dictate], **params})
