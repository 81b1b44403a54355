"""Repair a conversation that a chat template refuses, or of which it would lose a part.

Conversations come from clients that know nothing of the template, and may have been held with other models. Their users
cannot change them, so a refusal would end them. Each repair here is a way to say the same. It is made where a template
needs it, and nowhere else. What a template wrote of earlier messages never changes, so the prefix cache hits.
"""

from __future__ import annotations

import json
import re
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import islice, takewhile
from operator import is_
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.structured.calls.literals import PYTHONIC, PYTHONIC_END, write_pythonic
from cortexmlx.types.messages import wrap_in_tag

TemplateMessage = dict[str, Any]
"""A message, as templates read it."""
TemplateMessages = Sequence[TemplateMessage]
RenderMessages = Callable[[TemplateMessages], str | list[int]]


@dataclass(frozen=True, eq=False)
class TemplateRepair:
    """A rewrite that keeps a conversation's meaning. `apply` returns the same object if nothing needs repair."""

    apply: Callable[[TemplateMessages], TemplateMessages]
    probe: tuple[TemplateMessage, ...]
    """A conversation that some templates want repaired."""
    words: tuple[str, ...]
    """What a template should write of the probe, in order."""


class ConversationFitter:
    """Repairs conversations for one chat template, and remembers which repairs the template needs."""

    def __init__(self, render: RenderMessages) -> None:
        self._render = render
        self._repair_needed: dict[TemplateRepair, bool] = {}
        self._form: Callable[[TemplateMessages], TemplateMessages] = lambda messages: messages
        parts = TemplateRepair(_write_text_parts, (_ASK,), ("the question",))
        if self._score_rendering(parts, _write_text_parts(parts.probe)) > self._score_rendering(parts, parts.probe):
            self._form = _write_text_parts  # as LLaVA's templates read texts; they would write nothing of others

    def render(self, messages: TemplateMessages, render: RenderMessages) -> str | list[int]:
        """Render the messages, repaired as needed. Raises what `render` raises for the originals if no repair helps,
        and InvalidRequest if the template leaves out the messages of a role.
        """
        for role in islice({each["role"] for each in messages}.difference(_ROLES), _MAX_PROBED):
            probe = TemplateRepair(
                list, (_ASK, {"role": role, "content": "some words"}), ("the question", "some words")
            )
            if self._score_rendering(probe, probe.probe) == 1:
                raise InvalidRequest(
                    f"the chat template leaves out messages of the role {role!r:.80}, so it would not read them. "
                    f"Send them as {', '.join(_ROLES)}",
                    field="messages",
                )
        messages = self._apply_needed(messages, REPAIRS)
        try:
            return render(self._form(messages))
        except Exception:  # a template is other people's code
            repaired_messages = _repair_minimally(messages, lambda said: render(self._form(said)))
            if repaired_messages is None:
                raise
        return render(self._form(repaired_messages))

    def _apply_needed(self, messages: TemplateMessages, repairs: Sequence[TemplateRepair]) -> TemplateMessages:
        """Apply to the messages those of the `repairs` that the template needs. Return the new messages."""
        for repair in repairs:
            if self._repair_needed.get(repair, True):
                repaired = repair.apply(messages)
                messages = repaired if repaired is not messages and self._needs_repair(repair) else messages
        return messages

    def _needs_repair(self, repair: TemplateRepair) -> bool:
        """Return whether the template needs `repair`: whether it renders the repair's probe better after the repair.
        Else it may refuse the probe, leave a part out, or write a part before earlier ones.
        """
        if repair not in self._repair_needed:
            probe = self._apply_needed(repair.probe, REPAIRS[: REPAIRS.index(repair)])
            self._repair_needed[repair] = self._score_rendering(repair, repair.apply(probe)) > self._score_rendering(
                repair, probe
            )
        return self._repair_needed[repair]

    def _score_rendering(self, repair: TemplateRepair, messages: TemplateMessages) -> int:
        """Return how many of a repair's words the template writes, in order, or -1 if it refuses the messages."""
        try:
            text = self._render(self._form(messages))
        except Exception:
            return -1
        if not isinstance(text, str):
            return 0
        position = count = 0
        for word in repair.words:
            index = text.find(word, position)
            position, count = (position, count) if index < 0 else (index + len(word), count + 1)
        return count


def _repair_minimally(messages: TemplateMessages, render: RenderMessages) -> TemplateMessages | None:
    """Return messages that the template accepts, with as few repairs as possible, and as late in the conversation as
    possible; None if no repair helps.

    The template has accepted earlier turns, and what it wrote of them is in the prefix cache. So the longest beginning
    that it accepts stays as it is.
    """

    def accepts(candidate: TemplateMessages) -> bool:
        try:
            render(candidate)
        except Exception:
            return False
        return True

    turns = [0, *(index for index, each in enumerate(messages) if index and each["role"] == "assistant")]
    last = bisect(turns, False, lo=1, key=lambda turn: not accepts(messages[:turn])) - 1
    for start in dict.fromkeys((turns[last], 0)):

        def apply_all(repairs: Sequence[TemplateRepair], start: int = start) -> TemplateMessages:
            rest = messages[start:]
            for repair in repairs:
                rest = repair.apply(rest)
            return [*messages[:start], *rest]

        needed_repairs = [repair for repair in REPAIRS if repair.apply not in _LAST_RESORTS]
        needed_repairs = needed_repairs if accepts(apply_all(needed_repairs)) else list(REPAIRS)
        if accepts(apply_all(needed_repairs)):
            for repair in REPAIRS[::-1]:
                fewer_repairs = [each for each in needed_repairs if each is not repair]
                is_unchanged = apply_all(fewer_repairs) == apply_all(needed_repairs)
                needed_repairs = fewer_repairs if is_unchanged or accepts(apply_all(fewer_repairs)) else needed_repairs
            return apply_all(needed_repairs)
    return None


# -- system messages, and who speaks when -----------------------------------------------------------------------------


def join_texts(*texts: str, separator: str = "\n\n") -> str:
    """Join the non-empty texts."""
    return separator.join(text for text in texts if text)


def _message_text(message: TemplateMessage) -> str:
    """Return the content of a message as text. Some tools' results are objects."""
    content = message.get("content", "")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _append_text(message: TemplateMessage, text: str) -> TemplateMessage:
    """Return the message with `text` added to its content."""
    return {**message, "content": join_texts(_message_text(message), text, separator="\n")}


def _has_role(message: TemplateMessage, *roles: str) -> bool:
    return message["role"] in roles


def _join_leading_systems(messages: TemplateMessages) -> TemplateMessages:
    """Join the system messages at the beginning into one."""
    count = next((index for index, each in enumerate(messages) if not _has_role(each, "system")), len(messages))
    if count < 2:
        return messages
    return [{**messages[0], "content": join_texts(*map(_message_text, messages[:count]))}, *messages[count:]]


def _move_later_systems(messages: TemplateMessages, in_loop: bool) -> TemplateMessages:
    """Move each system message that is not the first message into the message before it, if that is a user's or a
    tool's, and otherwise into the next user message. With `in_loop`, move only those within tool loops, else only the
    others. Within a loop, their text goes into a tool's result: a user message would end the loop, and many templates
    leave out the thoughts of loops that have ended.
    """
    new_messages: list[TemplateMessage] = []
    pending_texts: list[str] = []
    has_begun = inside_loop = changed = False
    for message in messages:
        if _has_role(message, "system") and has_begun and inside_loop == in_loop:
            changed = True
            system_text = wrap_in_tag("system", _message_text(message))
            if _has_role(new_messages[-1], "user", "tool") and not pending_texts:
                new_messages[-1] = _append_text(new_messages[-1], system_text)
            else:
                pending_texts.append(system_text)
            continue
        if not _has_role(message, "system"):
            has_begun, inside_loop = True, _has_role(message, "tool") or bool(message.get("tool_calls"))
        if pending_texts:
            system_text = join_texts(*pending_texts, separator="\n")
            pending_texts = []
            if _has_role(message, "user"):
                message = {**message, "content": join_texts(system_text, _message_text(message), separator="\n")}
            elif _has_role(message, "tool"):
                message = _append_text(message, system_text)
            else:
                new_messages.append(_message("user", system_text))
        new_messages.append(message)
    new_messages += [_message("user", "\n".join(pending_texts))] if pending_texts else []
    return new_messages if changed else messages


def _join_neighbours(messages: TemplateMessages, with_calls: bool) -> TemplateMessages:
    """Join neighbouring messages of the user, or of the assistant; answers with calls only if `with_calls`. Those are
    joined last of all: some templates leave out what is said beside calls.
    """
    new_messages: list[TemplateMessage] = []
    for message in messages:
        same_role = (
            bool(new_messages)
            and new_messages[-1]["role"] == message["role"]
            and _has_role(message, "user", "assistant")
        )
        if not same_role or (not with_calls and (_tool_calls(message) or _tool_calls(new_messages[-1]))):
            new_messages.append(message)
            continue
        last = new_messages[-1] = {
            **new_messages[-1],
            "content": join_texts(_message_text(new_messages[-1]), _message_text(message)),
        }
        if thoughts := join_texts(last.get("reasoning_content") or "", message.get("reasoning_content") or ""):
            last["reasoning_content"] = thoughts
        if calls := [*_tool_calls(last), *_tool_calls(message)]:
            last["tool_calls"] = calls
    return new_messages if len(new_messages) < len(messages) else messages


def _move_user_into_result(messages: TemplateMessages) -> TemplateMessages:
    """Move a user's message that directly follows tool results into the last result: some templates refuse it there."""
    new_messages: list[TemplateMessage] = []
    for message in messages:
        if new_messages and _has_role(message, "user") and _has_role(new_messages[-1], "tool"):
            new_messages[-1] = _append_text(new_messages[-1], wrap_in_tag("user", _message_text(message)))
        else:
            new_messages.append(message)
    return new_messages if len(new_messages) < len(messages) else messages


def _move_system_to_user(messages: TemplateMessages) -> TemplateMessages:
    """Move the system prompt to the beginning of the user's first message."""
    if not messages or not _has_role(messages[0], "system"):
        return messages
    if len(messages) > 1 and _has_role(messages[1], "user"):
        return [
            {**messages[1], "content": join_texts(_message_text(messages[0]), _message_text(messages[1]))},
            *messages[2:],
        ]
    return [{"role": "user", "content": _message_text(messages[0])}, *messages[1:]]


# -- calls and their results ------------------------------------------------------------------------------------------


def _tool_calls(message: TemplateMessage) -> list[TemplateMessage]:
    """Return the tool calls of a message; empty if it has none."""
    calls = message.get("tool_calls")
    return list(calls) if isinstance(calls, list | tuple) and all(isinstance(call, dict) for call in calls) else []


def _replace_call_ids(messages: TemplateMessages, make_id: Callable[[TemplateMessage, int], str]) -> TemplateMessages:
    """Replace the ids of all calls and their results. `make_id` takes a call and the number of calls before it,
    and returns the new id.

    A result belongs to the last call with its id. One with an unknown id, or of several calls with one id, belongs to
    the first of the last calls that has no result yet.
    """
    new_messages: list[TemplateMessage] = []
    new_ids: dict[str, str] = {}
    pending_ids: list[tuple[str, str]] = []
    number = 0
    for message in messages:
        if calls := _tool_calls(message):
            pending_ids = []
            new_calls = []
            for call in calls:
                new_calls.append({**call, "id": make_id(call, number)})
                pending_ids.append((str(call.get("id") or ""), new_calls[-1]["id"]))
                number += 1
            new_ids |= dict(pending_ids)
            message = {**message, "tool_calls": new_calls}
        elif _has_role(message, "tool"):
            id = str(message.get("tool_call_id") or "")
            id_pair = next((pair for pair in pending_ids if pair[0] == id), None)
            if id_pair is None and id not in new_ids and pending_ids:
                id_pair = pending_ids[0]
            if id_pair is not None:
                pending_ids.remove(id_pair)
            new_id = id_pair[1] if id_pair is not None else new_ids.get(id)
            message = message if new_id is None else {**message, "tool_call_id": new_id}
        new_messages.append(message)
    return messages if new_messages == list(messages) else new_messages


_NAMED_ID = re.compile(r"functions\.([\w.-]+):\d+")


def find_named_ids(text: str) -> list[str]:
    """Return the call ids in a text that name a function and count calls, as Kimi K2 writes them."""
    return [match[0] for match in _NAMED_ID.finditer(text)]


def _put_names_into_ids(messages: TemplateMessages) -> TemplateMessages:
    """Write each call's id as `functions.NAME:INDEX`, unique; INDEX counts all calls. Ids of this form stay."""
    used_ids: set[str] = set()

    def make_id(call: TemplateMessage, number: int) -> str:
        function = call.get("function")
        prefix = f"functions.{function.get('name') if isinstance(function, dict) else ''}:"
        id = str(call.get("id") or "")
        if not (id.startswith(prefix) and id[len(prefix) :].isdecimal()) or id in used_ids:
            while (id := f"{prefix}{number}") in used_ids:
                number += 1
        used_ids.add(id)
        return id

    return _replace_call_ids(messages, make_id)


def _shorten_ids(messages: TemplateMessages) -> TemplateMessages:
    """Replace call ids by nine letters and digits, as Mistral's templates demand."""

    def make_id(call: TemplateMessage, number: int) -> str:
        id = str(call.get("id") or number)
        is_valid = len(id) == 9 and id.isascii() and id.isalnum()
        return id if is_valid else blake2b(id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]

    return _replace_call_ids(messages, make_id)


def _write_arguments_as_json(messages: TemplateMessages) -> TemplateMessages:
    """Write the arguments of calls as JSON texts, for templates that insert them unchanged."""

    def write_arguments(call: TemplateMessage) -> TemplateMessage:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    new_messages = [
        {**each, "tool_calls": [write_arguments(call) for call in calls]} if (calls := _tool_calls(each)) else each
        for each in messages
    ]
    return _reuse_if_unchanged(new_messages, messages)


def _sort_results(messages: TemplateMessages) -> TemplateMessages:
    """Sort tool results into their calls' order: most templates write no ids. Clients send results as the tools end."""
    new_messages = list(messages)
    for index, message in enumerate(messages):
        if len(calls := _tool_calls(message)) < 2:
            continue
        rank = {str(call.get("id") or ""): number for number, call in enumerate(calls)}
        results = list(takewhile(lambda each: _has_role(each, "tool"), islice(messages, index + 1, None)))
        ranks = [rank.get(str(each.get("tool_call_id") or ""), -1) for each in results]
        if len(rank) == len(calls) and -1 not in ranks:
            order = sorted(range(len(results)), key=ranks.__getitem__)
            new_messages[index + 1 : index + 1 + len(results)] = [results[each] for each in order]
    return _reuse_if_unchanged(new_messages, messages)


def _split_calls(messages: TemplateMessages) -> TemplateMessages:
    """Split an answer with several calls into answers with one call each, followed by that call's result."""
    new_messages: list[TemplateMessage] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = _tool_calls(message)
        if len(calls) < 2:
            new_messages.append(message)
            continue
        results = []
        while rest and _has_role(rest[0], "tool"):
            results.append(rest.pop(0))
        for index, call in enumerate(calls):
            call_message = {**message, "tool_calls": [call]}
            new_messages.append(
                call_message if not index else {"role": "assistant", "content": "", "tool_calls": [call]}
            )
            is_last = index == len(calls) - 1
            call_results = [each for each in results if is_last or each.get("tool_call_id") == call.get("id")]
            new_messages += call_results
            results = [each for each in results if not any(each is result for result in call_results)]
    return new_messages if len(new_messages) != len(messages) else messages


def _move_text_to_thoughts(messages: TemplateMessages) -> TemplateMessages:
    """Move texts beside calls into the thoughts: gpt-oss's template omits one, and Gemma 4's ends the turn."""

    def move_text(each: TemplateMessage) -> TemplateMessage:
        if not (_tool_calls(each) and (text := _message_text(each))):
            return each
        return {**each, "reasoning_content": join_texts(each.get("reasoning_content") or "", text), "content": ""}

    return _reuse_if_unchanged([move_text(each) for each in messages], messages)


def _write_results_as_user(messages: TemplateMessages) -> TemplateMessages:
    """Make the results of calls messages of the user, for templates that know no results."""
    new_messages = [
        _message("user", wrap_in_tag("tool_response", _message_text(each))) if _has_role(each, "tool") else each
        for each in messages
    ]
    return _reuse_if_unchanged(new_messages, messages)


def _write_calls_as_text(messages: TemplateMessages) -> TemplateMessages:
    """Write calls into the texts of their answers in LFM2's format, for its template, which leaves calls out."""

    def write_calls(each: TemplateMessage) -> TemplateMessage:
        if not (calls := _tool_calls(each)):
            return each
        texts = ", ".join(write_pythonic(call["function"]["name"], call["function"]["arguments"]) for call in calls)
        text = join_texts(_message_text(each), f"{PYTHONIC}[{texts}]{PYTHONIC_END}", separator="\n")
        return {**{name: value for name, value in each.items() if name != "tool_calls"}, "content": text}

    return _reuse_if_unchanged([write_calls(each) for each in messages], messages)


def _write_text_parts(messages: TemplateMessages) -> TemplateMessages:
    """Return the messages with each content as a list of one text part."""
    return [{**each, "content": [{"type": "text", "text": _message_text(each)}]} for each in messages]


def _reuse_if_unchanged(new_messages: TemplateMessages, messages: TemplateMessages) -> TemplateMessages:
    """Return `new_messages`, or `messages` itself if no message was replaced."""
    return messages if all(map(is_, new_messages, messages)) else new_messages


# -- all of them ------------------------------------------------------------------------------------------------------


def _message(role: str, text: str) -> TemplateMessage:
    return {"role": role, "content": text}


def _call_message(*names: str, **extra_fields: str) -> TemplateMessage:
    """Return an assistant's message that calls the functions `names`, for the probes."""
    calls = [
        {"id": _call_id(name), "type": "function", "function": {"name": name, "arguments": {"key": f"of {name}"}}}
        for name in names
    ]
    return {"role": "assistant", "content": "", **extra_fields, "tool_calls": calls}


def _result_message(name: str) -> TemplateMessage:
    """Return the tool's message with the result of the function `name`, for the probes."""
    return {"role": "tool", "tool_call_id": _call_id(name), "name": name, "content": f"result of {name}"}


def _call_id(name: str) -> str:
    """Return a call id that does not contain the function's name, as other servers make them."""
    return f"call_{name[0] * 24}"


_ROLES = ("system", "user", "assistant", "tool")
"""What every template should read. Some have more, such as `environment`."""
_MAX_PROBED = 32
_ASK = _message("user", "the question")
_ONCE = (_ASK, _call_message("lookup"), _result_message("lookup"))
_TWICE = (_ASK, _call_message("lookup", "search"), _result_message("lookup"), _result_message("search"))
_MIXED = (*_TWICE[:2], *_TWICE[:1:-1])
_THINKING = _call_message("lookup", reasoning_content="some thoughts")
_SPOKEN = (_ASK, {**_THINKING, "content": "some words"}, _result_message("lookup"))
_LOOP = (_ASK, _THINKING, _result_message("lookup"), _message("system", "a reminder"))
_ASKED = (_ASK, _message("user", "and this"))
_LATER = (_ASK, _message("assistant", "an answer"), _message("system", "more rules"), _message("user", "another"))

_LAST_RESORTS = (_write_arguments_as_json, _write_results_as_user, _write_calls_as_text)

REPAIRS = (
    TemplateRepair(_put_names_into_ids, _ONCE, ("the question", "lookup", "of lookup", "result")),
    TemplateRepair(_shorten_ids, _ONCE, ("the question", "of lookup", "result")),
    TemplateRepair(_write_arguments_as_json, _ONCE, ("the question", "of lookup", "result")),
    TemplateRepair(_sort_results, _MIXED, ("result of lookup", "result of search")),
    TemplateRepair(_split_calls, _TWICE, ("of lookup", "of search", "result of search")),
    TemplateRepair(_move_text_to_thoughts, _SPOKEN, ("some thoughts", "some words", "of lookup", "result")),
    TemplateRepair(_write_results_as_user, _ONCE, ("the question", "result")),
    TemplateRepair(_write_calls_as_text, _ONCE, ("the question", "of lookup", "result")),
    TemplateRepair(
        _join_leading_systems,
        (_message("system", "rules"), _message("system", "others"), _ASK),
        ("rules", "others", "the question"),
    ),
    TemplateRepair(
        partial(_move_later_systems, in_loop=True), _LOOP, ("some thoughts", "of lookup", "result", "a reminder")
    ),
    TemplateRepair(
        partial(_move_later_systems, in_loop=False), _LATER, ("the question", "an answer", "more rules", "another")
    ),
    TemplateRepair(partial(_join_neighbours, with_calls=False), _ASKED, ("the question", "and this")),
    TemplateRepair(partial(_join_neighbours, with_calls=True), _ASKED, ("the question", "and this")),
    TemplateRepair(
        _move_user_into_result,
        (*_ONCE, _message("user", "and this")),
        ("the question", "of lookup", "result", "and this"),
    ),
    TemplateRepair(_move_system_to_user, (_message("system", "rules"), _ASK), ("rules", "the question")),
)
"""All repairs, in the order in which they are made. The probe of each is first repaired by those before it."""
