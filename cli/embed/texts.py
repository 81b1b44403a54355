"""Read texts to embed: JSONL with a `text` in each line, or plain lines. The input is not held in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from cortexmlx.cli.files.lines import decode_line, detect_lines, parse_object
from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.batch import LineId, read_line_id
from cortexmlx.protocols.openai.embeddings import NO_PROMPT_FOR_TOKENS, TextOrTokens, read_input, require_text

_EXPECTED_FIELD = "a `text`"


@dataclass(frozen=True)
class TextLine:
    """One line of the input."""

    number: int
    """The number of the line, from 1."""
    id: LineId
    """The user's id, or the number of the line."""
    text: TextOrTokens | None
    """None: the line has no text."""
    error: str
    """Why it has none."""
    digest: str
    """Of the whole line, so that a run that goes on notices another input."""


def read_texts(
    lines: Iterable[bytes | None], jsonl: bool | None, vocab_size: int | None = None, *, has_prompt: bool = False
) -> Iterator[TextLine | None]:
    """Yield a text for each line that is not blank. None, for a line that has not arrived yet, is passed on. With
    `has_prompt`, a prompt is put before each text, so token ids are refused.

    With `jsonl` None, the first line decides: JSON begins with a brace. A line without a text is one with the reason.
    """
    is_json, nonblank_lines = detect_lines(lines, jsonl)
    for number, line in nonblank_lines:
        yield None if line is None else _parse_line(number, line, is_json, vocab_size, has_prompt)


def _parse_line(number: int, line: bytes, is_json: bool, vocab_size: int | None, has_prompt: bool) -> TextLine:
    """Parse a line as a text to embed, or note why it is none."""
    digest, identity = blake2b(line, digest_size=8).hexdigest(), number
    text: TextOrTokens | None = None
    reason = ""
    try:
        if not is_json:
            text = require_text(decode_line(line), "the line")
        else:
            data = parse_object(line, _EXPECTED_FIELD)
            identity = read_line_id(data, number)  # type: ignore[assignment]
            read = _text_field(data, vocab_size)
            if has_prompt and not isinstance(read, str):
                raise InvalidRequest(f"--prompt {NO_PROMPT_FOR_TOKENS}")
            text = read
    except InvalidRequest as error:
        reason = str(error)
    return TextLine(number, identity, text, reason, digest)


def _text_field(data: dict[str, object], vocab_size: int | None) -> TextOrTokens:
    """Return the text of a JSON object, whose other fields are ignored."""
    if "body" in data:
        raise InvalidRequest("it is a request of a batch file: `cortexmlx batch` answers those", field="body")
    names = [name for name in ("text", "input") if data.get(name) is not None]
    if not names:
        raise InvalidRequest("`text` is missing", field="text")
    if len(names) > 1:
        raise InvalidRequest("there are both `text` and `input`: give one of them", field="input")
    return read_input(data[names[0]], f"`{names[0]}`", vocab_size)


def count_texts(lines: Iterable[bytes]) -> int:
    """Count the lines that are not blank."""
    return sum(1 for line in lines if line.strip())
