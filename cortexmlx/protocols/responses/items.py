"""The items of a response's `input`: as messages of a chat, and in the form in which they are kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.earlier import Earlier
from cortexmlx.protocols.fields import checked, inside
from cortexmlx.protocols.history import (
    checked_name,
    known_fields,
    leave_out_thoughts,
    message_fields,
    read_arguments,
    read_text,
)
from cortexmlx.protocols.notes import note
from cortexmlx.protocols.reply import Body
from cortexmlx.protocols.responses.offered import INPUT, Offered
from cortexmlx.protocols.seal import Seal
from cortexmlx.types.request import Message

_PARTS = {
    "message": ("role", "content"),
    "reasoning": ("content", "summary", "encrypted_content"),
    "function_call": ("call_id", "name", "namespace", "arguments"),
    "function_call_output": ("call_id", "name", "namespace", "output"),
    "custom_tool_call": ("call_id", "name", "namespace", "input"),
    "custom_tool_call_output": ("call_id", "name", "namespace", "output"),
    "item_reference": (),
}
"""What an item of each type has."""

_NO_EFFECT = (
    *("type", "id", "status", "phase", "created_by", "caller", "async", "agent"),
    "internal_chat_message_metadata_passthrough",
)
"""What any item may have. It changes nothing of what the model is told."""


def plain_items(asked: object, earlier: Earlier | None) -> list[tuple[str, Body]]:
    """Return the items of an `input`, each with its path: without nulls, with the items that others refer to in their
    place, and without those that no model here reads. Raises InvalidRequest.
    """
    if isinstance(asked, str):
        if not asked:
            raise InvalidRequest("the prompt is empty", field="input")
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list) or not asked or not all(isinstance(item, dict) for item in asked):
        raise InvalidRequest("`input` must be a text or a list of messages", field="input")
    items = []
    for place, item in enumerate(asked):
        path = f"input[{place}]"
        with inside(path):
            plain = _plain(item, earlier)
        if plain is not None:
            items.append((path, plain))
    return items


def _plain(said: dict[str, Any], earlier: Earlier | None) -> Body | None:
    """Return an item, or None for one that only another server's model reads."""
    kind = said.get("type")
    kind = "message" if kind is None else checked_name("type", kind)
    if kind not in _PARTS:
        note("items", f"items of `input` such as {kind[:40]!r} are left out: only other servers' models read them")
        return None
    read_fields = message_fields if kind == "message" else known_fields
    item = read_fields(said, (*_PARTS[kind], *_NO_EFFECT), f"an item of type {kind!r}")
    item["type"] = kind
    id = checked("id", item.get("id", ""), str, "a text")
    bare = kind == "reasoning" and not (item.get("content") or item.get("summary") or item.get("encrypted_content"))
    if kind != "item_reference" and not (bare and id):
        return item
    found = earlier.item(id) if earlier is not None else None
    if found is None and not bare:
        raise InvalidRequest(
            f"there is no item {id!r:.80} here: it was never stored, was deleted, or had to make room for newer ones. "
            "Send the item itself",
            field="id",
        )
    return found or item


def messages_of(
    items: Iterable[tuple[str, Mapping[str, Any]]], offered: Offered, seal: Seal | None
) -> tuple[list[Message], list[str]]:
    """Return the messages of a chat that items tell of, each item with its path, and the paths of the messages. Raises
    InvalidRequest.
    """
    told = _Told(offered, seal)
    for path, item in items:
        with inside(path):
            told.add(path, item)
    return list(told.messages), told.paths


class _Told:
    """The messages so far. One answer of the model is one message: its thoughts, its text and its calls."""

    def __init__(self, offered: Offered, seal: Seal | None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self._offered = offered
        self._seal = seal
        self._thoughts = ""

    def add(self, path: str, item: Mapping[str, Any]) -> None:
        """Add an item. Thoughts that no answer follows are left out: chat templates have no place for them."""
        if item["type"] == "reasoning":
            self._thoughts += _thoughts(item, self._seal)
            return
        message = self._message(item)
        thoughts, self._thoughts = self._thoughts, ""
        last = self.messages[-1] if self.messages else {}
        if message.get("role") == "assistant":
            if thoughts:
                message["reasoning_content"] = thoughts
            elif last.get("role") == "assistant" and (last.get("tool_calls") or message.get("tool_calls")):
                _join(last, message)
                return
        self.messages.append(message)
        self.paths.append(path)

    def _message(self, item: Mapping[str, Any]) -> dict[str, Any]:
        kind = item["type"]
        if kind == "message":
            return {name: item[name] for name in ("role", "content") if name in item}
        id = checked_name("call_id", item.get("call_id"))
        if kind.endswith("_output"):
            return {"role": "tool", "tool_call_id": id, "content": read_text(item.get("output"), loose=True)}
        name = checked_name("name", item.get("name"))
        namespace = checked_name("namespace", item["namespace"]) if "namespace" in item else None
        if kind == "custom_tool_call":
            arguments: Mapping[str, Any] = {INPUT: read_text(item.get("input"), loose=True)}
        else:
            arguments = read_arguments(item.get("arguments"))
        function = {"name": self._offered.known_as(namespace, name), "arguments": arguments}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": id, "type": "function", "function": function}],
        }


def _join(last: dict[str, Any], message: Mapping[str, Any]) -> None:
    """Add the calls or the text of an answer to what it has said before."""
    if calls := message.get("tool_calls"):
        last["tool_calls"] = [*last.get("tool_calls", ()), *calls]
    else:
        last["content"] = [*_parts(last.get("content")), *_parts(message.get("content"))]


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [content]


def _thoughts(item: Mapping[str, Any], seal: Seal | None) -> str:
    """Return the text of thoughts: as it is there, or sealed. What another server sealed or summed up is left out."""
    thoughts, sealed = _told_thoughts(item), item.get("encrypted_content", "")
    if sealed and seal is not None:
        opened = seal.unwrap(sealed) if isinstance(sealed, str) else None
        thoughts = "" if opened is None else thoughts or opened
    if not thoughts and (item.get("content") or sealed or item.get("summary")):
        leave_out_thoughts()
    return thoughts


def _told_thoughts(item: Mapping[str, Any]) -> str:
    parts = _parts(item.get("content"))
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return "".join(text for text in texts if isinstance(text, str))


def kept_form(item: Mapping[str, Any]) -> Body:
    """Return an item that was read as the API lists it, without an id unless the client gave one. Of parts without
    effect only texts are kept.
    """
    kind = item["type"]
    kept = {name: item[name] for name in ("id", "type", "status", "phase") if isinstance(item.get(name), str)}
    kept = {**kept, "status": kept.get("status", "completed")}
    kept |= {name: item[name] for name in _PARTS[kind] if isinstance(item.get(name), str)}
    if kind == "message":
        text = "output_text" if item["role"] == "assistant" else "input_text"
        kept["content"] = _kept_parts(item.get("content"), text)
    elif kind == "reasoning":
        thoughts = _told_thoughts(item)
        kept["summary"] = []
        kept["content"] = _kept_parts(thoughts, "reasoning_text") if thoughts else []
    elif kind.endswith("_output") and "output" not in kept:
        kept["output"] = _kept_parts(item.get("output"), "input_text")
    elif kind == "function_call":
        kept.setdefault("arguments", json.dumps(read_arguments(item.get("arguments"))))
    elif kind == "custom_tool_call":
        kept.setdefault("input", read_text(item.get("input"), loose=True))
    return kept


def _kept_parts(content: Any, kind: str) -> list[Body]:
    """Return a content as parts that are text: one, if some of it is not, since that becomes lines between texts."""
    plain = isinstance(content, list) and all(isinstance(each, Mapping) and "text" in each for each in content)
    texts = [read_text([part], loose=True) for part in content] if plain else [read_text(content, loose=True)]
    more: Body = {"annotations": []} if kind == "output_text" else {}
    return [{"type": kind, "text": text, **more} for text in texts]
