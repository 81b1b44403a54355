"""A chat beside a model of it: what was said after any order of commands, and what is kept of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from rich.console import Console

from cortexmlx.cli.chat.attachments import prepend_files
from cortexmlx.cli.chat.input import PROMPT, PlainInput
from cortexmlx.cli.chat.session import AttachedFile, ChatSession
from cortexmlx.cli.chat.talk import ChatLoop
from cortexmlx.cli.chats.saved_chats import ChatSaver
from cortexmlx.cli.terminal.signals import InterruptHandler
from cortexmlx.sessions.saved import SavedConversation


class ChatModel:
    """The questions of a chat, in order. Each has an answer that begins with its text."""

    def __init__(self, file: AttachedFile) -> None:
        self.questions: list[str] = []
        self.taken: str | None = None
        self.saved: dict[str, list[str]] = {}
        self.waiting: list[AttachedFile] = []
        self._file = file

    def do(self, line: str) -> None:
        """Carry out one line."""
        command, _, argument = line.partition(" ")
        match command:
            case "/undo":
                self.taken = self.questions.pop() if self.questions else self.taken
            case "/edit" if self.last is not None:
                self._ask(argument, again=self.taken is None)
            case "/regen" if self.last is not None:
                self._ask(self.last, again=self.taken is None, files=False)
            case "/edit" | "/regen":
                pass
            case "/clear":
                self.questions, self.taken, self.waiting = [], None, []
            case "/save":
                self.saved[argument.partition(" ")[0]] = [*self.questions]
            case "/load":
                if argument in self.saved:
                    self.questions, self.taken = [*self.saved[argument]], None
            case "/file":
                self.waiting.append(self._file)
            case _:
                self._ask(line, again=False)

    def several(self, text: str, choice: str) -> None:
        """Answer `text`, or the last question, twice; the answer `choice` goes on."""
        before = [*self.questions], self.taken, [*self.waiting]
        if text:
            self._ask(text, again=False)
        elif self.last is not None:
            self._ask(self.last, again=self.taken is None, files=False)
        if choice == "0":
            self.questions, self.taken, self.waiting = before

    @property
    def last(self) -> str | None:
        return self.taken if self.taken is not None else next(iter(self.questions[::-1]), None)

    def _ask(self, text: str, *, again: bool, files: bool = True) -> None:
        if "!fail" in text:
            return
        if again:
            self.questions.pop()
        waiting = self.waiting if files else []
        self.questions.append(prepend_files(waiting, text) if waiting else text)
        self.waiting = [] if files else self.waiting
        self.taken = None


class Script(PlainInput):
    """Types lines. The end of them is no answer to a question."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def ask(self, prompt: str = PROMPT, draft: str = "") -> str | None:
        return self.lines.pop(0) if self.lines else None


@pytest.mark.parametrize("seed", [4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 60))])
def test_after_any_order_of_commands_a_chat_is_what_a_simple_model_says(
    seed: int, session: ChatSession, screen: Console, tmp_path: Path
) -> None:
    session.saver = ChatSaver()
    note = tmp_path / "note.txt"
    note.write_text("alpha\n")
    chance, model = random.Random(seed), ChatModel(AttachedFile(note, "alpha\n"))
    files = [str(tmp_path / f"{number}.json") for number in range(2)]
    for number in range(60):
        line = chance.choice(
            [
                f"question {number}",
                "/undo",
                "/undo",
                f"/edit changed {number}",
                "/regen",
                "/n 2",
                f"/n 2 several {number}",
                f"!fail {number}",
                "/edit !fail",
                "/n 2 !fail",
                f"/save {chance.choice(files)} --force",
                f"/load {chance.choice(files)}",
                f"/file {note}",
                *["/clear"] * (chance.random() < 0.3),
            ]
        )
        choice = chance.choice("012")
        several = line.startswith("/n ")
        asked = several and "!fail" not in line and (line != "/n 2" or model.last is not None)
        lines = [line, choice] if asked else [line]
        ChatLoop(session, Script(lines), screen, InterruptHandler(), pretty=False).run("")
        if asked:
            model.several(line.removeprefix("/n 2").strip(), choice)
        elif not several:
            model.do(line)
        said = [str(m["content"]) for m in session.conversation.messages if m["role"] == "user"]
        assert said == model.questions, (number, line)
        answers = [str(m["content"]) for m in session.conversation.messages if m["role"] == "assistant"]
        assert answers == [f"You said: {each}" for each in said]
        path = session.saver.path
        if path is not None and path.exists():
            kept = [str(m["content"]) for m in SavedConversation.read(path).messages if m["role"] == "user"]
            assert kept == said or line.startswith("/load")
    session.saver.close()
