"""A call on the screen: all of it is seen before it runs, and the user decides."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from cortexmlx.cli.chat.input import LineCleared
from cortexmlx.cli.chat.session import TurnStopped
from cortexmlx.cli.chat.talk import ToolCallDisplay, format_call, shorten_result
from cortexmlx.sessions.tool_rounds import NOT_ALLOWED, ToolEvent
from cortexmlx.structured.tools import ToolCall

CALL = ToolCall("1", "weather", '{"city": "Paris", "days": 2}')


def display(typed: Sequence[str | None], *, ask_first: bool = True) -> tuple[ToolCallDisplay, list[str]]:
    told: list[str] = []
    lines = iter(typed)

    def ask(prompt: str) -> str | None:
        told.append(prompt)
        line = next(lines)
        if line == "^C":
            raise LineCleared
        return line

    return ToolCallDisplay(told.append, ask, set(), ask_first=ask_first), told


@pytest.mark.parametrize(
    ("typed", "allowed"),
    [(["y"], True), (["YES "], True), (["n"], False), (["no"], False), (["", "what?", "y"], True), (["a"], True)],
)
def test_a_call_runs_if_the_user_says_so(typed: list[str | None], allowed: bool) -> None:
    shown, told = display(typed)
    assert shown.ask_approval(CALL) is allowed
    assert told[0] == 'weather(city="Paris", days=2)'
    assert len([line for line in told if line.strip().startswith("run it?")]) == len(typed)


def test_always_is_for_one_function() -> None:
    shown, told = display(["always", "n"])
    assert shown.ask_approval(CALL) and shown.ask_approval(CALL)
    assert not shown.ask_approval(ToolCall("2", "delete", "{}")) and told[-2] == "delete()"


@pytest.mark.parametrize("typed", ["^C", None])
def test_ctrl_c_and_the_end_of_the_input_stop_the_turn(typed: str | None) -> None:
    with pytest.raises(TurnStopped, match="taken back"):
        display([typed])[0].ask_approval(CALL)


def test_without_a_question_calls_are_shown_all_the_same() -> None:
    shown, told = display([], ask_first=False)
    assert shown.ask_approval(CALL) and told == ['weather(city="Paris", days=2)']


def test_nothing_of_a_call_is_hidden() -> None:
    """Control sequences, and characters without a width, which a terminal would not show."""
    call = ToolCall("1", "run", json.dumps({"code": "a\x1b[2K\rb\u200bc\U000e0041\u202ed\né"}))
    assert format_call(call) == r'run(code="a\u001b[2K\rb\u200bc\udb40\udc41\u202ed\né")'


def test_the_beginning_of_a_result_is_shown() -> None:
    shown, told = display([])
    for result in (None, "14 °C\n", NOT_ALLOWED, ""):
        shown.show_result(ToolEvent(CALL, result))
    assert told == ["= 14 °C", "= (nothing)"]
    assert shorten_result("\n".join(map(str, range(10)))) == "0\n1\n2\n3\n4\n5 ... (8 more characters)"
    assert shorten_result("x" * 700) == "x" * 600 + " ... (100 more characters)"
