"""PromptHistory: its bounds, whose paths it keeps, and how little of them it compares."""

from __future__ import annotations

from typing import Any

import numpy as np

from cortexmlx.core.prompt import PromptSource
from cortexmlx.core.prompt_history import MAX_PATHS, MAX_REPORTS, ModelVersion, PromptHistory
from cortexmlx.types.cache_report import CacheReport, RecomputeReason
from cortexmlx.types.request import QueuedRequest
from cortexmlx.types.sampling_params import SamplingParams

VERSION = ModelVersion("a model", "tiny", "")


class Letters:
    """A tokenizer with a letter for each token."""

    eos_token_ids = frozenset[int]()

    def decode(self, tokens: list[int], special_tokens: bool = False) -> str:
        return "".join(chr(0x4E00 + token) for token in tokens)


def tell(
    history: PromptHistory, prompt: Any, client: str | None = "me", answer: Any = (7, 8), chat: Any = None, **found: int
) -> CacheReport:
    request = QueuedRequest(tuple(int(token) for token in prompt), SamplingParams(), client=client)
    tokenizer: Any = Letters()
    trace = history.trace(request, chat, tokenizer, VERSION)
    cached = found.get("cached", trace.draft.known_tokens)
    return trace.finish(cached, 0, found.get("chain", cached), answer)


def text(seed: int, length: int = 400) -> Any:
    return np.random.default_rng(seed).integers(0, 20_000, length)


def test_a_path_that_goes_on_takes_the_place_of_its_beginning_and_the_oldest_go() -> None:
    history, long = PromptHistory(), text(0)
    tell(history, text(99))
    for end in range(40, 400, 40):
        assert tell(history, long[:end], answer=long[end : end + 20].tolist()).reason is None
    assert tell(history, long).known_tokens == 380
    assert tell(history, text(99)).known_tokens == 400
    for seed in range(1, MAX_PATHS - 1):
        tell(history, text(seed))
    assert tell(history, long, cached=0).reason is RecomputeReason.EVICTED
    for seed in range(20, 20 + MAX_PATHS):
        tell(history, text(seed))
    assert tell(history, long, cached=0).known_tokens == 0
    assert len(history.reports("me")) == MAX_REPORTS


def test_the_nearest_of_several_conversations_is_compared() -> None:
    """Two that begin alike: not the newest, but the one of which most is repeated."""
    history, first, second = PromptHistory(), text(1), text(2)
    first[:30] = second[:30]
    second[100:150] = first[100:150]
    tell(history, first)
    tell(history, second)
    changed = first.copy()
    changed[30] = 1
    report = tell(history, changed)
    assert (report.known_tokens, report.recomputed_tokens, report.character) == (30, 400 - 31, 30)
    assert report.old[:16] == report.new[:16] and report.new[16] == Letters().decode([1]) != report.old[16]
    found = tell(history, np.where(np.arange(400) == 36, 1, first), cached=390)  # by another process, on disk
    assert (found.recomputed_tokens, found.reason, found.old) == (0, None, "")


def test_the_conversation_whose_tokens_were_found_explains_the_rest() -> None:
    """Not one that leaves the prompt within them, though it repeats as much."""
    history, first, decoder = PromptHistory(), text(1), Letters()
    tell(history, first)
    tell(history, np.where(np.arange(400) == 20, 1, first))
    report = tell(history, np.where(np.arange(400) == 200, 2, first))
    assert (report.known_tokens, report.recomputed_tokens, report.character) == (200, 199, 200)
    assert report.new[16] == decoder.decode([2]) and report.old[16] == decoder.decode([first[200]])


def tell_chat(history: PromptHistory, *messages: Any) -> CacheReport:
    """Tell of a chat whose template writes the messages' tokens, one after the other."""
    said = [{"role": "user", "content": Letters().decode(tokens)} for tokens in messages]
    source = PromptSource(said, "".join(each["content"] for each in said), {}, lambda _: "")
    return tell(history, np.concatenate(messages), chat=source)


def test_a_short_chat_that_begins_alike_hides_no_difference() -> None:
    """The prompt leaves it near its end, and yet is no continuation of it."""
    history, begin, old, new = PromptHistory(), text(1, 20), text(2, 100), text(3, 100)
    tell_chat(history, text(4, 50), old, new)
    tell_chat(history, begin, text(5, 10))
    report = tell_chat(history, begin, old, new)
    assert (report.known_tokens, report.recomputed_tokens, report.reason) == (20, 200, RecomputeReason.TEXT)
    tell_chat(history, text(6, 40), text(7, 100))
    assert tell_chat(history, begin, old, new, text(7, 100)).reason is None  # it goes on


def test_what_was_found_is_not_computed_again() -> None:
    """A conversation that leaves the prompt earlier explains what follows, and only that, if it alone has it."""
    history, first, second = PromptHistory(), text(1), text(2)
    second[:200] = np.where(np.arange(200) == 20, 1, first[:200])
    tell(history, first)
    tell(history, second)
    prompt = np.where(np.arange(400) == 20, 1, first)
    prompt[300:] = text(3)[300:]
    report = tell(history, prompt)
    assert (report.known_tokens, report.recomputed_tokens, report.character) == (200, 100, 20)


def test_memory_is_bounded_and_those_who_asked_last_keep_theirs() -> None:
    history = PromptHistory(max_bytes=100_000)
    for number in range(200):
        tell(history, text(number), client=f"client {number}")
        assert 0 < history.nbytes <= 100_000
    assert tell(history, text(199), client="client 199", cached=0).reason is RecomputeReason.EVICTED
    assert history.reports("client 0") == [] and tell(history, text(0), client="client 0", cached=0).known_tokens == 0
    tell(history, text(5, 100_000), client="large")
    assert history.nbytes == 0 and history.reports("large") == []


def test_what_was_not_computed_is_not_known() -> None:
    history = PromptHistory()
    tell(history, text(1), answer=None)
    assert tell(history, text(1), cached=0).known_tokens == 0


def test_blocks_without_a_state_are_not_evicted_blocks() -> None:
    history = PromptHistory()
    tell(history, text(1))
    assert tell(history, text(1), cached=100, chain=384).reason is RecomputeReason.STATE
    assert tell(history, text(1), cached=100, chain=128).reason is RecomputeReason.EVICTED
    assert tell(history, text(1), cached=380, chain=380).reason is None  # fewer than a block
