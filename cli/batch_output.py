"""Writing a batch: one JSON record per request, on disk before the next one is begun."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cortexmlx.cli.batch_input import BadLine, BatchRequest, Style
from cortexmlx.request import Completion, Usage

Record = dict[str, Any]


class BatchWriter:
    """Writes records to a file, flushed and synced one by one, or to stdout. `failed` counts error records.

    `append`: what the file holds stays.
    """

    def __init__(self, path: Path | None, *, append: bool = False) -> None:
        self._file = sys.stdout if path is None else path.open("a" if append else "w", encoding="utf-8")
        self._sync = path is not None
        self.written = 0
        self.failed = 0

    def write(self, record: Record) -> None:
        """One line, safely on disk when this returns."""
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()
        if self._sync:
            os.fsync(self._file.fileno())
        self.written += 1
        self.failed += bool(record.get("error"))

    def close(self) -> None:
        """Close the file; stdout stays open."""
        if self._sync:
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
        "choices": [_choice(request.style, index, answer) for index, answer in enumerate(answers)],
        "usage": _usage(answers),
    }
    response = {"status_code": 200, "request_id": f"req_{request.line}", "body": body}
    return {"id": f"batch_req_{request.line}", "custom_id": request.id, "response": response, "error": None}


def _simple(answer: Completion) -> Record:
    usage = {**asdict(answer.usage), "total_tokens": answer.usage.total_tokens}
    record: Record = {"text": answer.text, "finish_reason": answer.finish_reason.value, "usage": usage}
    if answer.logprobs is not None:
        record["logprobs"] = [asdict(token) for token in answer.logprobs]
    return record


def _choice(style: Style, index: int, answer: Completion) -> Record:
    said: Record = (
        {"message": {"role": "assistant", "content": answer.text}} if style is Style.CHAT else {"text": answer.text}
    )
    return {
        "index": index,
        **said,
        "logprobs": _logprobs(style, answer),
        "finish_reason": answer.finish_reason.value,
    }


def _logprobs(style: Style, answer: Completion) -> Record | None:
    """Tokens are named `token_id:N`: a token's own text is not always text."""
    if answer.logprobs is None:
        return None
    if style is Style.COMPLETIONS:
        return {
            "tokens": [_name(t.token_id) for t in answer.logprobs],
            "token_logprobs": [t.logprob for t in answer.logprobs],
            "top_logprobs": [{_name(token): value for token, value in t.top} for t in answer.logprobs],
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
