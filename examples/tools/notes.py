"""Let a model look through a folder of notes, and add to it.

In the chat, which asks before each call:

    cortexmlx chat mlx-community/Qwen3-4B-4bit --tools examples/tools/notes.py

As a program, which asks only before a note is written:

    python examples/tools/notes.py mlx-community/Qwen3-4B-4bit "What did I write about the garden?"

The notes are the .txt files of the folder that NOTES names, or of this one. The chat offers each function whose name
does not begin with an underscore.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from cortexmlx import CortexError, Engine, ToolCall, ToolEvent

FOLDER = Path(os.environ.get("NOTES", "."))


def list_notes() -> list[str]:
    """List the names of all notes."""
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def read_note(name: str) -> str:
    """Read a note.

    Args:
        name: its name, as list_notes returns it
    """
    return _path(name).read_text(encoding="utf-8")


def add_note(name: str, text: str) -> str:
    """Write a new note.

    Args:
        name: a name that no other note has
        text: what it says
    """
    with _path(name).open("x", encoding="utf-8") as note:
        note.write(text)
    return f"{name} is written"


def _path(name: str) -> Path:
    """The file of a note. A model may write any name, also one that leads out of the folder."""
    path = FOLDER / f"{name}.txt"
    if path.resolve().parent != FOLDER.resolve():
        raise ValueError(f"{name!r} is no name of a note")
    return path


def _allowed(call: ToolCall) -> bool:
    """Ask before anything is written."""
    return call.name != "add_note" or input(f"{call.name} {call.arguments}: write it? y/n ").strip() == "y"


def _told(event: ToolEvent) -> None:
    """Show each call, and how it ended."""
    if event.result is None:
        print(f"[{event.call.name} {event.call.arguments}]")
    elif event.result.startswith("Error"):
        print(f"[{event.result}]")


def _main() -> None:
    parser = argparse.ArgumentParser(description="Ask a model about a folder of notes.")
    parser.add_argument("model", help="a model that can call tools")
    parser.add_argument("question")
    asked = parser.parse_args()
    try:
        with Engine(asked.model) as engine:
            talk = engine.conversation(system="Answer from the user's notes.")
            answer = talk.ask(asked.question, tools=[list_notes, read_note, add_note], approve=_allowed, on_event=_told)
            print(answer.text)
    except (CortexError, EOFError) as error:  # EOFError: nobody is there to allow a call
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    _main()
