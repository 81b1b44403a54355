"""What chat completions and completions share: a reply of numbered choices."""

from __future__ import annotations

from collections.abc import Sequence

from cortexmlx.protocols.openai.logprobs import id_logprobs
from cortexmlx.protocols.reply import Body, ReplyInfo
from cortexmlx.protocols.request import Request
from cortexmlx.request import Completion


def reply_body(kind: str, info: ReplyInfo, choices: Sequence[Body]) -> Body:
    """A reply, or a chunk of one, of the `kind` that `object` names."""
    return {
        "id": f"cmpl-{info.id}",
        "object": kind,
        "created": info.created,
        "model": info.model,
        "choices": list(choices),
    }


def scored_prompt(request: Request, answer: Completion, info: ReplyInfo) -> Body:
    """vLLM's field for the log-probabilities of the prompt, in the first choice of each prompt. An echo has them in the
    `logprobs` of its choice.
    """
    if answer.prompt_logprobs is None or request.echo or answer.index:
        return {}
    return {"prompt_logprobs": id_logprobs(answer.prompt_logprobs, info.token_bytes)}


def usage_body(answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    """The tokens of all answers to each prompt. A prompt counts once, however many answers it has."""
    prompts = [own[0].usage for own in answers]
    asked = sum(usage.prompt_tokens for usage in prompts)
    written = sum(answer.usage.completion_tokens for own in answers for answer in own)
    usage: Body = {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}
    if not info.repeatable:
        usage["prompt_tokens_details"] = {"cached_tokens": sum(usage.cached_tokens for usage in prompts)}
    return usage
