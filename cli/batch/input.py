"""Reading a batch: OpenAI batch JSONL, simple JSONL or plain lines, one request per line, nothing held in memory.

A line that cannot be understood becomes a `BadLine` with its number; it never ends the run.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.messages import TemplateVars, body_vars
from cortexmlx.request import Message, SamplingParams, plain_message

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
ALIASES = {"temp": "temperature", "max_completion_tokens": "max_tokens"}
REFUSED = ("tools", "functions", "response_format", "stream", "logits_processors")
"""What would change the answer, and is not served: better an error than an answer to another question."""
KNOWN = {f.name for f in fields(SamplingParams)} - {"logits_processors"} | set(ALIASES) | {"top_logprobs"}
TEMPLATE = {"chat_template_kwargs", "reasoning_effort"}
"""What goes to the chat template."""


class Style(str, Enum):
    """The shape of an input line, and so of its output record."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    SIMPLE = "simple"


@dataclass(frozen=True)
class BatchRequest:
    """One request of a batch.

    `line` counts from 1; `id` is the user's, or the line; `raw` prompts skip the chat template. With `echo` the answer
    begins with the prompt. `template_vars` are the chat template's.
    """

    line: int
    id: str | int
    style: Style
    prompt: str | list[int] | list[Message]
    params: SamplingParams
    raw: bool = False
    echo: bool = False
    template_vars: TemplateVars = field(default_factory=dict)


@dataclass(frozen=True)
class BadLine:
    """A line that is no request, and why."""

    line: int
    id: str | int
    style: Style
    message: str


class BatchReader:
    """Iterates over the requests of `lines` (bytes, as they are in the file).

    `jsonl` None decides by the first line that is not blank: an opening brace means JSON. `ignored` counts the keys
    that mean nothing here, so that a misspelt one can be reported.
    """

    def __init__(self, lines: Iterable[bytes], defaults: SamplingParams, *, jsonl: bool | None, raw: bool) -> None:
        self.ignored: dict[str, int] = {}
        self._lines = lines
        self._defaults = defaults
        self._jsonl = jsonl
        self._raw = raw

    def __iter__(self) -> Iterator[BatchRequest | BadLine]:
        numbered = ((n, line.strip()) for n, line in enumerate(self._lines, start=1))
        filled = ((n, line.removeprefix(b"\xef\xbb\xbf")) for n, line in numbered if line)
        first = next(filled, None)
        if first is None:
            return
        parse = self._parse_json if _decide(self._jsonl, first[1]) else self._parse_text
        for number, line in itertools.chain([first], filled):
            yield parse(number, line)

    def _parse_text(self, number: int, line: bytes) -> BatchRequest | BadLine:
        try:
            return BatchRequest(number, number, Style.SIMPLE, _checked(_utf8(line)), self._defaults, self._raw)
        except InvalidRequest as error:
            return BadLine(number, number, Style.SIMPLE, str(error))

    def _parse_json(self, number: int, line: bytes) -> BatchRequest | BadLine:
        identity: str | int = number
        style = Style.SIMPLE
        try:
            data = _object(line)
            identity, style = _identity(data, number), _style(data)
            if style is Style.SIMPLE:
                return self._request(number, identity, style, data, {"id", "prompt", "messages"}, self._raw)
            _check_envelope(data)
            body = data["body"]
            expected = {"model", "prompt", "messages", "user"} | ({"echo"} if style is Style.COMPLETIONS else set())
            return self._request(number, identity, style, body, expected, raw=style is Style.COMPLETIONS)
        except InvalidRequest as error:
            return BadLine(number, identity, style, str(error))

    def _request(
        self, number: int, identity: str | int, style: Style, body: Mapping[str, Any], expected: set[str], raw: bool
    ) -> BatchRequest:
        refused = [key for key in REFUSED if body.get(key)]
        if refused:
            raise InvalidRequest(f"{refused[0]!r} is not supported")
        for key in body.keys() - expected - KNOWN - TEMPLATE - set(REFUSED):
            self.ignored[key] = self.ignored.get(key, 0) + 1
        prompt, variables, echo = _prompt(body, style), body_vars(body), "echo" in expected and _echo(body)
        templated = not raw if isinstance(prompt, str) else isinstance(prompt[0], dict)
        if variables and not templated:
            raise InvalidRequest(
                f"{', '.join(variables)}: set for a chat template, which this prompt does not go through"
            )
        params = _params(body, style, self._defaults, echo)
        return BatchRequest(number, identity, style, prompt, params, raw, echo, variables)


def _decide(jsonl: bool | None, first: bytes) -> bool:
    return first.startswith(b"{") if jsonl is None else jsonl


def _utf8(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"not UTF-8: byte {error.object[error.start]:#04x} at column {error.start + 1}") from None


def _checked(text: str) -> str:
    if not text:
        raise InvalidRequest("the prompt is empty")
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise InvalidRequest("the prompt holds a NUL or half of a surrogate pair, which is no text")
    return text


def _object(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(_utf8(line))
    except ValueError as error:
        raise InvalidRequest(f"not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("not JSON that can be read: nested too deeply") from None
    if not isinstance(data, dict):
        raise InvalidRequest(f"a JSON {type(data).__name__}, but must be an object with `prompt` or `messages`")
    return data


def _identity(data: Mapping[str, Any], number: int) -> str | int:
    identity = data.get("custom_id", data.get("id"))
    return identity if isinstance(identity, (str, int)) and not isinstance(identity, bool) else number


def _style(data: Mapping[str, Any]) -> Style:
    if "body" not in data and "url" not in data:
        return Style.SIMPLE
    return Style.COMPLETIONS if data.get("url") == ENDPOINTS[1] else Style.CHAT


def _check_envelope(data: Mapping[str, Any]) -> None:
    if data.get("method", "POST") != "POST":
        raise InvalidRequest(f"method is {data['method']!r}, but must be 'POST'")
    if data.get("url", ENDPOINTS[0]) not in ENDPOINTS:
        raise InvalidRequest(f"url is {data['url']!r}, but must be one of {', '.join(ENDPOINTS)}")
    if not isinstance(data.get("body"), dict):
        raise InvalidRequest("`body` is missing or not an object")


def _prompt(body: Mapping[str, Any], style: Style) -> str | list[int] | list[Message]:
    if style is not Style.COMPLETIONS and "messages" in body:
        return _messages(body["messages"])
    if style is Style.CHAT:
        raise InvalidRequest("`messages` is missing")
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return _checked(prompt)
    if isinstance(prompt, list) and prompt and all(type(t) is int for t in prompt):
        return prompt
    wanted = "`prompt`" if style is Style.COMPLETIONS else "`prompt` or `messages`"
    raise InvalidRequest(f"{wanted} must be one text or a list of token ids, not {type(prompt).__name__}")


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise InvalidRequest("`messages` must be a list of objects with `role` and `content`")
    return [_message(m) for m in messages]


def _message(message: dict[str, Any]) -> Message:
    if not isinstance(message.get("role"), str):
        raise InvalidRequest("a message has no `role`")
    message = plain_message(message)
    content = message.get("content")
    if not isinstance(content, str):
        raise InvalidRequest(f"a message's `content` must be text, not {type(content).__name__}")
    return {**message, "content": _checked(content) if content else content}


def _echo(body: Mapping[str, Any]) -> bool:
    echo = body.get("echo") or False
    if not isinstance(echo, bool):
        raise InvalidRequest(f"echo is {echo!r}, but must be true or false")
    if echo and not isinstance(body.get("prompt"), str):
        raise InvalidRequest("echo needs a `prompt` that is a text")
    return echo


def _params(body: Mapping[str, Any], style: Style, defaults: SamplingParams, echo: bool) -> SamplingParams:
    """The defaults with what the line says; null means the default. What is to echo has its log-probabilities, too, if
    any were asked for.
    """
    given = {ALIASES.get(k, k): v for k, v in body.items() if k in KNOWN and k != "top_logprobs" and v is not None}
    for name, convert in _CONVERT.items():
        if name in given:
            given[name] = convert(given[name])
    if style is Style.CHAT and "logprobs" in given:
        given["logprobs"] = (body.get("top_logprobs") or 0) if given["logprobs"] is True else None
    if echo and given.get("logprobs") is not None:
        given.setdefault("prompt_logprobs", given["logprobs"])
    params = replace(defaults, **given)
    params.validate()
    return params


def _stops(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _biases(value: Any) -> dict[int, Any]:
    try:
        return {int(token): bias for token, bias in value.items()}
    except (AttributeError, ValueError):
        raise InvalidRequest(f"logit_bias is {value!r}, but must be an object from token ids to numbers") from None


_CONVERT: dict[str, Callable[[Any], Any]] = {"stop": _stops, "logit_bias": _biases}
