"""Reading a batch: OpenAI batch JSONL, simple JSONL or plain lines, one request per line, nothing held in memory.

A line that cannot be understood becomes a `BadLine` with its number; it never ends the run. An id that occurs twice
does: two records of one name could not be told from each other.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.messages import NO_VARIABLES, TemplateVars
from cortexmlx.protocols.fields import check_fields, given
from cortexmlx.protocols.params import echo_of, params_of, variables_of
from cortexmlx.protocols.prompts import checked, prompts_of
from cortexmlx.protocols.request import BadLine, BatchRequest, Identity, Style, key_of
from cortexmlx.request import SamplingParams

ENDPOINTS = {style.value: style for style in (Style.CHAT, Style.COMPLETIONS, Style.RESPONSES)}
ENVELOPE = ("custom_id", "id", "method", "url", "body")


class Ids:
    """The line that each id was given on, in their order. `lines` are by the key of `key_of`, and so are `digests` of
    the texts of those that were read ahead.
    """

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.digests: dict[str, str] = {}

    def add(self, identity: Identity | None, line: int, text: bytes | None = None) -> None:
        """Raises InvalidRequest, with both line numbers, for an id that was there before."""
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
    """Iterates over the requests of `lines` (bytes, as they are in the file; None, which is passed on, for none yet).

    `jsonl` None decides by the first line that is not blank: an opening brace means JSON. `defaults` and
    `template_vars` are for what a line does not say itself. `ids`, if given, is told of every line's id. `models` are
    the names of models in the bodies, which change nothing.
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
    ) -> None:
        self.models: set[str] = set()
        self._lines = lines
        self._defaults = defaults
        self._jsonl = jsonl
        self._raw = raw
        self._template_vars = template_vars
        self._ids = ids

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
        variables = NO_VARIABLES if self._raw else self._template_vars
        try:
            return BatchRequest(
                number,
                number,
                Style.SIMPLE,
                (checked(_utf8(line)),),
                self._defaults,
                self._raw,
                template_vars=variables,
            )
        except InvalidRequest as error:
            return BadLine(number, number, Style.SIMPLE, str(error))

    def _parse_json(self, number: int, line: bytes) -> BatchRequest | BadLine:
        identity: Identity | None = None
        style = Style.SIMPLE
        try:
            data = _object(line)
            style = _style(data)
            identity = identity_of(data, number)
            if style is Style.SIMPLE:
                return self._request(number, identity, style, data, self._raw)
            _check_envelope(data)
            return self._request(number, identity, style, data["body"], raw=style is Style.COMPLETIONS)
        except InvalidRequest as error:
            return BadLine(number, identity, style, str(error))
        except RecursionError:  # JSON within JSON, as the arguments of a tool call are
            return BadLine(number, identity, style, "not JSON that can be read: nested too deeply")

    def _request(
        self, number: int, identity: Identity, style: Style, body: Mapping[str, Any], raw: bool
    ) -> BatchRequest:
        said = given(body, style)
        echo = style is Style.COMPLETIONS and echo_of(said)
        params = params_of(said, style, self._defaults, echo)
        if isinstance(body.get("model"), str):
            self.models.add(body["model"])
        prompts = prompts_of(said, style)
        variables = variables_of(said, prompts, self._template_vars, raw=raw)
        return BatchRequest(number, identity, style, prompts, params, raw, echo, body, variables)


def survey(lines: Iterable[bytes | None], jsonl: bool | None) -> Ids:
    """The ids of a whole input, which has a request for each. Raises InvalidRequest if one occurs twice."""
    ids = Ids()
    is_json, filled = filled_lines(lines, jsonl)
    for number, line in filled:
        if line is None:
            continue
        identity: Identity | None = number
        if is_json:
            try:
                identity = identity_of(_object(line), number)
            except InvalidRequest:
                identity = None
        ids.add(identity, number, line)
    return ids


def filled_lines(lines: Iterable[bytes | None], jsonl: bool | None) -> tuple[bool, Iterator[tuple[int, bytes | None]]]:
    """Whether the lines are JSON, and those that are not blank with their numbers from 1, None among them as it came.
    The first one is waited for.
    """
    filled = _filled(lines)
    number, first = next(((number, line) for number, line in filled if line is not None), (0, None))
    if first is None:
        return False, iter(())
    return first.startswith(b"{") if jsonl is None else jsonl, itertools.chain([(number, first)], filled)


def _filled(lines: Iterable[bytes | None]) -> Iterator[tuple[int, bytes | None]]:
    number = 0
    for line in lines:
        if line is None:
            yield number, None
            continue
        number += 1
        if stripped := line.strip():
            yield number, stripped.removeprefix(b"\xef\xbb\xbf")


def identity_of(data: Mapping[str, Any], number: int) -> Identity:
    """The id of a line, or its number if it has none. Raises InvalidRequest for what is no id."""
    names = [name for name in ("custom_id", "id") if data.get(name) is not None]
    if not names:
        return number
    identity = data[names[0]]
    if len(names) > 1:
        raise InvalidRequest("there are both `custom_id` and `id`: give one of them")
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise InvalidRequest(f"{names[0]} is {identity!r}, but must be a text or an integer")
    return identity


def _utf8(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"not UTF-8: byte {error.object[error.start]:#04x} at column {error.start + 1}") from None


def _object(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(_utf8(line), object_pairs_hook=_each_once)
    except InvalidRequest:
        raise
    except ValueError as error:
        raise InvalidRequest(f"not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("not JSON that can be read: nested too deeply") from None
    if not isinstance(data, dict):
        raise InvalidRequest(f"a JSON {type(data).__name__}, but must be an object with `prompt` or `messages`")
    return data


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose fields all have names of their own: of two with one name, one would be left out."""
    data = dict(pairs)
    if len(data) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise InvalidRequest(f"{name!r} is there more than once")
    return data


def _style(data: Mapping[str, Any]) -> Style:
    url = data.get("url")
    if "body" not in data and "url" not in data:
        return Style.SIMPLE
    return ENDPOINTS.get(url, Style.CHAT) if isinstance(url, str) else Style.CHAT


def _check_envelope(data: Mapping[str, Any]) -> None:
    check_fields(data, ENVELOPE, "a request around its `body`")
    if data.get("method", "POST") != "POST":
        raise InvalidRequest(f"method is {data['method']!r}, but must be 'POST'")
    url = data.get("url", Style.CHAT.value)
    if url == "/v1/embeddings":
        raise InvalidRequest(
            "/v1/embeddings is not served: the models that run here write text, and what they compute on the way is "
            "no embedding"
        )
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise InvalidRequest(f"url is {url!r}, but must be one of {', '.join(ENDPOINTS)}")
    if not isinstance(data.get("body"), dict):
        raise InvalidRequest("`body` is missing or not an object")
