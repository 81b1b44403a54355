"""/thoughts: what the model thought before it answered, shown, or folded into a line."""

from __future__ import annotations

from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession
from cortexmlx.cli.chat.view import WIDEST
from cortexmlx.cli.markdown.stream import printed
from cortexmlx.cli.markdown.styles import THOUGHT
from cortexmlx.cli.terminal.console import print_indented
from cortexmlx.errors import InvalidRequest

FOLD, SHOW = "fold", "show"


def thoughts(chat: ChatSession, argument: str, console: Console) -> None:
    """The thoughts of the last answer. With `fold` or `show`, how those of the answers to come are shown."""
    if argument not in ("", FOLD, SHOW):
        raise InvalidRequest(f"/thoughts takes nothing, {FOLD} or {SHOW}: not {argument!r}")
    if argument:
        chat.folding.folded = argument == FOLD
        now = "one line; /thoughts shows the last" if chat.folding.folded else "shown"
        print_indented(console, f"thoughts are {now} from now on")
        return
    thought = chat.conversation.thinking
    if not thought:
        raise InvalidRequest("the last answer has no thoughts")
    for line in printed(thought, min(console.width, WIDEST)):
        line.stylize(THOUGHT)
        console.print(line, soft_wrap=True)
