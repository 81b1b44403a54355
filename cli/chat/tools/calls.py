"""The tool calls of a chat on the screen, and the user's consent to each."""

from __future__ import annotations

import json
from collections.abc import Callable

from cortexmlx.cli.chat.input import LineCleared
from cortexmlx.cli.chat.session import TurnStopped
from cortexmlx.cli.terminal.harmless import strip_controls
from cortexmlx.sessions.tool_rounds import NOT_ALLOWED, ToolEvent
from cortexmlx.structured.tools import ToolCall

CONSENT = "  run it? y, n, or a for always: "
TAKEN_BACK = "stopped: the question and its calls are taken back"

_SHOWN_LINES, _SHOWN_CHARACTERS = 6, 600
"""How much of a result is shown. The model reads all of it."""


class ToolCallDisplay:
    """Shows tool calls and the beginnings of results. If `ask_first`, the user approves all but `allowed_functions`."""

    def __init__(
        self,
        tell: Callable[[str], None],
        ask: Callable[[str], str | None],
        allowed_functions: set[str],
        *,
        ask_first: bool,
    ) -> None:
        self._tell = tell
        self._ask = ask
        self._allowed_functions = allowed_functions
        self._ask_first = ask_first

    def ask_approval(self, call: ToolCall) -> bool:
        """Show this call, and return whether the user allows it. Raises TurnStopped on Ctrl-C and the input's end."""
        self._tell(format_call(call))
        if not self._ask_first or call.name in self._allowed_functions:
            return True
        while True:
            try:
                line = self._ask(CONSENT)
            except LineCleared:
                line = None
            if line is None:
                raise TurnStopped(TAKEN_BACK)
            answer = line.strip().lower()
            if answer in ("a", "always"):
                self._allowed_functions.add(call.name)
            if answer in ("y", "yes", "a", "always"):
                return True
            if answer in ("n", "no"):
                return False
            self._tell(
                "y runs this call, n tells the model that you do not allow it, a runs all calls of "
                f"{call.name} from now on"
            )

    def show_result(self, event: ToolEvent) -> None:
        """Print the beginning of a call's result."""
        if event.result is not None and event.result != NOT_ALLOWED:
            self._tell(f"= {shorten_result(event.result)}")


def format_call(call: ToolCall) -> str:
    """Return a tool call like Python's, with JSON values. Characters that a terminal would hide or obey are escaped."""
    arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.values.items())
    text = f"{call.name}({arguments})"
    return "".join(char if strip_controls(char) == char else json.dumps(char)[1:-1] for char in text)


def shorten_result(result: str) -> str:
    """Return the beginning of a result, and how much more there is."""
    lines = result.strip().splitlines() or ["(nothing)"]
    shown_text = "\n".join(lines[:_SHOWN_LINES])[:_SHOWN_CHARACTERS]
    hidden_count = len(result.strip()) - len(shown_text)
    return shown_text + (f" ... ({hidden_count:,} more characters)" if hidden_count > 0 else "")
