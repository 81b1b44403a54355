"""Fit a conversation to a chat template that refuses it, or would lose a part of it.

Conversations come from clients that know nothing of the template, and may have been held with other models. Their users
cannot change them, so a refusal would end them. Each repair here is a way to say the same. It is made where a template
needs it, and nowhere else. What a template wrote of earlier messages never changes, so the prefix cache hits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import islice, takewhile
from typing import Any

from cortexmlx.types.messages import tagged

Said = dict[str, Any]
"""A message, as templates read it."""
Conversation = Sequence[Said]
Render = Callable[[Conversation], str | list[int]]


@dataclass(frozen=True, eq=False)
class Repair:
    """One way to say the same. `apply` returns the messages themselves where there is nothing to repair."""

    apply: Callable[[Conversation], Conversation]
    probe: tuple[Said, ...]
    """A conversation that some templates want repaired."""
    words: tuple[str, ...]
    """What a template should write of the probe, in order."""


class Fitting:
    """What the conversations of one template need. `render` renders messages in the plainest way."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._needed: dict[Repair, bool] = {}

    def rendered(self, messages: Conversation, render: Render) -> str | list[int]:
        """Return what `render` makes of the messages, with the repairs that they need. Raises what it raises for the
        messages as they are if no repair helps.
        """
        messages = self._fit(messages, REPAIRS)
        try:
            return render(messages)
        except Exception:  # a template is other people's code
            repaired = _least_repaired(messages, lambda said: _renders(render, said))
            if repaired is None:
                raise
        return render(repaired)

    def _fit(self, messages: Conversation, repairs: Sequence[Repair]) -> Conversation:
        for repair in repairs:
            if self._needed.get(repair, True):
                fit = repair.apply(messages)
                messages = fit if fit is not messages and self._needs(repair) else messages
        return messages

    def _needs(self, repair: Repair) -> bool:
        """Return whether the template writes more of the probe after the repair. It may refuse the probe as it is,
        leave a part out, or write a part before earlier ones.
        """
        if repair not in self._needed:
            probe = self._fit(repair.probe, REPAIRS[: REPAIRS.index(repair)])
            self._needed[repair] = self._written(repair, repair.apply(probe)) > self._written(repair, probe)
        return self._needed[repair]

    def _written(self, repair: Repair, messages: Conversation) -> int:
        """Return how many of a repair's words the template writes in order; -1 if it refuses the messages."""
        try:
            text = self._render(messages)
        except Exception:
            return -1
        if not isinstance(text, str):
            return 0
        place = count = 0
        for word in repair.words:
            found = text.find(word, place)
            place, count = (place, count) if found < 0 else (found + len(word), count + 1)
        return count


def _renders(render: Render, messages: Conversation) -> bool:
    try:
        render(messages)
    except Exception:
        return False
    return True


def _least_repaired(messages: Conversation, accepts: Callable[[Conversation], bool]) -> Conversation | None:
    """Return messages that a template accepts, repaired as little and as late as it takes; None if no repair helps.

    The template has accepted earlier turns, and what it wrote of them is in the prefix cache. So the longest beginning
    that it accepts stays as it is.
    """
    turns = [0, *(place for place, each in enumerate(messages) if place and each["role"] == "assistant")]
    low, high = 0, len(turns) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if accepts(messages[: turns[middle]]) else (low, middle - 1)
    for begin in dict.fromkeys((turns[low], 0)):

        def repaired(repairs: Sequence[Repair], begin: int = begin) -> Conversation:
            rest = messages[begin:]
            for repair in repairs:
                rest = repair.apply(rest)
            return [*messages[:begin], *rest]

        needed = [repair for repair in REPAIRS if repair is not _AS_TEXT]
        needed = needed if accepts(repaired(needed)) else list(REPAIRS)
        if accepts(repaired(needed)):
            for repair in REPAIRS[::-1]:
                fewer = [each for each in needed if each is not repair]
                same = repaired(fewer) == repaired(needed)
                needed = fewer if same or accepts(repaired(fewer)) else needed
            return repaired(needed)
    return None


# -- system messages, and who speaks when -----------------------------------------------------------------------------


def joined(*texts: str, between: str = "\n\n") -> str:
    """Return texts as one, without empty ones."""
    return between.join(text for text in texts if text)


def _text(message: Said) -> str:
    """Return what a message says. Some tools' results are objects."""
    content = message.get("content", "")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _with(message: Said, text: str) -> Said:
    return {**message, "content": joined(_text(message), text, between="\n")}


def _is(message: Said, *roles: str) -> bool:
    return message["role"] in roles


def _join_first_systems(messages: Conversation) -> Conversation:
    """Make one system message of those at the beginning."""
    count = next((place for place, each in enumerate(messages) if not _is(each, "system")), len(messages))
    if count < 2:
        return messages
    return [{**messages[0], "content": joined(*map(_text, messages[:count]))}, *messages[count:]]


def _move_systems(messages: Conversation, in_loop: bool) -> Conversation:
    """Make later system messages a part of the message before them, or else of the user's after them. Within a loop,
    between calls and the next answer, they are reminders. These become a part of a result: a user's message would end
    the loop, and many templates leave out the thoughts of loops that have ended.
    """
    moved: list[Said] = []
    waiting: list[str] = []
    begun = looping = changed = False
    for message in messages:
        if _is(message, "system") and begun and looping == in_loop:
            changed = True
            said = tagged("system", _text(message))
            if _is(moved[-1], "user", "tool") and not waiting:
                moved[-1] = _with(moved[-1], said)
            else:
                waiting.append(said)
            continue
        if not _is(message, "system"):
            begun, looping = True, _is(message, "tool") or bool(message.get("tool_calls"))
        if waiting:
            said = joined(*waiting, between="\n")
            waiting = []
            if _is(message, "user"):
                message = {**message, "content": joined(said, _text(message), between="\n")}
            elif _is(message, "tool"):
                message = _with(message, said)
            else:
                moved.append(_user(said))
        moved.append(message)
    moved += [_user("\n".join(waiting))] if waiting else []
    return moved if changed else messages


def _join_neighbours(messages: Conversation, with_calls: bool) -> Conversation:
    """Make one message of neighbours that users, or assistants, wrote. An answer with calls is joined last of all: some
    templates leave out what is said beside calls.
    """
    one: list[Said] = []
    for message in messages:
        same = bool(one) and one[-1]["role"] == message["role"] and _is(message, "user", "assistant")
        if not same or (not with_calls and (_calls(message) or _calls(one[-1]))):
            one.append(message)
            continue
        last = one[-1] = {**one[-1], "content": joined(_text(one[-1]), _text(message))}
        if thoughts := joined(last.get("reasoning_content") or "", message.get("reasoning_content") or ""):
            last["reasoning_content"] = thoughts
        if calls := [*_calls(last), *_calls(message)]:
            last["tool_calls"] = calls
    return one if len(one) < len(messages) else messages


def _move_users(messages: Conversation) -> Conversation:
    """Make what a user says right after results a part of the last one: some templates want an answer in between."""
    moved: list[Said] = []
    for message in messages:
        if moved and _is(message, "user") and _is(moved[-1], "tool"):
            moved[-1] = _with(moved[-1], tagged("user", _text(message)))
        else:
            moved.append(message)
    return moved if len(moved) < len(messages) else messages


def _system_to_user(messages: Conversation) -> Conversation:
    """Put the system prompt before the user's first words."""
    if not messages or not _is(messages[0], "system"):
        return messages
    if len(messages) > 1 and _is(messages[1], "user"):
        return [{**messages[1], "content": joined(_text(messages[0]), _text(messages[1]))}, *messages[2:]]
    return [{"role": "user", "content": _text(messages[0])}, *messages[1:]]


# -- calls and their results ------------------------------------------------------------------------------------------


def _calls(message: Said) -> list[Said]:
    """Return the calls of a message."""
    calls = message.get("tool_calls")
    return list(calls) if isinstance(calls, list | tuple) and all(isinstance(call, dict) for call in calls) else []


def _with_ids(messages: Conversation, identify: Callable[[Said, int], str]) -> Conversation:
    """Give all calls and their results the ids that `identify` returns for a call and the number of calls before it.

    A result belongs to the last call with its id. One with an unknown id, or of several calls with one id, belongs to
    the first of the last calls that has no result yet.
    """
    given: list[Said] = []
    known: dict[str, str] = {}
    waiting: list[tuple[str, str]] = []
    number = 0
    for message in messages:
        if calls := _calls(message):
            waiting = []
            renamed = []
            for call in calls:
                renamed.append({**call, "id": identify(call, number)})
                waiting.append((str(call.get("id") or ""), renamed[-1]["id"]))
                number += 1
            known |= dict(waiting)
            message = {**message, "tool_calls": renamed}
        elif _is(message, "tool"):
            id = str(message.get("tool_call_id") or "")
            own = next((pair for pair in waiting if pair[0] == id), None)
            if own is None and id not in known and waiting:
                own = waiting[0]
            if own is not None:
                waiting.remove(own)
            new = own[1] if own is not None else known.get(id)
            message = message if new is None else {**message, "tool_call_id": new}
        given.append(message)
    return messages if given == list(messages) else given


_NAMED = re.compile(r"functions\.([\w.-]+):\d+")


def named_ids(text: str) -> list[str]:
    """Return the ids in a text that name a function and count calls, as Kimi K2 writes them."""
    return [found[0] for found in _NAMED.finditer(text)]


def _name_in_ids(messages: Conversation) -> Conversation:
    """Write the names of functions into ids, as `functions.NAME:INDEX`: INDEX counts all calls of the conversation, and
    no two calls have the same id. An id of this form stays as it is.
    """
    used: set[str] = set()

    def identify(call: Said, number: int) -> str:
        function = call.get("function")
        beginning = f"functions.{function.get('name') if isinstance(function, dict) else ''}:"
        id = str(call.get("id") or "")
        if not (id.startswith(beginning) and id[len(beginning) :].isdecimal()) or id in used:
            while (id := f"{beginning}{number}") in used:
                number += 1
        used.add(id)
        return id

    return _with_ids(messages, identify)


def _shorten_ids(messages: Conversation) -> Conversation:
    """Make ids of nine letters and digits, as Mistral's templates demand."""

    def identify(call: Said, number: int) -> str:
        id = str(call.get("id") or number)
        fits = len(id) == 9 and id.isascii() and id.isalnum()
        return id if fits else blake2b(id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]

    return _with_ids(messages, identify)


def _arguments_as_text(messages: Conversation) -> Conversation:
    """Write the arguments of calls as JSON, for templates that add them to their text as they are."""

    def written(call: Said) -> Said:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    if not any(map(_calls, messages)):
        return messages
    return [{**each, "tool_calls": list(map(written, _calls(each)))} if _calls(each) else each for each in messages]


def _order_results(messages: Conversation) -> Conversation:
    """Put results into the order of their calls: most templates write no ids. Clients send them as the tools end."""
    ordered = list(messages)
    for place, message in enumerate(messages):
        if len(calls := _calls(message)) < 2:
            continue
        rank = {str(call.get("id") or ""): number for number, call in enumerate(calls)}
        results = list(takewhile(lambda each: _is(each, "tool"), islice(messages, place + 1, None)))
        ranks = [rank.get(str(each.get("tool_call_id") or ""), -1) for each in results]
        if len(rank) == len(calls) and -1 not in ranks:
            order = sorted(range(len(results)), key=ranks.__getitem__)
            ordered[place + 1 : place + 1 + len(results)] = [results[each] for each in order]
    same = all(one is other for one, other in zip(ordered, messages, strict=True))
    return messages if same else ordered


def _one_call_each(messages: Conversation) -> Conversation:
    """Part answers with several calls: each call, and then its result."""
    parted: list[Said] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = _calls(message)
        if len(calls) < 2:
            parted.append(message)
            continue
        results = []
        while rest and _is(rest[0], "tool"):
            results.append(rest.pop(0))
        for place, call in enumerate(calls):
            alone = {**message, "tool_calls": [call]}
            parted.append(alone if not place else {"role": "assistant", "content": "", "tool_calls": [call]})
            last = place == len(calls) - 1
            own = [each for each in results if last or each.get("tool_call_id") == call.get("id")]
            parted += own
            results = [each for each in results if not any(each is one for one in own)]
    return parted if len(parted) != len(messages) else messages


def _text_to_thoughts(messages: Conversation) -> Conversation:
    """Add what is said beside thoughts and calls to the thoughts: gpt-oss's template takes one of the two."""

    def moved(each: Said) -> Said:
        if not (_calls(each) and each.get("reasoning_content") and _text(each)):
            return each
        return {**each, "reasoning_content": joined(each["reasoning_content"], _text(each)), "content": ""}

    fit = [moved(each) for each in messages]
    return fit if any(one is not other for one, other in zip(fit, messages, strict=True)) else messages


# -- all of them ------------------------------------------------------------------------------------------------------


def _system(text: str) -> Said:
    return {"role": "system", "content": text}


def _user(text: str) -> Said:
    return {"role": "user", "content": text}


def _answer(text: str) -> Said:
    return {"role": "assistant", "content": text}


def _call(*names: str, **more: str) -> Said:
    calls = [
        {"id": _id(name), "type": "function", "function": {"name": name, "arguments": {"key": f"of {name}"}}}
        for name in names
    ]
    return {"role": "assistant", "content": "", **more, "tool_calls": calls}


def _result(name: str) -> Said:
    return {"role": "tool", "tool_call_id": _id(name), "name": name, "content": f"result of {name}"}


def _id(name: str) -> str:
    """Return an id as other servers make them, which does not have the name."""
    return f"call_{name[0] * 24}"


_ASK = _user("the question")
_ONCE = (_ASK, _call("lookup"), _result("lookup"))
_TWICE = (_ASK, _call("lookup", "search"), _result("lookup"), _result("search"))
_MIXED = (*_TWICE[:2], *_TWICE[:1:-1])
_THINKING = _call("lookup", reasoning_content="some thoughts")
_SPOKEN = (_ASK, {**_THINKING, "content": "some words"}, _result("lookup"))
_LOOP = (_ASK, _THINKING, _result("lookup"), _system("a reminder"))
_ASKED = (_ASK, _user("and this"))
_LATER = (_ASK, _answer("an answer"), _system("more rules"), _user("another"))

_AS_TEXT = Repair(_arguments_as_text, _ONCE, ("the question", "of lookup", "result"))

REPAIRS = (
    Repair(_name_in_ids, _ONCE, ("the question", "lookup", "of lookup", "result")),
    Repair(_shorten_ids, _ONCE, ("the question", "of lookup", "result")),
    _AS_TEXT,
    Repair(_order_results, _MIXED, ("result of lookup", "result of search")),
    Repair(_one_call_each, _TWICE, ("of lookup", "of search", "result of search")),
    Repair(_text_to_thoughts, _SPOKEN, ("some thoughts", "some words", "of lookup", "result")),
    Repair(_join_first_systems, (_system("rules"), _system("others"), _ASK), ("rules", "others", "the question")),
    Repair(partial(_move_systems, in_loop=True), _LOOP, ("some thoughts", "of lookup", "result", "a reminder")),
    Repair(partial(_move_systems, in_loop=False), _LATER, ("the question", "an answer", "more rules", "another")),
    Repair(partial(_join_neighbours, with_calls=False), _ASKED, ("the question", "and this")),
    Repair(partial(_join_neighbours, with_calls=True), _ASKED, ("the question", "and this")),
    Repair(_move_users, (*_ONCE, _user("and this")), ("the question", "of lookup", "result", "and this")),
    Repair(_system_to_user, (_system("rules"), _ASK), ("rules", "the question")),
)
"""All repairs, in the order in which they are made. The probe of each is first repaired by those before it."""
