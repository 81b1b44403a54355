"""What messages contain, texts and images, and what replaces contents that no chat template can read (images for a
model that does not see, invalid text, foreign fields).

A wrong parameter is refused: its sender can change it. A conversation was written by tools, by other servers and by
people who paste images, and it comes again with every request, so an error would end it for ever. What cannot be read
there is replaced or left out, and noted. Ids and names are never changed: a result would belong to another call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.error_text import add_note, warn_once
from cortexmlx.protocols.fields import reject_unknown_fields
from cortexmlx.protocols.images import KINDS, ImageBytes, ImageParts
from cortexmlx.structured.schemas import NO_TEXT, is_text
from cortexmlx.structured.tools import load_client_json
from cortexmlx.types.messages import suggest_name

INVALID_JSON = "INVALID_JSON"
"""The argument that holds the text of arguments that are no JSON object, as Anthropic's documentation names it."""

MAX_DEPTH = 128
"""How deep the arguments of a call may be nested. Deeper ones are a text."""

THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")
"""The types of parts that are thoughts."""

_TEXT_TYPES = ("text", "input_text", "output_text", "summary_text")
_MEDIA = {"image": "An image", "audio": "Audio", "video": "A video", "document": "A document", "file": "A file"}
_ANNOTATIONS = ("description", "title", "$comment")
_EXAMPLES = ("default", "examples")


_IGNORED_FIELDS = frozenset({"annotations", "cache_control", "caller", "citations", "index", "type"})
"""Fields of any part that change no answer here, and that everybody sends."""


class _SeparateLine(str):
    """A text that must stand on a line of its own when parts are joined."""

    __slots__ = ()


def sanitize_text(text: str) -> str:
    """Replace NULs and lone surrogates, which no tokenizer takes, by U+FFFD, and note it."""
    if is_text(text):
        return text
    add_note("text", "a NUL or half of a surrogate pair in the conversation or the tools is read as U+FFFD")
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\0", "\ufffd")


def sanitize_json(value: Any, depth: int = 0) -> Any:
    """Return a JSON value with all its texts sanitized. Raises RecursionError if it is nested deeper than MAX_DEPTH."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, str):
        return sanitize_text(value)
    if isinstance(value, Mapping):
        return {sanitize_text(str(name)): sanitize_json(each, depth + 1) for name, each in value.items()}
    return [sanitize_json(each, depth + 1) for each in value] if isinstance(value, list) else value


def sanitize_tool(value: Any) -> Any:
    """Return a tool with sanitized descriptions and examples at any depth. Names and schemas are checked later."""
    if isinstance(value, list):
        return [sanitize_tool(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    sanitized: dict[str, Any] = {}
    for name, each in value.items():
        if name in _EXAMPLES or (name in _ANNOTATIONS and isinstance(each, str)):
            sanitized[name] = sanitize_json(each)
        else:
            sanitized[name] = sanitize_tool(each)
    return sanitized


def pick_known_fields(
    fields: Mapping[str, Any], known_names: Iterable[str], label: str, expected_names: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the fields of a message part or tool that are known and not null. Other fields are ignored.

    Raises InvalidRequest if an unknown field is like one of the `expected_names` that is not there: it is a typing
    error.
    """
    known_names = frozenset(known_names)
    ignored_names = _IGNORED_FIELDS - known_names
    picked_fields = {name: value for name, value in fields.items() if value is not None and name not in ignored_names}
    unknown_names = [name for name in picked_fields if name not in known_names]
    missing = [name for name in expected_names if name not in fields]
    reject_unknown_fields(
        [name for name in unknown_names if missing and suggest_name(name[:80], missing)], known_names, label
    )
    if unknown_names:
        warn_once(
            f"fields of {label}", f"fields of {label} that are not known are ignored, such as {unknown_names[0][:80]!r}"
        )
        picked_fields = {name: value for name, value in picked_fields.items() if name in known_names}
    return picked_fields


def pick_message_fields(message: Mapping[str, Any], known_names: Iterable[str], label: str) -> dict[str, Any]:
    """Return a message's known fields. Raises InvalidRequest if an unknown one may be meant as a missing `content`."""
    if "content" not in message and message.get("role") in ("user", "system", "developer"):
        reject_unknown_fields([name for name, value in message.items() if value is not None], tuple(known_names), label)
    return pick_known_fields(message, known_names, label, () if message.get("tool_calls") else ("content",))


def require_name(name: str, value: object) -> str:
    """Return an id or a name unchanged. Raises InvalidRequest if it is not a valid text."""
    if not isinstance(value, str):
        raise InvalidRequest(f"`{name}` is {value!r:.80}, but must be a text", field=name)
    if not is_text(value):
        raise InvalidRequest(f"`{name}` {NO_TEXT}", field=name)
    return value


Piece = str | ImageBytes
"""A text or an image of a message."""

Content = str | list[dict[str, Any]]
"""The content of a message as the engine reads it: a text, or parts if there is an image."""


def read_text(content: object, *, loose: bool = False, thoughts: list[str] | None = None) -> str:
    """Return the text of a message's `content`: a text, or a list of parts. Null is empty; a part that cannot be read
    becomes a line that says so.

    A `loose` content may be any JSON, as tools return it. Parts that are thoughts are added to `thoughts`; None: they
    are left out. Raises InvalidRequest for what is neither a text nor parts.
    """
    pieces = read_pieces(content, loose=loose, thoughts=thoughts)
    return "".join(piece for piece in pieces if isinstance(piece, str))


PLACE: Any = object()
"""The key of a part's place in the client's message, if that is not in `content`. No JSON has it."""


def add_image_paths(field: str, parts: object) -> object:
    """Return a message's parts. Each image gets its path `field[index]` in the client's message, for errors."""
    if not isinstance(parts, list):
        return parts
    return [
        {**part, PLACE: f"{field}[{index}]"} if isinstance(part, Mapping) and part.get("type") in KINDS else part
        for index, part in enumerate(parts)
    ]


def read_pieces(
    content: object,
    *,
    loose: bool = False,
    thoughts: list[str] | None = None,
    images: ImageParts | None = None,
    strict: bool = False,
) -> list[Piece]:
    """Return the texts and images of a message's `content`: see `read_text`. Neighbouring texts are joined. Images are
    read by `images`; None: they become texts. If `strict`, an image that cannot be read raises InvalidRequest.
    """
    if loose and isinstance(content, Mapping) and isinstance(content.get("type"), str):
        content = [content]
    if content is None or isinstance(content, str):
        return [sanitize_text(content or "")]
    if not isinstance(content, list | tuple):
        if not loose:
            raise InvalidRequest(f"`content` is {content!r:.80}, but must be a text", field="content")
        return [_to_json_text(content)]
    pieces: list[Piece] = []
    texts: list[str] = []
    after_line = False
    for index, part in enumerate(content):
        path = part[PLACE] if isinstance(part, Mapping) and PLACE in part else f"content[{index}]"
        image = read_image(part, path, images, strict=strict)
        if isinstance(image, ImageBytes):
            pieces += [sanitize_text("".join(texts)), image]
            texts, after_line = [], False
            continue
        text = read_part(part, path, loose=loose, thoughts=thoughts) if image is None else image
        is_line = isinstance(text, _SeparateLine)
        if (is_line or after_line) and text and texts and not texts[-1].endswith("\n"):
            texts.append("\n")
        if text:
            texts.append(text)
            after_line = is_line
    pieces = [piece for piece in (*pieces, sanitize_text("".join(texts))) if piece]
    return pieces or [""]


def read_image(part: object, path: str, images: ImageParts | None, *, strict: bool = False) -> Piece | None:
    """Return the image of a part, or a line of text in place of an unreadable one; None if the part is no image, or if
    `images` is None. See `ImageParts.read`.
    """
    if images is None or not isinstance(part, Mapping) or part.get("type") not in KINDS:
        return None
    return images.read(part, path, strict=strict) or _SeparateLine("[An image was here, but it cannot be read.]")


def join_pieces(pieces: Iterable[Piece], separator: str = "") -> Content:
    """Return texts and images as a message's content. `separator` stands between neighbouring texts only."""
    parts: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, ImageBytes):
            parts.append(piece.to_part())
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += separator + piece
        else:
            parts.append({"type": "text", "text": piece})
    if all(part["type"] == "text" for part in parts):
        return str(parts[0]["text"]) if parts else ""
    return [part for part in parts if part.get("text") != ""]


def split_content(content: Content) -> list[Piece]:
    """Return the texts and images that `join_pieces` joined."""
    if isinstance(content, str):
        return [content]
    return [ImageBytes(part["image"]) if part["type"] == "image" else part["text"] for part in content]


def read_part(part: object, path: str = "", *, loose: bool = False, thoughts: list[str] | None = None) -> str:
    """Return the text of one part of a message's content. `path` names it in errors. See `read_text`."""
    if part is None or isinstance(part, str):
        return part or ""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        if loose:
            return _SeparateLine(_to_json_text(part))
        raise InvalidRequest(f"a part is {part!r:.80}, but must be an object with a `type`", field=path or None)
    if kind in THOUGHTS:
        thought = part.get(kind, part.get("text"))
        if thoughts is None:
            note_omitted_thoughts()
        elif kind != "redacted_thinking":
            thoughts.append(thought if isinstance(thought, str) else read_text(thought, loose=True))
        return ""
    if kind in _TEXT_TYPES or kind == "refusal":
        text = part.get("refusal" if kind == "refusal" else "text")
        if text is not None and not isinstance(text, str):
            field_path = f"{path}.text" if path else "text"
            raise InvalidRequest(f"the `text` of a part of type {kind!r} is {text!r:.80}, no text", field=field_path)
        return text or ""
    if kind == "tool_reference":
        return f"Tool: {require_name('tool_name', part.get('tool_name'))}"
    if (nested_text := _nested_text(part, kind)) is not None:
        return _SeparateLine(nested_text)
    media_name = next((_MEDIA[name] for name in _MEDIA if name in kind), None)
    if media_name is None and isinstance(part.get("text"), str):
        return str(part["text"])
    part_name = media_name or f"A part of the type {kind[:40]!r}"
    add_note(
        f"a part: {media_name}", f"{part_name.lower()} in the conversation is not read: a line says that it was there"
    )
    return _SeparateLine(f"[{part_name} was here, but only text can be read.]")


def orphan_result_message(result: Content) -> dict[str, Any]:
    """Return a user's message with the result of a tool call that is not in the conversation."""
    add_note("results", "results of calls that are not in the conversation are read as messages of the user")
    heading = "[The result of an earlier call:]\n"
    content = heading + result if isinstance(result, str) else [{"type": "text", "text": heading}, *result]
    return {"role": "user", "content": content}


def note_omitted_thoughts() -> None:
    """Add the note that thoughts were left out: not written by this server for this client, or unreadable."""
    add_note("thoughts", "thoughts that this server did not write for this client, or cannot read, are left out")


def read_arguments(arguments: object) -> Mapping[str, Any]:
    """Return an earlier tool call's arguments as an object. Text that is no JSON object is kept under INVALID_JSON."""
    values, is_plain = arguments, False
    try:
        if isinstance(arguments, str):
            values = load_client_json(arguments) if arguments.strip() else None
            max_depth = arguments.count("[") + arguments.count("{")
            is_plain = max_depth < MAX_DEPTH and "\\u" not in arguments and is_text(arguments)
        if isinstance(values, Mapping):
            return values if is_plain else dict(sanitize_json(values))
        return {} if values is None else _wrap_invalid_arguments(arguments)
    except (ValueError, RecursionError):
        return _wrap_invalid_arguments(arguments)


def _wrap_invalid_arguments(arguments: object) -> Mapping[str, Any]:
    """Return an object that holds unreadable arguments as a text, under INVALID_JSON."""
    add_note(
        "arguments", f"the arguments of an earlier call are no JSON object: they are read as a text, {INVALID_JSON}"
    )
    return {INVALID_JSON: sanitize_text(arguments if isinstance(arguments, str) else _to_json_text(arguments))}


def _nested_text(part: Mapping[str, Any], kind: str) -> str | None:
    """Return the text inside a `document` or `search_result` part; None if it has none."""
    source = part.get("source")
    if kind == "search_result":
        return read_text(part.get("content"), loose=True)
    if kind != "document" or not isinstance(source, Mapping):
        return None
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    return read_text(source.get("content"), loose=True) if source.get("type") == "content" else None


def _to_json_text(value: object) -> str:
    """Return a value as sanitized JSON text."""
    return sanitize_text(json.dumps(value, ensure_ascii=False))
