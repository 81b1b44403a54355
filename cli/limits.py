"""Limits on the length of a text: which one ended an answer, and how a chat stays within it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cortexmlx.errors import PromptTooLong
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.structured.output import Form, StructuredOutput
from cortexmlx.types.request import Completion, FinishReason
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.engine import Engine
    from cortexmlx.sessions.conversation import Conversation, Question


def is_limited_by_memory(engine: Engine) -> bool:
    """Return whether the KV memory, not the model's context, limits the length of a text."""
    return engine.longest_request < engine.info.context_length


def describe_limit(engine: Engine) -> str:
    """Return in words what limits the length of a text: `the context of 8,192 tokens`."""
    if is_limited_by_memory(engine):
        return f"the KV memory of {format_bytes(engine.stats().kv_bytes_limit)} ({engine.longest_request:,} tokens)"
    return f"the context of {engine.longest_request:,} tokens"


def cut_reason(completion: Completion, params: SamplingParams, engine: Engine) -> str:
    """Return why an answer was cut short; empty if the model ended it."""
    if completion.finish_reason is FinishReason.CANCELLED:
        return "stopped"
    if completion.finish_reason is not FinishReason.LENGTH:
        return ""
    if params.max_tokens is not None and completion.usage.completion_tokens >= params.max_tokens:
        return f"stopped at the token limit of {params.max_tokens:,}"
    return f"stopped: {describe_limit(engine)} is full"


FORM_CUT = "before the form is whole"
"""What each note says of an answer that ends within its form: batch finds these answers by it."""


def incomplete_form_note(completion: Completion, params: SamplingParams, end_reason: str = "") -> str:
    """Return a note on answers with incomplete structured output; empty if none. `end_reason`: why the first ended."""
    form, answers = params.form, (completion, *completion.others)
    incomplete_answers = [answer for answer in answers if form is not None and not _is_complete(answer, form)]
    if not incomplete_answers:
        return ""
    subject = "the answer ends" if len(answers) == 1 else f"{len(incomplete_answers)} of {len(answers)} answers end"
    reason = end_reason or (
        "a stop text ended it" if incomplete_answers[0].finish_reason is FinishReason.STOP else "max_tokens ended it"
    )
    return f"{subject} {FORM_CUT}: {reason}"


def _is_complete(answer: Completion, form: StructuredOutput) -> bool:
    """Return whether an answer's structured output is complete: it is if a grammar ended it, or if it is whole JSON or
    one of the choices. An answer that was cancelled or calls a function counts as complete.
    """
    if answer.finish_reason is FinishReason.STOP and answer.stop_string is None:
        return True
    if answer.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        return True  # cancelled, or it calls a function: told elsewhere
    if form.form not in (Form.JSON, Form.CHOICE):
        return False
    try:
        value = json.loads(form.definition if form.form is Form.CHOICE else answer.text)
    except (ValueError, RecursionError):
        return False
    return form.form is Form.JSON or answer.text in value


ANSWER_SHARE = 8
"""Drop turns if less than an eighth of the limit is left for the answer, unless `max_tokens` is even less."""

FREE_SHARE = 3
"""Then free a third of the limit. The rest of the chat is computed again, so this must not happen at each turn."""


def drop_oldest_turns(conversation: Conversation, question: Question, engine: Engine) -> str:
    """Drop the oldest turns until `question` and its answer fit. Return a note for the user, empty if none dropped."""
    token_limit, previous_unsent = engine.longest_request, conversation.unsent
    answer_tokens = min(conversation.params.max_tokens or token_limit, token_limit // ANSWER_SHARE)
    tokens = conversation.count(question)
    if tokens + answer_tokens <= token_limit:
        return ""
    try:
        dropped_count = conversation.make_room(token_limit // FREE_SHARE, question)
    except PromptTooLong:  # which the turn raises, too
        return ""
    if conversation.unsent == len(conversation.messages):  # a question so long that no third becomes free
        conversation.unsent = previous_unsent
        dropped_count = conversation.make_room(answer_tokens, question)
    if not dropped_count:
        return ""
    return (
        f"{describe_limit(engine)} is full: with this question the chat has {tokens:,} tokens. The {dropped_count} "
        f"oldest messages ({tokens - conversation.count(question):,} tokens) are not sent any more. "
        f"{room_advice(engine)}"
    )


def room_advice(engine: Engine, tokens: int = 0) -> str:
    """Return which option makes room for longer texts, or for a text of so many `tokens`."""
    if is_limited_by_memory(engine) and tokens < engine.info.context_length:
        return f"/set kv_memory SIZE gives it more ({format_bytes(engine.stats().kv_bytes_limit)} now)."
    without_images = ", but shows no images" * engine.sees_images
    return f"/set keep_last {engine.info.context_length // 4} lets a text outgrow the context{without_images}."
