"""Images in a chat: attached, mentioned or dropped; shown again by /regen, and a line in the file that is kept."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("PIL")

from cortexmlx import Engine
from cortexmlx.cli.chat.attachments import find_dropped_image
from cortexmlx.cli.chat.session import ChatSession
from cortexmlx.cli.chat.talk import ChatLoop
from cortexmlx.cli.chat.view import PlainTextView
from cortexmlx.cli.terminal.signals import InterruptHandler
from support.cli.chat_commands import Lines
from support.models.sighted import picture, write_sighted

LINE = "[An image was here: a b.png. It is not kept.]\n"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_sighted(tmp_path_factory.mktemp("sighted") / "tiny")
    with Engine(str(folder), kv_memory="8MB") as opened:
        yield opened


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    picture(24, 32).save(tmp_path / "a b.png")
    picture(64, 16).save(tmp_path / "c.jpg")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a b.png").read_bytes()[:99])
    (tmp_path / "notes.txt").write_text("alpha\n")
    return tmp_path


def talk(session: ChatSession, *lines: str) -> str:
    """Type lines; return what is printed of the commands."""
    screen = Console(file=io.StringIO(), width=200)
    ChatLoop(session, Lines(*lines), screen, InterruptHandler(), pretty=False).run("")
    return screen.file.getvalue()  # type: ignore[attr-defined]


def open_chat(engine: Engine) -> ChatSession:
    conversation = engine.conversation()
    conversation.params = replace(conversation.params, max_tokens=2, temperature=0)
    return ChatSession(engine, lambda reply: PlainTextView(), conversation)


def questions(session: ChatSession) -> list[list[str]]:
    """What each question shows and says."""
    contents: list[Any] = [each["content"] for each in session.conversation.messages if each["role"] == "user"]
    return [[each.get("name") or each["text"] for each in content] for content in contents]


def test_images_are_attached_mentioned_dropped_and_shown_again(engine: Engine, here: Path) -> None:
    session = open_chat(engine)
    said = talk(session, "/image a b.png", "one", "see @c.jpg", f"{here}/a\\ b.png", "three", f"'{here}/a b.png' four")
    assert "+ a b.png: 24 x 32, 12 tokens\n  it goes with the next message" in said
    assert "+ c.jpg: 64 x 16, 16 tokens" in said
    shown = [["a b.png", "one"], ["c.jpg", "see @c.jpg"], ["a b.png", "three"], ["a b.png", "four"]]
    assert questions(session) == shown
    talk(session, "/regen", "/edit five", "/undo", "/regen")
    assert questions(session) == [*shown[:3], ["a b.png", "five"]]


def test_a_kept_chat_has_lines_for_its_images_and_goes_on(engine: Engine, here: Path) -> None:
    session = open_chat(engine)
    talk(session, "/image a\\ b.png what?")
    session.conversation.save("kept.json")
    assert f"{LINE}what?" in session.conversation.markdown()
    again = open_chat(engine)
    again.conversation.load("kept.json")
    talk(again, "and?")
    assert [each["content"] for each in again.conversation.messages][::2] == [f"{LINE}what?", "and?"]


def test_what_cannot_be_shown_is_said(
    engine: Engine, here: Path, session: ChatSession, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(open_chat(engine), "/image cut.png", "/image notes.txt", "/image gone.png", "/image")
    talk(session, "/image a b.png", "see @c.jpg", f"{here}/c.jpg")
    said = " ".join(capsys.readouterr().err.split())
    for each in ("cut.png: the image cannot", "notes.txt is no image but a text", "gone.png is not there", "a path"):
        assert each in said
    assert said.count("sees none") == 3
    assert not session.conversation.messages and session.engine.info.name in said


@pytest.mark.parametrize(
    ("line", "found"),
    [("{}/c.jpg", ("c.jpg", "")), ("{}/a b.png", ("a b.png", "")), ('"{}/a b.png"  x', ("a b.png", "x"))]
    + [(each, None) for each in ("c.jpg", " {}/c.jpg", "{}/notes.txt", "{}/gone.png", "/", "'", "/ {}/c.jpg", "~/\0")],
)
def test_only_the_path_of_an_image_is_dropped(here: Path, line: str, found: tuple[str, str] | None) -> None:
    want = None if found is None else (str(here / found[0]), found[1])
    assert find_dropped_image(line.format(here)) == want
