"""/model and /show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession, Question
from cortexmlx.cli.chat.slash import models
from cortexmlx.cli.chat.slash.models import describe_device
from cortexmlx.cli.engine import ReplaceableEngine
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import InvalidRequest, ModelNotFound
from cortexmlx.models.inventory import LocalModel
from cortexmlx.models.resolve import SourceKind
from support.cli.chat_commands import TerminalText, printed, run_command
from support.cli.cli_fakes import Fakes


@pytest.fixture
def hosted(fakes: Fakes, session: ChatSession) -> Iterator[ChatSession]:
    """A chat whose engine can be exchanged."""
    with ReplaceableEngine(EngineConfig("fake", adapter="mine", keep_last=500)) as host:
        session.replaceable, session.engine = host, host.engine
        session.conversation = host.engine.conversation(system="S")
        yield session


def test_another_model_goes_on_with_what_was_said(fakes: Fakes, hosted: ChatSession, screen: Console) -> None:
    hosted.ask(Question("one"))
    fakes.info = replace(fakes.info, name="org/other", identity="07e4", notes=("on 8 [layers]",))
    run_command("/model org/other", hosted, screen)
    assert [engine.closed for engine in fakes.opened] == [True, False] and hosted.engine is fakes.engine
    options = fakes.engine.options
    assert (options.model, options.adapter, options.keep_last) == ("org/other", None, 500)
    hosted.ask(Question("two"))
    text = "".join(map(chr, fakes.engine.seen[-1][0]))
    assert text == "<system>S\n<user>one\n<assistant>You said: one\n<user>two\n<assistant>"
    said = "  org/other answers now, and reads the 2 messages again\n  on 8 [layers]\n"
    assert printed(screen) == said
    run_command("/model org/other", hosted, screen)
    assert len(fakes.opened) == 2 and printed(screen).endswith("answers already\n")


def test_a_model_that_cannot_be_opened_leaves_the_chat_as_it_was(
    fakes: Fakes, hosted: ChatSession, screen: Console
) -> None:
    hosted.ask(Question("one"))
    with pytest.raises(ModelNotFound, match="no model 'nosuch'"):
        run_command("/model nosuch", hosted, screen)
    assert len(fakes.opened) == 1, "the engine was not even closed"
    with pytest.raises(ModelNotFound):
        run_command("/model org/missing", hosted, screen)
    assert hosted.engine is fakes.engine and not fakes.engine.closed and hosted.engine.options.model == "fake"  # type: ignore[attr-defined]
    hosted.ask(Question("two"))
    assert len(hosted.conversation.messages) == 4


def test_variables_that_its_template_does_not_read_are_not_set_any_more(
    fakes: Fakes, hosted: ChatSession, screen: Console
) -> None:
    told: list[str] = []
    hosted.note = told.append
    hosted.conversation.template_vars = {"enable_thinking": False, "reasoning_effort": "low"}
    fakes.info = replace(fakes.info, template_vars=("reasoning_effort",))
    run_command("/model org/other", hosted, screen)
    assert hosted.conversation.template_vars == {"reasoning_effort": "low"}
    assert told == ["the chat template of fake does not read enable_thinking: not set any more"]


def test_a_model_without_a_template_says_so(fakes: Fakes, hosted: ChatSession, screen: Console) -> None:
    fakes.info = replace(fakes.info, name="org/base", chat_template=False)
    with pytest.raises(InvalidRequest, match="org/base has no chat template, so it cannot answer here"):
        run_command("/model org/base", hosted, screen)


def test_the_models_on_this_machine_are_listed(
    hosted: ChatSession, screen: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [LocalModel(name, SourceKind.HUB, Path("/"), 2**30) for name in ("fake", "org/[other]")]
    monkeypatch.setattr(models, "list_models", lambda: found)
    run_command("/model", hosted, screen)
    assert printed(screen).splitlines()[:2] == [" * fake  1 GiB", "   org/[other]  1 GiB"]
    assert models.model_names() == ["fake", "org/[other]"]


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("", ["model         fake", "temperature", "system prompt: S", "chat          2 messages"]),
        ("info", ["llama, 134 M parameters", "8,192 tokens, each 45 KiB of KV memory", "up to 2 GiB in blocks of 32"]),
        ("parameters", ["top_p"]),
        ("system", ["system prompt: S"]),
        ("messages", ["one", "You said: one"]),
        ("license", ["it is in the model's files: /models/fake"]),
    ],
)
def test_what_is_known_is_shown(hosted: ChatSession, screen: Console, topic: str, says: list[str]) -> None:
    hosted.ask(Question("one"))
    run_command(f"/show {topic}", hosted, screen)
    assert [text for text in says if text not in printed(screen)] == []


def test_what_is_not_known_is_refused(session: ChatSession, screen: Console) -> None:
    with pytest.raises(InvalidRequest, match=r"/show shows info, parameters, .* not 'weights'"):
        run_command("/show weights", session, screen)
    for line in ("/model org/other",):
        with pytest.raises(InvalidRequest, match="this chat cannot change its model"):
            run_command(line, session, screen)
    run_command("/show messages", session, screen)
    assert printed(screen) == "  there are no messages yet\n"


def test_what_was_said_is_shown_with_all_its_words(session: ChatSession) -> None:
    session.ask(Question("!say <b>one</b>\n\n<div>two</div>\n\n```\nopen"))
    session.ask(Question("three"))
    session.conversation.edit(0, "say it")
    screen = Console(file=TerminalText(), width=60, force_terminal=True, color_system=None)
    run_command("/show messages", session, screen)
    said = printed(screen)
    assert "<div>two</div>" in said and "<b>one</b>" in said
    assert "\nUser\n\nthree\n" in said, "code without an end does not reach into the next message"


def test_the_last_turns_of_a_resumed_chat_are_shown_in_a_part_of_the_window(session: ChatSession) -> None:
    for text in ("one", "two", "three"):
        session.ask(Question(text))
    screen = Console(file=TerminalText(), width=60, height=60, force_terminal=True, color_system=None)
    models.print_last_messages(session.conversation.messages, screen)
    said = printed(screen)
    assert "one" not in said and said.index("two") < said.index("You said: three") and "..." not in said
    small = Console(file=TerminalText(), width=60, height=12, force_terminal=True, color_system=None)
    models.print_last_messages(session.conversation.messages, small)
    lines = printed(small).splitlines()
    assert len(lines) == 9 and lines[0] == "..." and "You said: three" in lines[-2]


def test_adapters_are_listed_chosen_and_loaded(fakes: Fakes, session: ChatSession, screen: Console) -> None:
    engine: Any = session.engine
    with pytest.raises(InvalidRequest, match="there is no adapter 'sql': there are none"):
        run_command("/adapter sql", session, screen)
    run_command("/adapter sql=~/sql", session, screen)
    assert session.conversation.adapter == "sql" and engine.loaded["sql"].path == str(Path("~/sql").expanduser())
    session.ask(Question("one"))
    run_command("/adapter", session, screen)
    run_command("/adapter none", session, screen)
    session.ask(Question("two"))
    assert engine.adapted == ["sql", None]
    said = printed(screen)
    assert "loaded sql: rank 4, 8 KiB" in said and "fake answers with sql now" in said
    assert "    none\n  * sql\n" in said and "fake answers alone now" in said
    with pytest.raises(InvalidRequest, match="did you mean 'sql'"):
        run_command("/adapter sqll", session, screen)
    with pytest.raises(ModelNotFound):
        run_command("/adapter other=missing", session, screen)
    assert session.conversation.adapter is None


def test_an_adapter_stays_with_its_model(fakes: Fakes, hosted: ChatSession, screen: Console) -> None:
    folder = str(Path("folder").absolute())
    run_command("/adapter sql=folder", hosted, screen)
    assert hosted.replaceable is not None and hosted.replaceable.config.adapters == {"sql": folder}
    hosted.switch_engine(replace(hosted.replaceable.config, keep_last=400))
    assert hosted.conversation.adapter == "sql" and fakes.engine.options.adapters == {"sql": folder}
    run_command("/model org/other", hosted, screen)
    assert hosted.conversation.adapter is None and fakes.engine.options.adapters is None


def test_a_gpu_is_named_and_a_cpu_says_which_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert describe_device().startswith("CPU, ") and "BLAS" in describe_device()
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda device: {"device_name": "Apple M3 Max"})
    assert describe_device() == "Apple M3 Max (Metal)"
