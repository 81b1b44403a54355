"""Read a batch: OpenAI batch JSONL, simple JSONL or plain lines, one request per line. The input is not held in memory.

A line that cannot be understood becomes a `InvalidLine` with its number, and the run continues. An id that occurs twice
ends the run: two records with the same id could not be told apart.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from cortexmlx.cli.files.source import InputFormat, is_jsonl, open_ahead
from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.batch import (
    UNSERVED,
    BatchRequest,
    InvalidLine,
    LineId,
    LineStyle,
    line_style,
    read_line,
    read_line_id,
    request_key,
)
from cortexmlx.protocols.images import CheckImage, ReadElsewhere
from cortexmlx.protocols.request import Request, RequestDefaults, require_prompt_text
from cortexmlx.types.messages import NO_VARIABLES, TemplateVars
from cortexmlx.types.sampling_params import SamplingParams


class RequestIds:
    """The request ids of a batch input, in input order, each with its line number. Rejects duplicates.

    `lines` and `digests` are by the key of `request_key`. `digests` has a digest of each line's text, for an input that
    was read ahead.
    """

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.digests: dict[str, str] = {}

    def add(self, identity: LineId | None, line: int, text: bytes | None = None) -> None:
        """Add an id. Raises InvalidRequest, with both line numbers, for a duplicate."""
        key = request_key(identity, line)
        first = self.lines.setdefault(key, line)
        if text is not None:
            self.digests[key] = blake2b(text, digest_size=8).hexdigest()
        if first != line:
            raise InvalidRequest(
                f"lines {first} and {line} both have the id {identity!r:.80}: their answers could not be told apart, "
                "so every request needs an id of its own (one without has the number of its line)"
            )


class BatchReader:
    """Iterates over a batch input: yields a `BatchRequest` or `InvalidLine` per line, None while a pipe is silent.

    - `lines`: the lines as bytes. None stands for a line that has not arrived yet, and is passed on.
    - `jsonl`: whether the lines are JSON. With None, the first line that is not blank decides: JSON begins with a
      brace.
    - `defaults`, `template_vars`: used for what a line does not say itself.
    - `ids`: gets the id of every line, if given.
    - `model`, `adapters`: the name of the model that answers, and those of its adapters, which a line may name.
    - `models`: the models that the bodies name. They do not change which model answers.
    """

    def __init__(
        self,
        lines: Iterable[bytes | None],
        defaults: SamplingParams,
        *,
        jsonl: bool | None,
        raw: bool,
        template_vars: TemplateVars = NO_VARIABLES,
        ids: RequestIds | None = None,
        model: str = "",
        adapters: Collection[str] = (),
    ) -> None:
        self.models: set[str] = set()
        self._lines = lines
        self._defaults = RequestDefaults(defaults, template_vars, raw, UNSERVED, adapters=adapters)
        self._model = model
        self._jsonl = jsonl
        self._ids = ids

    def restrict_variables(self, variables: frozenset[str] | None) -> None:
        """Ignore lines' template variables other than `variables`, those that the template reads. None: keep all."""
        self._defaults = replace(self._defaults, known_vars=variables)

    def enable_images(self, check: CheckImage | None, read_elsewhere: ReadElsewhere | None = None) -> None:
        """Have the images that lines name read from data URLs, or else by `read_elsewhere`. `check` prepares each
        image for the model. Without `check`, a line of text replaces each image.
        """
        self._defaults = replace(self._defaults, check_image=check, read_elsewhere=read_elsewhere)

    def __iter__(self) -> Iterator[BatchRequest | InvalidLine | None]:
        jsonl, numbered_lines = detect_format(self._lines, self._jsonl)
        parse = self._parse_json if jsonl else self._parse_text
        for number, line in numbered_lines:
            if line is None:
                yield None
                continue
            item = parse(number, line)
            if self._ids is not None:
                self._ids.add(item.id, number)
            yield item

    def _parse_text(self, number: int, line: bytes) -> BatchRequest | InvalidLine:
        """Parse a plain line as one prompt."""
        defaults = self._defaults
        variables = NO_VARIABLES if defaults.raw else defaults.template_vars
        try:
            prompt = require_prompt_text(decode_line(line))
        except InvalidRequest as error:
            return InvalidLine(number, number, LineStyle.SIMPLE, str(error))
        return BatchRequest(
            number, number, LineStyle.SIMPLE, Request((prompt,), defaults.params, variables, defaults.raw)
        )

    def _parse_json(self, number: int, line: bytes) -> BatchRequest | InvalidLine:
        """Parse a JSON line as an OpenAI batch request or a simple one."""
        identity: LineId | None = None
        style = LineStyle.SIMPLE
        try:
            data = parse_object(line)
            style = line_style(data)
            identity = read_line_id(data, number)
            request = read_line(data, style, self._defaults, self._model)
        except InvalidRequest as error:
            return InvalidLine(number, identity, style, str(error))
        except RecursionError:  # JSON within JSON, such as the arguments of a tool call
            return InvalidLine(number, identity, style, "not JSON that can be read: nested too deeply")
        body = data if style is LineStyle.SIMPLE else data["body"]
        if isinstance(model := body.get("model"), str) and not (isinstance(request, Request) and request.adapter):
            self.models.add(model)
        return BatchRequest(number, identity, style, request)


def collect_ids(lines: Iterable[bytes | None], jsonl: bool | None) -> RequestIds:
    """Read a whole input and return its request ids. Raises InvalidRequest if an id occurs twice."""
    ids = RequestIds()
    is_json, numbered_lines = detect_format(lines, jsonl)
    for number, line in numbered_lines:
        if line is None:
            continue
        identity: LineId | None = number
        if is_json:
            try:
                identity = read_line_id(parse_object(line), number)
            except (InvalidRequest, RecursionError):
                identity = None
        ids.add(identity, number, line)
    return ids


def read_ids(source: str, input_format: InputFormat) -> RequestIds | None:
    """Read all ids ahead of the run; None for a pipe, which can be read only once. Raises InvalidRequest if an id
    occurs twice.
    """
    with open_ahead(source) as file:
        return None if file is None else collect_ids(file, is_jsonl(source, input_format))


# The non-blank lines of an input, as text or as JSON objects.


def detect_format(lines: Iterable[bytes | None], jsonl: bool | None) -> tuple[bool, Iterator[tuple[int, bytes | None]]]:
    """Wait for the first line that is not blank. Return whether lines are JSON, and an iterator of all nonblank lines.

    Each line comes with its number, counted from 1. A None after the first line is passed on.
    """
    nonblank_lines = _nonblank_lines(lines)
    number, first = next(((number, line) for number, line in nonblank_lines if line is not None), (0, None))
    if first is None:
        return False, iter(())
    return first.startswith(b"{") if jsonl is None else jsonl, itertools.chain([(number, first)], nonblank_lines)


def _nonblank_lines(lines: Iterable[bytes | None]) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number and the content of each line that is not blank; None for a line that has not arrived yet."""
    number = 0
    for line in lines:
        if line is None:
            yield number, None
            continue
        number += 1
        if stripped := line.strip().removeprefix(b"\xef\xbb\xbf").lstrip():
            yield number, stripped


def decode_line(line: bytes) -> str:
    """Decode a line. Raises InvalidRequest with the position of a byte that is not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"not UTF-8: byte {error.object[error.start]:#04x} at column {error.start + 1}") from None


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse a line as a JSON object. Raises InvalidRequest."""
    try:
        data = json.loads(decode_line(line), object_pairs_hook=_reject_duplicates)
    except InvalidRequest:
        raise
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from None
    except ValueError as error:
        raise InvalidRequest(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequest(f"a JSON {type(data).__name__}, but must be an object with `prompt` or `messages`")
    return data


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of a JSON object's fields. Raises InvalidRequest if two have one name: one would be lost."""
    data = dict(pairs)
    if len(data) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise InvalidRequest(f"{name!r} is there more than once")
    return data
