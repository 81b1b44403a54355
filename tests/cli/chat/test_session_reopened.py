"""A chat whose engine is opened again while files are gone: it loses only what is gone, and says what."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cortexmlx.cli import engine as engines
from cortexmlx.cli.chat.input import PROMPT, PlainInput
from cortexmlx.cli.chat.session import ChatSession, Question
from cortexmlx.cli.chat.talk import ChatLoop
from cortexmlx.cli.chat.view import PlainTextView
from cortexmlx.cli.chats.saved_chats import ChatSaver
from cortexmlx.cli.engine import ReplaceableEngine
from cortexmlx.cli.terminal.signals import InterruptHandler
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import CortexError, EngineClosed, InvalidRequest, KVCacheFull, ModelCorrupt, ModelNotFound
from support.cli.chat_commands import printed, run_command
from support.cli.cli_fakes import Fakes
from support.models.adapters import write_adapter


class Typed(PlainInput):
    """Lines that a person types."""

    def __init__(self, *lines: str) -> None:
        self.lines = [*lines]

    def ask(self, prompt: str = PROMPT, draft: str = "") -> str | None:
        return self.lines.pop(0) if self.lines else None


def chat_of(replaceable: ReplaceableEngine, told: list[str]) -> ChatSession:
    talk = replaceable.engine.conversation()
    return ChatSession(
        replaceable.engine, lambda reply: PlainTextView(), talk, replaceable=replaceable, note=told.append
    )


@pytest.fixture
def told() -> list[str]:
    """The notes of the chat."""
    return []


@pytest.fixture
def hosted(fakes: Fakes, told: list[str]) -> Iterator[ChatSession]:
    """A chat with fake engines and two adapters."""
    with ReplaceableEngine(EngineConfig("fake", adapters={"sql": "one", "poem": "two"})) as replaceable:
        yield chat_of(replaceable, told)


def gone(session: ChatSession, name: str) -> None:
    """Remove the folder of an adapter that the engine has in memory."""
    assert session.replaceable is not None
    there = session.replaceable.config.adapters or {}
    session.replaceable.config = replace(session.replaceable.config, adapters={**there, name: f"missing {name}"})


def fails_to_open(fakes: Fakes, monkeypatch: pytest.MonkeyPatch, refused: Callable[[EngineConfig], bool]) -> None:
    """Let engines fail to open for reasons that no check sees."""

    def load(options: EngineConfig) -> Any:
        if refused(options):
            raise KVCacheFull("no memory is left.")
        return fakes.load(options)

    monkeypatch.setattr(engines, "load_engine", load)


def test_an_adapter_that_is_gone_and_not_in_use_is_left_out_with_a_note(
    fakes: Fakes, hosted: ChatSession, told: list[str], screen: Console
) -> None:
    hosted.ask(Question("one"))
    gone(hosted, "sql")
    hosted.conversation.adapter = "poem"
    run_command("/set keep_last 400", hosted, screen)
    assert fakes.engine.options.adapters == {"poem": "two"} and fakes.engine.options.keep_last == 400
    assert hosted.conversation.adapter == "poem" and len(hosted.conversation.messages) == 2
    (note,) = told
    assert "'sql' (no adapter folder missing sql). /adapter NAME=FOLDER" in note
    run_command("/set keep_last 500", hosted, screen)
    assert len(told) == 1, "it is said once"


def test_the_adapter_that_answers_is_not_lost_and_nothing_changes(
    fakes: Fakes, hosted: ChatSession, told: list[str], screen: Console
) -> None:
    hosted.conversation.adapter = "sql"
    gone(hosted, "sql")
    with pytest.raises(
        InvalidRequest, match=re.escape("missing sql. 'sql' answers here") + ".*/adapter none.*/adapter"
    ):
        run_command("/set keep_last 400", hosted, screen)
    assert len(fakes.opened) == 1 and not fakes.engine.closed and not told
    hosted.ask(Question("one"))
    assert fakes.engine.adapted == ["sql"]
    run_command("/adapter none", hosted, screen)
    run_command("/set keep_last 400", hosted, screen)
    assert fakes.engine.options.adapters == {"poem": "two"} and "'sql'" in told[0]


@pytest.mark.parametrize("kept", [True, False])
def test_a_chat_without_any_engine_keeps_its_words_and_takes_another_model(
    kept: bool, fakes: Fakes, hosted: ChatSession, screen: Console, monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    hosted.saver = ChatSaver() if kept else None
    hosted.ask(Question("one"))
    fails_to_open(fakes, monkeypatch, lambda options: str(options.model) == "fake")
    file, missing = tmp_path / "saved.json", tmp_path / "missing"
    lines = ["/set keep_last 400", "two", "/model", "/model fake", "/show info", f"/save {file}", f"/model {missing}"]
    ChatLoop(hosted, Typed(*lines), screen, InterruptHandler(), pretty=False).run("")
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors[0] == "error: fake cannot be opened again: no memory is left."
    assert "no model is open" in errors[1] and len(errors) >= 4
    path = hosted.saver.path if hosted.saver is not None else None
    there = f"the chat is saved in {path}" if kept else "/save FILE keeps the chat"
    assert f"no model is open: /model NAME opens one, and the chat goes on. Until then, {there}" in printed(screen)
    assert file.is_file() and [m["content"] for m in hosted.conversation.messages] == ["one", "You said: one"]
    ChatLoop(hosted, Typed("/model org/other", "three"), screen, InterruptHandler(), pretty=False).run("")
    assert hosted.has_model and [m["content"] for m in hosted.conversation.messages][2:] == [
        "three",
        "You said: three",
    ]
    if hosted.saver is not None:
        hosted.saver.close()


def test_an_engine_that_ends_by_itself_still_ends_the_chat(hosted: ChatSession, screen: Console) -> None:
    def closed() -> Any:
        raise EngineClosed("the engine's thread failed")

    hosted.engine.stats = closed  # type: ignore[method-assign]
    with pytest.raises(EngineClosed):
        ChatLoop(hosted, Typed("/show info"), screen, InterruptHandler(), pretty=False).run("")


@pytest.mark.parametrize("what", ["cut short", "removed"])
def test_files_that_are_damaged_meanwhile_end_no_chat(
    what: str, tiny: Any, tmp_path: Path, told: list[str], screen: Console
) -> None:
    """With real engines, from the adapter that nobody uses to the model itself."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    adapter = write_adapter(tmp_path / "sql", folder)

    def damage(path: Path) -> None:
        if what == "removed":
            shutil.rmtree(path)
        for file in path.glob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-100])

    with ReplaceableEngine(EngineConfig(folder, kv_memory="256KB")) as replaceable:
        session = chat_of(replaceable, told)
        session.params = replace(session.params, max_tokens=2)
        run_command(f"/adapter sql={adapter}", session, screen)
        session.ask(Question("one"))
        damage(adapter)
        with pytest.raises(InvalidRequest, match="'sql' answers here"):
            run_command("/set kv_memory 300KB", session, screen)
        session.ask(Question("two"))
        run_command("/adapter none", session, screen)
        run_command("/set kv_memory 300KB", session, screen)
        assert not session.engine.adapters and "'sql'" in told[0]
        session.ask(Question("three"))
        damage(folder)
        engine = session.engine
        with pytest.raises((ModelCorrupt, ModelNotFound)):
            run_command("/set kv_memory 400KB", session, screen)
        assert session.engine is engine, "the files were looked at before it was closed"
        session.ask(Question("four"))
        assert len(session.conversation.messages) == 8


@pytest.mark.parametrize("option", ["adapter", "draft"])
def test_an_only_adapter_and_a_draft_model_are_looked_at_first(option: str, tiny: Any, tmp_path: Path) -> None:
    there = tmp_path / "there"
    if option == "draft":
        shutil.copytree(tiny("llama"), there)
    else:
        write_adapter(there, tiny("llama"))
    options: dict[str, Any] = {option: there}
    with ReplaceableEngine(EngineConfig(tiny("llama"), kv_memory="256KB", **options)) as replaceable:
        shutil.rmtree(there)
        with pytest.raises(CortexError, match="there"):
            replaceable.check(replace(replaceable.config, kv_memory="300KB"))
        assert replaceable.is_open and replaceable.engine.generate([1], max_tokens=1)


def test_who_gives_up_when_nothing_can_be_opened_is_told(
    fakes: Fakes, hosted: ChatSession, told: list[str], screen: Console, monkeypatch: Any
) -> None:
    def load(options: EngineConfig) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(engines, "load_engine", load)
    with pytest.raises(KeyboardInterrupt):
        run_command("/set keep_last 400", hosted, screen)
    assert not hosted.has_model and "given up: no model is open" in told[0]
