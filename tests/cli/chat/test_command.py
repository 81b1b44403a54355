"""`cortexmlx chat` as a whole: through pipes, and typed and shown in a real terminal."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cortexmlx.cli.chat.command import print_banner
from cortexmlx.cli.start import run
from cortexmlx.core.config import EngineConfig
from cortexmlx.sessions.saved import SavedConversation
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.cli_fakes import FakeEngine, FakeInfo, Fakes
from support.cli.terminal import Terminal

Piped = Callable[..., int]


def test_piped_input_is_one_question_and_piped_output_is_plain(
    fakes: Fakes, piped: Piped, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped("**the** notes\n", "chat", "fake", "-p", "Summarise.") == 0
    assert capsys.readouterr() == ("You said: **the** notes\n\nSummarise.\n", "")


def test_an_answer_from_a_pipe_that_ends_before_its_form_is_whole_exits_1(
    fakes: Fakes, piped: Piped, capsys: pytest.CaptureFixture[str]
) -> None:
    for most, code in ((2, 0), (1, 1)):
        assert piped("!say { }", "chat", "fake", "--schema", "json", "-n", str(most)) == code
        out, err = capsys.readouterr()
        said = "the answer ends before the form is whole: stopped at the token limit of 1"
        assert out and (said in err) is bool(code)


def test_a_failed_question_from_a_pipe_exits_1(fakes: Fakes, piped: Piped, capsys: pytest.CaptureFixture[str]) -> None:
    assert piped("!fail", "chat", "fake") == 1
    assert capsys.readouterr().err.startswith("error: prompt has 9120 tokens")


def test_a_piped_question_goes_on_with_a_kept_chat_and_is_kept(
    fakes: Fakes, piped: Piped, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    talk: Any = FakeEngine(EngineConfig("fake"), info=FakeInfo(name="other")).conversation(system="Be brief.")
    talk.params = SamplingParams(top_k=7, temperature=0.5)
    talk.ask("one")
    path = tmp_path / "state" / "cortexmlx" / "chats" / "mine.json"
    talk.save(path)

    def ask(question: str, *arguments: str) -> tuple[str, SamplingParams]:
        assert piped(question, "chat", *arguments) == 0
        capsys.readouterr()
        tokens, params = fakes.engine.seen[-1]
        return "".join(map(chr, tokens)), params

    asked, params = ask("two", "--resume", "--temp", "0.9")
    assert asked == "<system>Be brief.\n<user>one\n<assistant>You said: one\n<user>two\n<assistant>"
    assert (params.temperature, params.top_k, params.max_tokens) == (0.9, 7, 256), "the file's, but for what was said"
    assert fakes.engine.options.model == "other", "no model was named"
    asked, _ = ask("three", "fake", "--resume", "mine", "--no-save", "--system", "Be long.")
    assert asked.startswith("<system>Be long.\n<user>one\n") and asked.endswith("<user>three\n<assistant>")
    assert fakes.engine.options.model == "fake"
    asked, _ = ask("four", "--resume=mine")
    assert "<user>two\n" in asked and "three" not in asked, "--no-save kept nothing"


def test_messages_of_somebody_else_are_resumed_and_left_as_they_are(
    fakes: Fakes, piped: Piped, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs.json"
    theirs.write_text('[{"role": "user", "content": "one"}, {"role": "assistant", "content": "uno"}]')
    before = theirs.read_bytes()
    assert piped("two", "chat", "fake", "--resume", str(theirs)) == 0
    assert "".join(map(chr, fakes.engine.seen[-1][0])).startswith("<user>one\n<assistant>uno\n<user>two")
    assert theirs.read_bytes() == before
    assert [len(SavedConversation.read(kept).messages) for kept in (tmp_path / "state/cortexmlx/chats").iterdir()] == [
        4
    ]


def test_a_chat_that_is_not_kept_is_not_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "--resume", "-m", "fake"]) == 1
    assert capsys.readouterr().err == "error: no chat 'last' is saved: there are none yet\n"


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal("--no-history")
    yield opened
    opened.close()


def test_a_chat_says_what_stays_on_disk_and_with_no_save_nothing_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORTEXMLX_KV_STORE", "/kv")
    for options, said in (
        ((), f"on disk: the chat in {tmp_path}/state/cortexmlx, keys and values in /kv; --no-save: nothing"),
        (("--no-kv-store",), f"on disk: the chat in {tmp_path}/state/cortexmlx; --no-save: nothing"),
        (("--no-save", "--kv-store", "/mine"), "on disk: keys and values in /mine"),
        (("--no-save",), "nothing of this chat stays on disk"),
    ):
        opened = Terminal(*options)
        shown = opened.wait_for("/help lists")
        assert said.replace(" ", "") in "".join(shown.split()), options
        opened.wait_for(">>>")
        opened.type("one\r")
        opened.wait_for("tok/s · TTFT")
        opened.type("/exit\r")
        assert opened.exit_code() == 0
        opened.close()
        if options == ("--no-save",):
            assert not (tmp_path / "state").exists(), "not even what was typed"
        shutil.rmtree(tmp_path / "state", ignore_errors=True)


def test_the_banner_names_the_adapter_and_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    engine: Any = FakeEngine(EngineConfig("fake"), info=FakeInfo(adapter="/my/[red]adapter", notes=("on 8 [layers]",)))
    print_banner(engine, Console(width=200), "on disk: [it]")
    shown = capsys.readouterr().out
    assert shown.splitlines()[:3] == [
        "fake + /my/[red]adapter · 134 M parameters · context 8,192 tokens",
        "on 8 [layers]",
        "on disk: [it]",
    ]
    assert len(shown.splitlines()) == 5, "three lines, a note and an empty line: /show has the rest"
    selective: Any = FakeEngine(EngineConfig("fake", keep_first=9, keep_last=4000))
    print_banner(selective, Console(width=200), "")
    assert "context 8,192 tokens, then the first 9 and newest 4,000\n" in capsys.readouterr().out


@pytest.fixture
def twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """While this file is there, every Ctrl-C of a terminal is the second one within a second."""
    monkeypatch.setenv("FAKE_TWICE", str(tmp_path / "twice"))
    return tmp_path / "twice"


def test_ctrl_c_stops_the_answer_then_clears_the_line_and_twice_it_leaves(twice: Path, terminal: Terminal) -> None:
    terminal.wait_for(">>>")
    terminal.type("!slow\r")
    terminal.wait_for("word12")
    terminal.type("\x03")
    terminal.wait_for("· stopped")
    terminal.wait_for_prompt()
    terminal.type("half a line\x03")
    terminal.wait_for("Ctrl-C again")
    terminal.wait_for_prompt()
    terminal.type("\x03")
    terminal.wait_for("Ctrl-C again")
    terminal.wait_for_prompt()
    twice.touch()
    terminal.type("\x03")
    assert terminal.exit_code() == 130 and "saved: cortexmlx chat --resume " in str(terminal)


def test_ctrl_d_leaves_and_a_dumb_terminal_gets_plain_lines() -> None:
    dumb = Terminal("--no-history", term="dumb")
    dumb.wait_for(">>>")
    dumb.type("**hi**\n")
    assert "You said: **hi**" in dumb.wait_for(">>>")
    dumb.type("\x04")
    assert dumb.exit_code() == 0
    dumb.close()
