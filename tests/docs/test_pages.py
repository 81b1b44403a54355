"""The pages of the documentation: all can be found from the README, and no link leads nowhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from support.pages import PAGES, ROOT, Block, anchors, blocks, links, prose, read

OTHERS = {
    "docs/architecture.md: chat, batch, server": "a drawing; tests/house/test_rooms.py has the order",
    "docs/batch.md: text": "tests/cli/test_batch_page.py reads it as input",
    "docs/batch.md: jsonl": "tests/cli/test_batch_page.py reads it as input, or compares it with what is written",
    "docs/bench.md: | model   |      size": "tests/bench/report/test_speed.py has the table",
    "docs/chat.md: >>> what is wrong in": "tests/cli/chat/test_attachments.py has what is said of a file",
    "docs/clients.md: json": "tests/docs/test_clients_page.py reads it, tests/server/clients/test_agents.py uses it",
    "docs/clients.md: toml": "tests/docs/test_clients_page.py reads it, tests/server/clients/test_agents.py uses it",
    "docs/clients.md: yaml": "tests/docs/test_clients_page.py reads it, tests/server/clients/test_packages.py uses it",
    "docs/hosts.md: json": "tests/docs/test_hosts_page.py reads it",
    "docs/server.md: xml": "tests/docs/test_server_page.py reads it",
    "docs/structured.md: jsonl": "tests/docs/test_structured_page.py reads it",
    "docs/tools.md: jsonl": "tests/docs/test_tools_page.py reads it",
    "docs/tools.md: text": "tests/docs/test_tools_page.py compares it with what is shown",
    "docs/cli.md: Examples:": "tests/cli/test_reference.py compares the page with the help",
}
"""Blocks that are no commands and no Python, by page and kind (without one: by how they begin), and their judge."""


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.name)
def test_every_block_has_a_judge(block: Block) -> None:
    """`sh` and `python` are run by the other files here."""
    assert block.kind in ("sh", "python") or listed(block)


def listed(block: Block) -> list[str]:
    """Its entries in the list."""
    name = f"{block.page}: {block.kind}"
    return [entry for entry in OTHERS if (entry == name if block.kind else block.name.startswith(entry))]


def test_the_list_of_judges_names_blocks_and_files_that_exist() -> None:
    assert {entry for block in blocks() for entry in listed(block)} == set(OTHERS)
    judges = {path for reason in OTHERS.values() for path in re.findall(r"tests/\S+\.py", reason)}
    assert [path for path in judges if not (ROOT / path).is_file()] == []


def test_every_page_and_picture_can_be_found_from_the_readme() -> None:
    found, new = set[str](), {"README.md"}
    while new:
        page = new.pop()
        found.add(page)
        if page.endswith(".md"):
            new |= {path for path, _ in links(page)} - found
    pictures = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.svg")}
    assert set(PAGES) | pictures <= found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for path, anchor in links(page):
        assert (ROOT / path).exists(), path
        assert not anchor or anchor in anchors(path), f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_modules_that_are_named_can_be_run(page: str) -> None:
    for name in re.findall(r"python\s+-m\s+([\w.]+)", read(page)):
        found = importlib.util.find_spec(name)
        assert found is not None, name
        if found.submodule_search_locations is not None:
            assert importlib.util.find_spec(f"{name}.__main__"), name
        else:
            assert found.origin and '__name__ == "__main__"' in Path(found.origin).read_text(), name


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_are_there(page: str) -> None:
    """Paths in backticks that begin with a folder of this repository."""
    tops = "|".join(("cortexmlx", "cli", "bench", "metal", "tests", "docs", "examples"))
    named = re.findall(rf"`((?:{tops})/[\w./-]+)`", prose(page))
    inside = {path: path for path in named} | {path: path + ".py" for path in named if not (ROOT / path).exists()}
    assert [path for path in inside.values() if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_page_was_left_in_the_middle_of_a_merge_or_of_its_writing(page: str) -> None:
    assert (
        re.findall(r"^(?:<<<<<<<|=======|>>>>>>>)|\b(?:TODO|FIXME|MEASURED\d?|XXX)\b", read(page), re.MULTILINE) == []
    )


@pytest.mark.parametrize(
    "target", sorted({n for b in blocks("sh") for n in re.findall(r"^make ([\w-]+)", b.text, re.M)})
)
def test_what_make_is_told_to_make_is_there(target: str) -> None:
    assert subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True).returncode == 0


LONGEST = 120
"""Columns of a line of prose."""

UNBROKEN = re.compile(r"\||#|!\[|\[[^]]*\]\([^)]*\)\.?$")
"""How lines begin that cannot be broken: rows of tables, headings, pictures, and a link alone."""


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_prose_are_no_longer_than_a_window(page: str) -> None:
    lines = [line for line in prose(page).splitlines() if not UNBROKEN.match(line)]
    assert [line for line in lines if len(line) > LONGEST] == []
