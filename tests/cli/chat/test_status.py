"""The line below an answer: what it says at each moment, by which clock, and that it agrees with the engine."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams, TokenEvent
from cortexmlx.cli.chat import status as module
from cortexmlx.cli.chat.status import AnswerStatus, ArenaView
from cortexmlx.errors import EngineClosed
from cortexmlx.stats import BlockMap, BlockState, GroupBlocks
from cortexmlx.types.progress import Progress
from support.cli.statuses import Written, closed
from support.cli.terminal import STOP, Terminal, pieces
from support.patience import soon


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def picture(used: int, blocks: int = 40) -> BlockMap:
    return BlockMap(32, (GroupBlocks(30, None, 1024, blocks, bytes([BlockState.PRIVATE] * used).ljust(blocks, b"\0")),))


def test_from_the_prompt_to_the_end_it_says_what_is_known(clock: Clock) -> None:
    asked = Written(range(4096))
    status = AnswerStatus(asked, 8192)
    assert status.line() == "reading 4,096 tokens · 0 s"
    for done, now in ((0, 100.2), (512, 102.0), (1024, 104.0)):
        clock.now, asked.progress = now, Progress("prefilling", done, 4096)
        status.update(TokenEvent("", progress=asked.progress))
    assert status.line() == "reading 1,024 of 4,096 tokens · 4 s"
    clock.now = 110.0
    status.update(TokenEvent("a", 1))
    assert status.line() == "1 token · TTFT 10.0 s · context 50%"
    for _ in range(40):
        clock.now += 0.05
        status.update(TokenEvent("a", 1))
    status.update(TokenEvent("", finish_reason=None))
    assert status.line() == "41 tokens · 20 tok/s · TTFT 10.0 s · context 51%"


def test_what_was_found_in_the_prefix_cache_is_said_before_and_after_the_first_token(clock: Clock) -> None:
    status = AnswerStatus(Written(range(1000), Progress("prefilling", 700, 1000, cached=600)), 10_000)
    assert status.line() == "reading 700 of 1,000 tokens, 600 cached · 0 s"
    status.update(TokenEvent("a", 1))
    assert status.line() == "1 token · TTFT 0.0 s · context 10% · 600 cached"


def test_a_stop_is_acknowledged_at_once(clock: Clock) -> None:
    asked = Written(range(9))
    status = AnswerStatus(asked, 100)
    asked.cancelling = True
    assert status.line() == "stopping with the piece of the prompt that is under way"
    status.update(TokenEvent("a", 1))
    assert status.line() == "stopping"


def test_an_answer_that_drops_tokens_says_so_and_that_it_reads_again(clock: Clock) -> None:
    status = AnswerStatus(Written(range(1234)), 10_000)
    for _ in range(6):
        status.update(TokenEvent("a", 1, dropped=0))
    status.update(TokenEvent("", progress=Progress("prefilling", 512, 700)))
    assert status.line() == "6 tokens · reading 512 of 700 tokens again"
    status.update(TokenEvent("a", 1, dropped=1000))
    assert status.line() == "7 tokens · TTFT 0.0 s · context 2% · 1,000 dropped"


def test_the_arena_is_looked_at_while_an_answer_is_written_and_no_longer() -> None:
    looks: list[float] = []

    def ask() -> BlockMap:
        looks.append(time.monotonic())
        return picture(len(looks))

    arena = ArenaView(ask)
    with AnswerStatus(Written(range(3)), 100, arena) as status:
        status.update(TokenEvent("a", 1))
        while arena.newest_map is None:
            time.sleep(0.005)
        assert status.line().endswith("KV 1 block")
        while len(looks) < 2:
            time.sleep(0.005)
    assert looks[1] - looks[0] >= module.WATCH_SECONDS
    assert soon(lambda: all(thread.name != "cortexmlx-arena" for thread in threading.enumerate())), "it looks on"


def test_an_engine_that_has_gone_is_not_looked_at() -> None:
    arena = ArenaView(closed)
    arena.watch(threading.Event())
    assert arena.newest_map is None and arena.rows(80, 24) == []
    with pytest.raises(EngineClosed):
        closed()


@pytest.mark.parametrize(("height", "rows"), [(8, 2), (24, 3), (60, 3)])
def test_the_picture_takes_a_third_of_the_window_at_most_and_only_if_it_is_wanted(height: int, rows: int) -> None:
    arena = ArenaView(lambda: picture(2))
    arena.newest_map = picture(2)
    assert arena.rows(80, height) == []
    arena.toggle()
    drawn = arena.rows(80, height)
    assert len(drawn) <= height // 3 and drawn[-1].plain.strip() == "██" + "·" * 38 and len(drawn) == rows
    arena.toggle()
    assert arena.rows(80, height) == []


def test_its_figures_are_those_of_the_answer_in_the_end(engine: Engine) -> None:
    """Tokens, prompt and cached tokens exactly; the time to the first token by two clocks that began together."""
    talk: Any = engine.conversation(params=SamplingParams(max_tokens=30, ignore_eos=True))
    for question in ("word " * 40, "and again"):
        with talk.stream(question) as reply:
            status = AnswerStatus(reply, 512)
            for event in reply:
                status.update(event)
            done = reply.result()
        cached = f" · {done.usage.cached_tokens} cached" if done.usage.cached_tokens else ""
        share = (done.usage.prompt_tokens + done.usage.completion_tokens) / 512
        assert status._tokens == done.usage.completion_tokens == 30
        assert status._first_token_time - status._started == pytest.approx(done.timings.ttft, abs=0.3)
        reply._handle._cancelling = False
        assert f"context {share:.0%}{cached}" in status.line()
    assert cached


SIZES = [(80, 24), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((40, 10), (200, 50)))]


@pytest.mark.parametrize(("columns", "lines"), SIZES)
def test_a_long_prompt_says_how_far_it_is_and_a_stop_is_heard_at_once(columns: int, lines: int) -> None:
    with Terminal("--no-history", columns=columns, lines=lines, held=True) as terminal:
        terminal.wait_for_prompt()
        terminal.type("!read 40\r")
        terminal.go_on()
        terminal.shows("reading 100 of 4,000")
        terminal.type("\x03")
        terminal.shows("stopping")
        terminal.go_on()
        terminal.wait_for_prompt()
        assert any("stopped before the first word" in line for line in terminal.lines())
        terminal.enter("hello", "You said: hello")
        assert not any("reading" in line or "stopping" in line for line in terminal.lines()), "nothing of it stays"


def test_a_key_shows_and_hides_the_arena_while_an_answer_is_written() -> None:
    with Terminal("--no-history", columns=80, lines=24) as terminal:
        terminal.wait_for_prompt()
        terminal.ask([*pieces("The sky is blue, "), STOP, *pieces("and the grass is green.")])
        terminal.wait_for_stop()
        terminal.shows("TTFT")
        assert not any("▒" in row for row in terminal.screen.rows())
        terminal.type("a\x14b")
        terminal.shows("███▒▒·")
        terminal.type("\x14")
        terminal.wait_until(lambda: not any("▒" in row for row in terminal.screen.rows()), "the end of the picture")
        terminal.go_on()
        terminal.wait_until(lambda: ">>> ab" in terminal.screen.rows(), "what was typed besides")
        assert terminal.answer() == ["The sky is blue, and the grass is green."]
