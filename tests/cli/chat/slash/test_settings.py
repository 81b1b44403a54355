"""/set and /system: what they change, what they refuse, and the names that other programs have for the same."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession, FigureDisplay
from cortexmlx.cli.chat.slash.settings import setting_names
from cortexmlx.cli.engine import ReplaceableEngine
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import InvalidRequest
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.chat_commands import printed, run_command
from support.cli.cli_fakes import Fakes


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temp 0.7", "temperature", 0.7),
        ("/set seed=5", "seed", 5),
        ("/set parameter num_predict 40", "max_tokens", 40),
        ("/set parameter repeat_penalty 1.3", "repetition_penalty", 1.3),
        ("/SET repeat_last_n 64", "repetition_context", 64),
        ("/set max_tokens none", "max_tokens", None),
        ('/set parameter stop "END" "a b" "\\n"', "stop", ("END", "a b", "\n")),
        ('/set stop "né"', "stop", ("né",)),
    ],
)
def test_a_parameter_has_the_names_that_people_know(
    session: ChatSession, screen: Console, line: str, name: str, value: object
) -> None:
    run_command(line, session, screen)
    assert getattr(session.params, name) == value
    assert printed(screen).startswith(f"  {name} ") and printed(screen).count("\n") == 1, "only what has changed"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/set temp hot", "temperature is 'hot', but must be a number"),
        ("/set top_k 1.5", "top_k is '1.5', but must be a whole number"),
        ("/set top_p 2", "top_p is 2.0, but must be a number in (0, 1]"),
        ("/set temperatur 1", "no setting 'temperatur': did you mean temperature?"),
        ("/set colour red", "no setting 'colour': there are max_tokens, max_thinking_tokens"),
        ("/set parameter num_ctx 4096", "the context is the model's own; /set kv_memory"),
        ('/set schema {"a', "no JSON"),
        ("/set schema /nowhere/x.json", "/nowhere/x.json cannot be read: No such file"),
        ("/set format yaml", "yaml cannot be read: No such file"),
        ("/set schema ~nobody-is-called-so/x.json", "~nobody-is-called-so/x.json cannot be read: No such file"),
        ("/set schema a\0b", "cannot be read: embedded null byte"),
        ("/set nohistory", "begin the chat with --no-history"),
        ('/set stop "', "write each text in quotes"),
        ("/set kv_memory 4GB", "this chat cannot change kv_memory"),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(session: ChatSession, screen: Console, line: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(says)):
        run_command(line, session, screen)
    assert session.params == SamplingParams()


def test_set_alone_shows_everything_and_a_name_alone_its_value(session: ChatSession, screen: Console) -> None:
    run_command("/set stop", session, screen)
    run_command("/set", session, screen)
    said = printed(screen)
    assert said.startswith("  stop                none") and "repetition_penalty  1.0" in said
    assert {"temperature", "kv_memory", "verbose", "system"} <= set(setting_names())


def test_answers_can_have_a_schema(session: ChatSession, screen: Console, tmp_path: Path) -> None:
    """JSON, a file, or ollama's own name for any JSON."""
    schema = {"type": "object", "properties": {"name": {"type": "string", "description": "a=b"}}}
    file = tmp_path / "s.json"
    file.write_text(json.dumps(schema))
    for line in (f"/set schema {json.dumps(schema)}", f"/set schema {file}"):
        run_command(line, session, screen)
        assert session.params.form == StructuredOutput.json(schema, closed=True, compact=True)
        run_command("/set noformat", session, screen)
        assert session.params.form is None
    run_command(f"/set schema --open-schema {file}", session, screen)
    assert session.params.form == StructuredOutput.json(schema)
    run_command("/set format json", session, screen)
    assert session.params.form == StructuredOutput.json(compact=True)
    assert '  schema              {"type":"object"}' in printed(screen)


@pytest.mark.parametrize("figures", FigureDisplay)
def test_what_is_said_below_an_answer(session: ChatSession, screen: Console, figures: FigureDisplay) -> None:
    run_command(f"/set {figures.value}", session, screen)
    assert session.figures is figures


def test_the_system_prompt_is_shown_changed_and_removed(session: ChatSession, screen: Console) -> None:
    for line, prompt in {
        "/system Be brief.": "Be brief.",
        '/set system "Be long."': "Be long.",
        '/set system """Be\nwhat you are."""': "Be\nwhat you are.",
        "/system": "Be\nwhat you are.",
        "/system none": None,
    }.items():
        run_command(line, session, screen)
        assert session.conversation.system == prompt
    assert printed(screen).splitlines()[0] == "  system prompt: Be brief."
    assert printed(screen).splitlines()[-1] == "  system prompt: none"


def test_more_memory_takes_another_engine_and_the_chat_goes_on(
    fakes: Fakes, session: ChatSession, screen: Console
) -> None:
    with ReplaceableEngine(EngineConfig("fake")) as host:
        engine: Any = host.engine
        session.replaceable, session.engine, session.conversation = host, engine, engine.conversation(system="S")
        session.conversation.ask("one")
        run_command("/set kv_memory 4GB", session, screen)
        assert engine.closed and session.engine is fakes.engine and not fakes.engine.closed
        assert fakes.engine.options.kv_memory == 4 * 10**9 and session.conversation.system == "S"
        run_command("/set keep_last 1000", session, screen)
        run_command("/set keep_first 9", session, screen)
        assert (fakes.engine.options.keep_last, fakes.engine.options.keep_first) == (1000, 9)
        run_command("/set keep_last none", session, screen)
        assert (fakes.engine.options.keep_last, fakes.engine.options.keep_first) == (None, None)
        for line, says in {
            "/set kv_memory much": "'much' is not a size",
            "/set kv_bits 5": "kv_bits is 5, but must be one of",
            "/set keep_first 4": "keep_first is 4, but must be None without keep_last",
        }.items():
            with pytest.raises(InvalidRequest, match=re.escape(says)):
                run_command(line, session, screen)
        assert len(fakes.opened) == 5 and not fakes.engine.closed, "what is refused costs nothing"
        assert session.conversation.ask("two").text == "You said: two" and len(session.conversation.messages) == 4


def test_set_think_and_any_variable_of_the_template(session: ChatSession) -> None:
    screen = Console(file=io.StringIO(), width=100)
    run_command("/set nothink", session, screen)
    assert session.conversation.template_vars == {"enable_thinking": False}
    run_command("/set think", session, screen)
    assert session.conversation.template_vars == {"enable_thinking": True}
    for line in ("/set think off", "/set reasoning_effort high"):
        run_command(line, session, screen)
    assert session.conversation.template_vars == {"enable_thinking": False, "reasoning_effort": "high"}
    run_command("/set enable_thinking true", session, screen)
    assert session.conversation.template_vars["enable_thinking"] is True
    run_command("/set think none", session, screen)
    assert session.conversation.template_vars == {"reasoning_effort": "high"}
    assert '  reasoning_effort    "high" ' in screen.file.getvalue()  # type: ignore[attr-defined]


def test_what_the_template_does_not_read_is_no_setting(session: ChatSession) -> None:
    with pytest.raises(InvalidRequest, match="no setting 'colour'"):
        run_command("/set colour red", session, Console(file=io.StringIO()))
    assert session.conversation.template_vars == {}
