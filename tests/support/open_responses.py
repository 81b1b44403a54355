"""What Open Responses (version 2026-04-24) requires of a response, its items and the events of a stream: names and
types of fields. Items of custom tools and the group of a call are OpenAI's own, and not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator

Schema = Mapping[str, Any]


def required(**types: Any) -> Schema:
    """An object with these fields: JSON types, several with bars between them, or schemas."""
    properties = {name: {"type": kind.split("|")} if isinstance(kind, str) else kind for name, kind in types.items()}
    return {"type": "object", "required": list(types), "properties": properties}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def listed(kind: Schema) -> Schema:
    return {"type": "array", "items": kind}


def or_null(kind: Schema) -> Schema:
    return {"anyOf": [kind, {"type": "null"}]}


STATUS = one_of("in_progress", "completed", "incomplete")
LOGPROB = required(token="string", logprob="number", bytes=listed({"type": "integer"}), top_logprobs="array")
PARTS = {
    "input_text": required(text="string"),
    "output_text": {
        **required(text="string", annotations="array"),
        "properties": {"text": {"type": "string"}, "annotations": {"type": "array"}, "logprobs": listed(LOGPROB)},
    },
    "reasoning_text": required(text="string"),
    "summary_text": required(text="string"),
}
PART = {
    "oneOf": [{"allOf": [kind, required(type=one_of(name))]} for name, kind in PARTS.items()],
}
ITEMS = {
    "message": required(
        id="string", status=STATUS, role=one_of("user", "assistant", "system", "developer"), content=listed(PART)
    ),
    "function_call": required(id="string", call_id="string", name="string", arguments="string", status=STATUS),
    "function_call_output": required(id="string", call_id="string", output="string|array", status=STATUS),
    "reasoning": {
        "allOf": [
            required(id="string", summary=listed(PART)),
            {"properties": {"content": listed(PART), "encrypted_content": {"type": "string"}}},
        ]
    },
}
ITEM = {"oneOf": [{"allOf": [kind, required(type=one_of(name))]} for name, kind in ITEMS.items()]}
TOOL = required(
    **{"type": one_of("function"), "name": "string"},
    **{"description": "string|null", "parameters": "object|null", "strict": "boolean|null"},
)
USAGE = required(
    **{"input_tokens": "integer", "output_tokens": "integer", "total_tokens": "integer"},
    input_tokens_details=required(cached_tokens="integer"),
    output_tokens_details=required(reasoning_tokens="integer"),
)
TOOL_CHOICE = {
    "anyOf": [
        one_of("none", "auto", "required"),
        required(type=one_of("function")),
        required(type=one_of("allowed_tools"), tools="array", mode=one_of("none", "auto", "required")),
    ]
}
FORMAT = {
    "anyOf": [
        required(type=one_of("text", "json_object")),
        required(type=one_of("json_schema"), name="string", description="string|null", schema={}, strict="boolean"),
    ]
}
RESPONSE = required(
    **{"id": "string", "object": one_of("response"), "model": "string", "status": "string"},
    **{"created_at": "integer", "completed_at": "integer|null"},
    incomplete_details=or_null(required(reason="string")),
    **{"previous_response_id": "string|null", "instructions": "string|null"},
    output=listed(ITEM),
    error=or_null(required(code="string", message="string")),
    tools=listed(TOOL),
    tool_choice=TOOL_CHOICE,
    truncation=one_of("auto", "disabled"),
    **{"parallel_tool_calls": "boolean", "store": "boolean", "background": "boolean"},
    text=required(format=FORMAT),
    **{"top_p": "number", "presence_penalty": "number", "frequency_penalty": "number", "temperature": "number"},
    **{"top_logprobs": "integer", "max_output_tokens": "integer|null", "max_tool_calls": "integer|null"},
    reasoning=or_null(required(effort="string|null", summary="string|null")),
    usage=or_null(USAGE),
    **{"service_tier": "string", "metadata": {}, "safety_identifier": "string|null", "prompt_cache_key": "string|null"},
)
_AT: dict[str, Any] = {"item_id": "string", "output_index": "integer"}
_WITHIN: dict[str, Any] = {**_AT, "content_index": "integer"}
EVENTS = {
    **{
        f"response.{kind}": required(response=RESPONSE)
        for kind in ("created", "in_progress", "completed", "failed", "incomplete")
    },
    **{f"response.output_item.{kind}": required(output_index="integer", item=ITEM) for kind in ("added", "done")},
    **{f"response.content_part.{kind}": required(**_WITHIN, part=PART) for kind in ("added", "done")},
    "response.output_text.delta": required(**_WITHIN, delta="string"),
    "response.output_text.done": required(**_WITHIN, text="string"),
    "response.function_call_arguments.delta": required(**_AT, delta="string"),
    "response.function_call_arguments.done": required(**_AT, arguments="string"),
}
"""By their types. Thoughts are told with OpenAI's `reasoning_text`, which Open Responses calls `reasoning`."""


def faults(value: Any, schema: Schema) -> list[str]:
    """What a value lacks."""
    return [f"{error.json_path}: {error.message:.200}" for error in Draft202012Validator(schema).iter_errors(value)]


def event_faults(events: list[Any]) -> Iterator[str]:
    """What the events of a stream lack."""
    for number, event in enumerate(events):
        if event["type"].startswith("response.reasoning_text."):
            continue
        yield from faults(event, EVENTS[event["type"]])
        if event["sequence_number"] != number:
            yield f"{event['type']} has the number {event['sequence_number']}, not {number}"
