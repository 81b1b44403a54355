"""Bugs of memory that others met when they speculated: hashes, blocks, rows and states."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest

from cortexmlx.attention.recurrent import RecordedCall
from cortexmlx.scheduling.job import Job
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.types.request import FinishReason
from support.engine.core_driver import assert_nothing_lost
from support.models.recurrent import RECURRENT
from support.models.tiny import VOCAB, tokens_of
from support.speculation.guided import PROMPT, guide, guided, plain, planned, quiet, right, verified

COLOURS = StructuredOutput.choice(["red", "green"])


@pytest.fixture
def llama(tiny: Any) -> Path:
    folder: Path = tiny("llama")
    return folder


@pytest.mark.parametrize("name", ["windowed llama", "deepseek_v3", "qwen3_5", "mamba2"])
def test_refused_drafts_are_in_nobodys_prefix(name: str, tiny: Any) -> None:
    """A block was shared under the hash of its accepted and refused tokens."""
    folder = tiny(name)
    (whole,) = plain(folder, max_tokens=20)
    wrong = [(token + 1) % VOCAB for token in whole.token_ids]
    for at in (1, 12):
        refused = [*whole.token_ids[:at], *wrong[at:]]
        driver = quiet(folder)
        (answer,) = guided(driver, right(refused), max_tokens=20)
        assert answer.token_ids == whole.token_ids
        for text in (refused, whole.token_ids):
            prompt = [*PROMPT, *text]
            (alone,) = plain(folder, prompt, max_tokens=8)
            again = driver.result_of(prompt, 8)
            shared = len(PROMPT) + (at if text is refused else len(text))
            assert again.token_ids == alone.token_ids and again.usage.cached_tokens <= shared
        assert again.usage.cached_tokens >= len(prompt) - 9, "the right tokens are found"


def test_refused_drafts_over_the_border_of_a_block(llama: Path) -> None:
    """Blocks that only refused tokens had begun were read, or lost."""
    (whole,) = plain(llama, max_tokens=30)
    for length in (1, 2, 7, 8, 9, 15):
        driver = quiet(llama)

        def guess(job: Job, length: int = length) -> list[int]:
            return [(token + 1) % VOCAB for token in right(whole.token_ids, length)(job)]

        (answer,) = guided(driver, guess, max_tokens=30)
        assert answer.token_ids == whole.token_ids and verified(driver) > 10


def test_a_row_that_is_preempted_with_drafts(llama: Path) -> None:
    """Its drafts were verified after it had begun again, at another place."""
    prompts = [tokens_of(30, seed=n) for n in range(4)]
    wanted = [answer.token_ids for answer in plain(llama, *prompts, max_tokens=40)]
    for length in (2, 15):
        driver = quiet(llama, tokens=112, max_rows=4)

        def guess(job: Job, length: int = length) -> Sequence[int]:
            return wanted[job.id][job.num_generated :][:length]

        answers = guided(driver, guess, *prompts, max_tokens=40)
        assert [answer.token_ids for answer in answers] == wanted
        assert driver.core.stats().preemptions > 1 and verified(driver)


def test_drafts_beside_the_piece_of_a_long_prompt(llama: Path) -> None:
    """A row's drafts and another's prompt share a step, of which both need logits."""
    prompts = [PROMPT, tokens_of(120, seed=1)]
    wanted = [answer.token_ids for answer in plain(llama, *prompts, max_tokens=24)]
    driver = quiet(llama, prefill_budget=8)
    plans = planned(driver)
    answers = guided(driver, lambda job: wanted[job.id][job.num_generated :][:3], *prompts, max_tokens=24)
    assert [answer.token_ids for answer in answers] == wanted
    assert {0, 4} in [{len(segment.logits) for segment in plan.segments} for plan in plans]


def test_a_request_that_is_cancelled_while_its_drafts_are_verified(llama: Path) -> None:
    (whole,) = plain(llama)
    driver = quiet(llama)
    guide(driver, right(whole.token_ids, 5))
    handle = driver.add(PROMPT)
    while not any(job.drafts_in_flight for job in driver.core.scheduler.jobs):
        driver.core.step()
    driver.core.cancel(handle.id)
    driver.core.check_invariants()
    driver.finish()
    answer = driver.result(handle)
    assert answer.finish_reason is FinishReason.CANCELLED
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert_nothing_lost(driver.core.stats())
    assert driver.result_of(PROMPT, 32).token_ids == whole.token_ids


@pytest.mark.parametrize(
    ("outside", "asked"), [(-1, {}), (VOCAB, {"structured": COLOURS, "ignore_eos": False}), (-(2**70), {})]
)
def test_drafts_outside_the_vocabulary(outside: int, asked: dict[str, Any], llama: Path) -> None:
    """A draft of another vocabulary was looked up beside the embeddings: it reads anything, or ends the process."""
    (whole,) = plain(llama, **asked)
    driver, drafts = quiet(llama), (outside, 5)
    (answer,) = guided(driver, lambda job: [*right(whole.token_ids, 2)(job), *drafts], **asked)
    assert answer.token_ids == whole.token_ids and verified(driver)
    (answer,) = guided(driver, lambda job: drafts, **asked)
    assert answer.token_ids == whole.token_ids


def test_functions_of_the_caller_see_a_text_that_grows_by_one(llama: Path) -> None:
    """They were called for drafts that no answer has. Rows with such functions do not speculate."""
    (whole,) = plain(llama)
    seen: list[list[int]] = []

    def watch(tokens: Any, logits: Any) -> Any:
        seen.append(tokens.tolist()[len(PROMPT) :])
        return logits

    driver = quiet(llama)
    (answer,) = guided(driver, lambda job: [*right(whole.token_ids, 3)(job), 5], logits_processors=(watch,))
    assert answer.token_ids == whole.token_ids and not verified(driver)
    assert seen == [list(whole.token_ids[:count]) for count in range(len(whole.token_ids))]


FEW = ("qwen3_5", "rwkv7", "baichuan_m1")
"""A delta net behind a convolution; states of two modules; a state within attention."""


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in RECURRENT])
def test_recurrent_states_have_not_seen_refused_drafts(name: str, tiny: Any) -> None:
    """vllm#39273: they had. Right drafts, none, some or all of them wrong, equally many in all rows, or not."""
    prompts = [PROMPT, tokens_of(33, seed=1), tokens_of(9, seed=2)]
    wanted = [answer.token_ids for answer in plain(tiny(name), *prompts, max_tokens=30)]
    for right_drafts in (4, 2, 0, None):
        dice = random.Random(3)

        def guess(job: Job, right_drafts: int | None = right_drafts, dice: random.Random = dice) -> list[int]:
            count = 4 if right_drafts is not None else dice.randint(0, 6)
            drafts = list(wanted[job.id][job.num_generated :][:count])
            first_wrong = dice.randint(0, 7) if right_drafts is None else right_drafts
            return [*drafts[:first_wrong], *((token + 1) % VOCAB for token in drafts[first_wrong:])]

        driver = quiet(tiny(name))
        answers = guided(driver, guess, *prompts, max_tokens=30)
        assert [answer.token_ids for answer in answers] == wanted
        assert verified(driver) >= 6


def test_taking_back_drafts_reads_no_weights(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the recurrence is computed again, from what the verifying step has computed."""
    calls: list[RecordedCall] = []
    products: list[nn.Module] = []
    multiply, replay = nn.Linear.__call__, RecordedCall.replay

    def watch(call: RecordedCall, *arguments: Any) -> None:
        calls.append(call)
        with monkeypatch.context() as patch:
            patch.setattr(nn.Linear, "__call__", lambda module, x: products.append(module) or multiply(module, x))
            replay(call, *arguments)

    monkeypatch.setattr(RecordedCall, "replay", watch)
    (whole,) = plain(tiny("qwen3_5"))
    guided(quiet(tiny("qwen3_5")), right(whole.token_ids, 3))
    assert not calls, "nothing was wrong"
    guided(quiet(tiny("qwen3_5")), lambda job: [(token + 1) % VOCAB for token in right(whole.token_ids, 3)(job)])
    assert len(calls) > 20 and not products


def test_a_full_cache_gives_no_room_to_drafts(llama: Path) -> None:
    """The draft tokens took blocks that a row needed, and the cache was full."""
    (whole,) = plain(llama, max_tokens=40)
    driver = quiet(llama, tokens=64, max_rows=1)
    (answer,) = guided(driver, right([*whole.token_ids, *[5] * 40]), max_tokens=40)
    assert answer.token_ids == whole.token_ids and verified(driver)
