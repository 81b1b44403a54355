"""Our own simple JSON format, for batch files: a `prompt` or `messages` with sampling parameters. The answer is one
flat object.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import BodyFields, prefix_error_field
from cortexmlx.protocols.images import ImageParts
from cortexmlx.protocols.openai import parameters
from cortexmlx.protocols.openai.chat_completions import notes_field, reasoning_field, tool_call_bodies
from cortexmlx.protocols.openai.logprobs import id_logprobs
from cortexmlx.protocols.openai.messages import read_messages
from cortexmlx.protocols.request import Body, PromptInput, ReplyInfo, Request, RequestDefaults, read_prompt, with_notes
from cortexmlx.types.messages import suggest_name
from cortexmlx.types.request import Completion

FIELDS = BodyFields(
    "a request",
    parameters.SHARED_FIELDS | parameters.TOOL_FIELDS | {"adapter", "id", "custom_id", "prompt", "messages"},
    parameters.NO_EFFECT,
    parameters.UNSERVED,
)


@with_notes
def read(body: Mapping[str, Any], defaults: RequestDefaults) -> Request:
    """Parse an object with a `prompt` or `messages` into a Request. Raises InvalidRequest."""
    body_fields = FIELDS.exclude(defaults.unserved).validate(body)
    values = parameters.read_sampling(body_fields) | parameters.read_tools(body_fields)
    params = parameters.build_sampling_params(defaults.params, values, body_fields)
    prompt = _read_prompt(body_fields, defaults.image_parts())
    uses_template = not defaults.raw if isinstance(prompt, str) else isinstance(prompt[0], dict)
    variables = parameters.template_variables(body_fields, defaults, uses_template=uses_template)
    return Request((prompt,), params, variables, defaults.raw, body=body, adapter=_read_adapter(body_fields, defaults))


def write(request: Request, answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    """Return the first answer to the prompt as a flat object, with `others` if there are any."""
    first, *other_answers = [_answer_body(request, answer, info) for answer in answers[0]]
    return {**first, **({"others": other_answers} if other_answers else {})}


def _read_prompt(body_fields: Mapping[str, Any], images: ImageParts | None) -> PromptInput:
    """Return the prompt: the text or token ids in `prompt`, or the `messages`. Raises InvalidRequest."""
    if "messages" in body_fields:
        if "prompt" in body_fields:
            raise InvalidRequest("there are both `prompt` and `messages`: give one of them", field="prompt")
        return read_messages(body_fields["messages"], images=images)
    with prefix_error_field("prompt"):
        return read_prompt(body_fields.get("prompt"), "`prompt` or `messages`")


def _read_adapter(body_fields: Mapping[str, Any], defaults: RequestDefaults) -> str | None:
    """Return the name of the adapter in the field `adapter`, or None. Raises InvalidRequest."""
    name = body_fields.get("adapter")
    if name is None or (isinstance(name, str) and name in defaults.adapters):
        return name
    if not isinstance(name, str):
        raise InvalidRequest(f"adapter is {name!r:.80}, but must be a text", field="adapter")
    raise unknown_adapter_error(name, defaults.adapters, "adapter")


def unknown_adapter_error(name: str, known_names: Collection[str], field: str) -> InvalidRequest:
    """Return the error for the name of an adapter that is not loaded. `known_names` are those that are."""
    available_text = f"there are {', '.join(map(repr, known_names))}" if known_names else "none are loaded (--adapters)"
    return InvalidRequest(
        f"there is no adapter {name!r:.80}{suggest_name(name[:80], known_names)}: {available_text}", field=field
    )


def _answer_body(request: Request, answer: Completion, info: ReplyInfo) -> Body:
    """Return one answer as a flat object."""
    answer_usage = answer.usage
    usage = {
        "prompt_tokens": answer_usage.prompt_tokens,
        "completion_tokens": answer_usage.completion_tokens,
        "dropped_tokens": answer_usage.dropped_tokens,
        "thinking_tokens": answer_usage.thinking_tokens,
        "total_tokens": answer_usage.total_tokens,
    }
    reason = answer.finish_reason.value
    answer_body: Body = {"text": answer.text, **reasoning_field(answer), "finish_reason": reason, "usage": usage}
    answer_body.update(notes_field(request, answer))
    if answer.tool_calls:
        answer_body["tool_calls"] = tool_call_bodies(answer.tool_calls)
    if answer.logprobs is not None:
        answer_body["logprobs"] = id_logprobs(answer.logprobs, info.token_bytes)
    if answer.prompt_logprobs is not None and not answer.index:
        answer_body["prompt_logprobs"] = id_logprobs(answer.prompt_logprobs, info.token_bytes)
    return answer_body
