"""What the documentation shows: its pages, the links between them, and the code blocks in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")),
]

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"\s+# .*$")


@dataclass(frozen=True)
class Block:
    """A code block: the page it is on, what its fence calls it, and its text. Its first line names it."""

    page: str
    kind: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}: {self.text.partition(chr(10))[0]}"

    @property
    def commands(self) -> list[str]:
        """Its lines, without comments."""
        return [_COMMENT.sub("", line) for line in self.text.splitlines() if line.strip()]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(*kinds: str) -> Iterator[Block]:
    """The blocks of all pages; of these kinds, if any are given."""
    for page in PAGES:
        for kind, text in _FENCED.findall(read(page)):
            if not kinds or kind in kinds:
                yield Block(page, kind, text)


def prose(page: str) -> str:
    """A page without its blocks."""
    return _FENCED.sub("", read(page))


def links(page: str) -> list[tuple[str, str]]:
    """Where the links and pictures of a page lead: a path from the root ("" for the web) and what stands behind #."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        whole = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
        found.append((whole.relative_to(ROOT).as_posix(), anchor))
    return found


def anchors(page: str) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
