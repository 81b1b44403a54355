"""Agents read and correct a file: each as docs/clients.md sets it up, in a home of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from support.clients.agents import CLAUDE_CODE, CODEX, DONE, FILE, OPENCODE, RIGHT, Agent
from support.clients.home import Home
from support.clients.installed import HERE, node, program
from support.clients.launched import GREETING
from support.clients.scripted import CONTEXT

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
