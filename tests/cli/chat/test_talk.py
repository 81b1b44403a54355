"""What a person does in a chat, in a real terminal: commands, pastes, Ctrl-C, and a context that fills up."""

from __future__ import annotations

import random
import resource
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console

from cortexmlx.cli.chat.attachments import prepend_files
from cortexmlx.cli.chat.session import AttachedFile, ChatSession, Question, ReplyReader
from cortexmlx.cli.chat.talk import ChatLoop
from cortexmlx.cli.chats.saved_chats import ChatSaver
from cortexmlx.cli.terminal.signals import InterruptHandler
from cortexmlx.sessions.saved import SavedConversation
from support.cli.chat_commands import Lines
from support.cli.terminal import STOP, Terminal

FIGURES = "TTFT 12 ms · prompt"
"""In the line below an answer, but not in its status while it is written."""

UP = "\x1b[A"


def kept(tmp_path: Path) -> list[str]:
    """What the user said, in the newest chat that was kept."""
    newest = max((tmp_path / "state" / "cortexmlx" / "chats").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return [str(m["content"]) for m in SavedConversation.read(newest).messages if m["role"] == "user"]


def test_every_command_in_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("alpha\n")
    messages = tmp_path / "talk.json"
    messages.write_text('[{"role": "user", "content": "old"}, {"role": "assistant", "content": "older"}]')
    steps = [
        ("/help", "a blank in front"),
        ("/?", "a blank in front"),
        ("/HELP save", "/save FILE"),
        ("help", "a blank in front"),
        ("/system Be brief.", "system prompt: Be brief."),
        ("/set temp 0.7", "temperature         0.7"),
        ("/set", "keep_last"),
        ("/show", "system prompt: Be brief."),
        ("one", FIGURES),
        ("/regen", FIGURES),
        ("/edit uno", FIGURES),
        ("/undo", "took back: uno"),
        ("/n 2 three", "which one goes on? 1-2, 0 for none:"),
        ("2", ">>>"),
        (UP, "which one goes on?"),
        ("0", "none: the chat is as it was before"),
        (f"/file {tmp_path}/notes.txt", "its text goes with the next message"),
        ("what?", FIGURES),
        (f"@{tmp_path}/notes.txt and?", "+ "),
        (f"/edit @{tmp_path}/notes.txt or?", "+ "),
        ("/regen", FIGURES),
        ("/tokens", "of the context of 8,192 tokens"),
        ("/stats", "prefix cache ("),
        ("/blocks", "private"),
        (f"/save {tmp_path}/mine.md", "saved 6 messages"),
        (f"/save {tmp_path}/mine.md", "exists already: name another file"),
        (f"/load {messages}", "loaded 2 messages"),
        ("/show messages", "older"),
        ("/set kv_memory 4GB", "the model is loaded again"),
        ("/model org/other", "answers now, and reads the 2 messages"),
        ("/clear", "the conversation is empty again"),
        ("/reset", "the conversation is empty again"),
        ("/clera", "no command /clera: did you mean /clear?"),
        ("/foo bar", "You said: /foo bar"),
        ("// a comment", "You said: // a comment"),
        (" /clear", "You said:  /clear"),
        ("/set quiet", "figures below an answer: quiet"),
        ("quit", "saved: cortexmlx chat --resume"),
    ]
    with Terminal("--no-history", columns=200, lines=50) as terminal:
        terminal.wait_for_prompt()
        for line, says in steps:
            terminal.type(f"{line}\r")
            terminal.wait_for(says)
            if line not in ("/n 2 three", UP, "quit"):
                terminal.wait_for_prompt()
        assert terminal.exit_code() == 0
    assert "\x1b[?2004l" in terminal.raw.decode().rpartition("\x1b[?2004h")[2], "the shell gets a terminal as it was"


def test_whoever_wants_none_of_several_answers_has_the_one_that_was_there(
    session: ChatSession, screen: Console
) -> None:
    lines = Lines("one", "/n 3", "0", "/n 2 two", "0", "/n 2", "")
    ChatLoop(session, lines, screen, InterruptHandler(), pretty=False).run("")
    said = [message["content"] for message in session.conversation.messages]
    assert said == ["one", "You said: one"], "also if the input ends there"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("late", "said", "kept"),
    [(False, "stopped before the first word", []), (True, "stopped", ["one", "You said: one"])],
)
def test_ctrl_c_beside_an_answer_is_acknowledged_too(
    session: ChatSession, screen: Console, monkeypatch: pytest.MonkeyPatch, late: bool, said: str, kept: list[str]
) -> None:
    ask = session.ask

    def interrupted(question: Question, follow: ReplyReader | None = None) -> NoReturn:
        if late:
            ask(question, follow)
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "ask", interrupted)
    with screen.capture() as printed:
        ChatLoop(session, Lines("one"), screen, InterruptHandler(), pretty=False).run("")
    assert printed.get().splitlines()[-1] == f"  {said}"
    assert [message["content"] for message in session.conversation.messages] == kept


def test_the_last_question_is_changed_in_the_input_line(tmp_path: Path) -> None:
    with Terminal("--no-history") as terminal:
        terminal.wait_for_prompt()
        terminal.type("what is a cat?\r")
        terminal.wait_for(FIGURES)
        terminal.type("/edit\r")
        terminal.shows(">>> what is a cat?")
        terminal.type("\x7f\x7f\x7f\x7fdog?\r")
        terminal.wait_for("You said: what is a dog?")
        terminal.wait_for(FIGURES)
        assert kept(tmp_path) == ["what is a dog?"]
        terminal.type("/edit\r")
        terminal.wait_for(">>> what is a dog?")  # not the line above, which looks the same
        terminal.type("\x03")
        terminal.wait_for("Ctrl-C again")
        terminal.type("and now?\r")
        terminal.wait_for(FIGURES)
        assert kept(tmp_path) == ["what is a dog?", "and now?"], "an edit that was given up changes nothing"


CODE = "\n".join(f"/* line {number} */  // {'x' * 40}" for number in range(200))


def test_a_paste_of_200_lines_is_one_turn_also_while_an_answer_streams(tmp_path: Path) -> None:
    with Terminal("--no-history") as terminal:
        terminal.wait_for_prompt()
        terminal.paste(CODE)
        terminal.enter("", FIGURES)
        terminal.ask(["so ", STOP, "it is"])
        terminal.wait_for_stop()
        before = terminal.screen.rows()
        terminal.paste(CODE)
        terminal.type(" and this?\r")
        assert terminal.screen.rows()[:-1] == before[:-1], "nothing of it appears in the answer"
        terminal.go_on()
        terminal.wait_for(FIGURES)
        terminal.wait_for(FIGURES)
        terminal.wait_for_prompt()
        assert kept(tmp_path) == [CODE, "!script", f"{CODE} and this?"]


@pytest.mark.slow
def test_a_paste_that_the_end_of_an_answer_cuts_in_two_is_one_turn(tmp_path: Path) -> None:
    with Terminal("--no-history") as terminal:
        terminal.wait_for_prompt()
        terminal.ask(["so ", STOP, "it is"])
        terminal.wait_for_stop()
        terminal.type("\x1b[200~one\ntw")
        terminal.go_on()
        terminal.wait_for(FIGURES)
        terminal.enter("o\nthree\x1b[201~", FIGURES)
        assert kept(tmp_path) == ["!script", "one\ntwo\nthree"]


def test_ctrl_c_while_the_prompt_is_read_and_twice_loses_nothing_that_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = tmp_path / "twice"  # while it is there, a Ctrl-C is the second within a second
    monkeypatch.setenv("FAKE_TWICE", str(twice))
    with Terminal("--no-history") as terminal:
        terminal.wait_for_prompt()
        terminal.enter("one", FIGURES)
        terminal.ask([STOP, "never"])
        terminal.wait_for_stop()
        terminal.type("\x03")
        terminal.wait_for("stopped before the first word")
        terminal.wait_for_prompt()
        assert "error" not in "".join(terminal.lines())
        assert kept(tmp_path) == ["one"], "a turn without an answer is rolled back"
        terminal.ask(["some words", STOP])
        terminal.wait_for_stop()
        terminal.shows("some words")
        terminal.type("\x03")
        terminal.wait_for("· stopped")
        terminal.wait_for_prompt()
        assert kept(tmp_path) == ["one", "!script"]
        terminal.type("!slow\r")
        terminal.wait_for("word3")
        terminal.type("\x03")
        terminal.wait_for("stopp")
        twice.touch()
        terminal.type("\x03")
        assert terminal.exit_code() == 130
        assert kept(tmp_path) == ["one", "!script", "!slow"]


def test_a_full_context_never_ends_the_chat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAKE_CONTEXT", "400")
    with Terminal("--no-history", "-n", "60", columns=100, lines=40) as terminal:
        terminal.wait_for_prompt()
        for number in range(12):
            terminal.enter(f"question number {number}", FIGURES)
        said = "".join(terminal.lines())
        assert said.count("the context of 400 tokens is full: with this question") >= 2
        terminal.type("x" * 500 + "\r")
        terminal.wait_for_prompt()
        terminal.type("/tokens\r")
        terminal.wait_for("oldest messages are not sent any more")
        assert len(kept(tmp_path)) == 13, "the file has all of it"
        terminal.type("exit\r")
        assert terminal.exit_code() == 0


@pytest.mark.slow
def test_once_is_one_answer() -> None:
    with Terminal("--no-history", "--once", "-p", "hello **there**") as terminal:
        terminal.wait_for("You said: hello there")
        assert terminal.exit_code() == 0 and "cortexmlx" not in terminal.screen.text_lines()[0]
    with Terminal("--no-history", "--once") as terminal:
        terminal.wait_for_prompt()
        terminal.enter("/set temp 0.2", "temperature")
        terminal.type("hi\r")
        terminal.wait_for("You said: hi")
        assert terminal.exit_code() == 0
    with Terminal("--once", "-p", "!fail") as terminal:
        terminal.wait_for("error: prompt has 9120 tokens")
        assert terminal.exit_code() == 1


@pytest.mark.parametrize(("keys", "code"), [("/bye\r", 0), ("\x04", 0), ("\x03\x03", 130)])
def test_once_is_left_like_any_chat(keys: str, code: int) -> None:
    with Terminal("--no-history", "--once", "--no-save") as terminal:
        terminal.wait_for_prompt()
        terminal.type(keys)
        assert terminal.exit_code() == code and "error" not in "".join(terminal.lines())


def test_once_stopped_before_its_first_word_is_interrupted() -> None:
    with Terminal("--no-history", "--once", "--no-save") as terminal:
        terminal.wait_for_prompt()
        terminal.ask([STOP, "never"])
        terminal.wait_for_stop()
        terminal.type("\x03")
        assert terminal.exit_code() == 130 and "error" not in "".join(terminal.lines())


def test_a_full_disk_ends_neither_the_chat_nor_its_lines() -> None:
    with Terminal() as terminal:
        terminal.wait_for_prompt()
        resource.prlimit(terminal.pid, resource.RLIMIT_FSIZE, (0, 0))
        for word in ("one", "two"):
            terminal.enter(word, FIGURES)
        said = " ".join(" ".join(terminal.lines()).split())  # where lines break is the path's length's affair
        assert "You said: two" in said and "Traceback" not in said and said.count("the chat is not saved") == 1


# -- A chat beside a model of it: what was said after any order of commands, and what is kept of it -------------------


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
        waiting = self.waiting if files else []
        if "!fail" in text:
            self.taken = self.taken if again or waiting else text
            return
        if again:
            self.questions.pop()
        self.questions.append(prepend_files(waiting, text) if waiting else text)
        self.waiting = [] if files else self.waiting
        self.taken = None


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
        text = line.removeprefix("/n 2").strip()
        answered = several and "!fail" not in (text or model.last or "!fail")
        lines = [line, choice] if answered else [line]
        ChatLoop(session, Lines(*lines), screen, InterruptHandler(), pretty=False).run("")
        if several:
            model.several(text, choice if answered else "1")
        else:
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
