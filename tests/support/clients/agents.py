"""Agents: how each is set up as docs/clients.md says, and asked to correct a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from support.clients.home import Home
from support.clients.installed import program
from support.clients.page import configuration
from support.clients.scripted import Answer, Turn, call

FILE = "notes.txt"
WRONG = "Grass is red, and water is wet.\n"
RIGHT = "Grass is green, and water is wet.\n"
QUESTION = f"Correct {FILE}."
DONE = "I have corrected the colour of grass."

_PATCH = f"""apply_patch <<'END'
*** Begin Patch
*** Update File: {FILE}
@@
-{WRONG.strip()}
+{RIGHT.strip()}
*** End Patch
END
"""


@dataclass(frozen=True)
class Agent:
    """A program that works in a folder."""

    section: str
    """Its section of the page."""
    file: str
    """Its configuration, in its home."""
    path: str
    """What it asks."""
    command: Callable[[], Sequence[str | Path]]
    """How it is asked a question, which comes last."""
    calls: Callable[[str], Sequence[str]]
    """What its model writes to read the file of that name, and then to correct it."""
    said: Callable[[str], str]
    """Its last words, in what it prints."""

    def correct(self, home: Home, url: str, question: str = QUESTION) -> CompletedProcess[str]:
        """Ask it to correct the file, which is wrong."""
        file = home.folder / self.file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(configuration(self.section, url))
        (home.project / FILE).write_text(WRONG)
        return home.run([*self.command(), question])

    def script(self, home: Home) -> Answer:
        """Return what its model writes: the calls, one in each turn, and then that it is done."""
        calls = self.calls(str(home.project / FILE))

        def answer(turns: Sequence[Turn]) -> str:
            if turns[0].role != "tools":
                return "A title"
            results = sum(turn.role == "tool" for turn in turns)
            return [*calls, DONE][results]

        return answer


def _json_lines(said: str) -> list[Any]:
    return [json.loads(line) for line in said.splitlines()]


CODEX = Agent(
    "Codex",
    ".codex/config.toml",
    "/v1/responses",
    lambda: [program("codex"), "exec", "--json", "--skip-git-repo-check", "--sandbox", "workspace-write"],
    lambda file: [call("exec_command", cmd=f"cat {FILE}"), call("exec_command", cmd=_PATCH)],
    lambda said: [
        one["item"]["text"]
        for one in _json_lines(said)
        if one["type"] == "item.completed" and one["item"]["type"] == "agent_message"
    ][-1],
)
OPENCODE = Agent(
    "opencode",
    ".config/opencode/opencode.json",
    "/v1/chat/completions",
    lambda: [program("opencode"), "run"],
    lambda file: [
        call("read", filePath=file),
        call("edit", filePath=file, oldString="red", newString="green"),
    ],
    lambda said: said.strip(),
)
CLAUDE_CODE = Agent(
    "Claude Code",
    ".claude/settings.json",
    "/v1/messages",
    lambda: [program("claude"), "--print", "--output-format", "json", "--allowedTools", "Read,Edit", "--"],
    lambda file: [
        call("Read", file_path=file),
        call("Edit", file_path=file, old_string="red", new_string="green"),
    ],
    lambda said: json.loads(said)["result"],
)
