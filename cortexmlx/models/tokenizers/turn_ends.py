"""The tokens that end a turn. A model's settings often name only the end of a text, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.models.tokenizers.templates import render_template

END_NAMES = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|return|>",
        "<|call|>",
    )
)
"""Tokens that end a turn or a text in some model family."""

MESSAGE_END, ANSWER_END = "<|end|>", "<|return|>"
"""If an answer has several messages, <|return|> ends the last one and <|end|> the others."""

_ANSWER = "An answer."


def find_named_ends(tokens: Mapping[str, int]) -> set[int]:
    """Return the ids of the tokens with names such as <|im_end|>, which end an answer. `tokens` are ids by text."""
    return {index for token, index in tokens.items() if token in END_NAMES} - _find_message_end(tokens)


def _find_message_end(tokens: Mapping[str, int]) -> set[int]:
    """Return the id of the token that ends a message within an answer, as a set; empty if there is none."""
    return {tokens[MESSAGE_END]} if MESSAGE_END in tokens and ANSWER_END in tokens else set()


def find_template_ends(tokenizer: Any, tokens: Mapping[str, int]) -> set[int]:
    """Return the ids of the tokens with which the chat template ends an answer. `tokens` are ids by text.

    These are the tokens of `END_NAMES` that it names, and the last token that it writes after an answer if it writes
    nothing but tokens and white space there. `tokenizer` is mlx-lm's or ours.
    """
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    if not isinstance(template, str):
        return set()
    end_ids = find_named_ends({token: index for token, index in tokens.items() if token in template})
    names = ("bos_token", "eos_token", "unk_token")
    special_tokens = {name: token for name in names if (token := getattr(tokenizer, name)) is not None}
    messages = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = render_template(template, messages, None, {**special_tokens, "add_generation_prompt": False})
    except InvalidRequest:  # the template is broken, or wants something else: each request says so
        return end_ids
    _, answer, after_answer = text.rpartition(_ANSWER)
    last_token = max(
        (token for token in tokens if token and after_answer.rstrip().endswith(token)), key=len, default=""
    )
    for token in sorted(tokens, key=len, reverse=True) if answer and last_token else ():
        after_answer = after_answer.replace(token, "")
    if answer and last_token and not after_answer.strip():
        end_ids.add(tokens[last_token])
    return end_ids - _find_message_end(tokens)
