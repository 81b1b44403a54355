"""The reader of `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.error_text import add_note
from cortexmlx.protocols.fields import (
    PEER_ALIASES,
    BodyFields,
    UnservedField,
    prefix_error_field,
    reject_unknown_fields,
    require_type,
)
from cortexmlx.protocols.history import (
    add_image_paths,
    note_omitted_thoughts,
    pick_known_fields,
    pick_message_fields,
    read_arguments,
    read_text,
    require_name,
    sanitize_text,
)
from cortexmlx.protocols.images import KINDS
from cortexmlx.protocols.openai import parameters
from cortexmlx.protocols.openai.errors import ResponseNotFound
from cortexmlx.protocols.openai.messages import read_messages
from cortexmlx.protocols.request import Body, EarlierResponse, EarlierResponses, Request, RequestDefaults, with_notes
from cortexmlx.protocols.responses.offered import INPUT_ARGUMENT, OfferedTools, read_offered_tools
from cortexmlx.protocols.seal import Seal
from cortexmlx.types.messages import EFFORT
from cortexmlx.types.request import Message

URL = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log-probabilities."""
ENCRYPTED = "reasoning.encrypted_content"
"""The value of `include` that asks for sealed thoughts."""

_ABSENT_INCLUDES = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Values of `include` that ask for parts of what no answer has here."""

_STATELESS = "nothing is remembered of other requests: send all messages"
_NO_BACKGROUND = "an answer is sent as it is written, or when it is whole"
RESPONSE_UNSERVED = {
    "background": UnservedField(_NO_BACKGROUND, (False,)),
    "background_options": UnservedField(_NO_BACKGROUND),
    "context_management": UnservedField("nothing is left out of a prompt: send what the model should read", ([],)),
    "conversation": UnservedField(
        "there are no conversations on the server: use `previous_response_id`, or send all messages"
    ),
    "image": UnservedField("the model writes text only"),
    "prompt": UnservedField("there are no prompts that are kept elsewhere"),
    "truncation": UnservedField("it must be auto or disabled", ("disabled", "auto")),
}
"""The unserved fields that other protocols do not have."""

FIELDS = BodyFields(
    f"a {URL} body",
    parameters.SAMPLING_FIELDS - {"n", "best_of", "logprobs", "prompt_logprobs", "max_tokens"}
    | set(parameters.TEMPLATE_FIELDS)
    | {"input", "instructions", "max_output_tokens", "top_logprobs", "include", "reasoning", "text"}
    | {"previous_response_id"}
    | {
        "skip_special_tokens",
        *(alias for alias, name in PEER_ALIASES.items() if name in parameters.SAMPLING_FIELDS - {"max_tokens"}),
    }
    | parameters.STREAM_FIELDS
    | parameters.TOOL_FIELDS,
    parameters.NO_EFFECT | {"client_metadata", "max_tool_calls"},
    {**parameters.UNSERVED, **RESPONSE_UNSERVED},
)

_VERBOSITIES = ("low", "medium", "high")
_SUMMARIES = ("auto", "concise", "detailed")


@with_notes
def read(body: Mapping[str, Any], defaults: RequestDefaults) -> Request:
    """Parse the JSON body of a `/v1/responses` call into a Request. Raises InvalidRequest."""
    body_fields = FIELDS.exclude(defaults.unserved)
    if defaults.earlier_responses is None:
        body_fields = body_fields.exclude({"previous_response_id": UnservedField(_STATELESS)})
    served_fields = body_fields.reject_unserved(body)
    if "metadata" in served_fields:
        _check_metadata(served_fields["metadata"])
    fields = body_fields.reject_unknown(served_fields)
    values = parameters.read_sampling(fields)
    included_values = _read_include(fields, defaults)
    values["logprobs"] = parameters.read_top_logprobs(
        fields, LOGPROBS in included_values, f'"include": ["{LOGPROBS}"]', defaults.params.logprobs
    )
    offered_tools, tool_values = read_offered_tools(fields)
    values |= _read_structured(fields) | tool_values
    if "max_output_tokens" in fields:
        values["max_tokens"] = fields["max_output_tokens"]
    params = parameters.build_sampling_params(defaults.params, values, fields)
    stream = parameters.read_stream_fields(fields, params)
    previous = _find_previous(fields, defaults)
    all_items = items = read_items(fields.get("input"), defaults.earlier_responses)
    if previous is not None:
        all_items = [*(("previous_response_id", item) for item in previous.items()), *all_items]
    messages, paths = build_messages(all_items, offered_tools, defaults.seal)
    if not messages:
        raise InvalidRequest("`input` has no message, no call and no result: send one of them", field="input")
    chat_messages = [*_read_instructions(fields), *read_messages(messages, paths, defaults.image_parts())]
    variables = parameters.template_variables(fields, defaults, extra_vars=_read_effort(fields))
    store = defaults.earlier_responses is not None and parameters.read_flag({"store": True, **served_fields}, "store")
    sees = defaults.check_image is not None
    stored_items = tuple(stored_item(item, sees=sees) for _, item in items) if store else ()
    details = ResponseDetails(offered_tools, stored_items, previous, store, ENCRYPTED in included_values)
    return Request((chat_messages,), params, variables, body=body, details=details, **stream)


def _find_previous(fields: Mapping[str, Any], defaults: RequestDefaults) -> EarlierResponse | None:
    """Return the stored response that `previous_response_id` names; None if it is not set. Raises ResponseNotFound."""
    if defaults.earlier_responses is None or "previous_response_id" not in fields:
        return None
    id = require_type("previous_response_id", fields["previous_response_id"], str, "the id of a response")
    response = defaults.earlier_responses.find_response(id)
    if response is None:
        raise ResponseNotFound(id, field="previous_response_id")
    return response


def _check_metadata(metadata: Any) -> None:
    """Raise InvalidRequest unless `metadata`, which the reply repeats, is an object of texts."""
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        message = f"metadata is {metadata!r:.80}, but must be an object whose values are texts"
        raise InvalidRequest(message, field="metadata")


def _read_include(fields: Mapping[str, Any], defaults: RequestDefaults) -> list[str]:
    """Return the values of `include`, checked. Raises InvalidRequest."""
    include = require_type("include", fields.get("include", []), list, "a list")
    served_values = (LOGPROBS, *((ENCRYPTED,) if defaults.seal is not None else ()))
    for index, name in enumerate(include):
        if name not in (*served_values, *_ABSENT_INCLUDES):
            message = f"include has {name!r:.80}, but only {' and '.join(map(repr, served_values))} is served"
            raise InvalidRequest(message, field=f"include[{index}]")
    return include


def _read_structured(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameter `structured` that the field `text` sets, or an empty dict. Raises InvalidRequest."""
    text = require_type("text", fields.get("text", {}), dict, "an object")
    with prefix_error_field("text"):
        reject_unknown_fields(text, ("format", "verbosity"), "`text`")
        _check_hint("verbosity", text.get("verbosity"), _VERBOSITIES)
        if text.get("format") is None:
            return {}
        format_fields = require_type("format", text["format"], dict, "an object")
        with prefix_error_field("format"):
            return {"structured": parameters.read_text_format(format_fields)}


def _read_effort(fields: Mapping[str, Any]) -> dict[str, object]:
    """Return the chat template's variable for the degree of thinking that `reasoning` sets. Raises InvalidRequest."""
    reasoning = require_type("reasoning", fields.get("reasoning", {}), dict, "an object")
    with prefix_error_field("reasoning"):
        reasoning_fields = {name: part for name, part in reasoning.items() if part is not None}
        reject_unknown_fields(reasoning_fields, ("effort", "summary", "generate_summary"), "`reasoning`")
        for name in ("summary", "generate_summary"):
            _check_hint(name, reasoning_fields.get(name), _SUMMARIES)
        effort = require_type("effort", reasoning_fields.get("effort", ""), str, "a text like 'low'")
    return {EFFORT: effort} if effort else {}


def _check_hint(name: str, value: object, known_values: tuple[str, ...]) -> None:
    """Raise InvalidRequest if the field `name`, which has no effect, has a value that is not known."""
    if value is not None and value not in known_values:
        raise InvalidRequest(f"{name} is {value!r:.80}, but must be one of {', '.join(known_values)}", field=name)


def _read_instructions(fields: Mapping[str, Any]) -> list[Message]:
    """Return `instructions` as a list with one system message, or an empty list."""
    instructions = fields.get("instructions")
    with prefix_error_field("instructions"):
        if not isinstance(instructions, str | None):
            raise InvalidRequest(f"`instructions` must be a text, not {type(instructions).__name__}")
        return [{"role": "system", "content": sanitize_text(instructions)}] if instructions else []


# The items of a response's `input`: as messages of a chat, and in the form in which they are kept.


_ITEM_FIELDS = {
    "message": ("role", "content"),
    "reasoning": ("content", "summary", "encrypted_content"),
    "function_call": ("call_id", "name", "namespace", "arguments"),
    "function_call_output": ("call_id", "name", "namespace", "output"),
    "custom_tool_call": ("call_id", "name", "namespace", "input"),
    "custom_tool_call_output": ("call_id", "name", "namespace", "output"),
    "item_reference": (),
}
"""What an item of each type has."""

_IGNORED_FIELDS = (
    *("type", "id", "status", "phase", "created_by", "caller", "async", "agent"),
    "internal_chat_message_metadata_passthrough",
)
"""What any item may have. It changes nothing of what the model is told."""


def read_items(input_value: object, earlier_responses: EarlierResponses | None) -> list[tuple[str, Body]]:
    """Return the items of `input`, each with its JSON path, without unread types and fields. Raises InvalidRequest."""
    if isinstance(input_value, str):
        if not input_value:
            raise InvalidRequest("the prompt is empty", field="input")
        input_value = [{"role": "user", "content": input_value}]
    if not isinstance(input_value, list) or not input_value or not all(isinstance(item, dict) for item in input_value):
        raise InvalidRequest("`input` must be a text or a list of messages", field="input")
    items = []
    for index, item in enumerate(input_value):
        path = f"input[{index}]"
        with prefix_error_field(path):
            known_item = _read_item(item, earlier_responses)
        if known_item is not None:
            items.append((path, known_item))
    return items


def _read_item(raw_item: dict[str, Any], earlier_responses: EarlierResponses | None) -> Body | None:
    """Return an item's known fields, or the stored item that it refers to; None for a type that is not read here."""
    kind = raw_item.get("type")
    kind = "message" if kind is None else require_name("type", kind)
    if kind not in _ITEM_FIELDS:
        add_note("items", f"items of `input` such as {kind[:40]!r} are left out: only other servers' models read them")
        return None
    read_fields = pick_message_fields if kind == "message" else pick_known_fields
    item = read_fields(raw_item, (*_ITEM_FIELDS[kind], *_IGNORED_FIELDS), f"an item of type {kind!r}")
    item["type"] = kind
    id = require_type("id", item.get("id", ""), str, "a text")
    is_empty = kind == "reasoning" and not (item.get("content") or item.get("summary") or item.get("encrypted_content"))
    if kind != "item_reference" and not (is_empty and id):
        return item
    referenced_item = earlier_responses.find_item(id) if earlier_responses is not None else None
    if referenced_item is None and not is_empty:
        raise InvalidRequest(
            f"there is no item {id!r:.80} here: it was never stored, was deleted, or had to make room for newer ones. "
            "Send the item itself",
            field="id",
        )
    return referenced_item or item


def build_messages(
    items: Iterable[tuple[str, Mapping[str, Any]]], offered_tools: OfferedTools, seal: Seal | None
) -> tuple[list[Message], list[str]]:
    """Convert items, each with its JSON path, into chat messages and their paths. Raises InvalidRequest."""
    builder = _MessageBuilder(offered_tools, seal)
    for path, item in items:
        with prefix_error_field(path):
            builder.add(path, item)
    return list(builder.messages), builder.paths


class _MessageBuilder:
    """Builds chat messages from items. One answer of the model is one message: its thoughts, text and calls."""

    def __init__(self, offered_tools: OfferedTools, seal: Seal | None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self._offered_tools = offered_tools
        self._seal = seal
        self._thoughts = ""

    def add(self, path: str, item: Mapping[str, Any]) -> None:
        """Add an item. Thoughts that no answer follows are left out: chat templates have no place for them."""
        if item["type"] == "reasoning":
            self._thoughts += _read_thoughts(item, self._seal)
            return
        message = self._to_message(item)
        thoughts, self._thoughts = self._thoughts, ""
        last = self.messages[-1] if self.messages else {}
        if message.get("role") == "assistant":
            if thoughts:
                message["reasoning_content"] = thoughts
            elif last.get("role") == "assistant" and (last.get("tool_calls") or message.get("tool_calls")):
                _extend_answer(last, message)
                return
        self.messages.append(message)
        self.paths.append(path)

    def _to_message(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a message, a call or a call's result into a message."""
        kind = item["type"]
        if kind == "message":
            return {name: item[name] for name in ("role", "content") if name in item}
        id = require_name("call_id", item.get("call_id"))
        if kind.endswith("_output"):
            return {"role": "tool", "tool_call_id": id, "content": add_image_paths("output", item.get("output"))}
        name = require_name("name", item.get("name"))
        namespace = require_name("namespace", item["namespace"]) if "namespace" in item else None
        if kind == "custom_tool_call":
            arguments: Mapping[str, Any] = {INPUT_ARGUMENT: read_text(item.get("input"), loose=True)}
        else:
            arguments = read_arguments(item.get("arguments"))
        function = {"name": self._offered_tools.function_name(namespace, name), "arguments": arguments}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": id, "type": "function", "function": function}],
        }


def _extend_answer(last: dict[str, Any], message: Mapping[str, Any]) -> None:
    """Append the calls or the text of a message to the answer before it."""
    if calls := message.get("tool_calls"):
        last["tool_calls"] = [*last.get("tool_calls", ()), *calls]
    else:
        last["content"] = [*_as_list(last.get("content")), *_as_list(message.get("content"))]


def _as_list(content: Any) -> list[Any]:
    """Return a content as a list of parts."""
    return content if isinstance(content, list) else [content]


def _read_thoughts(item: Mapping[str, Any], seal: Seal | None) -> str:
    """Return the thoughts in a `reasoning` item, plain or unsealed; "" if another server sealed or summarized them."""
    thoughts, sealed_text = _plain_thoughts(item), item.get("encrypted_content", "")
    if sealed_text and seal is not None:
        unsealed_text = seal.unwrap(sealed_text) if isinstance(sealed_text, str) else None
        thoughts = "" if unsealed_text is None else thoughts or unsealed_text
    if not thoughts and (item.get("content") or sealed_text or item.get("summary")):
        note_omitted_thoughts()
    return thoughts


def _plain_thoughts(item: Mapping[str, Any]) -> str:
    """Return the text in the content of a `reasoning` item, without its sealed form."""
    parts = _as_list(item.get("content"))
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return "".join(text for text in texts if isinstance(text, str))


def stored_item(item: Mapping[str, Any], *, sees: bool = False) -> Body:
    """Return an item in the form to store. It has an id only if the client gave one. If the model `sees`, images are
    kept for later turns, as the client sent them.
    """
    kind = item["type"]
    stored_fields = {name: item[name] for name in ("id", "type", "status", "phase") if isinstance(item.get(name), str)}
    stored_fields = {**stored_fields, "status": stored_fields.get("status", "completed")}
    stored_fields |= {name: item[name] for name in _ITEM_FIELDS[kind] if isinstance(item.get(name), str)}
    if kind == "message":
        text = "output_text" if item["role"] == "assistant" else "input_text"
        stored_fields["content"] = _stored_parts(item.get("content"), text, sees)
    elif kind == "reasoning":
        thoughts = _plain_thoughts(item)
        stored_fields["summary"] = []
        stored_fields["content"] = _stored_parts(thoughts, "reasoning_text") if thoughts else []
    elif kind.endswith("_output") and "output" not in stored_fields:
        stored_fields["output"] = _stored_parts(item.get("output"), "input_text", sees)
    elif kind == "function_call":
        stored_fields.setdefault("arguments", json.dumps(read_arguments(item.get("arguments"))))
    elif kind == "custom_tool_call":
        stored_fields.setdefault("input", read_text(item.get("input"), loose=True))
    return stored_fields


def _stored_parts(content: Any, kind: str, sees: bool = False) -> list[Body]:
    """Return a content as text parts. If any part is no text, all become a single text, with a line in place of that
    part. If the model `sees`, images are parts as well.
    """
    if sees and isinstance(content, list) and kind == "input_text":
        runs = groupby(content, lambda part: isinstance(part, Mapping) and part.get("type") in KINDS)
        return [
            part for is_image, run in runs for part in (map(dict, run) if is_image else _stored_parts([*run], kind))
        ]
    is_text_list = isinstance(content, list) and all(isinstance(each, Mapping) and "text" in each for each in content)
    texts = [read_text([part], loose=True) for part in content] if is_text_list else [read_text(content, loose=True)]
    extra_fields: Body = {"annotations": []} if kind == "output_text" else {}
    return [{"type": kind, "text": text, **extra_fields} for text in texts]


# What a response's writer and its keeper need to know of the request.


@dataclass(frozen=True)
class ResponseDetails:
    """What a Request has only for `/v1/responses`: tools, input items, earlier response, and what to store or seal."""

    offered_tools: OfferedTools = field(default_factory=OfferedTools)
    input_items: tuple[Body, ...] = ()
    """The items of `input`, as they are kept. They have no ids yet, unless the client gave them."""
    previous: EarlierResponse | None = None
    """The response that this one continues."""
    store: bool = False
    """Whether to keep the response."""
    seal_thoughts: bool = False
    """Whether thoughts are written as `encrypted_content`, too."""


def response_details(request: Request) -> ResponseDetails:
    """Return the `ResponseDetails` of a request, or empty ones."""
    return request.details if isinstance(request.details, ResponseDetails) else ResponseDetails()
