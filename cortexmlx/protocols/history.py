"""What a conversation may hold that no chat template reads, and what becomes of it.

A wrong parameter is refused: its sender can change it. A conversation was written by tools, by other servers and by
people who paste images, and it comes again with every request, so an error would end it for ever. What cannot be read
there is replaced or left out, and noted. Ids and names are never changed: a result would belong to another call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.error_text import note, tell_once
from cortexmlx.protocols.fields import check_fields
from cortexmlx.structured.schemas import NO_TEXT, is_text
from cortexmlx.structured.tools import loaded
from cortexmlx.types.messages import meant

INVALID_JSON = "INVALID_JSON"
"""The argument that holds the text of arguments that are no JSON object, as Anthropic's documentation names it."""

MOST_DEPTH = 128
"""How deep the arguments of a call may be nested. Deeper ones are a text."""

THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")
"""The types of parts that are thoughts."""

_TEXT = ("text", "input_text", "output_text", "summary_text")
_MEDIA = {"image": "An image", "audio": "Audio", "video": "A video", "document": "A document", "file": "A file"}
_ANNOTATIONS = ("description", "title", "$comment")
_EXAMPLES = ("default", "examples")


_HINTS = frozenset({"annotations", "cache_control", "caller", "citations", "index", "type"})
"""Fields of any part that change no answer here, and that everybody sends."""


class _Line(str):
    """A text that stands in a line of its own."""

    __slots__ = ()


def mend(text: str) -> str:
    """Return a text without NULs and halves of surrogate pairs, which no tokenizer takes. They become U+FFFD."""
    if is_text(text):
        return text
    note("text", "a NUL or half of a surrogate pair in the conversation or the tools is read as U+FFFD")
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\0", "\ufffd")


def mend_values(value: Any, depth: int = 0) -> Any:
    """Return a JSON value with all its texts mended. Raises RecursionError beyond MOST_DEPTH."""
    if depth > MOST_DEPTH:
        raise RecursionError
    if isinstance(value, str):
        return mend(value)
    if isinstance(value, Mapping):
        return {mend(str(name)): mend_values(each, depth + 1) for name, each in value.items()}
    return [mend_values(each, depth + 1) for each in value] if isinstance(value, list) else value


def mend_tool(value: Any) -> Any:
    """Return a tool with mended descriptions and examples, also those in its schema. Other texts are rules and names,
    which are refused where they are no texts.
    """
    if isinstance(value, list):
        return [mend_tool(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    mended: dict[str, Any] = {}
    for name, each in value.items():
        if name in _EXAMPLES or (name in _ANNOTATIONS and isinstance(each, str)):
            mended[name] = mend_values(each)
        else:
            mended[name] = mend_tool(each)
    return mended


def known_fields(
    given: Mapping[str, Any], known: Iterable[str], what: str, guarded: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the fields of a part of a conversation, or of a tool, that are known and not null. Others are ignored.

    Raises InvalidRequest if an unknown field is like a `guarded` one that is not there: it is a typing error.
    """
    known = frozenset(known)
    idle = _HINTS - known
    said = {name: value for name, value in given.items() if value is not None and name not in idle}
    foreign = [name for name in said if name not in known]
    missing = [name for name in guarded if name not in given]
    check_fields([name for name in foreign if missing and meant(name[:80], missing)], known, what)
    if foreign:
        tell_once(f"fields of {what}", f"fields of {what} that are not known are ignored, such as {foreign[0][:80]!r}")
        said = {name: value for name, value in said.items() if name in known}
    return said


def message_fields(message: Mapping[str, Any], known: Iterable[str], what: str) -> dict[str, Any]:
    """Return the known fields of a message. Raises InvalidRequest if it has no `content`, and an unknown field may be
    what was to be it.
    """
    if "content" not in message and message.get("role") in ("user", "system", "developer"):
        check_fields([name for name, value in message.items() if value is not None], tuple(known), what)
    return known_fields(message, known, what, () if message.get("tool_calls") else ("content",))


def checked_name(name: str, value: object) -> str:
    """Return an id or a name. Raises InvalidRequest if it is no text: it is never changed."""
    if not isinstance(value, str):
        raise InvalidRequest(f"`{name}` is {value!r:.80}, but must be a text", field=name)
    if not is_text(value):
        raise InvalidRequest(f"`{name}` {NO_TEXT}", field=name)
    return value


def read_text(content: object, *, loose: bool = False, thoughts: list[str] | None = None) -> str:
    """Return the text of a `content`: a text, or a list of parts. Null is empty, and what is not read becomes a line
    that says so.

    A `loose` content may be any JSON, as tools return it. Parts that are thoughts are added to `thoughts`; None: they
    are left out. Raises InvalidRequest for what is neither a text nor parts.
    """
    if loose and isinstance(content, Mapping) and isinstance(content.get("type"), str):
        content = [content]
    if content is None or isinstance(content, str):
        return mend(content or "")
    if not isinstance(content, list | tuple):
        if not loose:
            raise InvalidRequest(f"`content` is {content!r:.80}, but must be a text", field="content")
        return _as_json(content)
    pieces: list[str] = []
    apart = False
    for place, part in enumerate(content):
        piece = read_part(part, f"content[{place}]", loose=loose, thoughts=thoughts)
        line = isinstance(piece, _Line)
        if (line or apart) and piece and pieces and not pieces[-1].endswith("\n"):
            pieces.append("\n")
        if piece:
            pieces.append(piece)
            apart = line
    return mend("".join(pieces))


def read_part(part: object, path: str = "", *, loose: bool = False, thoughts: list[str] | None = None) -> str:
    """Return the text of a part of any protocol, which `path` names in errors. See `read_text`."""
    if part is None or isinstance(part, str):
        return part or ""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        if loose:
            return _Line(_as_json(part))
        raise InvalidRequest(f"a part is {part!r:.80}, but must be an object with a `type`", field=path or None)
    if kind in THOUGHTS:
        said = part.get(kind, part.get("text"))
        if thoughts is None:
            leave_out_thoughts()
        elif kind != "redacted_thinking":
            thoughts.append(said if isinstance(said, str) else read_text(said, loose=True))
        return ""
    if kind in _TEXT or kind == "refusal":
        text = part.get("refusal" if kind == "refusal" else "text")
        if text is not None and not isinstance(text, str):
            where = f"{path}.text" if path else "text"
            raise InvalidRequest(f"the `text` of a part of type {kind!r} is {text!r:.80}, no text", field=where)
        return text or ""
    if kind == "tool_reference":
        return f"Tool: {checked_name('tool_name', part.get('tool_name'))}"
    if (inner := _inner(part, kind)) is not None:
        return _Line(inner)
    what = next((_MEDIA[name] for name in _MEDIA if name in kind), None)
    if what is None and isinstance(part.get("text"), str):
        return str(part["text"])
    shown = what or f"A part of the type {kind[:40]!r}"
    note(f"a part: {what}", f"{shown.lower()} in the conversation is not read: a line says that it was there")
    return _Line(f"[{shown} was here, but only text can be read.]")


def orphan(result: str) -> dict[str, str]:
    """Return the result of a call that is not in the conversation, as a user's message."""
    note("results", "results of calls that are not in the conversation are read as messages of the user")
    return {"role": "user", "content": f"[The result of an earlier call:]\n{result}"}


def leave_out_thoughts() -> None:
    """Note that thoughts are left out which this server cannot read or did not write."""
    note("thoughts", "thoughts that this server did not write for this client, or cannot read, are left out")


def read_arguments(arguments: object) -> Mapping[str, Any]:
    """Return the arguments of an earlier call as an object. What is none is kept as a text, in INVALID_JSON."""
    values, simple = arguments, False
    try:
        if isinstance(arguments, str):
            values = loaded(arguments) if arguments.strip() else None
            opened = arguments.count("[") + arguments.count("{")
            simple = opened < MOST_DEPTH and "\\u" not in arguments and is_text(arguments)
        if isinstance(values, Mapping):
            return values if simple else dict(mend_values(values))
        return {} if values is None else _invalid(arguments)
    except (ValueError, RecursionError):
        return _invalid(arguments)


def _invalid(arguments: object) -> Mapping[str, Any]:
    note("arguments", f"the arguments of an earlier call are no JSON object: they are read as a text, {INVALID_JSON}")
    return {INVALID_JSON: mend(arguments if isinstance(arguments, str) else _as_json(arguments))}


def _inner(part: Mapping[str, Any], kind: str) -> str | None:
    """Return the text in a document or a result of a search; None: it has none."""
    source = part.get("source")
    if kind == "search_result":
        return read_text(part.get("content"), loose=True)
    if kind != "document" or not isinstance(source, Mapping):
        return None
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    return read_text(source.get("content"), loose=True) if source.get("type") == "content" else None


def _as_json(value: object) -> str:
    return mend(json.dumps(value, ensure_ascii=False))
