"""The menu-bar app without a Mac: what it does with a real engine, and its menu with a stand-in for rumps."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cortexmlx import MemoryPressure, SamplingParams
from support.examples import example
from support.patience import PATIENCE, soon


@pytest.fixture
def assistant(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = example("menu_bar/assistant.py")
    monkeypatch.setattr(module, "PARAMS", SamplingParams(max_tokens=100, ignore_eos=True))
    monkeypatch.setattr(module, "SYSTEM", "Short.")
    opened = module.Assistant(tiny("llama"), "256KB")
    assert opened.view.busy and opened.view.status.startswith("Loading")
    opened.start()
    yield opened
    opened.close()
    assert opened._engine is None


def test_questions_are_answered_one_after_the_other(assistant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer waits at every 20th token until somebody has looked at what is new."""
    assert soon(lambda: assistant.view.status.endswith("llama is ready") and not assistant.view.busy)
    looked = threading.Semaphore(0)

    def wait(tokens: Any, logits: Any) -> Any:
        if tokens.size % 20 == 0:
            looked.acquire(timeout=PATIENCE)
        return logits

    params = SamplingParams(max_tokens=100, ignore_eos=True, logits_processors=[wait])
    monkeypatch.setattr(sys.modules[type(assistant).__module__], "PARAMS", params)
    answers: list[str] = []

    def look() -> bool:
        view = assistant.view
        if view.status == "Writing ..." and view.answer not in answers:
            answers.append(view.answer)
            looked.release()
        return "100 tokens" in view.status

    assistant.ask("one?")
    looked.release()  # the prompt's end may be such a token
    assert soon(look)
    assert len(answers) > 3 and all(assistant.view.answer.startswith(answer) for answer in answers)
    first = assistant.view.answer
    assistant.ask("and two?")
    assert soon(lambda: "100 tokens" in assistant.view.status and assistant.view.answer != first)


def test_an_answer_is_stopped_and_what_there_is_stays(assistant: Any) -> None:
    assistant.ask("a long one?")
    assert soon(lambda: len(assistant.view.answer) > 3)
    assistant.stop()
    assert soon(lambda: not assistant.view.busy)
    assert assistant.view.status.startswith("Stopped after") and assistant.view.answer
    assistant.memory_is_short(MemoryPressure.CRITICAL)
    assistant.ask("and now?")
    assert soon(lambda: assistant.view.status.startswith("100 tokens"))


def test_what_does_not_fit_is_said_and_the_next_question_is_answered(assistant: Any) -> None:
    assistant.ask("x" * 5000)
    assert soon(lambda: "prompt still has" in assistant.view.status and not assistant.view.busy)
    assistant.ask("short?")
    assert soon(lambda: assistant.view.status.startswith("100 tokens"))


def test_closing_answers_no_question_that_still_waits(assistant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(tokens: Any, logits: Any) -> Any:
        assert not assistant.view.answer or soon(lambda: assistant._closed)
        return logits

    params = SamplingParams(max_tokens=100, ignore_eos=True, logits_processors=[wait])
    monkeypatch.setattr(sys.modules[type(assistant).__module__], "PARAMS", params)
    for number in range(9):
        assistant.ask(f"question {number}?")
    assert soon(lambda: assistant.view.answer)
    assistant.close()
    assert assistant.view.status.startswith("Stopped after") and assistant._questions.qsize() >= 7


def test_a_model_that_is_not_there_is_said() -> None:
    assistant = example("menu_bar/assistant.py").Assistant("no such model")
    assistant.start()
    assert soon(lambda: "no model 'no such model'" in assistant.view.status and not assistant.view.busy)
    assistant.close()


class Item:
    """rumps.MenuItem, as far as the app uses it."""

    def __init__(self, title: str, callback: Any = None, key: str | None = None) -> None:
        self.title, self.callback = title, callback


def test_the_menu_shows_what_there_is_and_asks_what_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[dict[str, Any]] = []
    answer = SimpleNamespace(clicked=1, text="  why? ")
    done: list[str] = []

    class App:
        def __init__(self, name: str, title: str, quit_button: None) -> None:
            self.title = title

    def window(**options: Any) -> Any:
        windows.append(options)
        return SimpleNamespace(run=lambda: answer)

    timer = SimpleNamespace(start=lambda: done.append("timer"))
    rumps = ModuleType("rumps")
    quits = {"quit_application": lambda: done.append("quit")}
    rumps.__dict__.update(App=App, MenuItem=Item, Timer=lambda call, every: timer, Window=window, **quits)
    monkeypatch.setitem(sys.modules, "rumps", rumps)
    module = example("menu_bar/assistant.py")
    monkeypatch.setitem(sys.modules, "assistant", module)

    asked: list[str] = []
    assistant = SimpleNamespace(
        view=module.View("Writing ...", "many words " * 20, busy=True),
        ask=asked.append,
        stop=lambda: done.append("stop"),
        close=lambda: done.append("close"),
    )
    menu = example("menu_bar/app.py").MenuBar(assistant)
    items = {item.title: item for item in menu.menu if item is not None}
    menu.refresh(timer)
    assert menu.title == "◆" and items["status"].title == "Writing ..." and len(items["answer"].title) == 61
    items["Ask ..."].callback(None)
    answer.clicked = 0
    items["Ask ..."].callback(None)
    items["answer"].callback(None)
    assert asked == ["why?"] and windows[-1]["default_text"] == assistant.view.answer
    items["Stop"].callback(None)
    items["Quit"].callback(None)
    assert done == ["timer", "stop", "close", "quit"]
