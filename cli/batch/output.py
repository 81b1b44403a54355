"""Writing a batch: one JSON record per request, on disk before the next one is begun."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cortexmlx.cli.batch.input import BadLine, BatchRequest, Style
from cortexmlx.cli.terminal.text import to_json
from cortexmlx.errors import CortexError
from cortexmlx.logprobs import PromptLogprobs
from cortexmlx.request import Completion, Usage

Record = dict[str, Any]


class BatchWriter:
    """Writes records to a file, flushed and synced one by one, or to stdout. `failed` counts error records.

    `append`: what the file holds stays.
    """

    def __init__(self, path: Path | None, *, append: bool = False) -> None:
        self._path = path
        self._file = sys.stdout if path is None else path.open("a" if append else "w", encoding="utf-8")
        self.written = 0
        self.failed = 0

    def write(self, record: Record) -> None:
        """One line, safely on disk when this returns. Raises CortexError if the file takes no more."""
        line = to_json(record) + "\n"
        if self._path is None:
            self._file.write(line)
            self._file.flush()
        else:
            try:
                self._file.write(line)
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise CortexError(
                    f"{self._path} cannot be written: {error.strerror or error}; what it holds stays, and with "
                    "--resume the rest is asked"
                ) from error
        self.written += 1
        self.failed += bool(record.get("error"))

    def close(self) -> None:
        """Close the file; stdout stays open."""
        if self._path is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take, as was said
                self._file.close()


def error_record(item: BatchRequest | BadLine, message: str, code: str = "invalid_request") -> Record:
    """What stands in the place of an answer: the error, with the number of the line it came from."""
    error = {"code": code, "message": message, "line": item.line}
    if item.style is Style.SIMPLE:
        return {"id": item.id, "error": error}
    return {"id": f"batch_req_{item.line}", "custom_id": item.id, "response": None, "error": error}


def answer_record(request: BatchRequest, answers: Sequence[Completion], model: str) -> Record:
    """The answer in the shape of the question: an OpenAI batch record, or a simple one."""
    if request.style is Style.SIMPLE:
        first, *others = [_simple(answer) for answer in answers]
        return {"id": request.id, **first, **({"others": others} if others else {})}
    body = {
        "id": f"cmpl-{request.line}",
        "object": "chat.completion" if request.style is Style.CHAT else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(request, index, answer) for index, answer in enumerate(answers)],
        "usage": _usage(answers),
    }
    response = {"status_code": 200, "request_id": f"req_{request.line}", "body": body}
    return {"id": f"batch_req_{request.line}", "custom_id": request.id, "response": response, "error": None}


def _simple(answer: Completion) -> Record:
    usage = {**asdict(answer.usage), "total_tokens": answer.usage.total_tokens}
    record: Record = {"text": answer.text, "finish_reason": answer.finish_reason.value, "usage": usage}
    if answer.logprobs is not None:
        record["logprobs"] = [asdict(token) for token in answer.logprobs]
    if answer.prompt_logprobs is not None and not answer.index:
        record["prompt_logprobs"] = _of_prompt(answer.prompt_logprobs)
    return record


def _choice(request: BatchRequest, index: int, answer: Completion) -> Record:
    text = f"{request.prompt if request.echo else ''}{answer.text}"
    said: Record = {"text": text}
    if request.style is Style.CHAT:
        said = {"message": {"role": "assistant", "content": text}}
    if answer.prompt_logprobs is not None and not request.echo and not index:
        said["prompt_logprobs"] = _of_prompt(answer.prompt_logprobs)
    return {
        "index": index,
        **said,
        "logprobs": _logprobs(request, answer),
        "finish_reason": answer.finish_reason.value,
    }


def _of_prompt(told: PromptLogprobs) -> list[Record | None]:
    return [None if token is None else asdict(token) for token in told]


def _logprobs(request: BatchRequest, answer: Completion) -> Record | None:
    """Tokens are named `token_id:N`: a token's own text is not always text. An echo's come first, and the first has
    none.
    """
    if answer.logprobs is None:
        return None
    if request.style is Style.COMPLETIONS:
        told = answer.prompt_logprobs if request.echo else None
        echoed = () if told is None else tuple(told)
        ids = [*(() if told is None else told.tokens), *(t.token_id for t in answer.logprobs)]
        every = (*echoed, *answer.logprobs)
        return {
            "tokens": [_name(token) for token in ids],
            "token_logprobs": [None if t is None else t.logprob for t in every],
            "top_logprobs": [None if t is None else {_name(token): value for token, value in t.top} for t in every],
        }
    content = [
        {
            "token": _name(t.token_id),
            "logprob": t.logprob,
            "top_logprobs": [{"token": _name(token), "logprob": value} for token, value in t.top],
        }
        for t in answer.logprobs
    ]
    return {"content": content}


def _name(token: int) -> str:
    return f"token_id:{token}"


def _usage(answers: Sequence[Completion]) -> Record:
    """The prompt counts once, however many answers it has."""
    first = answers[0].usage
    total = Usage(first.prompt_tokens, sum(a.usage.completion_tokens for a in answers), first.cached_tokens)
    return {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.completion_tokens,
        "total_tokens": total.total_tokens,
        "prompt_tokens_details": {"cached_tokens": total.cached_tokens},
    }
