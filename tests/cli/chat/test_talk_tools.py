"""A chat whose model calls functions: each call is shown and asked for, and a turn that is stopped leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession
from cortexmlx.cli.chat.talk import CONSENT, ChatLoop
from cortexmlx.cli.terminal.signals import InterruptHandler
from cortexmlx.sessions.saved import SavedConversation
from cortexmlx.structured.tools import read_tools
from support.cli.chat_commands import Lines, printed
from support.cli.cli_fakes import Fakes
from support.cli.terminal import STOP, Terminal

FUNCTIONS = '''
def add(a: int, b: int) -> int:
    """Add two numbers."""
    print("adding")
    return a + b

def shout(text: str) -> str:
    """Shout."""
    return text.upper()

def wait() -> None:
    """Wait for Ctrl-C."""
    import time
    open(FILE, "w").close()
    time.sleep(600)

def fail() -> None:
    """Fail."""
    raise ValueError("no luck")
'''


def add(a: int, b: int) -> int:
    return a + b


def ask_again(again: int) -> str:
    """Its result makes the fake model call it once more."""
    return f'!call ask_again {{"again": {again - 1}}}' if again else "done"


def interrupted() -> None:
    raise KeyboardInterrupt


def offered(session: ChatSession, *functions: Callable[..., object]) -> None:
    session.params = replace(session.params, tools=read_tools(functions))


def talk(session: ChatSession, screen: Console, *lines: str) -> list[object]:
    """What was said after these lines."""
    session.note = lambda text: screen.print(text)
    ChatLoop(session, Lines(*lines), screen, InterruptHandler(), pretty=False).run("")
    return [message["content"] for message in session.conversation.messages]


CALL = '!call add {"a": 1, "b": 2}'


def test_a_call_runs_after_the_users_consent(session: ChatSession, screen: Console) -> None:
    offered(session, add)
    assert talk(session, screen, CALL, "y") == [CALL, "", "3", "The result is 3"]
    assert "add(a=1, b=2)\n= 3\n" in printed(screen)
    assert session.conversation.messages[1]["tool_calls"]


def test_the_model_reads_that_a_call_is_not_allowed(session: ChatSession, screen: Console) -> None:
    offered(session, add)
    said = talk(session, screen, CALL, "n")
    assert said[2:] == [
        "Error: the user did not allow this call",
        "The result is Error: the user did not allow this call",
    ]


def test_always_asks_no_more_in_this_chat(session: ChatSession, screen: Console) -> None:
    offered(session, ask_again)
    question = '!call ask_again {"again": 3}'
    said = talk(session, screen, question, "a", question)
    assert said.count("The result is done") == 2 and session.allowed_functions == {"ask_again"}
    session.set_tools(read_tools([ask_again]))
    assert not session.allowed_functions, "other functions may have the same names"


def test_a_turn_that_is_stopped_at_the_question_is_taken_back(session: ChatSession, screen: Console) -> None:
    offered(session, add)
    assert talk(session, screen, "one", CALL) == ["one", "You said: one"], "the input ends at the question"
    assert session.saver is None or session.conversation.messages


def test_ctrl_c_while_a_function_runs_takes_the_turn_back(
    session: ChatSession, screen: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    offered(session, interrupted)
    assert talk(session, screen, "one", "!call interrupted {}", "y", "two")[2:] == ["two", "You said: two"]
    assert "the question and its calls are taken back" in printed(screen)


def test_a_failure_after_a_call_takes_the_turn_back(
    session: ChatSession, screen: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> str:
        return "!fail"

    offered(session, failing)
    assert talk(session, screen, "one", "!call failing {}", "y") == ["one", "You said: one"]
    assert "prompt has 9120 tokens" in capsys.readouterr().err


def test_undo_regen_and_edit_take_the_whole_turn(session: ChatSession, screen: Console) -> None:
    offered(session, add)
    assert talk(session, screen, "one", CALL, "y", "/undo") == ["one", "You said: one"]
    assert talk(session, screen, CALL, "y", "/regen", "y")[2:] == [CALL, "", "3", "The result is 3"]
    assert talk(session, screen, "/edit other")[2:] == ["other", "You said: other"]
    assert talk(session, screen, CALL, "y", "/regen")[2:] == [
        "other",
        "You said: other",
        CALL,
        "",
        "3",
        "The result is 3",
    ]


def test_answers_side_by_side_call_nothing(session: ChatSession, screen: Console) -> None:
    offered(session, add)
    said = talk(session, screen, f"/n 2 {CALL}", "1")
    assert "answers side by side call no functions" in printed(screen)
    assert str(said[-1]).startswith("<tool_call>"), "it is text"


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS.replace("FILE", repr(str(tmp_path / "begun"))))
    return str(path)


def test_a_piped_question_runs_its_calls_with_yes(
    fakes: Fakes, functions: str, piped: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for options, code, out, err in (
        (["--tools", functions, "--yes"], 0, "The result is 3", "adding"),
        (["--tools", functions], 2, "", "nobody can be asked before a call runs"),
        (["--yes"], 2, "", "give --tools FILE.py"),
        (["--tools", str(tmp_path / "missing.py"), "--yes"], 1, "", "is not a file"),
    ):
        assert piped(CALL, "chat", "fake", *options) == code
        said = capsys.readouterr()
        assert said.out.strip() == out and err in said.err


def test_calls_in_a_terminal(functions: str, tmp_path: Path) -> None:
    with Terminal("--no-history", "--tools", functions, columns=100) as terminal:
        terminal.wait_for_prompt()
        terminal.type(f"{CALL}\r")
        terminal.wait_for(CONSENT.strip())
        terminal.enter("y", "The result is 3")
        terminal.type('!call fail {} !call shout {"text": "a[2Jb"}\r')
        terminal.wait_until(lambda: "\n".join(terminal.lines()).count("run it?") == 2, "a question")
        terminal.type("y\r")
        terminal.wait_for("= Error: ValueError: no luck")
        terminal.wait_until(lambda: "\n".join(terminal.lines()).count("run it?") == 3, "the next question")
        terminal.enter("a", "The result is")
        terminal.type("!call wait {}\r")
        terminal.wait_until(lambda: "\n".join(terminal.lines()).count("run it?") == 4, "a question")
        terminal.type("y\r")
        terminal.wait_until(lambda: (tmp_path / "begun").exists(), "the function runs")
        terminal.type("\x03")
        terminal.wait_for("the question and its calls are taken back")
        terminal.wait_for_prompt()
        terminal.type("/tools\r")
        terminal.wait_for("Add two numbers.")
        terminal.type("/tools none\r")
        terminal.wait_for("the model may call no functions")
        terminal.type("/bye\r")
        assert terminal.exit_code() == 0
    newest = max((tmp_path / "state" / "cortexmlx" / "chats").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    said = [m["content"] for m in SavedConversation.read(newest).messages if m["role"] == "tool"]
    assert said == ["3", "Error: ValueError: no luck", "A[2JB"]


def test_what_was_typed_before_a_question_does_not_answer_it(functions: str) -> None:
    """It is the beginning of the next message."""
    with Terminal("--no-history", "--tools", functions, columns=100) as terminal:
        terminal.wait_for_prompt()
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
        terminal.ask([STOP, call])
        terminal.wait_for_stop()
        terminal.type("y")
        terminal.type("\r")
        terminal.go_on()
        terminal.wait_for(CONSENT.strip())
        terminal.type("n\r")
        terminal.wait_for("The result is Error: the user did not allow this call")
        terminal.wait_for("You said: y")
