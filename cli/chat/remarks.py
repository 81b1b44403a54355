"""Notes on a chat that was loaded or continues with another model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cortexmlx.cli.prompts import calls_left_out
from cortexmlx.errors import InvalidRequest

if TYPE_CHECKING:
    from cortexmlx.engine import Engine
    from cortexmlx.sessions.conversation import Conversation


def remarks(engine: Engine, talk: Conversation) -> tuple[str, ...]:
    """The conversation's own notes, and what the model does not see of it. What its template refuses as a whole is said
    when something is asked.
    """
    try:
        left_out = calls_left_out(engine, talk.messages)
    except InvalidRequest:
        left_out = ""
    return (*talk.notes, left_out) if left_out else talk.notes
