"""Agents read and correct a file: each as docs/clients.md sets it up, in a home of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from support.clients.home import Home
from support.clients.installed import HERE, node, program
from support.clients.launched import GREETING
from support.clients.page import configuration
from support.clients.scripted import CONTEXT, Answer, Turn, call
from support.clients.served import BLOCK, Exchange

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


CODEX = Agent(
    "Codex",
    ".codex/config.toml",
    "/v1/responses",
    lambda: [program("codex"), "exec", "--json", "--skip-git-repo-check", "--sandbox", "workspace-write"],
    lambda file: [call("exec_command", cmd=f"cat {FILE}"), call("exec_command", cmd=_PATCH)],
    lambda said: [
        one["item"]["text"]
        for one in map(json.loads, said.splitlines())
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


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("agent", [OPENCODE, CODEX, CLAUDE_CODE], ids=lambda agent: agent.section)
def test_an_agent_reads_a_file_and_corrects_it_in_three_turns(agent: Agent, serving: Any, home: Home) -> None:
    server = serving(agent.script(home))
    done = agent.correct(home, server.url)
    assert server.refused == []
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert (home.project / FILE).read_text() == RIGHT, (done.stdout, done.stderr)
    assert agent.said(done.stdout) == DONE
    assert len(server.turns(agent.path)) == 3


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("claude", ["--print", "--output-format", "json"]),
        ("codex", ["exec", "--skip-git-repo-check"]),
        ("opencode", ["run"]),
    ],
)
def test_a_launched_agent_is_answered_and_knows_the_context(
    agent: str, words: list[str], scripted: Path, home: Home
) -> None:
    options = ["-m", scripted, "--kv-memory", "500MB"]
    path = {"PATH": f"{program(agent).parent}:{node()}:{os.defpath}:/usr/bin:/bin"}
    done = home.run([sys.executable, HERE / "launched.py", agent, *options, "--", *words, "Hi"], path)
    assert done.returncode == 0 and GREETING in done.stdout, (done.stdout, done.stderr)
    if agent == "claude":
        [usage] = json.loads(done.stdout)["modelUsage"].values()
        assert usage["contextWindow"] == CONTEXT


# -- What a server computes for agents: what is new, whether their turns go on or a conversation begins ---------------


OTHER = "There is a mistake in notes.txt. Repair it."
MARKS = 8
"""The most tokens that a template writes around a message."""

AGENTS = pytest.mark.parametrize("agent", [OPENCODE, CODEX, CLAUDE_CODE], ids=lambda agent: agent.section)


def new_tokens(before: Exchange, after: Exchange) -> int:
    """How many tokens a turn's prompt has that the turn before it had not, nor its answer."""
    assert before.tokens is not None and after.tokens is not None
    return after.tokens.prompt - before.tokens.prompt - before.tokens.answer


@AGENTS
def test_from_the_second_turn_on_only_new_tokens_are_computed(agent: Agent, serving: Any, home: Home) -> None:
    server = serving(agent.script(home))
    agent.correct(home, server.url)
    assert server.refused == []
    turns = server.turns(agent.path)
    assert len(turns) == 3
    computed = [(after.computed, new_tokens(before, after) + 2 * BLOCK) for before, after in pairwise(turns)]
    assert all(have <= most for have, most in computed), computed


@AGENTS
def test_a_second_conversation_finds_the_tools_and_the_instructions(agent: Agent, serving: Any, home: Home) -> None:
    asked: list[Sequence[Turn]] = []
    script = agent.script(home)
    server = serving(lambda turns: asked.append(turns) or script(turns))
    agent.correct(home, server.url)
    first = len(server.turns(agent.path))
    agent.correct(home, server.url, OTHER)
    assert server.refused == []
    begun = server.turns(agent.path)[first]
    prompt = next(turns for turns in asked if turns[0].role == "tools" and OTHER in str(turns))
    own = next(place for place, turn in enumerate(prompt) if turn.role == "user")
    words = sum(len(server.engine.encode(turn.text)) + MARKS for turn in prompt[own:])
    assert begun.computed <= words + 2 * BLOCK, (begun.tokens, words)
