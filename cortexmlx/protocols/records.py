"""The records of a batch: an answer in the shape of its question, or the error in its place.

A record holds nothing that depends on how a run went, such as the moment or what was cached: a run that was
interrupted and went on ends with the same bytes as one that was not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cortexmlx.protocols.request import BadLine, BatchRequest, Identity, Style, key_of
from cortexmlx.protocols.responses import response_body
from cortexmlx.protocols.tokens import (
    Record,
    TokenBytes,
    chat_tokens,
    completion_tokens,
    simple_tokens,
)
from cortexmlx.request import Completion

INVALID = "invalid_request"
_LONGEST_MESSAGE = 1000


class Recorder:
    """Makes the records of one run: `model` is the name of the one that answers, `created` when the run first began,
    in seconds since 1970, `bytes_of` says what tokens stand for.
    """

    def __init__(self, model: str, created: int, bytes_of: TokenBytes) -> None:
        self._model = model
        self._created = created
        self._bytes_of = bytes_of

    def answer(self, request: BatchRequest, answers: Sequence[Sequence[Completion]]) -> Record:
        """The record of a request: `answers` to each of its prompts."""
        if request.style is Style.SIMPLE:
            first, *others = [self._simple(answer) for answer in answers[0]]
            return {"id": request.id, **first, **({"others": others} if others else {})}
        if request.style is Style.RESPONSES:
            body = response_body(request, answers[0][0], self._model, self._created, self._bytes_of)
        else:
            body = self._choices(request, answers)
        response = {"status_code": 200, "request_id": f"req_{request.line}", "body": body}
        return {"id": f"batch_req_{request.line}", "custom_id": request.id, "response": response, "error": None}

    def _simple(self, answer: Completion) -> Record:
        used = answer.usage
        usage = {
            "prompt_tokens": used.prompt_tokens,
            "completion_tokens": used.completion_tokens,
            "dropped_tokens": used.dropped_tokens,
            "thinking_tokens": used.thinking_tokens,
            "total_tokens": used.total_tokens,
        }
        reason = answer.finish_reason.value
        record: Record = {"text": answer.text, **_thoughts(answer), "finish_reason": reason, "usage": usage}
        if answer.logprobs is not None:
            record["logprobs"] = simple_tokens(answer.logprobs, self._bytes_of)
        if answer.prompt_logprobs is not None and not answer.index:
            record["prompt_logprobs"] = simple_tokens(answer.prompt_logprobs, self._bytes_of)
        return record

    def _choices(self, request: BatchRequest, answers: Sequence[Sequence[Completion]]) -> Record:
        """The choices of all prompts one after the other. A prompt counts once, however many answers it has."""
        each = [(prompt, answer) for prompt, own in enumerate(answers) for answer in own]
        asked = sum(own[0].usage.prompt_tokens for own in answers)
        written = sum(answer.usage.completion_tokens for _, answer in each)
        usage: Record = {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}
        if request.style is Style.CHAT:
            thought = sum(answer.usage.thinking_tokens for _, answer in each)
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        return {
            "id": f"cmpl-{request.line}",
            "object": "chat.completion" if request.style is Style.CHAT else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(request, index, *one) for index, one in enumerate(each)],
            "usage": usage,
        }

    def _choice(self, request: BatchRequest, index: int, prompt: int, answer: Completion) -> Record:
        said: Record
        logprobs: Record | None = None
        if request.style is Style.CHAT:
            said = {"message": {"role": "assistant", "content": answer.text, **_thoughts(answer)}}
            if answer.logprobs is not None:
                logprobs = {"content": chat_tokens(answer.logprobs, self._bytes_of)}
        else:
            echo = self._echo(request.prompts[prompt]) if request.echo else ""
            said = {"text": echo + answer.text}
            told = answer.prompt_logprobs if request.echo else None
            logprobs = completion_tokens(answer, told, said["text"], self._bytes_of)
        if answer.prompt_logprobs is not None and not request.echo and not answer.index:
            said["prompt_logprobs"] = simple_tokens(answer.prompt_logprobs, self._bytes_of)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": answer.finish_reason.value}

    def _echo(self, prompt: Any) -> str:
        return prompt if isinstance(prompt, str) else b"".join(map(self._bytes_of, prompt)).decode("utf-8", "replace")


def _thoughts(answer: Completion) -> Record:
    """What the model thought before it answered, under vLLM's name, if it did."""
    return {"reasoning_content": answer.thinking} if answer.thinking else {}


def error_record(item: BatchRequest | BadLine, message: str, code: str = INVALID) -> Record:
    """What stands in the place of an answer: the error, with the number of the line it came from. What repeats a value
    of any length is cut in its middle.
    """
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[: _LONGEST_MESSAGE // 2]} ... {message[-_LONGEST_MESSAGE // 2 :]}"
    error = {"code": code, "message": message, "line": item.line}
    if item.style is Style.SIMPLE:
        return {"id": item.id, "error": error}
    return {"id": f"batch_req_{item.line}", "custom_id": item.id, "response": None, "error": error}


def key_of_record(record: Record) -> str | None:
    """The key of the request that a record belongs to (see `key_of`); None if it is no record of a batch."""
    identity: Identity | None = record.get("custom_id", record.get("id"))
    error = record.get("error")
    line = error.get("line") if isinstance(error, dict) else None
    if identity is None and not isinstance(line, int):
        return None
    return key_of(identity, line or 0) if isinstance(identity, str | int | None) else None
