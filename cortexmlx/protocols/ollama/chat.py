"""`/api/chat`: the reader, the body of a reply, and the lines of a stream; and what `/api/generate` shares with it:
options, thoughts, and the fields of replies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.error_text import add_note
from cortexmlx.protocols.fields import BodyFields, prefix_error_field, require_type
from cortexmlx.protocols.history import PLACE, read_arguments
from cortexmlx.protocols.ollama.errors import error_body
from cortexmlx.protocols.openai import parameters
from cortexmlx.protocols.openai.chat_completions import notes_field
from cortexmlx.protocols.openai.logprobs import chat_logprobs
from cortexmlx.protocols.openai.messages import read_messages
from cortexmlx.protocols.request import Body, ReplyInfo, Request, RequestDefaults, with_notes
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.types.logprobs import TokenLogprob
from cortexmlx.types.messages import EFFORT, THINKING, TemplateVars
from cortexmlx.types.request import Completion, FinishReason, TokenEvent

URL = "/api/chat"

SHARED_FIELDS = frozenset({"format", "logprobs", "options", "stream", "think", "top_logprobs"})
"""The fields that `/api/generate` has, too."""

NO_EFFECT = frozenset({"keep_alive", "model", "shift", "truncate"})
"""Fields that change no answer: the server decides how long a model stays, and no prompt is cut to fit."""

FIELDS = BodyFields(f"a {URL} body", SHARED_FIELDS | {"messages", "tools"}, NO_EFFECT, {})

_PARAMETERS = {
    **{name: name for name in ("frequency_penalty", "min_p", "presence_penalty", "seed", "stop", "temperature")},
    "num_predict": "max_tokens",
    "repeat_last_n": "repetition_context",
    "repeat_penalty": "repetition_penalty",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""The options that are served, with their names here."""

_NOT_ENFORCED = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}
"""Options that are noted, not served, with the values that have no effect. Ollama ignores most of them today."""

OPTIONS = BodyFields(
    "`options`",
    frozenset({*_PARAMETERS, *_NOT_ENFORCED}),
    frozenset(
        {
            *("draft_num_predict", "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat_eta"),
            *("mirostat_tau", "num_batch", "num_ctx", "num_gpu", "num_gqa", "num_keep", "num_thread", "numa"),
            *("penalize_newline", "use_mlock", "use_mmap", "vocab_only"),
        }
    ),
    {},
)
"""The others are about how a model is loaded, which the server decides: its context is whole, and nothing is cut."""

_AT_ONCE = (0, "0", "0s", "0m", "0h")
_LEVELS = ("low", "medium", "high", "max")
_LOOK_BACK = 2**31 - 1
"""Tokens that a repetition penalty looks back if its option says: all."""


@with_notes
def read(body: Mapping[str, Any], defaults: RequestDefaults) -> Request:
    """Parse the JSON body of an `/api/chat` call into a Request. A body without messages asks only to load the model;
    its Request has no prompt. Raises InvalidRequest.
    """
    fields = FIELDS.exclude(defaults.unserved).validate(body)
    values = {} if not fields.get("tools") else parameters.read_tools({"tools": fields["tools"]})
    request_parts = read_shared(fields, values, defaults)
    messages = require_type("messages", fields.get("messages", []), list, "a list of messages")
    if not messages:
        return make_load_request(body, request_parts)
    prompt = read_messages([_to_openai(message) for message in messages], images=defaults.image_parts())
    return Request((prompt,), **request_parts, body=body)


def write(request: Request, answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    """Return the JSON body of a whole reply. `answers` is empty if the model was only to be loaded."""
    return ChatLines(request, info).reply_body(answers)


def make_load_request(body: Mapping[str, Any], request_parts: Mapping[str, Any]) -> Request:
    """Return the Request for a body without a prompt, which asks only to load the model. Raises InvalidRequest if
    `keep_alive` asks to unload it at once: other clients may need the model.
    """
    if body.get("keep_alive") in _AT_ONCE:
        reason = "the server unloads models itself, after the time of its option `--idle`"
        raise InvalidRequest(f"the model is not unloaded: {reason}", field="keep_alive")
    return Request((), **request_parts, body=body)


def image_content(images: object, text: object) -> object:
    """Return the `content` for `images` (a list of base64 texts) and a text: as parts, like in the OpenAI API."""
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise InvalidRequest(f"images is {images!r:.40}, but must be a list of base64 texts", field="images")
    parts = [{"type": "image", "data": image, PLACE: f"images[{index}]"} for index, image in enumerate(images)]
    return [*parts, *(text if isinstance(text, list) else [{"type": "text", "text": text}])] if parts else text


def read_shared(fields: Mapping[str, Any], values: Mapping[str, Any], defaults: RequestDefaults) -> dict[str, Any]:
    """Return the Request's fields that chat and generate bodies share: sampling parameters (with `values`), chat
    template variables, and whether to stream. Raises InvalidRequest.
    """
    options = require_type("options", fields.get("options", {}), dict, "an object")
    with prefix_error_field("options"):
        params = parameters.build_sampling_params(defaults.params, _read_options(options), options)
    wanted = parameters.read_flag(fields, "logprobs")
    logprobs = parameters.read_top_logprobs(fields, wanted, '"logprobs": true', None)
    more = {**values, **_read_format(fields.get("format", "")), "logprobs": logprobs, "n": 1}
    stream = require_type("stream", fields.get("stream", True), bool, "true or false")
    variables = parameters.template_variables({}, defaults, extra_vars=_read_think(fields.get("think"), defaults))
    params = parameters.build_sampling_params(params, {**more, "best_of": None}, fields)
    return {"params": params, "template_vars": variables, "stream": stream}


def _read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters in `options`. Raises InvalidRequest."""
    served = OPTIONS.validate(options)
    for name in sorted(_NOT_ENFORCED.keys() & served.keys()):
        if served[name] != _NOT_ENFORCED[name]:
            add_note(name, f"the option {name} is not served, so it is ignored")
    values = {_PARAMETERS[name]: value for name, value in served.items() if name in _PARAMETERS}
    if _is_at_most(values.get("max_tokens"), 0):
        values["max_tokens"] = None
    if _is_at_most(values.get("seed"), -1):
        values["seed"] = None
    if _is_at_most(values.get("repetition_context"), 0):
        if values["repetition_context"] == 0:
            values["repetition_penalty"] = 1.0
        values["repetition_context"] = _LOOK_BACK
    return values


def _is_at_most(value: object, bound: int) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value <= bound


def _read_format(form: Any) -> dict[str, StructuredOutput]:
    """Return the parameter `structured` of a `format`: "json", or a schema, whose objects get no additional
    properties, as in Ollama; nothing for "". Raises InvalidRequest.
    """
    if form == "":
        return {}
    if form == "json":
        return {"structured": StructuredOutput.json()}
    require_type("format", form, dict, '"json" or a JSON schema: an object')
    try:
        return {"structured": StructuredOutput.json(form, lenient=True, closed=True)}
    except InvalidRequest as error:
        error.field = "format"
        raise


def _read_think(think: object, defaults: RequestDefaults) -> TemplateVars:
    """Return the variables of the chat template that `think` sets: a switch or a level. A template without levels gets
    a switch. Raises InvalidRequest.
    """
    if think is None:
        return {}
    if isinstance(think, bool):
        return {THINKING: think}
    if think not in _LEVELS:
        raise InvalidRequest(f"think is {think!r:.80}, but must be true, false or {', '.join(_LEVELS)}", field="think")
    has_levels = defaults.known_vars is None or EFFORT in defaults.known_vars
    return {EFFORT: think} if has_levels else {THINKING: True}


def _to_openai(message: object) -> object:
    """Return a message as in the OpenAI API: with images as parts, and the `name` of the tool whose result it is."""
    if not isinstance(message, Mapping):
        return message
    fields = {name: value for name, value in message.items() if value is not None}
    if isinstance(role := fields.get("role"), str):
        fields["role"] = role.lower()
    if "tool_name" in fields:
        fields["name"] = fields.pop("tool_name")
    if "images" in fields:
        fields["content"] = image_content(fields.pop("images"), fields.get("content", ""))
    return fields


# Replies: one line for each piece of an answer, and a last one with counts and times.


class AnswerLines(ABC):
    """Converts the engine's events into the lines of a stream. Together they have a whole reply's content."""

    def __init__(self, request: Request, info: ReplyInfo) -> None:
        self._request = request
        self._info = info
        self._text_length = 0
        self._thinking_length = 0
        self._logprob_count = 0

    @abstractmethod
    def piece_fields(self, text: str, thinking: str = "", calls: Sequence[Body] = ()) -> Body:
        """Return the fields that hold a piece of the answer."""

    def end_fields(self, answer: Completion) -> Body:
        """Return what a subclass adds to the fields of the last line."""
        return {}

    def convert(self, event: TokenEvent, prompt: int = 0) -> list[Body]:
        """Return the lines of an event: mostly one, none for progress, and an error body for an error."""
        if event.error is not None:
            return [error_body(event.error)]
        if event.completion is not None:
            return self._finish(event.completion)
        logprobs = () if event.logprob is None else (event.logprob,)
        if not (event.text or event.thinking or logprobs):
            return []
        self._text_length += len(event.text)
        self._thinking_length += len(event.thinking)
        self._logprob_count += len(logprobs)
        return [self._line(self.piece_fields(event.text, event.thinking), logprobs)]

    def ping(self) -> Body:
        """Return a line with an empty piece, which keeps a silent stream alive."""
        return self._line(self.piece_fields(""))

    def reply_body(self, answers: Sequence[Sequence[Completion]]) -> Body:
        """Return the body of a whole reply. If `answers` is empty, the request only loaded the model."""
        if not answers:
            return self._line(self.piece_fields("")) | {"done": True, "done_reason": "load", **self._durations(0.0)}
        [[answer]] = answers
        piece = self.piece_fields(answer.text, answer.thinking, _call_bodies(answer))
        return self._line(piece, answer.logprobs or ()) | self._final_fields(answer)

    def _finish(self, answer: Completion) -> list[Body]:
        """Return the lines that end a stream: what was not streamed yet, such as calls, and the last line."""
        text, thinking = answer.text[self._text_length :], answer.thinking[self._thinking_length :]
        calls, logprobs = _call_bodies(answer), (answer.logprobs or ())[self._logprob_count :]
        is_rest = text or thinking or calls or logprobs
        lines = [self._line(self.piece_fields(text, thinking, calls), logprobs)] if is_rest else []
        return [*lines, self._line(self.piece_fields("")) | self._final_fields(answer)]

    def _line(self, piece: Body, logprobs: Sequence[TokenLogprob] = ()) -> Body:
        """Return a line with a piece of the answer."""
        created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        line: Body = {"model": self._info.model, "created_at": created, **piece, "done": False}
        return {**line, "logprobs": chat_logprobs(logprobs, self._info.token_bytes)} if logprobs else line

    def _final_fields(self, answer: Completion) -> Body:
        """Return the fields of the last line: why the answer ended, counts of tokens, and nanoseconds."""
        usage, timings = answer.usage, answer.timings
        return {
            "done": True,
            "done_reason": "length" if answer.finish_reason is FinishReason.LENGTH else "stop",
            **self.end_fields(answer),
            **notes_field(self._request, answer),
            **self._durations(timings.total),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(timings.ttft - timings.queued),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(timings.total - timings.ttft),
        }

    def _durations(self, seconds: float) -> Body:
        """Return the total duration of a request and its wait for the model, in nanoseconds."""
        load = self._info.load_seconds
        return {"total_duration": _nanoseconds(load + seconds), "load_duration": _nanoseconds(load)}


class ChatLines(AnswerLines):
    """The lines of an `/api/chat` stream."""

    def piece_fields(self, text: str, thinking: str = "", calls: Sequence[Body] = ()) -> Body:
        """Return the field `message` with a piece of the answer."""
        message: Body = {"role": "assistant", "content": text}
        more = {"thinking": thinking, "tool_calls": list(calls)}
        return {"message": message | {name: value for name, value in more.items() if value}}


def _call_bodies(answer: Completion) -> list[Body]:
    """Return the `tool_calls` of an answer, with arguments as objects."""
    return [
        {"id": call.id, "function": {"index": index, "name": call.name, "arguments": read_arguments(call.arguments)}}
        for index, call in enumerate(answer.tool_calls)
    ]


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
