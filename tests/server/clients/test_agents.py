"""Agents read and correct a file: each as docs/clients.md sets it up, in a home of its own."""

from __future__ import annotations

from typing import Any

import pytest

from support.clients.agents import CLAUDE_CODE, CODEX, DONE, FILE, OPENCODE, RIGHT, Agent
from support.clients.home import Home

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
