"""What is set of a chat template, looked at before a turn depends on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cortexmlx.errors import InvalidRequest
from cortexmlx.messages import ChatPrompt

if TYPE_CHECKING:
    from cortexmlx.engine import Engine
    from cortexmlx.sessions.conversation import Conversation


def checked(engine: Engine, variables: dict[str, object]) -> dict[str, object]:
    """The same variables. Raises InvalidRequest if the model's template does not read one, or fails with it."""
    engine.encode(ChatPrompt([{"role": "user", "content": "?"}], variables))
    return variables


def leave_out(engine: Engine, conversation: Conversation) -> list[str]:
    """Variables that were set for another model, and that this one's template does not read, are not set any more.
    Returns their names.
    """
    given = conversation.template_vars
    gone = [name for name in given if not _reads(engine, name, given[name])]
    conversation.template_vars = {name: value for name, value in given.items() if name not in gone}
    return gone


def _reads(engine: Engine, name: str, value: object) -> bool:
    try:
        checked(engine, {name: value})
    except InvalidRequest:
        return False
    return True
