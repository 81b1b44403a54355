"""A chat without a model: its turns, its commands, and what is typed and shown in a real terminal."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from rich.console import Console

from cortexmlx.cli.chat_commands import COMMANDS, Leave, completions, run_command, sparkline
from cortexmlx.cli.chat_input import PlainInput, is_open, private_file, unquoted
from cortexmlx.cli.chat_session import ChatSession, Question, Stopped
from cortexmlx.cli.chat_view import RawView
from cortexmlx.cli.conversation import Conversation
from cortexmlx.cli.start import run
from cortexmlx.cli.thinking import Part, ThinkSplitter
from cortexmlx.errors import InvalidRequest, PromptTooLong
from cortexmlx.request import FinishReason, SamplingParams
from cortexmlx.serving.config import EngineConfig
from support import cli_fakes
from support.cli_fakes import FakeEngine, FakeInfo, Fakes, fake_engines  # noqa: F401  (a fixture)


@pytest.fixture
def session() -> ChatSession:
    return ChatSession(FakeEngine(EngineConfig("fake")), lambda prompt: RawView(), SamplingParams())  # type: ignore[arg-type]


@pytest.fixture
def screen() -> Console:
    return Console(file=io.StringIO(), width=100)


def printed(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def rendered(session: ChatSession) -> str:
    return "".join(map(chr, session.engine.seen[-1][0]))  # type: ignore[attr-defined]


# -- turns ------------------------------------------------------------------------------------------------------------


def test_every_turn_sends_the_whole_conversation(session: ChatSession) -> None:
    session.conversation.system = "Be brief."
    session.ask(Question("one"))
    session.ask(Question("two"))
    assert rendered(session) == "<system>Be brief.\n<user>one\n<assistant>You said: one\n<user>two\n<assistant>"


def test_a_failed_turn_is_rolled_back(session: ChatSession) -> None:
    session.ask(Question("one"))
    with pytest.raises(PromptTooLong):
        session.ask(Question("!fail"))
    assert [turn["content"] for turn in session.conversation.turns] == ["one", "You said: one"]


def test_a_stopped_answer_is_kept_as_far_as_it_came(session: ChatSession, capsys: pytest.CaptureFixture[str]) -> None:
    stops = []

    class Stopping(RawView):
        def feed(self, text: str) -> None:
            super().feed(text)
            if "word3" in text:
                stops[0]()

    session.show = lambda prompt: Stopping()
    session.stoppable = lambda stop: nullcontext(stops.append(stop))  # type: ignore[func-returns-value]
    completion = session.ask(Question("!slow"))
    assert completion.finish_reason is FinishReason.CANCELLED
    assert session.conversation.turns[-1]["content"] == completion.text
    assert completion.text.startswith("word0 word1 word2 word3") and len(completion.text) < 100
    assert capsys.readouterr().out == completion.text + "\n"


def test_stopping_before_the_first_word_forgets_the_turn(session: ChatSession) -> None:
    session.engine.cancelled.add(1)  # type: ignore[attr-defined]
    with pytest.raises(Stopped):
        session.ask(Question("!slow"))
    assert session.conversation.turns == []


def test_a_template_that_opens_a_thought_is_noticed_and_remembered(session: ChatSession) -> None:
    session.engine.template_end = "<think>\n"  # type: ignore[attr-defined]
    prompts = []
    session.show = lambda prompt: prompts.append(prompt) or RawView()  # type: ignore[func-returns-value]
    session.ask(Question("!say hm</think>yes"))
    assert prompts[0].thinking == "<think>\n"
    assert session.conversation.turns[-1]["content"] == "<think>\nhm</think>yes"


def test_a_model_without_a_template_is_refused_with_the_way_out() -> None:
    engine = FakeEngine(EngineConfig("fake"), info=FakeInfo(chat_template=False))
    session = ChatSession(engine, lambda prompt: RawView(), SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="no chat template: try `cortexmlx generate fake --raw"):
        session.ask(Question("hi"))


# -- commands ---------------------------------------------------------------------------------------------------------


def test_help_names_every_command_and_alias(session: ChatSession, screen: Console) -> None:
    run_command("/help", session, screen)
    for command in COMMANDS:
        assert all(name in printed(screen) for name in (command.name, *command.aliases, command.meaning))
    assert [name for name, _ in completions()] == [command.name for command in COMMANDS]


def test_clear_undo_and_regen_change_what_the_model_sees(session: ChatSession, screen: Console) -> None:
    session.ask(Question("one"))
    session.ask(Question("two"))
    assert run_command("/regen", session, screen) == Question("two", again=True)
    run_command("/undo", session, screen)
    assert [turn["content"] for turn in session.conversation.turns] == ["one", "You said: one"]
    run_command("/reset", session, screen)
    assert session.conversation.turns == []
    assert run_command("/undo", session, screen) is None
    with pytest.raises(InvalidRequest, match="no answer to write again"):
        run_command("/regen", session, screen)


def test_writing_again_replaces_the_last_answer_unless_it_fails(session: ChatSession) -> None:
    session.ask(Question("one"))
    session.ask(Question("two"))
    session.conversation.turns[-1]["content"] = "the old answer"
    with pytest.raises(PromptTooLong):
        session.ask(Question("!fail", again=True))
    assert session.conversation.turns[-1]["content"] == "the old answer"
    session.ask(Question("two", again=True))
    assert rendered(session) == "<user>one\n<assistant>You said: one\n<user>two\n<assistant>"
    assert [turn["content"] for turn in session.conversation.turns][2:] == ["two", "You said: two"]


def test_system_is_shown_changed_and_removed(session: ChatSession, screen: Console) -> None:
    run_command("/system Be brief.", session, screen)
    assert session.conversation.system == "Be brief."
    run_command("/system", session, screen)
    run_command("/system none", session, screen)
    assert session.conversation.system is None
    assert printed(screen).splitlines() == [
        "  system prompt: Be brief.",
        "  system prompt: Be brief.",
        "  system prompt: none",
    ]


def test_set_changes_one_parameter_and_checks_it(session: ChatSession, screen: Console) -> None:
    run_command("/set temp 0.7", session, screen)
    run_command("/set seed=5", session, screen)
    assert (session.params.temperature, session.params.seed) == (0.7, 5)
    run_command("/set seed none", session, screen)
    assert session.params.seed is None
    for line, says in {
        "/set temp hot": "temperature is 'hot', but must be a number",
        "/set top_k 1.5": "top_k is '1.5', but must be a whole number",
        "/set top_p 2": "top_p is 2.0",
        "/set colour red": "no setting 'colour': max_tokens, temperature",
    }.items():
        with pytest.raises(InvalidRequest, match=re.escape(says)):
            run_command(line, session, screen)
    assert session.params.temperature == 0.7


def test_a_saved_conversation_goes_on_where_it_was(session: ChatSession, screen: Console, tmp_path: Path) -> None:
    session.conversation.system = "Be brief."
    session.ask(Question("né"))
    run_command(f"/save {tmp_path / 'talk.json'}", session, screen)
    assert (tmp_path / "talk.json").stat().st_mode & 0o777 == 0o600
    before, session.conversation = session.conversation, Conversation()
    run_command(f"/load {tmp_path / 'talk.json'}", session, screen)
    assert session.conversation == before


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"system": 1, "messages": []}',
        '{"system": null, "messages": [{"role": "user", "content": "x"}]}',
        '{"system": null, "messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]}',
    ],
)
def test_a_file_that_is_no_conversation_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "talk.json").write_text(text)
    with pytest.raises(InvalidRequest, match="is not a saved conversation"):
        Conversation.load(tmp_path / "talk.json")


def test_stats_blocks_and_tokens_speak_of_the_engine(session: ChatSession, screen: Console) -> None:
    session.ask(Question("one"))
    for line in ("/stats", "/blocks", "/tokens"):
        run_command(line, session, screen)
    assert "1 MiB in use of 1 GiB; it may grow to 2 GiB" in printed(screen) and "##.." in printed(screen)
    assert "of 8,192 tokens of context" in printed(screen)
    assert "150 of 200 prompt tokens found (75%)" in printed(screen) and "over time" in printed(screen) in printed(
        screen
    )


def test_a_sparkline_shows_peaks_and_never_more_than_its_width() -> None:
    assert sparkline([0, 8, 4, 1]) == " █▄▁"
    assert sparkline([1] * 9 + [100] + [1] * 90, width=10) == "█" + "▁" * 9
    assert sparkline([]) == sparkline([0, 0]) == "-"


def test_an_unknown_command_suggests_the_nearest(session: ChatSession, screen: Console) -> None:
    with pytest.raises(InvalidRequest, match=r"no command /clera: did you mean /clear\?"):
        run_command("/clera", session, screen)
    for name in ("/exit", "/quit", "/bye"):
        with pytest.raises(Leave):
            run_command(name, session, screen)


# -- input and output -------------------------------------------------------------------------------------------------


def test_thoughts_are_told_from_the_answer_however_the_tags_arrive() -> None:
    text = "<think>let me <b>see</b></think>The answer<think>again</think> is <thin air"
    expected = [
        Part("let me <b>see</b>", True),
        Part("The answer", False),
        Part("again", True),
        Part(" is <thin air", False),
    ]
    for size in (1, 3, 7, len(text)):
        splitter = ThinkSplitter()
        parts = [part for at in range(0, len(text), size) for part in splitter.feed(text[at : at + size])]
        joined: list[Part] = []
        for part in [*parts, *splitter.rest()]:
            if joined and joined[-1].thought == part.thought:
                part = Part(joined.pop().text + part.text, part.thought)
            joined.append(part)
        assert joined == expected


def test_three_quotes_open_and_close_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [is_open(t) for t in ("hi", '"""', '"""a\nb', '"""a"""', '  """a\nb"""  ')] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert unquoted('"""a\nb\n"""') == "a\nb" and unquoted(' hi "') == ' hi "'
    monkeypatch.setattr(sys, "stdin", io.StringIO('one\n"""\ntwo\nthree\n"""\nfour'))
    source = PlainInput()
    assert [source.ask() for _ in range(4)] == ["one", "two\nthree", "four", None]


def test_the_history_is_readable_for_this_user_only(tmp_path: Path) -> None:
    path = tmp_path / "state" / "chat_history"
    assert private_file(path) and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    assert private_file(path) and path.stat().st_mode & 0o777 == 0o600
    assert not private_file(path / "below a file")


def test_piped_input_is_one_question_and_piped_output_is_plain(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "in").write_text("**the** notes\n")
    with (tmp_path / "in").open() as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        assert run(["chat", "fake", "-p", "Summarise."]) == 0
    assert capsys.readouterr() == ("You said: **the** notes\n\nSummarise.\n", "")


def test_a_failed_question_from_a_pipe_exits_1(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "in").write_text("!fail")
    with (tmp_path / "in").open() as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        assert run(["chat", "fake"]) == 1
    assert capsys.readouterr().err.startswith("error: prompt has 9120 tokens")


# -- in a terminal ----------------------------------------------------------------------------------------------------


class Terminal:
    """A pseudo-terminal with the chat in it: type into it, wait for what should appear."""

    def __init__(self, *arguments: str, term: str = "xterm") -> None:
        import pty

        fakes_file = cli_fakes.__file__
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM=term, COLUMNS="80", LINES="40", NO_COLOR="1")
            os.execv(sys.executable, [sys.executable, fakes_file, "chat", "fake", *arguments])
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str, seconds: float = 15.0) -> str:
        """What has appeared since the last wait, up to and with `text`."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < deadline, f"{text!r} did not appear in {self.seen!r}"
            self._read()
        before, found, self.seen = self.seen.partition(text)
        return before + found

    def exit_code(self, seconds: float = 15.0) -> int:
        deadline = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < deadline, f"the chat goes on after {self.seen!r}"
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.master)

    def _read(self) -> bool:
        """Read what is there, waiting a little for it; False at the end."""
        if not select.select([self.master], [], [], 0.2)[0]:
            return True
        try:
            data = os.read(self.master, 65536)
        except OSError:
            return False
        self.seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", data.decode("utf-8", "replace"))
        return bool(data)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal("--no-history")
    yield opened
    opened.close()


def test_a_chat_in_a_terminal_from_banner_to_exit(terminal: Terminal) -> None:
    assert "fake · llama, 134 M parameters, float32 · cortexmlx" in terminal.wait_for(">>>")
    terminal.type("hello **there**\r")
    assert "You said: hello there\n" in terminal.wait_for(
        "4 tokens · 40.0 tok/s · TTFT 12 ms · prompt 5 tok (2 cached)"
    )
    terminal.type("!fail\r")
    terminal.wait_for("error: prompt has 9120 tokens")
    terminal.type("/exit\r")
    assert terminal.exit_code() == 0


def test_ctrl_c_stops_the_answer_then_clears_the_line_and_twice_it_leaves(terminal: Terminal) -> None:
    terminal.wait_for(">>>")
    terminal.type("!slow\r")
    terminal.wait_for("word12")
    terminal.type("\x03")
    terminal.wait_for("· stopped")
    time.sleep(1.1)
    terminal.type("half a line\x03")
    terminal.wait_for("Ctrl-C again")
    time.sleep(1.1)
    terminal.type("\x03")
    terminal.wait_for("Ctrl-C again")
    terminal.type("\x03")
    assert terminal.exit_code() == 130


def test_ctrl_c_twice_during_an_answer_leaves_at_once(terminal: Terminal) -> None:
    terminal.wait_for(">>>")
    terminal.type("!slow\r")
    terminal.wait_for("word3")
    terminal.type("\x03")
    time.sleep(0.2)
    terminal.type("\x03")
    assert terminal.exit_code() == 130


def test_ctrl_d_leaves_and_a_dumb_terminal_gets_plain_lines() -> None:
    dumb = Terminal("--no-history", term="dumb")
    dumb.wait_for(">>>")
    dumb.type("**hi**\n")
    assert "You said: **hi**" in dumb.wait_for(">>>")
    dumb.type("\x04")
    assert dumb.exit_code() == 0
    dumb.close()
