"""/stats and /blocks: figures that add up, and a picture that comes and goes."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from cortexmlx import Engine
from cortexmlx.cli.chat.session import ChatSession, Question
from cortexmlx.cli.chat.slash.display import disk_tier_summary, show_blocks, show_stats, sparkline
from cortexmlx.cli.chat.status import ArenaView
from cortexmlx.cli.chat.view import PlainTextView
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import InvalidRequest
from cortexmlx.stats import BlockMap, GroupBlocks, StoreState, StoreStats
from support.cli.chat_commands import run_command
from support.cli.cli_fakes import FakeEngine
from support.engine.asked import SHORT


@pytest.fixture
def screen() -> Console:
    return Console(file=io.StringIO(), width=150, height=24)


def printed(screen: Console) -> dict[str, str]:
    """The lines by their labels."""
    assert isinstance(screen.file, io.StringIO)
    lines = [line.strip() for line in screen.file.getvalue().splitlines()]
    screen.file.truncate(0)
    screen.file.seek(0)
    return {re.split(r"  +", line)[0]: re.split(r"  +", line, maxsplit=1)[-1] for line in lines}


def test_the_figures_are_the_engines_and_add_up(engine: Engine, screen: Console) -> None:
    chat = ChatSession(engine, lambda reply: PlainTextView(), engine.conversation(params=SHORT))
    done = [chat.ask(Question(question)) for question in ("one", "and two", "and three")]
    tokens = [each.usage.completion_tokens for each in done]
    rates = [each.timings.decode_tokens_per_second for each in done]
    show_stats(chat, "", screen)
    figures, said = engine.stats(), printed(screen)
    used, shared, cached, stored, free, total, size = map(int, re.findall(r"\d+", said["blocks"])[:7])
    assert used + cached + free == total == figures.total_blocks and shared == stored == 0
    assert (used, cached, free) == (0, figures.cached_blocks, figures.free_blocks - figures.cached_blocks)
    assert size == 8 and cached > 0
    per_block = engine.info.kv_bytes_per_token * 8
    assert said["KV memory"].startswith(f"0 B in use and {cached * per_block / 1024:.3g} KiB cached, of ")
    assert said["prompts"].startswith(
        f"{figures.prompt_tokens:,} tokens, of which {figures.cached_tokens:,} were found"
    )
    rate = float(re.sub(r".* steps, | tok/s while written", "", said["answers"]))
    seconds = sum((n - 1) / each for n, each in zip(tokens, rates, strict=True))
    assert said["answers"].startswith("36 tokens in ") and rate == pytest.approx(33 / seconds, abs=0.06)
    assert f"first token {figures.time_to_first_token.p50:.2f} s" in said["latency"]
    assert said["over time"].endswith("at most") and "on disk" not in said and "states" not in said


def test_what_only_some_engines_have_is_said_where_it_is(
    session: ChatSession, screen: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = replace(
        session.engine.stats(),
        state_bytes=3 * 2**20,
        state_snapshots=12,
        kv_store=StoreStats("/kv", 4 * 2**30, 17, 2**20, 0, 5, 2**19, 1),
    )
    arena = BlockMap(32, (GroupBlocks(2, None, 2**20, 24, bytes([1] * 5 + [2] * 3 + [3] * 4 + [4] * 2 + [0] * 10)),))
    monkeypatch.setattr(session.engine, "stats", lambda: known)
    monkeypatch.setattr(session.engine, "blocks", lambda: arena)
    show_stats(session, "", screen)
    said = printed(screen)
    assert said["blocks"].startswith("8 in use (3 shared), 6 cached (2 on disk, too), 10 free: 24 of 32 tokens; ")
    assert said["KV memory"].startswith("1 MiB in use and 6 MiB cached, of 1 GiB")
    assert said["states"] == "3 MiB, for 12 beginnings to use again"
    assert said["on disk"].startswith("17 blocks written (1 MiB), 5 read, since the chat began; /kv has")
    session.engine = FakeEngine(EngineConfig("fake", keep_last=1000))  # type: ignore[assignment]
    show_stats(session, "", screen)
    assert printed(screen)["kept"] == "the first 4 and the newest 1,000 tokens of a text; 1,234 dropped"


def test_a_store_that_is_not_in_use_yet_says_so() -> None:
    store = StoreStats("/kv", 4 * 2**30, 0, 0, 0, 0, 0, 0, StoreState.HASHING, 0.4)
    assert disk_tier_summary(store) == "nothing yet: the weights are being hashed (40%), for /kv"
    assert "no hash" in disk_tier_summary(replace(store, state=StoreState.OFF))


def test_blocks_draws_the_arena_with_its_legend(session: ChatSession, screen: Console) -> None:
    show_blocks(session, "", screen)
    assert isinstance(screen.file, io.StringIO)
    assert screen.file.getvalue().splitlines() == [
        "  █ private 0  ▓ shared 0  ▒ cached 2  ░ on disk 0  · free 62",
        "  64 blocks of 32 tokens, 64 MiB, up to 1,024",
        "  ▒▒" + "·" * 62,
    ]


def test_blocks_live_goes_on_until_it_is_asked_again(session: ChatSession, screen: Console) -> None:
    with pytest.raises(InvalidRequest, match="needs a terminal"):
        show_blocks(session, "live", screen)
    nothing: Any = None
    session.arena = ArenaView(nothing)
    for again in ("live", ""):
        show_blocks(session, "live", screen)
        assert session.arena.is_shown and "drawn below answers" in str(printed(screen))
        show_blocks(session, again, screen)
        assert not session.arena.is_shown and "not drawn any more" in str(printed(screen))
    show_blocks(session, "", screen)
    assert not session.arena.is_shown
    with pytest.raises(InvalidRequest, match="takes nothing, or live: not 'off'"):
        show_blocks(session, "off", screen)


def test_a_sparkline_shows_peaks_and_never_more_than_its_width() -> None:
    assert sparkline([0, 8, 4, 1]) == " █▄▁"
    assert sparkline([1] * 9 + [100] + [1] * 90, width=10) == "█" + "▁" * 9
    assert sparkline([]) == sparkline([0, 0]) == "-"


def test_the_thoughts_of_the_last_answer_are_shown_and_those_to_come_folded(session: ChatSession) -> None:
    screen = Console(file=io.StringIO(), width=40)
    with pytest.raises(InvalidRequest, match="has no thoughts"):
        run_command("/thoughts", session, screen)
    session.ask(Question("!say <think>\n**So** it is.\n</think>yes <think>or not</think>"))
    run_command("/thoughts", session, screen)
    assert screen.file.getvalue() == "So it is.\n"  # type: ignore[attr-defined]
    run_command("/thoughts fold", session, screen)
    assert session.thought_display.is_folded
    run_command("/thoughts show", session, screen)
    assert not session.thought_display.is_folded
    with pytest.raises(InvalidRequest, match="takes nothing, fold or show: not 'off'"):
        run_command("/thoughts off", session, screen)
    session.ask(Question("without"))
    with pytest.raises(InvalidRequest, match="has no thoughts"):
        run_command("/thoughts", session, screen)
