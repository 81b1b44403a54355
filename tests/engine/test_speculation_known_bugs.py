"""Bugs that others met when they speculated, one test for each. The numbers are those of their threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.scheduling.job import Job
from cortexmlx.structured.output import StructuredOutput, Thoughts
from cortexmlx.types.request import FinishReason
from support.engine.judge import NOISE
from support.models.tiny import EOS, VOCAB, write_tiny
from support.speculation.guided import PROMPT, guide, guided, plain, planned, quiet, right, verified

CLOSE = (27, 14, 258, 72, 77, 74, 29)
"""The tokens of `</think>`."""
LETTER = 64
"""A token that is an "a"."""
THOUGHTS = Thoughts("<think>", "</think>", opened_by_prompt=True)
COLOURS = StructuredOutput.choice(["red", "green"])


@pytest.fixture
def llama(tiny: Any) -> Path:
    folder: Path = tiny("llama")
    return folder


# -- forms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "ignore_eos"), [(COLOURS, False), (StructuredOutput.regex("[ab]{1,9}"), True)])
def test_drafts_beyond_the_end_of_a_form(form: StructuredOutput, ignore_eos: bool, llama: Path) -> None:
    """vllm#25905: a matcher was rolled back over its end token, and would not."""
    asked = {"structured": form, "ignore_eos": ignore_eos}
    (whole,) = plain(llama, **asked)
    for beyond in ((EOS,), (EOS, EOS, 5), (5, EOS), (97, 98) * 4):
        driver = quiet(llama)
        (answer,) = guided(driver, right([*whole.token_ids, *beyond]), **asked)
        assert (answer.token_ids, answer.text) == (whole.token_ids, whole.text) and verified(driver)
        assert answer.finish_reason is FinishReason.STOP


def test_logits_that_are_wider_than_the_vocabulary(tmp_path: Path) -> None:
    """vllm#50924: a mask of another width ended the engine. Here three kinds of masks meet in one step."""
    folder = write_tiny(tmp_path / "m", vocab_size=VOCAB + 45)
    asks: list[dict[str, Any]] = [
        {"structured": COLOURS, "ignore_eos": False},
        {"max_thinking_tokens": 4, "thoughts": THOUGHTS},
        {"structured": COLOURS, "ignore_eos": False, "max_thinking_tokens": 3, "thoughts": THOUGHTS},
        {},
    ]
    wanted = [plain(folder, **asked)[0] for asked in asks]
    driver = quiet(folder)
    guide(driver, lambda job: [*wanted[job.id].token_ids[job.num_generated :][:3], VOCAB + 44])
    handles = [driver.add(PROMPT, **asked) for asked in asks]
    driver.finish()
    assert [driver.result(handle).token_ids for handle in handles] == [each.token_ids for each in wanted]
    assert verified(driver) > 5


@pytest.mark.parametrize(("limit", "form"), [(0, None), (1, COLOURS), (9, None)])
def test_a_limit_of_thoughts_within_verified_tokens(limit: int, form: Any, llama: Path) -> None:
    """vllm#41768: what closes the thoughts was forced at other places than without speculation."""
    asked = {"thoughts": THOUGHTS, "structured": form, "ignore_eos": form is None, "max_tokens": 30}
    (free,) = plain(llama, **asked)
    asked["max_thinking_tokens"] = limit
    (whole,) = plain(llama, **asked)
    places = range(limit, limit + 4)  # a character is not torn
    assert any(whole.token_ids[place : place + len(CLOSE)] == CLOSE for place in places)
    for guess in (right(free.token_ids), right(whole.token_ids), right([*whole.token_ids[:limit], *free.token_ids])):
        driver = quiet(llama)
        (answer,) = guided(driver, guess, **asked)
        assert (answer.token_ids, answer.usage.thinking_tokens) == (whole.token_ids, whole.usage.thinking_tokens)
        assert verified(driver)


def test_a_form_that_begins_within_verified_tokens(llama: Path) -> None:
    """vllm#44297, #36138: tokens after the end of the thoughts were verified without the grammar's mask."""
    asked: dict[str, Any] = {"structured": COLOURS, "ignore_eos": False, "thoughts": THOUGHTS}
    asked["logit_bias"] = {token: 300.0 - 20 * place for place, token in enumerate([LETTER, *CLOSE])}
    asked |= {"presence_penalty": 100.0, "frequency_penalty": 100.0}  # so they come in this order
    (whole,) = plain(llama, **asked)
    assert whole.thinking == "a" and whole.text in ("red", "green")
    after = whole.token_ids.index(CLOSE[-1]) + 1
    for drafts in (whole.token_ids, (*whole.token_ids[:after], LETTER, LETTER), (*whole.token_ids[:after], EOS)):
        driver = quiet(llama)
        (answer,) = guided(driver, right(drafts), **asked)
        assert (answer.token_ids, answer.text) == (whole.token_ids, whole.text) and verified(driver)


def test_a_draft_that_the_form_refuses(llama: Path) -> None:
    """vllm#27969, #11484: the engine ended when a drafted token did not fit the form."""
    asked = {"structured": StructuredOutput.regex("[ab]{30}"), "ignore_eos": False}
    (whole,) = plain(llama, **asked)
    for place in range(4):
        driver = quiet(llama)

        def guess(job: Job, place: int = place) -> list[int]:
            drafts = list(whole.token_ids[job.num_generated : job.num_generated + 6])
            return [*drafts[:place], 0, *drafts[place + 1 :]]

        (answer,) = guided(driver, guess, **asked)
        assert answer.token_ids == whole.token_ids and verified(driver)


# -- what is chosen ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{}, {"temperature": 0.9, "top_p": 0.9}, {"frequency_penalty": 1.0}])
def test_log_probabilities_of_accepted_tokens(asked: dict[str, Any], llama: Path) -> None:
    """llama.cpp#27972, vllm#38711: each was 0, or that of another place."""
    (whole,) = plain(llama, logprobs=3, **asked)
    driver = quiet(llama)
    (answer,) = guided(driver, right(whole.token_ids, 5), logprobs=3, **asked)
    assert answer.token_ids == whole.token_ids and verified(driver) > 3
    assert answer.logprobs is not None and whole.logprobs is not None
    for one, other in zip(answer.logprobs, whole.logprobs, strict=True):
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert one.token_id == other.token_id
        assert np.allclose(
            [one.logprob, *dict(one.top).values()], [other.logprob, *dict(other.top).values()], atol=NOISE
        )
    assert len({round(one.logprob, 3) for one in answer.logprobs}) > 20


@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 3.0}, {"presence_penalty": 9.0}, {"repetition_penalty": 3.0, "repetition_context": 3}],
)
def test_penalties_count_the_accepted_tokens_of_the_same_step(penalty: dict[str, float], llama: Path) -> None:
    """Tokens before a place were not counted if they were accepted in the step that chose it."""
    asked = {"logit_bias": {97: 60.0, 98: 57.0, 99: 54.0}, **penalty}
    (whole,) = plain(llama, **asked)
    assert len(set(whole.token_ids)) > 2, "the penalties must change the answer"
    for guess in (right(whole.token_ids), lambda job: [97] * 15, lambda job: [97, 98, 99] * 5):
        driver = quiet(llama)
        assert guided(driver, guess, **asked)[0].token_ids == whole.token_ids and verified(driver)


def test_several_seeded_answers(llama: Path) -> None:
    """The answers of one request drew the same numbers, or those of another place."""
    asked = {"n": 3, "temperature": 1.3, "seed": 9}
    (whole,) = plain(llama, **asked)
    each = [answer.token_ids for answer in (whole, *whole.others)]
    assert len(set(each)) == 3
    driver = quiet(llama)
    (answer,) = guided(driver, lambda job: each[job.id][job.num_generated :][:7], **asked)
    assert [one.token_ids for one in (answer, *answer.others)] == each and verified(driver) > 3


def test_full_acceptance_brings_one_token_more(llama: Path) -> None:
    """The token after the last draft is chosen in the same step, and none is left out or chosen twice."""
    (whole,) = plain(llama, max_tokens=33)
    driver = quiet(llama, pipeline=False)
    (answer,) = guided(driver, right(whole.token_ids, 7), max_tokens=33)
    assert answer.token_ids == whole.token_ids
    assert verified(driver) == 4, "one token with the prompt, then four times seven drafts and one more"


# -- where answers end -------------------------------------------------------------------------------------------------


def test_a_stop_string_within_accepted_tokens_leaks_no_text(llama: Path) -> None:
    """Text after a stop string was sent, since all tokens of a step were decoded before anybody looked."""
    (whole,) = plain(llama)
    for at in (3, 5, 8):
        stop = (whole.text[at : at + 2],)
        (wanted,) = plain(llama, stop=stop)
        driver = quiet(llama)
        guide(driver, right(whole.token_ids))
        handle = driver.add(PROMPT, stop=stop)
        driver.finish()
        events = list(handle)
        assert "".join(event.text for event in events) == wanted.text
        assert len([event for event in events if event.token_id is not None]) == len(wanted.token_ids)
        answer = handle.result(0)
        assert (answer.token_ids, answer.finish_reason) == (wanted.token_ids, FinishReason.STOP)
        assert answer.usage.completion_tokens == len(wanted.token_ids)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_end_token_within_accepted_tokens(ignore_eos: bool, llama: Path) -> None:
    """vllm#41493: an end token among drafts ended, or did not end, the answer."""
    penalties = {"presence_penalty": 100.0, "frequency_penalty": 100.0}
    asked = {"logit_bias": {EOS: 200.0, 97: 300.0}, "ignore_eos": ignore_eos, "max_tokens": 12, **penalties}
    (whole,) = plain(llama, **asked)
    assert whole.token_ids[:2] == (97, EOS) and (len(whole.token_ids) == 2) is not ignore_eos
    for guess in (right(whole.token_ids), lambda job: [97, EOS, 97, 98, EOS], lambda job: [EOS] * 6):
        (answer,) = guided(quiet(llama), guess, **asked)
        assert (answer.token_ids, answer.text, answer.finish_reason) == (
            whole.token_ids,
            whole.text,
            whole.finish_reason,
        )


@pytest.mark.parametrize("most", [1, 3, 17])
def test_accepted_tokens_do_not_overrun_max_tokens_nor_are_drafts_billed(most: int, llama: Path) -> None:
    (whole,) = plain(llama, max_tokens=40)
    driver = quiet(llama)
    (answer,) = guided(driver, right(whole.token_ids), max_tokens=most)
    assert answer.token_ids == whole.token_ids[:most] and answer.finish_reason is FinishReason.LENGTH
    assert answer.usage.completion_tokens == most and answer.usage.prompt_tokens == len(PROMPT)
    (refused,) = guided(quiet(llama), lambda job: [3] * 15, max_tokens=most)
    billed = [(each.usage.prompt_tokens, each.usage.completion_tokens) for each in (answer, refused)]
    assert billed[0] == billed[1] and refused.token_ids == answer.token_ids and not refused.usage.accepted_tokens


def test_drafts_end_at_the_context(llama: Path, tmp_path: Path) -> None:
    """vllm#13673: positions beyond the context were computed."""
    folder = write_tiny(tmp_path / "m", max_position_embeddings=32)
    (whole,) = plain(folder, max_tokens=None)
    assert len(whole.token_ids) == 11
    driver = quiet(folder)
    plans = planned(driver)
    (answer,) = guided(driver, right([*whole.token_ids, *[5] * 40]), max_tokens=None)
    assert answer.token_ids == whole.token_ids and verified(driver)
    assert max(int(plan.positions.max()) for plan in plans if len(plan.positions)) < 32
