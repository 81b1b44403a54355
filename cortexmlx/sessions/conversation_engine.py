"""ConversationEngine: what a conversation needs of an engine; and the types of its questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cortexmlx.core.streams import Listener
from cortexmlx.types.messages import NO_VARIABLES, TemplateVars
from cortexmlx.types.request import Message
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.core.handle import RequestHandle
    from cortexmlx.stats import ModelInfo

Params = SamplingParams | None
Question = str | Message | Sequence[Message]
"""What is said to the model: a user's text, or messages, such as the outputs of tools."""


class ConversationEngine(Protocol):
    """What a conversation needs of its engine."""

    info: ModelInfo

    @property
    def longest_request(self) -> int:
        """How many tokens a prompt and its answer may have."""

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        listener: Listener | None = None,
        client: str | None = None,
        timeout: float | None = None,
        adapter: str | None = None,
    ) -> RequestHandle:
        """Queue a request and return its handle: see `Engine.submit`."""

    def conversation(
        self,
        *,
        system: str | None = None,
        messages: Sequence[Message] = (),
        params: SamplingParams | None = None,
        template_vars: TemplateVars = NO_VARIABLES,
        client: str | None = None,
        adapter: str | None = None,
    ) -> Any:
        """Return a new Conversation: see `Engine.conversation`."""
