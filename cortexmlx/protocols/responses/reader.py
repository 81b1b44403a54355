"""The reader of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols import peers
from cortexmlx.protocols.earlier import EarlierResponse
from cortexmlx.protocols.fields import Fields, Unserved, check_fields, checked, inside
from cortexmlx.protocols.history import mend
from cortexmlx.protocols.openai import forms, parameters, tools
from cortexmlx.protocols.openai.errors import NotStored
from cortexmlx.protocols.openai.messages import read_messages
from cortexmlx.protocols.request import Defaults, Request, with_notes
from cortexmlx.protocols.responses.details import Details
from cortexmlx.protocols.responses.items import kept_form, messages_of, plain_items
from cortexmlx.protocols.responses.offered import offered_tools
from cortexmlx.types.messages import EFFORT
from cortexmlx.types.request import Message

URL = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log-probabilities."""
ENCRYPTED = "reasoning.encrypted_content"
"""The value of `include` that asks for sealed thoughts."""

_ABSENT = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Values of `include` that ask for parts of what no answer has here."""

_STATELESS = "nothing is remembered of other requests: send all messages"
_FOREGROUND = "an answer is sent as it is written, or when it is whole"
OWN_UNSERVED = {
    "background": Unserved(_FOREGROUND, (False,)),
    "background_options": Unserved(_FOREGROUND),
    "context_management": Unserved("nothing is left out of a prompt: send what the model should read", ([],)),
    "conversation": Unserved(
        "there are no conversations on the server: use `previous_response_id`, or send all messages"
    ),
    "image": Unserved("the model writes text only"),
    "prompt": Unserved("there are no prompts that are kept elsewhere"),
    "truncation": Unserved("it must be auto or disabled", ("disabled", "auto")),
}
"""The unserved fields that other protocols do not have."""

FIELDS = Fields(
    f"a {URL} body",
    parameters.SAMPLING - {"n", "best_of", "logprobs", "prompt_logprobs", "max_tokens"}
    | set(parameters.TEMPLATE)
    | {"input", "instructions", "max_output_tokens", "top_logprobs", "include", "reasoning", "text"}
    | {"previous_response_id"}
    | {
        "skip_special_tokens",
        *(alias for alias, name in peers.RENAMED.items() if name in parameters.SAMPLING - {"max_tokens"}),
    }
    | parameters.STREAM
    | tools.FIELDS,
    parameters.NO_EFFECT | {"client_metadata", "max_tool_calls"},
    {**parameters.UNSERVED, **OWN_UNSERVED},
)

_VERBOSITIES = ("low", "medium", "high")
_SUMMARIES = ("auto", "concise", "detailed")


@with_notes
def read(body: Mapping[str, Any], defaults: Defaults) -> Request:
    """Return the request in a body. Raises InvalidRequest."""
    own = FIELDS.without(defaults.unserved)
    if defaults.earlier is None:
        own = own.without({"previous_response_id": Unserved(_STATELESS)})
    accepted = own.accepted(body)
    if "metadata" in accepted:
        _check_metadata(accepted["metadata"])
    said = own.known(accepted)
    values = parameters.sampling_values(said)
    included = _included(said, defaults)
    values["logprobs"] = parameters.alternatives(
        said, LOGPROBS in included, f'"include": ["{LOGPROBS}"]', defaults.params.logprobs
    )
    offered, chosen = offered_tools(said)
    values |= _form(said) | chosen
    if "max_output_tokens" in said:
        values["max_tokens"] = said["max_output_tokens"]
    params = parameters.sampling_params(defaults.params, values, said)
    stream = parameters.stream_of(said, params)
    previous = _previous(said, defaults)
    told = items = plain_items(said.get("input"), defaults.earlier)
    if previous is not None:
        told = [*(("previous_response_id", item) for item in previous.items()), *told]
    messages, paths = messages_of(told, offered, defaults.seal)
    if not messages:
        raise InvalidRequest("`input` has no message, no call and no result: send one of them", field="input")
    read = [*_instructions(said), *read_messages(messages, paths)]
    variables = parameters.template_variables(said, defaults, more=_effort(said))
    store = defaults.earlier is not None and parameters.flag({"store": True, **accepted}, "store")
    kept = tuple(kept_form(item) for _, item in items) if store else ()
    details = Details(offered, kept, previous, store, ENCRYPTED in included)
    return Request((read,), params, variables, body=body, details=details, **stream)


def _previous(said: Mapping[str, Any], defaults: Defaults) -> EarlierResponse | None:
    """Return the response that a body continues."""
    if defaults.earlier is None or "previous_response_id" not in said:
        return None
    id = checked("previous_response_id", said["previous_response_id"], str, "the id of a response")
    found = defaults.earlier.response(id)
    if found is None:
        raise NotStored(id, field="previous_response_id")
    return found


def _check_metadata(metadata: Any) -> None:
    """Raise InvalidRequest for metadata that the body of a response cannot hold. A response repeats its request's
    metadata.
    """
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        message = f"metadata is {metadata!r:.80}, but must be an object whose values are texts"
        raise InvalidRequest(message, field="metadata")


def _included(said: Mapping[str, Any], defaults: Defaults) -> list[str]:
    """Return what `include` asks for."""
    include = checked("include", said.get("include", []), list, "a list")
    served = (LOGPROBS, *((ENCRYPTED,) if defaults.seal is not None else ()))
    for place, name in enumerate(include):
        if name not in (*served, *_ABSENT):
            message = f"include has {name!r:.80}, but only {' and '.join(map(repr, served))} is served"
            raise InvalidRequest(message, field=f"include[{place}]")
    return include


def _form(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return `structured` as `text` sets it, or nothing if `text` does not set it."""
    text = checked("text", said.get("text", {}), dict, "an object")
    with inside("text"):
        check_fields(text, ("format", "verbosity"), "`text`")
        _check_hint("verbosity", text.get("verbosity"), _VERBOSITIES)
        if text.get("format") is None:
            return {}
        asked = checked("format", text["format"], dict, "an object")
        with inside("format"):
            return {"structured": forms.text_format(asked)}


def _effort(said: Mapping[str, Any]) -> dict[str, object]:
    """Return the template's variable that `reasoning` sets: the degree of thinking."""
    reasoning = checked("reasoning", said.get("reasoning", {}), dict, "an object")
    with inside("reasoning"):
        given = {name: part for name, part in reasoning.items() if part is not None}
        check_fields(given, ("effort", "summary", "generate_summary"), "`reasoning`")
        for name in ("summary", "generate_summary"):
            _check_hint(name, given.get(name), _SUMMARIES)
        effort = checked("effort", given.get("effort", ""), str, "a text like 'low'")
    return {EFFORT: effort} if effort else {}


def _check_hint(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise InvalidRequest unless a hint has one of its values. Hints have no effect."""
    if value is not None and value not in known:
        raise InvalidRequest(f"{name} is {value!r:.80}, but must be one of {', '.join(known)}", field=name)


def _instructions(said: Mapping[str, Any]) -> list[Message]:
    instructions = said.get("instructions")
    with inside("instructions"):
        if not isinstance(instructions, str | None):
            raise InvalidRequest(f"`instructions` must be a text, not {type(instructions).__name__}")
        return [{"role": "system", "content": mend(instructions)}] if instructions else []
