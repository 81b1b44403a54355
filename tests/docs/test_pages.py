"""The pages of the documentation: all can be found from the README, and no link leads nowhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from support.pages import PAGES, ROOT, Block, anchors, blocks, links, prose, read

OTHERS = {
    "docs/architecture.md: chat, batch, server": "a drawing; tests/house/test_rooms.py has the order",
    "docs/batch.md: text": "tests/cli/test_batch_page.py reads it as input",
    "docs/batch.md: jsonl": "tests/cli/test_batch_page.py reads it as input, or compares it with what is written",
    "docs/bench.md: | model   |      size": "tests/bench/test_report.py has the table",
    "docs/chat.md: >>> what is wrong in": "tests/cli/chat/test_attachments.py has what is said of a file",
    "docs/clients.md: json": "tests/docs/test_clients_page.py reads it, tests/server/clients/test_agents.py uses it",
    "docs/clients.md: toml": "tests/docs/test_clients_page.py reads it, tests/server/clients/test_agents.py uses it",
    "docs/clients.md: yaml": "tests/docs/test_clients_page.py reads it, tests/server/clients/test_packages.py uses it",
    "docs/images.md: >>> /image photo.jpg": "tests/cli/chat/test_images.py has what is said of an image",
    "docs/hosts.md: json": "tests/docs/test_hosts_page.py reads it",
    "docs/server.md: 10:42:07": "tests/server/test_cache_why.py has what the command prints",
    "docs/server.md: xml": "tests/docs/test_server_page.py reads it",
    "docs/structured.md: jsonl": "tests/docs/test_structured_page.py reads it",
    "docs/tools.md: jsonl": "tests/docs/test_tools_page.py reads it",
    "docs/tools.md: text": "tests/docs/test_tools_page.py compares it with what is shown",
    "docs/cli.md: Examples:": "tests/cli/test_reference.py compares the page with the help",
}
"""Blocks that are no commands and no Python, by page and kind (without one: by how they begin), and their judge."""

SAYING = [*PAGES, "CHANGELOG.md", "bench/LEDGER.md", "metal/README.md", "metal/lab/README.md"]
"""Pages that name files and commands."""


def listed(block: Block) -> list[str]:
    """The entries of a block in the list."""
    name = f"{block.page}: {block.kind}"
    return [entry for entry in OTHERS if (entry == name if block.kind else block.name.startswith(entry))]


def test_every_block_has_a_judge_that_exists_and_every_judge_a_block() -> None:
    """`sh` and `python` are run by the other files here."""
    others = [block for block in blocks() if block.kind not in ("sh", "python")]
    assert [block.name for block in others if not listed(block)] == []
    assert {entry for block in others for entry in listed(block)} == set(OTHERS)
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


def test_links_lead_somewhere() -> None:
    pages = [*PAGES, *(path for page in PAGES for path, _ in links(page) if path.endswith(".md"))]
    ends = {(page, *link) for page in pages for link in links(page)}
    assert {end for end in ends if not (ROOT / end[1]).exists()} == set()
    assert {end for end in ends if end[2] and end[2] not in anchors(end[1])} == set()


def test_modules_that_are_named_can_be_run() -> None:
    for name in {name for page in SAYING for name in re.findall(r"python\s+-m\s+([\w.]+)", read(page))}:
        found = importlib.util.find_spec(name)
        assert found is not None, name
        if found.submodule_search_locations is not None:
            assert importlib.util.find_spec(f"{name}.__main__"), name
        else:
            assert found.origin and '__name__ == "__main__"' in Path(found.origin).read_text(), name


def test_files_that_are_named_are_there() -> None:
    """Paths in backticks that begin with a folder of this repository."""
    tops = "|".join(("cortexmlx", "cli", "bench", "metal", "tests", "docs", "examples"))
    named = {path for page in SAYING for path in re.findall(rf"`((?:{tops})/[\w./-]+)`", prose(page))}
    inside = {path: path for path in named} | {path: path + ".py" for path in named if not (ROOT / path).exists()}
    assert [path for path in inside.values() if not (ROOT / path).exists()] == []


def test_no_page_was_left_in_the_middle_of_a_merge_or_of_its_writing() -> None:
    left = re.compile(r"^(?:<<<<<<<|=======|>>>>>>>)|\b(?:TODO|FIXME|MEASURED\d?|XXX)\b", re.MULTILINE)
    assert [page for page in SAYING if left.search(read(page))] == []


LONGEST = 120
"""Columns of a line of prose."""

UNBROKEN = re.compile(r"\||#|!\[|\[[^]]*\]\([^)]*\)\.?$")
"""How lines begin that cannot be broken: rows of tables, headings, pictures, and a link alone."""


def test_lines_of_prose_are_no_longer_than_a_window() -> None:
    lines = [line for page in PAGES for line in prose(page).splitlines() if not UNBROKEN.match(line)]
    assert [line for line in lines if len(line) > LONGEST] == []
