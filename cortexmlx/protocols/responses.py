"""The body of a response, as `/v1/responses` of the OpenAI API has it."""

from __future__ import annotations

from cortexmlx.protocols.request import BatchRequest
from cortexmlx.protocols.tokens import Record, TokenBytes, chat_tokens
from cortexmlx.request import Completion, FinishReason


def response_body(request: BatchRequest, answer: Completion, model: str, created: int, bytes_of: TokenBytes) -> Record:
    """One message of text, behind the model's thoughts if it had any. `incomplete` is an answer that the number of
    tokens ended.
    """
    whole = answer.finish_reason is not FinishReason.LENGTH
    status = "completed" if whole else "incomplete"
    text: Record = {"type": "output_text", "text": answer.text, "annotations": []}
    if answer.logprobs is not None:
        text["logprobs"] = chat_tokens(answer.logprobs, bytes_of)
    message = {
        "id": f"msg_{request.line}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [text],
    }
    return {
        "id": f"resp_{request.line}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "instructions": request.body.get("instructions"),
        "max_output_tokens": request.params.max_tokens,
        "metadata": request.body.get("metadata") or {},
        "model": model,
        "output": [*_thoughts(request, answer, status), message],
        "parallel_tool_calls": False,
        "temperature": request.params.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "top_p": request.params.top_p,
        "truncation": "disabled",
        "usage": {
            "input_tokens": answer.usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.usage.thinking_tokens},
            "total_tokens": answer.usage.total_tokens,
        },
    }


def _thoughts(request: BatchRequest, answer: Completion, status: str) -> list[Record]:
    if not answer.thinking:
        return []
    content = [{"type": "reasoning_text", "text": answer.thinking}]
    return [{"id": f"rs_{request.line}", "type": "reasoning", "status": status, "summary": [], "content": content}]
