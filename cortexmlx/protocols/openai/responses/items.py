"""The items of a response's `input`: as messages of a chat, and in the form in which they are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.messages import plain_message
from cortexmlx.protocols.earlier import Earlier
from cortexmlx.protocols.fields import check_fields, checked, inside
from cortexmlx.protocols.openai.messages import read_arguments
from cortexmlx.protocols.openai.responses.offered import INPUT, Offered
from cortexmlx.protocols.reply import Body
from cortexmlx.protocols.seal import Seal
from cortexmlx.request import Message

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


def plain_items(asked: object, earlier: Earlier | None) -> list[Body]:
    """Return the items of an `input` without nulls, and with the items that others refer to in their place. Raises
    InvalidRequest.
    """
    if isinstance(asked, str):
        if not asked:
            raise InvalidRequest("the prompt is empty", field="input")
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list) or not asked or not all(isinstance(item, dict) for item in asked):
        raise InvalidRequest("`input` must be a text or a list of messages", field="input")
    items = []
    for place, item in enumerate(asked):
        with inside(f"input[{place}]"):
            items.append(_plain(item, earlier))
    return items


def _plain(said: dict[str, Any], earlier: Earlier | None) -> Body:
    item = {name: part for name, part in said.items() if part is not None}
    kind = item.setdefault("type", "message")
    if not isinstance(kind, str) or kind not in _PARTS:
        served = ", ".join(_PARTS)
        raise InvalidRequest(f"an item of `input` of type {kind!r:.80} is not served: there are {served}", field="type")
    check_fields(item, (*_PARTS[kind], *_NO_EFFECT), f"an item of type {kind!r}")
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
        if message["role"] == "assistant":
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
            return {name: item.get(name) for name in ("role", "content")}
        id = checked("call_id", item.get("call_id"), str, "a text")
        if kind.endswith("_output"):
            return {"role": "tool", "tool_call_id": id, "content": _output(item.get("output"))}
        name = checked("name", item.get("name"), str, "a text")
        namespace = checked("namespace", item["namespace"], str, "a text") if "namespace" in item else None
        if kind == "custom_tool_call":
            arguments: Mapping[str, Any] = {INPUT: checked("input", item.get("input"), str, "a text")}
        else:
            text = checked("arguments", item.get("arguments"), str, "a text")
            with inside("arguments"):
                arguments = read_arguments(name, text)
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
    elif last["content"] is None:
        last["content"] = message["content"]
    else:
        last["content"] = [*_parts(last["content"]), *_parts(message["content"])]


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [content]


def _thoughts(item: Mapping[str, Any], seal: Seal | None) -> str:
    """Return the text of thoughts: as it is there, or sealed."""
    texts = []
    for place, part in enumerate(checked("content", item.get("content", []), list, "a list")):
        text = part.get("text") if isinstance(part, dict) else None
        texts.append(checked(f"content[{place}].text", text, str, "a text"))
    sealed = checked("encrypted_content", item.get("encrypted_content", ""), str, "a text")
    thoughts = "".join(texts)
    if sealed and seal is not None:
        opened = seal.unwrap(sealed)
        if opened is None:
            why = "it was not written by this server for this API key, or before its last start"
            raise InvalidRequest(
                f"encrypted_content cannot be read: {why}. Leave the item out", field="encrypted_content"
            )
        return thoughts or opened
    if sealed and not thoughts:
        raise InvalidRequest("encrypted_content cannot be read here: send the `content`", field="encrypted_content")
    if item.get("summary") and not thoughts:
        why = "thoughts are served with `content` or `encrypted_content`, not with a summary alone"
        raise InvalidRequest(why, field="summary")
    return thoughts


def _output(output: Any) -> str:
    """Return what a tool said."""
    try:
        text = plain_message({"content": output})["content"]
    except InvalidRequest as error:
        error.field = f"output{(error.field or '').removeprefix('content')}"
        raise
    return checked("output", text, str, "a text")


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
        kept["content"] = [_kept_part(part, text) for part in _parts(item["content"])]
    elif kind == "reasoning":
        kept["summary"] = []
        kept["content"] = [_kept_part(part, "reasoning_text") for part in item.get("content", [])]
    elif "output" in item and "output" not in kept:
        kept["output"] = [_kept_part(part, "input_text") for part in item["output"]]
    return kept


def _kept_part(part: Any, kind: str) -> Body:
    text = part if isinstance(part, str) else part["text"]
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}
