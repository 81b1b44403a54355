"""`/api/generate`: the reader, the body of a reply, and the lines of a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import BodyFields, UnservedField, require_type
from cortexmlx.protocols.history import split_content
from cortexmlx.protocols.ollama.chat import (
    NO_EFFECT,
    SHARED_FIELDS,
    AnswerLines,
    image_content,
    make_load_request,
    read_shared,
)
from cortexmlx.protocols.openai import parameters
from cortexmlx.protocols.openai.messages import read_messages
from cortexmlx.protocols.request import Body, ReplyInfo, Request, RequestDefaults, require_prompt_text, with_notes
from cortexmlx.types.request import Completion, Message

URL = "/api/generate"

_TEXT_ONLY = UnservedField("the model writes text only")
FIELDS = BodyFields(
    f"a {URL} body",
    SHARED_FIELDS | {"context", "images", "prompt", "raw", "system"},
    NO_EFFECT,
    {
        "height": _TEXT_ONLY,
        "steps": _TEXT_ONLY,
        "suffix": UnservedField("a text is continued at its end only", ("",)),
        "template": UnservedField(
            "the model's own chat template is used: send `raw` and the whole prompt for another", ("",)
        ),
        "width": _TEXT_ONLY,
    },
)

_MESSAGE_FIELDS = ("system", "context", "images")
"""The fields that a raw prompt cannot have."""


@with_notes
def read(body: Mapping[str, Any], defaults: RequestDefaults) -> Request:
    """Parse the JSON body of an `/api/generate` call into a Request. A body without a prompt asks only to load the
    model; its Request has no prompt. Raises InvalidRequest.
    """
    fields = FIELDS.exclude(defaults.unserved).validate(body)
    text, raw = require_type("prompt", fields.get("prompt", ""), str, "a text"), parameters.read_flag(fields, "raw")
    request_parts = read_shared(fields, {}, defaults)
    if not text:
        return make_load_request(body, request_parts)
    if raw:
        if given := [name for name in _MESSAGE_FIELDS if fields.get(name)]:
            raise InvalidRequest(f"a raw prompt is all that the model reads: leave out `{given[0]}`", field=given[0])
        return Request((require_prompt_text(text),), **request_parts | {"template_vars": {}}, raw=True, body=body)
    system = require_type("system", fields.get("system", ""), str, "a text")
    earlier = _decode_context(fields.get("context", []))
    if system:
        others = (message for message in earlier if message["role"] != "system")
        earlier = [{"role": "system", "content": system}, *others]
    prompt = {"role": "user", "content": image_content(fields.get("images", []), text)}
    messages = read_messages([*earlier, prompt], ["context"] * len(earlier) + [""], defaults.image_parts())
    return Request((messages,), **request_parts, body=body)


def write(request: Request, answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    """Return the JSON body of a whole reply. `answers` is empty if the model was only to be loaded."""
    return GenerateLines(request, info).reply_body(answers)


class GenerateLines(AnswerLines):
    """The lines of an `/api/generate` stream. The last one has the `context` that continues it."""

    def piece_fields(self, text: str, thinking: str = "", calls: Sequence[Body] = ()) -> Body:
        """Return the fields `response` and `thinking` with a piece of the answer."""
        return {"response": text, **({"thinking": thinking} if thinking else {})}

    def end_fields(self, answer: Completion) -> Body:
        """Return the field `context`, or no field for a raw prompt."""
        messages: Any = self._request.prompts[0]
        return {} if self._request.raw else {"context": _encode_context(messages, answer.text)}


# The `context` of a reply, which a client may send back: numbers that hold the conversation's texts. Ollama's are token
# ids; clients do not look into them.

_BYTES = 6
"""Bytes of a number. JavaScript has no larger integers."""

_ROLES = {role: role for role in ("system", "user", "assistant")}


def _encode_context(messages: Sequence[Message], answer: str) -> list[int]:
    """Return messages and the answer to them as numbers. Images are left out."""
    turns = [(str(message["role"]), _join_texts(message["content"])) for message in messages]
    data = json.dumps([*turns, ("assistant", answer)]).encode()
    data += b" " * (-len(data) % _BYTES)
    return [int.from_bytes(data[start : start + _BYTES]) for start in range(0, len(data), _BYTES)]


def _join_texts(content: Any) -> str:
    return "".join(piece for piece in split_content(content) if isinstance(piece, str))


def _decode_context(context: object) -> list[Message]:
    """Return the messages in a `context`, which any client may have written. Raises InvalidRequest."""
    numbers = require_type("context", context, list, "a list of numbers")
    try:
        turns = json.loads(b"".join(number.to_bytes(_BYTES) for number in numbers) or b"[]")
        return [{"role": _ROLES[role], "content": text + ""} for role, text in turns]
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        message = "context is not from a reply of this server: leave it out, or send the conversation to /api/chat"
        raise InvalidRequest(message, field="context") from None
