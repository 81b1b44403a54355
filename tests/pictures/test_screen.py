"""Pictures of a screen: its words and colours, and nothing from elsewhere; and those in the documentation."""

from __future__ import annotations

import re

import pyte
import pytest

from support.cli.emulator import Emulator
from support.pages import ROOT
from tests.pictures.screen import svg

SHOWN = {
    "chat": [r"\$ cortexmlx chat", r"lists the commands", r"tokens · .* tok/s · TTFT", r"context .*KV "],
    "batch": [r"\d+/100 done", r"left: the same command with --resume", r"KV .* of .* left"],
    "bench": [r"pp128", r"tg32", r"t/s", r"±"],
    "blocks": [r"private", r"shared", r"cached", r"on disk", r"free"],
}
"""What must be in each picture of the documentation."""


def words(drawn: str) -> str:
    return re.sub(r"<[^>]*>", " ", drawn).replace("&#160;", " ").replace("&gt;", ">")


def test_a_picture_has_the_words_and_colours_of_the_screen() -> None:
    screen = Emulator(30, 5)
    pyte.ByteStream(screen).feed(
        b"plain \x1b[38;2;1;2;3mcoloured\x1b[0m\r\n\x1b[2mfaint\x1b[22m \x1b[1mbold\x1b[0m <&>"
    )
    drawn = svg(screen, "a title")
    assert "a title" in words(drawn) and "coloured" in words(drawn)
    assert "#010203" in drawn and "#868887" in drawn and "font-weight: bold" in drawn and "&lt;&amp;" in drawn
    assert "line-2" not in drawn.replace("line-2)", ""), "empty rows at the end are left out"
    assert "@font-face" not in drawn


@pytest.mark.parametrize("name", SHOWN)
def test_the_pictures_of_the_documentation_show_what_they_are_for(name: str) -> None:
    drawn = (ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8")
    assert [wanted for wanted in SHOWN[name] if not re.search(wanted, words(drawn))] == []
    assert set(re.findall(r"https?://[^\s\"]+", drawn)) <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    assert not re.search(r"/(?:tmp|home|root|work)/", drawn)
