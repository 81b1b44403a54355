"""Read a batch: OpenAI batch JSONL, simple JSONL or plain lines, one request per line. The input is not held in memory.

A line that cannot be understood becomes a `BadLine` with its number, and the run continues. An id that occurs twice
ends the run: two records with the same id could not be told apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b

from cortexmlx.cli.files.lines import filled_lines, json_object, utf8
from cortexmlx.cli.files.source import Format, is_jsonl, read_ahead
from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.batch import (
    UNSERVED,
    BadLine,
    BatchRequest,
    Identity,
    Style,
    identity_of,
    key_of,
    read_line,
    style_of,
)
from cortexmlx.protocols.request import Defaults, Request, checked_text
from cortexmlx.types.messages import NO_VARIABLES, TemplateVars
from cortexmlx.types.sampling_params import SamplingParams


class Ids:
    """The line number of each id, in input order.

    `lines` and `digests` are by the key of `key_of`. `digests` has a digest of each line's text, for an input that was
    read ahead.
    """

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.digests: dict[str, str] = {}

    def add(self, identity: Identity | None, line: int, text: bytes | None = None) -> None:
        """Add an id. Raises InvalidRequest, with both line numbers, for an id that is known already."""
        key = key_of(identity, line)
        first = self.lines.setdefault(key, line)
        if text is not None:
            self.digests[key] = blake2b(text, digest_size=8).hexdigest()
        if first != line:
            raise InvalidRequest(
                f"lines {first} and {line} both have the id {identity!r:.80}: their answers could not be told apart, "
                "so every request needs an id of its own (one without has the number of its line)"
            )


class BatchReader:
    """An iterable of the requests and bad lines of a batch.

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
        ids: Ids | None = None,
        model: str = "",
        adapters: Collection[str] = (),
    ) -> None:
        self.models: set[str] = set()
        self._lines = lines
        self._defaults = Defaults(defaults, template_vars, raw, UNSERVED, adapters=adapters)
        self._model = model
        self._jsonl = jsonl
        self._ids = ids

    def know(self, variables: frozenset[str] | None) -> None:
        """Leave out other variables than those that the chat template reads, where a line sets them; None: leave out
        none.
        """
        self._defaults = replace(self._defaults, known_vars=variables)

    def __iter__(self) -> Iterator[BatchRequest | BadLine | None]:
        jsonl, filled = filled_lines(self._lines, self._jsonl)
        parse = self._parse_json if jsonl else self._parse_text
        for number, line in filled:
            if line is None:
                yield None
                continue
            item = parse(number, line)
            if self._ids is not None:
                self._ids.add(item.id, number)
            yield item

    def _parse_text(self, number: int, line: bytes) -> BatchRequest | BadLine:
        usual = self._defaults
        variables = NO_VARIABLES if usual.raw else usual.template_vars
        try:
            prompt = checked_text(utf8(line))
        except InvalidRequest as error:
            return BadLine(number, number, Style.SIMPLE, str(error))
        return BatchRequest(number, number, Style.SIMPLE, Request((prompt,), usual.params, variables, usual.raw))

    def _parse_json(self, number: int, line: bytes) -> BatchRequest | BadLine:
        identity: Identity | None = None
        style = Style.SIMPLE
        try:
            data = json_object(line)
            style = style_of(data)
            identity = identity_of(data, number)
            request = read_line(data, style, self._defaults, self._model)
        except InvalidRequest as error:
            return BadLine(number, identity, style, str(error))
        except RecursionError:  # JSON within JSON, such as the arguments of a tool call
            return BadLine(number, identity, style, "not JSON that can be read: nested too deeply")
        body = data if style is Style.SIMPLE else data["body"]
        if isinstance(model := body.get("model"), str) and not (isinstance(request, Request) and request.adapter):
            self.models.add(model)
        return BatchRequest(number, identity, style, request)


def survey(lines: Iterable[bytes | None], jsonl: bool | None) -> Ids:
    """Return the ids of a whole input. Raises InvalidRequest if an id occurs twice."""
    ids = Ids()
    is_json, filled = filled_lines(lines, jsonl)
    for number, line in filled:
        if line is None:
            continue
        identity: Identity | None = number
        if is_json:
            try:
                identity = identity_of(json_object(line), number)
            except InvalidRequest:
                identity = None
        ids.add(identity, number, line)
    return ids


def ids_of(source: str, input_format: Format) -> Ids | None:
    """Return the ids of a regular file, read ahead. None for a pipe, which can be read only once. Raises InvalidRequest
    if an id occurs twice.
    """
    with read_ahead(source) as file:
        return None if file is None else survey(file, is_jsonl(source, input_format))
