"""A drafted token whose keys and values are NaN harms no answer: neither its own, nor one that continues the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.errors import NoTokenToChoose
from cortexmlx.scheduling.job import Job
from support.models.tiny import tokens_of, write_tiny
from support.speculation.guided import PROMPT, guide, guided, plain, quiet, verified

NAN = 300
"""A token that no answer has."""
MODELS: dict[str, dict[str, Any]] = {
    "full": {},
    "windows": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 11},
}


@pytest.fixture(params=MODELS)
def model(request: Any, tmp_path: Path) -> Path:
    folder = write_tiny(tmp_path / "m", tie_word_embeddings=False, **MODELS[request.param])
    weights: Any = mx.load(str(folder / "model.safetensors"))
    weights["model.embed_tokens.weight"][NAN] = mx.nan
    weights["lm_head.weight"][NAN] = -weights["lm_head.weight"][7]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


@pytest.mark.parametrize(("place", "at", "prefix_cache"), [(0, 1, True), (2, 9, False), (6, 9, True)])
def test_an_answer_with_such_drafts(place: int, at: int, prefix_cache: bool, model: Path) -> None:
    """It begins again, and no more is drafted for it."""
    prompts = (PROMPT, tokens_of(40, seed=2))
    wanted = [answer.token_ids for answer in plain(model, *prompts)]
    assert not any(NAN in answer for answer in wanted)

    def guess(job: Job) -> list[int]:
        coming = wanted[job.id][job.num_generated :][:7]
        return [*coming[:place], NAN, *coming[place + 1 :]] if job.id == 0 and job.num_generated >= at else []

    driver = quiet(model, prefix_cache=prefix_cache)
    assert [answer.token_ids for answer in guided(driver, guess, *prompts)] == wanted and verified(driver) == 1
    assert driver.core.stats().preemptions == 0


@pytest.mark.parametrize("place", [0, 2])
def test_a_text_that_continues_an_answer_that_ended_with_such_drafts(place: int, model: Path) -> None:
    (whole,) = plain(model, max_tokens=8)
    assert len(set(whole.token_ids)) == 8
    driver = quiet(model, pipeline=False)

    def guess(job: Job) -> list[int]:
        return [*whole.token_ids[job.num_generated :][:place], NAN, NAN] if job.num_generated == 8 - place - 1 else []

    (first,) = guided(driver, guess, max_tokens=40, stop_token_ids=whole.token_ids[-1:])
    assert first.token_ids == whole.token_ids and verified(driver)
    longer = [*PROMPT, *whole.token_ids, 7]
    (wanted,) = plain(model, longer)
    (second,) = guided(driver, lambda job: [], longer)
    assert second.token_ids == wanted.token_ids and second.usage.cached_tokens >= 24


def test_a_text_that_continues_an_answer_that_was_cancelled_while_such_drafts_were_verified(model: Path) -> None:
    driver = quiet(model, pipeline=False)
    guide(driver, lambda job: [NAN, NAN] if job.num_generated == 5 else [])
    handle = driver.add(PROMPT)
    while not driver.core.scheduler.jobs[0].drafts_in_flight:
        driver.core.step()
    driver.core.cancel(handle.id)
    driver.finish()
    text = [*PROMPT, *driver.result(handle).token_ids, 7, 8]
    (wanted,) = plain(model, text)
    (answer,) = guided(driver, lambda job: [], text)
    assert answer.token_ids == wanted.token_ids and answer.usage.cached_tokens == 24


def test_an_answer_that_is_nan_without_drafts_fails_all_the_same(model: Path) -> None:
    driver = quiet(model)
    with pytest.raises(NoTokenToChoose, match="after 22 tokens of the prompt and 0 of the answer"):
        guided(driver, lambda job: [1, 2], [*PROMPT, NAN])
