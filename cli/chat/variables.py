"""What is set of a chat template, looked at before a turn depends on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cortexmlx.messages import ChatPrompt

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


def checked(engine: Engine, variables: dict[str, object]) -> dict[str, object]:
    """The same variables. Raises InvalidRequest if the model's template does not read one, or fails with it."""
    engine.encode(ChatPrompt([{"role": "user", "content": "?"}], variables))
    return variables
