"""/undo, /regen, /edit and /n."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession, Question, QuestionDraft
from cortexmlx.errors import InvalidRequest
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.chat_commands import printed, run_command


def test_turns_are_taken_back_and_answered_again(session: ChatSession, screen: Console) -> None:
    session.ask(Question("one"))
    session.ask(Question("two\nlines"))
    assert run_command("/regen", session, screen) == Question("two\nlines", replaces_last=True)
    run_command("/undo", session, screen)
    assert [turn["content"] for turn in session.conversation.messages] == ["one", "You said: one"]
    run_command("/undo", session, screen)
    run_command("/undo", session, screen)
    said = printed(screen).splitlines()
    assert said[-3:] == ["  took back: two ...", "  took back: one", "  there is nothing to take back"]
    assert said[0].startswith("  the same again, at temperature 0")
    session.save_in_new_file()
    for line, says in {
        "/regen": "no answer to write again",
        "/edit x": "no question to change",
        "/n": "/n 3 TEXT",
    }.items():
        with pytest.raises(InvalidRequest, match=says):
            run_command(line, session, screen)


def test_it_is_said_why_several_answers_will_be_the_same(session: ChatSession, screen: Console) -> None:
    for settings, said in (
        (
            {"temperature": 0.0, "seed": 3},
            "  all 3 will be the same, at temperature 0: /set temp 0.7 for another answer\n",
        ),
        (
            {"temperature": 0.5, "top_k": 1},
            "  all 3 will be the same, with top_k 1: /set top_k 40 for another answer\n",
        ),
        ({"temperature": 0.5}, ""),
    ):
        session.params = replace(SamplingParams(), **settings)  # type: ignore[arg-type]
        printed(screen)
        run_command("/n 3 one?", session, screen)
        assert printed(screen).endswith(said)


def test_what_comes_after_undo_replaces_no_older_turn(session: ChatSession, screen: Console) -> None:
    for text in ("one", "two", "three"):
        session.ask(Question(text))
    run_command("/undo", session, screen)
    assert run_command("/edit", session, screen) == QuestionDraft("three", replaces_last=False)
    assert run_command("/edit drei", session, screen) == Question("drei", typed_text="drei")
    assert run_command("/regen", session, screen) == Question("three")
    assert run_command("/n 2", session, screen) == Question("three", answers=2)
    run_command("/undo", session, screen)
    session.ask(Question("zwei"))
    assert [m["content"] for m in session.conversation.messages if m["role"] == "user"] == ["one", "zwei"]
    assert run_command("/edit", session, screen) == QuestionDraft("zwei"), "what was taken back is over"


def test_the_last_question_is_asked_in_other_words(session: ChatSession, screen: Console) -> None:
    session.ask(Question("one"))
    assert run_command("/edit", session, screen) == QuestionDraft("one")
    assert run_command("/edit uno\ndue", session, screen) == Question(
        "uno\ndue", replaces_last=True, typed_text="uno\ndue"
    )
    session.ask(Question("notes.txt:\n```\na\n```\n\n@notes.txt what?", typed_text="@notes.txt what?"))
    assert run_command("/edit", session, screen) == QuestionDraft("@notes.txt what?"), "not the text of the file"


def test_several_answers_are_asked_for(session: ChatSession, screen: Console) -> None:
    session.params = replace(session.params, temperature=0.5)
    assert run_command("/n 4 What now?", session, screen) == Question("What now?", answers=4, typed_text="What now?")
    session.ask(Question("one"))
    assert run_command("/n", session, screen) == Question("one", replaces_last=True, answers=3)
    assert printed(screen) == ""
    for line in ("/n 1", "/n 10", "/n many", "/n -3"):
        with pytest.raises(InvalidRequest, match="/n takes how many answers are wanted, 2 to 9"):
            run_command(line, session, screen)


def test_functions_are_offered_listed_and_taken_away(session: ChatSession, screen: Console, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('def add(a: int) -> int:\n    """Add one."""\n    return a + 1\n')
    run_command("/tools", session, screen)
    assert "the model may call no functions; /tools FILE.py" in printed(screen)
    run_command(f"/tools {tmp_path}/mine.py", session, screen)
    assert [tool.name for tool in session.params.offered] == ["add"] and "Add one." in printed(screen)
    with pytest.raises(InvalidRequest, match="is not a file"):
        run_command("/tools missing.py", session, screen)
    assert [tool.name for tool in session.params.offered] == ["add"], "what was offered stays"
    run_command("/tools none", session, screen)
    assert session.params.offered == ()


def test_a_model_that_cannot_call_is_offered_nothing(session: ChatSession, screen: Console, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def add(a: int) -> int: return a + 1\n")
    object.__setattr__(session.conversation._reader, "call_format", None)
    with pytest.raises(InvalidRequest, match="this model cannot call tools"):
        run_command(f"/tools {tmp_path}/mine.py", session, screen)
    assert session.params.offered == ()
