"""Our own JSON: a `prompt` or `messages` with sampling parameters. The answer is one flat object."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import Fields, inside
from cortexmlx.protocols.openai import parameters
from cortexmlx.protocols.openai.chat_completions import call_bodies, notes, thoughts
from cortexmlx.protocols.openai.logprobs import id_logprobs
from cortexmlx.protocols.openai.messages import read_messages
from cortexmlx.protocols.request import Asked, Body, Defaults, ReplyInfo, Request, read_prompt, with_notes
from cortexmlx.types.messages import meant
from cortexmlx.types.request import Completion

FIELDS = Fields(
    "a request",
    parameters.SHARED | parameters.TOOL_FIELDS | {"adapter", "id", "custom_id", "prompt", "messages"},
    parameters.NO_EFFECT,
    parameters.UNSERVED,
)


@with_notes
def read(body: Mapping[str, Any], defaults: Defaults) -> Request:
    """Return the request in an object. Raises InvalidRequest."""
    said = FIELDS.without(defaults.unserved).given(body)
    values = parameters.sampling_values(said) | parameters.tool_values(said)
    params = parameters.sampling_params(defaults.params, values, said)
    prompt = _prompt(said)
    templated = not defaults.raw if isinstance(prompt, str) else isinstance(prompt[0], dict)
    variables = parameters.template_variables(said, defaults, templated=templated)
    return Request((prompt,), params, variables, defaults.raw, body=body, adapter=_adapter(said, defaults))


def write(request: Request, answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    """Return the first answer to the prompt, with the `others` if there are any."""
    first, *others = [_answer(request, answer, info) for answer in answers[0]]
    return {**first, **({"others": others} if others else {})}


def _prompt(said: Mapping[str, Any]) -> Asked:
    if "messages" in said:
        if "prompt" in said:
            raise InvalidRequest("there are both `prompt` and `messages`: give one of them", field="prompt")
        return read_messages(said["messages"])
    with inside("prompt"):
        return read_prompt(said.get("prompt"), "`prompt` or `messages`")


def _adapter(said: Mapping[str, Any], defaults: Defaults) -> str | None:
    name = said.get("adapter")
    if name is None or (isinstance(name, str) and name in defaults.adapters):
        return name
    if not isinstance(name, str):
        raise InvalidRequest(f"adapter is {name!r:.80}, but must be a text", field="adapter")
    raise no_adapter(name, defaults.adapters, "adapter")


def no_adapter(name: str, known: Collection[str], field: str) -> InvalidRequest:
    """Return the error of a name for which there is no adapter."""
    there = f"there are {', '.join(map(repr, known))}" if known else "none are loaded (--adapters)"
    return InvalidRequest(f"there is no adapter {name!r:.80}{meant(name[:80], known)}: {there}", field=field)


def _answer(request: Request, answer: Completion, info: ReplyInfo) -> Body:
    used = answer.usage
    usage = {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "dropped_tokens": used.dropped_tokens,
        "thinking_tokens": used.thinking_tokens,
        "total_tokens": used.total_tokens,
    }
    reason = answer.finish_reason.value
    said: Body = {"text": answer.text, **thoughts(answer), "finish_reason": reason, "usage": usage}
    said.update(notes(request, answer))
    if answer.tool_calls:
        said["tool_calls"] = call_bodies(answer.tool_calls)
    if answer.logprobs is not None:
        said["logprobs"] = id_logprobs(answer.logprobs, info.token_bytes)
    if answer.prompt_logprobs is not None and not answer.index:
        said["prompt_logprobs"] = id_logprobs(answer.prompt_logprobs, info.token_bytes)
    return said
