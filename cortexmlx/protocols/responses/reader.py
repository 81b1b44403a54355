"""The reader of `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.error_text import note
from cortexmlx.protocols.fields import RENAMED, Fields, Unserved, check_fields, checked, inside
from cortexmlx.protocols.history import (
    checked_name,
    known_fields,
    leave_out_thoughts,
    mend,
    message_fields,
    read_arguments,
    read_text,
)
from cortexmlx.protocols.openai import parameters
from cortexmlx.protocols.openai.errors import NotStored
from cortexmlx.protocols.openai.messages import read_messages
from cortexmlx.protocols.request import Body, Defaults, Earlier, EarlierResponse, Request, with_notes
from cortexmlx.protocols.responses.offered import INPUT, Offered, offered_tools
from cortexmlx.protocols.seal import Seal
from cortexmlx.types.messages import EFFORT
from cortexmlx.types.request import Message

URL = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log-probabilities."""
ENCRYPTED = "reasoning.encrypted_content"
"""The value of `include` that asks for sealed thoughts."""

_ABSENT = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Values of `include` that ask for parts of what no answer has here."""

_STATELESS = "nothing is remembered of other requests: send all messages"
_FOREGROUND = "an answer is sent as it is written, or when it is whole"
OWN_UNSERVED = {
    "background": Unserved(_FOREGROUND, (False,)),
    "background_options": Unserved(_FOREGROUND),
    "context_management": Unserved("nothing is left out of a prompt: send what the model should read", ([],)),
    "conversation": Unserved(
        "there are no conversations on the server: use `previous_response_id`, or send all messages"
    ),
    "image": Unserved("the model writes text only"),
    "prompt": Unserved("there are no prompts that are kept elsewhere"),
    "truncation": Unserved("it must be auto or disabled", ("disabled", "auto")),
}
"""The unserved fields that other protocols do not have."""

FIELDS = Fields(
    f"a {URL} body",
    parameters.SAMPLING - {"n", "best_of", "logprobs", "prompt_logprobs", "max_tokens"}
    | set(parameters.TEMPLATE)
    | {"input", "instructions", "max_output_tokens", "top_logprobs", "include", "reasoning", "text"}
    | {"previous_response_id"}
    | {
        "skip_special_tokens",
        *(alias for alias, name in RENAMED.items() if name in parameters.SAMPLING - {"max_tokens"}),
    }
    | parameters.STREAM
    | parameters.TOOL_FIELDS,
    parameters.NO_EFFECT | {"client_metadata", "max_tool_calls"},
    {**parameters.UNSERVED, **OWN_UNSERVED},
)

_VERBOSITIES = ("low", "medium", "high")
_SUMMARIES = ("auto", "concise", "detailed")


@with_notes
def read(body: Mapping[str, Any], defaults: Defaults) -> Request:
    """Return the request in a body. Raises InvalidRequest."""
    own = FIELDS.without(defaults.unserved)
    if defaults.earlier is None:
        own = own.without({"previous_response_id": Unserved(_STATELESS)})
    accepted = own.accepted(body)
    if "metadata" in accepted:
        _check_metadata(accepted["metadata"])
    said = own.known(accepted)
    values = parameters.sampling_values(said)
    included = _included(said, defaults)
    values["logprobs"] = parameters.alternatives(
        said, LOGPROBS in included, f'"include": ["{LOGPROBS}"]', defaults.params.logprobs
    )
    offered, chosen = offered_tools(said)
    values |= _form(said) | chosen
    if "max_output_tokens" in said:
        values["max_tokens"] = said["max_output_tokens"]
    params = parameters.sampling_params(defaults.params, values, said)
    stream = parameters.stream_of(said, params)
    previous = _previous(said, defaults)
    told = items = plain_items(said.get("input"), defaults.earlier)
    if previous is not None:
        told = [*(("previous_response_id", item) for item in previous.items()), *told]
    messages, paths = messages_of(told, offered, defaults.seal)
    if not messages:
        raise InvalidRequest("`input` has no message, no call and no result: send one of them", field="input")
    read = [*_instructions(said), *read_messages(messages, paths)]
    variables = parameters.template_variables(said, defaults, more=_effort(said))
    store = defaults.earlier is not None and parameters.flag({"store": True, **accepted}, "store")
    kept = tuple(kept_form(item) for _, item in items) if store else ()
    details = Details(offered, kept, previous, store, ENCRYPTED in included)
    return Request((read,), params, variables, body=body, details=details, **stream)


def _previous(said: Mapping[str, Any], defaults: Defaults) -> EarlierResponse | None:
    """Return the response that a body continues."""
    if defaults.earlier is None or "previous_response_id" not in said:
        return None
    id = checked("previous_response_id", said["previous_response_id"], str, "the id of a response")
    found = defaults.earlier.response(id)
    if found is None:
        raise NotStored(id, field="previous_response_id")
    return found


def _check_metadata(metadata: Any) -> None:
    """Raise InvalidRequest for metadata that the body of a response cannot hold. A response repeats its request's
    metadata.
    """
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        message = f"metadata is {metadata!r:.80}, but must be an object whose values are texts"
        raise InvalidRequest(message, field="metadata")


def _included(said: Mapping[str, Any], defaults: Defaults) -> list[str]:
    """Return what `include` asks for."""
    include = checked("include", said.get("include", []), list, "a list")
    served = (LOGPROBS, *((ENCRYPTED,) if defaults.seal is not None else ()))
    for place, name in enumerate(include):
        if name not in (*served, *_ABSENT):
            message = f"include has {name!r:.80}, but only {' and '.join(map(repr, served))} is served"
            raise InvalidRequest(message, field=f"include[{place}]")
    return include


def _form(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return `structured` as `text` sets it, or nothing if `text` does not set it."""
    text = checked("text", said.get("text", {}), dict, "an object")
    with inside("text"):
        check_fields(text, ("format", "verbosity"), "`text`")
        _check_hint("verbosity", text.get("verbosity"), _VERBOSITIES)
        if text.get("format") is None:
            return {}
        asked = checked("format", text["format"], dict, "an object")
        with inside("format"):
            return {"structured": parameters.text_format(asked)}


def _effort(said: Mapping[str, Any]) -> dict[str, object]:
    """Return the template's variable that `reasoning` sets: the degree of thinking."""
    reasoning = checked("reasoning", said.get("reasoning", {}), dict, "an object")
    with inside("reasoning"):
        given = {name: part for name, part in reasoning.items() if part is not None}
        check_fields(given, ("effort", "summary", "generate_summary"), "`reasoning`")
        for name in ("summary", "generate_summary"):
            _check_hint(name, given.get(name), _SUMMARIES)
        effort = checked("effort", given.get("effort", ""), str, "a text like 'low'")
    return {EFFORT: effort} if effort else {}


def _check_hint(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise InvalidRequest unless a hint has one of its values. Hints have no effect."""
    if value is not None and value not in known:
        raise InvalidRequest(f"{name} is {value!r:.80}, but must be one of {', '.join(known)}", field=name)


def _instructions(said: Mapping[str, Any]) -> list[Message]:
    instructions = said.get("instructions")
    with inside("instructions"):
        if not isinstance(instructions, str | None):
            raise InvalidRequest(f"`instructions` must be a text, not {type(instructions).__name__}")
        return [{"role": "system", "content": mend(instructions)}] if instructions else []


# The items of a response's `input`: as messages of a chat, and in the form in which they are kept.


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


# What a response's writer and its keeper need to know of the request.


@dataclass(frozen=True)
class Details:
    """What only responses have."""

    offered: Offered = field(default_factory=Offered)
    items: tuple[Body, ...] = ()
    """The items of `input`, as they are kept. They have no ids yet, unless the client gave them."""
    previous: EarlierResponse | None = None
    """The response that this one continues."""
    store: bool = False
    """Whether to keep the response."""
    sealed: bool = False
    """Whether thoughts are written as `encrypted_content`, too."""


def details_of(request: Request) -> Details:
    """Return the details of a request."""
    return request.details if isinstance(request.details, Details) else Details()
