"""The page is one file that runs and loads nothing else, and a wheel has it."""

from __future__ import annotations

import re
import tomllib
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import httpx2 as httpx
import pytest

import cortexmlx.server
from cortexmlx.server.monitoring import page

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "cortexmlx/server/index.html"
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


class Inline(HTMLParser):
    """Collects the texts of scripts and styles, all tags, and all attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.attributes: list[tuple[str, str, str]] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in self.texts:
            self.texts[self._inside].append(data)


@pytest.fixture
def inline() -> Inline:
    parser = Inline()
    parser.feed(FILE.read_text(encoding="utf-8"))
    return parser


def policy() -> dict[str, str]:
    rules = (rule.partition(" ") for rule in page().headers["content-security-policy"].split("; "))
    return {name: value for name, _, value in rules}


@pytest.mark.parametrize("tag", ["script", "style"])
def test_only_the_files_own_scripts_and_styles_run(inline: Inline, tag: str) -> None:
    hashes = [b64encode(sha256(text.encode()).digest()).decode() for text in inline.texts[tag]]
    assert len(hashes) == 1 and policy()[f"{tag}-src"] == " ".join(f"'sha256-{each}'" for each in hashes)


def test_nothing_else_is_loaded_and_nobody_may_frame_it() -> None:
    rules = policy()
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["connect-src"] == "'self'" and rules["img-src"] == "data:"
    assert not any("unsafe" in value or "http" in value or "*" in value for value in rules.values())
    headers = page().headers
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer" and headers["content-type"] == "text/html; charset=utf-8"


def test_the_file_has_no_address_handler_or_style_that_the_policy_would_refuse(inline: Inline) -> None:
    refused = [
        (tag, name, value)
        for tag, name, value in inline.attributes
        if name.startswith("on") or name == "style" or (name in ("src", "href") and not value.startswith("data:"))
    ]
    assert refused == []
    [script], [style] = inline.texts["script"], inline.texts["style"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script)
    assert "localStorage" not in script and "cookie" not in script and "url(" not in style and "@import" not in style
    assert "://" not in script + style


def test_what_a_person_uses_has_a_name(inline: Inline) -> None:
    labelled = {value for tag, name, value in inline.attributes if (tag, name) == ("label", "for")}
    assert {"key", "prompt"} <= labelled
    assert ("html", "lang", "en") in inline.attributes and ("meta", "name", "viewport") in inline.attributes
    text = FILE.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text and "prefers-reduced-motion" in text


def test_a_wheel_has_the_file() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = Path(cortexmlx.server.__path__[0])
    found = {path.name for pattern in data["cortexmlx.server"] for path in folder.glob(pattern)}
    assert found == {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py"} == {FILE.name}


def test_it_is_the_file(http: httpx.Client) -> None:
    reply = http.get("/", headers=HTML)
    assert reply.content == FILE.read_bytes() and reply.status_code == 200
    head = http.head("/", headers=HTML)
    assert head.content == b"" and head.headers["content-security-policy"] == reply.headers["content-security-policy"]
