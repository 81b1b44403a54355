"""The configurations that docs/clients.md shows, for a server at another address."""

from __future__ import annotations

from support.clients.served import MODEL
from support.pages import blocks, read

PAGE = "docs/clients.md"
URL = "http://localhost:8000"


def shown(client: str) -> str:
    """Return the code block of a client's section."""
    _, _, section = read(PAGE).partition(f"\n## {client}\n")
    (found,) = [block.text for block in blocks() if block.page == PAGE and block.text in section.partition("\n## ")[0]]
    return found


def configuration(client: str, url: str) -> str:
    """Return the code block of a client's section, with the address of a server that runs."""
    text = shown(client)
    assert URL in text and MODEL in text
    return text.replace(URL, url)
