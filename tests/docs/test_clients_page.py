"""docs/clients.md: its blocks are of their languages, name the address and the model, and its versions are those that
tests/server/clients runs.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from support.clients.installed import HERE, OLLAMA_NPM, PROGRAMS
from support.clients.page import PAGE, URL, configuration
from support.clients.served import MODEL
from support.pages import Block, blocks, read

READERS: dict[str, Callable[[str], Any]] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
    "python": lambda text: compile(text, PAGE, "exec", dont_inherit=True),
}
CONFIGURED = [block for block in blocks() if block.page == PAGE and block.kind != "sh"]
RUN = (
    "Claude Code",
    "Codex",
    "opencode",
    "openai",
    "anthropic",
    "LangChain",
    "litellm",
    "pydantic-ai",
    "instructor",
    "llm",
    "ollama",
)


@pytest.mark.parametrize("block", CONFIGURED, ids=lambda block: block.name)
def test_a_block_can_be_read_and_asks_the_server_of_the_page(block: Block) -> None:
    assert READERS[block.kind](block.text)
    assert URL in block.text and MODEL in block.text


def test_every_client_that_is_run_has_one_block() -> None:
    found = [configuration(client, "http://elsewhere:1") for client in RUN]
    assert len(set(found)) == len(RUN) == len(CONFIGURED) - 2  # Zed and Continue are not run
    assert all("http://elsewhere:1" in text and URL not in text for text in found)
    command, launch = [block.text for block in blocks("sh") if block.page == PAGE]
    assert f"--alias {MODEL}\n" in command and launch.startswith("cortexmlx launch claude ")


def test_the_versions_are_those_that_are_installed() -> None:
    rows = re.findall(r"^\| (.*) \| ([\d., ]+) \|$", read(PAGE), re.MULTILINE)
    told = [version for _, versions in rows for version in versions.split(", ")]
    pinned = dict(line.split("==", 1) for line in (HERE / "packages.txt").read_text().split("\n") if "==" in line)
    packages = ["openai", "anthropic", "langchain-openai", "langchain-anthropic", "litellm", "pydantic-ai-slim"]
    own = dict(line.split("==", 1) for line in (HERE / "instructor.txt").read_text().split("\n") if "==" in line)
    ollama = [pinned["ollama"], OLLAMA_NPM.rpartition("@")[2], pinned["langchain-ollama"], pinned["llm-ollama"]]
    programs = [package.rpartition("@")[2] for package in PROGRAMS.values()]
    assert told == [*programs, *(pinned[name] for name in packages), own["instructor"], pinned["llm"], *ollama]
    assert f"instructor, with openai {own['openai']} |" in read(PAGE)
