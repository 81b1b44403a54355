"""Limits on the length of a text: which one ended an answer, and how a chat stays within it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cortexmlx.kv.sizing import format_bytes
from cortexmlx.structured.output import Form, StructuredOutput
from cortexmlx.types.request import Completion, FinishReason
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.engine import Engine
    from cortexmlx.sessions.conversation import Conversation
    from cortexmlx.sessions.host import Question


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


def incomplete_form_note(completion: Completion, params: SamplingParams, ended: str = "") -> str:
    """Return a note on answers that end before their structured output is complete; empty if there is none. `ended` is
    why the first one ended.
    """
    form, answers = params.form, (completion, *completion.others)
    cut = [answer for answer in answers if form is not None and not _is_complete(answer, form)]
    if not cut:
        return ""
    which = "the answer ends" if len(answers) == 1 else f"{len(cut)} of {len(answers)} answers end"
    why = ended or ("a stop text ended it" if cut[0].finish_reason is FinishReason.STOP else "max_tokens ended it")
    return f"{which} before the form is whole: {why}"


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


def drop_oldest_turns(talk: Conversation, question: Question, engine: Engine) -> str:
    """Drop the oldest turns until `question` and its answer fit. Return a message for the user, empty if nothing was
    dropped.
    """
    longest, before = engine.longest_request, talk.unread
    answer = min(talk.params.max_tokens or longest, longest // ANSWER_SHARE)
    tokens = talk.count(question)
    if tokens + answer <= longest:
        return ""
    dropped = talk.make_room(longest // FREE_SHARE, question)
    if talk.unread == len(talk.messages):  # a question so long that no third becomes free
        talk.unread = before
        dropped = talk.make_room(answer, question)
    if not dropped:
        return ""
    return (
        f"{describe_limit(engine)} is full: with this question the chat has {tokens:,} tokens. The {dropped} oldest "
        "messages "
        f"({tokens - talk.count(question):,} tokens) are not sent any more. {room_advice(engine)}"
    )


def room_advice(engine: Engine) -> str:
    """Return which option makes room for longer texts."""
    if is_limited_by_memory(engine):
        return f"/set kv_memory SIZE gives it more ({format_bytes(engine.stats().kv_bytes_limit)} now)."
    return f"/set keep_last {engine.info.context_length // 4} lets a text outgrow the context."
