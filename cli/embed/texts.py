"""Read texts to embed: JSONL with a `text` in each line, or plain lines. The input is not held in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from cortexmlx.cli.files.lines import filled_lines, json_object, utf8
from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.batch import Identity, identity_of
from cortexmlx.protocols.openai.embeddings import UNPROMPTED, Text, checked_text, read_text

_WANTED = "a `text`"


@dataclass(frozen=True)
class TextLine:
    """One line of the input."""

    number: int
    """The number of the line, from 1."""
    id: Identity
    """The user's id, or the number of the line."""
    text: Text | None
    """None: the line has no text."""
    refused: str
    """Why it has none."""
    digest: str
    """Of the whole line, so that a run that goes on notices another input."""


def read_texts(
    lines: Iterable[bytes | None], jsonl: bool | None, vocab_size: int | None = None, *, prompted: bool = False
) -> Iterator[TextLine | None]:
    """Yield a text for each line that is not blank. None, for a line that has not arrived yet, is passed on. If they
    are `prompted`, a prompt goes before each text, so token ids are none.

    With `jsonl` None, the first line decides: JSON begins with a brace. A line without a text is one with the reason.
    """
    is_json, filled = filled_lines(lines, jsonl)
    for number, line in filled:
        yield None if line is None else _read(number, line, is_json, vocab_size, prompted)


def _read(number: int, line: bytes, is_json: bool, vocab_size: int | None, prompted: bool) -> TextLine:
    digest, identity = blake2b(line, digest_size=8).hexdigest(), number
    text: Text | None = None
    why = ""
    try:
        if not is_json:
            text = checked_text(utf8(line), "the line")
        else:
            data = json_object(line, _WANTED)
            identity = identity_of(data, number)  # type: ignore[assignment]
            read = _text_of(data, vocab_size)
            if prompted and not isinstance(read, str):
                raise InvalidRequest(f"--prompt {UNPROMPTED}")
            text = read
    except InvalidRequest as error:
        why = str(error)
    return TextLine(number, identity, text, why, digest)


def _text_of(data: dict[str, object], vocab_size: int | None) -> Text:
    """Return the text of a JSON object. Its other fields are the user's own."""
    if "body" in data:
        raise InvalidRequest("it is a request of a batch file: `cortexmlx batch` answers those", field="body")
    names = [name for name in ("text", "input") if data.get(name) is not None]
    if not names:
        raise InvalidRequest("`text` is missing", field="text")
    if len(names) > 1:
        raise InvalidRequest("there are both `text` and `input`: give one of them", field="input")
    return read_text(data[names[0]], f"`{names[0]}`", vocab_size)


def count_texts(lines: Iterable[bytes]) -> int:
    """Return how many lines are not blank."""
    return sum(1 for line in lines if line.strip())
