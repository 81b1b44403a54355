"""Requests of any protocol after parsing, the defaults of what their bodies do not set, and what a reply's writer
needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Protocol

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.error_text import collect_notes
from cortexmlx.protocols.fields import UnservedField
from cortexmlx.protocols.images import CheckImage, ImageParts, ReadElsewhere
from cortexmlx.protocols.seal import Seal
from cortexmlx.structured.schemas import NO_TEXT, is_text
from cortexmlx.types.messages import TemplateVars
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import Message
from cortexmlx.types.sampling_params import SamplingParams

PromptInput = str | list[int] | list[Message]
"""One prompt of a request: a text, token ids, or messages."""


@dataclass(frozen=True)
class Request:
    """A parsed and checked request of any protocol: its prompts, sampling parameters, and options of the reply."""

    prompts: tuple[PromptInput, ...]
    """One prompt, or more if a completions body has a list of them."""
    params: SamplingParams
    template_vars: TemplateVars = field(default_factory=dict)
    """The variables of the chat template."""
    raw: bool = False
    """Whether a text is the prompt as it is, without the chat template."""
    echo: bool = False
    """Whether the answer begins with its prompt."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with the usage."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """The body itself. Some replies repeat parts of it."""
    details: object = None
    """What only the writer of the same protocol knows."""
    hints: TemplateVars = field(default_factory=dict)
    """Variables for chat templates that read them: see `ChatPrompt`."""
    adapter: str | None = None
    """The name of the adapter that answers, where a body can say it; None: the model alone."""
    token_ids: bool = False
    """Whether the choices of a reply say the ids of their tokens."""
    usage_so_far: bool = False
    """Whether every chunk of a stream says the usage so far."""
    notes: tuple[str, ...] = ()
    """What was changed or left out of the body when it was read."""


@dataclass(frozen=True)
class RequestDefaults:
    """Default values of fields that a body leaves out, and what a body may refer to: adapters, earlier responses."""

    params: SamplingParams
    """The sampling parameters."""
    template_vars: TemplateVars = field(default_factory=dict)
    """The variables of the chat template."""
    raw: bool = False
    """Whether texts of our own JSON skip the chat template."""
    unserved: Mapping[str, UnservedField] = field(default_factory=dict)
    """Fields of the protocol that are not served here."""
    seal: Seal | None = None
    """What thoughts that come back are checked with; None: they are not checked."""
    earlier_responses: EarlierResponses | None = None
    """The responses of the same client that were kept; None: none ever are."""
    known_vars: frozenset[str] | None = None
    """The variables that the model's chat template reads; None: they are not known."""
    adapters: Collection[str] = ()
    """The names of the adapters that our own JSON may name."""
    check_image: CheckImage | None = None
    """What prepares the images of messages for the model; None: it sees none."""

    read_elsewhere: ReadElsewhere | None = None
    """What reads images that a body only names; None: they are not read."""

    def image_parts(self) -> ImageParts | None:
        """Return a new reader of one conversation's images; None if the model does not see images."""
        return None if self.check_image is None else ImageParts(self.check_image, self.read_elsewhere)


BodyReader = Callable[[Mapping[str, Any], RequestDefaults], Request]
"""What reads a body of a protocol."""


def with_notes(read: BodyReader) -> BodyReader:
    """Decorate a reader of bodies: its requests get the notes on what it changed or left out."""

    @wraps(read)
    def read_with_notes(body: Mapping[str, Any], defaults: RequestDefaults) -> Request:
        with collect_notes() as notes:
            request = read(body, defaults)
        return replace(request, notes=tuple(notes.values())) if notes else request

    return read_with_notes


def require_prompt_text(text: str) -> str:
    """Return a prompt's text unchanged. Raises InvalidRequest if it is empty or cannot be encoded as UTF-8."""
    if not text:
        raise InvalidRequest("the prompt is empty")
    if not is_text(text):
        raise InvalidRequest(f"the prompt {NO_TEXT}")
    return text


def read_prompt(prompt: Any, label: str) -> PromptInput:
    """Check and return a prompt: a text or a list of token ids. `label` names it in errors. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return require_prompt_text(prompt)
    if is_token_list(prompt):
        return list(prompt)
    raise InvalidRequest(f"{label} must be one text or a list of token ids, not {type(prompt).__name__}")


def is_token_list(prompt: Any) -> bool:
    """Whether a prompt is a list of at least one token id."""
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


# Metadata of a reply that every protocol needs.


Body = dict[str, Any]
"""A JSON object."""

TokenBytes = Callable[[int], bytes]
"""A function from a token id to its bytes: `Engine.token_bytes`."""

StoreReply = Callable[[Request, Body], None]
"""What keeps a reply."""


@dataclass(frozen=True)
class ReplyInfo:
    """What every body and chunk of one reply repeats: id, model, time; and what its writer needs, such as the seal."""

    id: str
    """The id without the protocol's prefix."""
    model: str
    created: int
    """Seconds since 1970."""
    token_bytes: TokenBytes
    repeatable: bool = False
    """Whether to leave out what differs from run to run: how many tokens were cached, drafted and accepted."""
    seal: Seal | None = None
    """What proves to this client's later requests that thoughts are the model's own; None: nothing does."""
    keep: StoreReply | None = None
    """Called with a request and the whole body of its reply, before the end of the reply is sent; None: nothing is
    kept.
    """
    load_seconds: float = 0.0
    """How long the request waited for its model."""
    progress: Callable[[], Progress | None] = lambda: None
    """Returns how far the prompt is, with its tokens and those that were cached; None: it has not begun."""


# What a reader may know of earlier responses of the same client.


ResponseItem = dict[str, Any]
"""An item of a response's input or output, as JSON."""


class EarlierResponse(Protocol):
    """A stored response that a new request can continue (`previous_response_id`)."""

    def items(self) -> list[ResponseItem]:
        """Return the conversation's input and output items up to the end of this response, without instructions."""


class EarlierResponses(Protocol):
    """The stored responses of one client, and their items, by id."""

    def find_response(self, id: str) -> EarlierResponse | None:
        """Return a stored response, or None."""

    def find_item(self, id: str) -> ResponseItem | None:
        """Return an item that the client sent or the model wrote, or None."""
