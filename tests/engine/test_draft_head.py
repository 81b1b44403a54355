"""A checkpoint's own draft head, or an assistant, in an engine: it proposes what it finds in the whole text, and no
answer changes.

Random weights propose nothing right, so the tests that need right proposals put them in its place.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from cortexmlx.execution.head_pass import RowKeys
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.models.draft_head import read_draft_head
from cortexmlx.speculation.drafter import HeadDrafter, HeadQuery, TokenDraft
from support.engine.core_driver import Driver, assert_nothing_lost
from support.models.assistants import drafted_by_float64, write_pair
from support.models.draft_heads import LAST_LAYERS, write_draft_head, write_last_layer
from support.models.tiny import tokens_of
from support.speculation.guided import plain

PROMPTS = [tokens_of(21, seed=21), tokens_of(50, seed=1), tokens_of(9, seed=2)]
CHAIN = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("head") / "model", "qwen3_5")


def written(folder: Path, name: str) -> Path:
    if name in LAST_LAYERS:
        write_last_layer(folder, name)
        return folder
    write_draft_head(folder, name, raw=name == "qwen3_next")
    return folder


def asking(driver: Driver, wanted: Sequence[Sequence[int]] = ()) -> list[tuple[list[int], Sequence[int]]]:
    """Have the head asked for most rows before each step where it can be, and its tokens drafted: as they are, or two
    of three made right by the `wanted` answers. Return the texts that it was asked for, and what it proposed.
    """
    core, asked, chance = driver.core, [], random.Random(1)

    def draft() -> None:
        jobs = [] if core._in_flight else core.scheduler.draftable_jobs
        share = 0.8 if len(jobs) > 1 else 1
        if not core.scheduler.config.pipeline:
            share = chance.choice([0, 0.5])  # after 0, the next step writes the tail
        jobs = [job for job in jobs if chance.random() < share]
        rows = [(job.id, job.generation, len(job.tokens) - 2, job.tokens[-1], job.position_shift) for job in jobs]
        query = HeadQuery(rows, CHAIN, core.scheduler.locate_rows(jobs))
        for job, tokens in zip(jobs, core.runner.propose(query) if jobs else (), strict=True):
            asked.append((list(job.tokens), tokens))
            if wanted:
                pairs = zip(tokens, wanted[job.id][job.num_generated :], strict=False)
                tokens = [pair[(place + job.id) % 3 > 0] for place, pair in enumerate(pairs, job.num_generated)]
            core.scheduler.set_drafts(job.id, tokens)

    core.speculation.draft = draft
    return asked


@cache
def judge_of(folder: Path) -> tuple[Any, Any]:
    """mlx-lm's own model of a folder, and its head."""
    model = load_model(folder)[0]
    head = read_draft_head(folder, json.loads((folder / "config.json").read_text()), model)
    assert head is not None
    return getattr(model, "language_model", model), head


def proposed(folder: Path, text: Sequence[int], count: int = CHAIN) -> tuple[int, ...]:
    """The head's tokens after a text, which it sees as a whole, on mlx-lm's own model and caches."""
    language, head = judge_of(folder)
    tokens = mx.array(list(text))[None]
    keys, guesses = KVCache(), []
    states = head(language.model(tokens)[:, :-1], language.model.embed_tokens(tokens[:, 1:]), keys)[:, -1:]
    for _ in range(count):
        guesses.append(mx.argmax(head.project(states), axis=-1))
        states = head(states, language.model.embed_tokens(guesses[-1]), keys)
    return tuple(np.array(mx.concatenate(guesses)).ravel().tolist())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_5", {"prefill_budget": 16}),
        ("qwen3_5", {"pipeline": False}),
        pytest.param("qwen3_5", {"tokens": 200, "max_rows": 3}, id="preempted"),
        ("glm4_moe", {"prefill_budget": 16}),
        ("glm4_moe_lite", {"prefill_budget": 16}),
        pytest.param("qwen3_next", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", {"prefill_budget": 8}, marks=pytest.mark.slow),
    ],
)
def test_its_proposals_are_those_of_the_whole_text(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Every draft is wrong, so keys and values of the head, and states, are taken back at every token."""
    folder = written(tmp_path / "model", name)
    wanted = [answer.token_ids for answer in plain(folder, *PROMPTS, max_tokens=30)]
    driver = Driver(folder, speculate=True, **options)
    if "tokens" in options:
        driver.limit_blocks(options["tokens"])
    asked = asking(driver)
    handles = [driver.add(prompt, 30) for prompt in PROMPTS]
    while not driver.core.idle:
        driver.core.step()
        driver.core.check_invariants()
    assert [driver.result(handle).token_ids for handle in handles] == wanted
    assert_nothing_lost(driver.core.stats())
    assert len(asked) > 15  # about 70, or 24 to 28 without a pipeline, where the steps depend on the time they take
    for text, tokens in asked[:: 1 if "pipeline" in options else 5]:
        assert tokens == proposed(folder, text)[: len(tokens)]
    assert all(tokens for _, tokens in asked) and sum(len(tokens) == CHAIN for _, tokens in asked) > len(asked) // 2


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        *(("reference", options) for options in ({"prefill_budget": 16}, {"pipeline": False}, {"tokens": 200})),
        pytest.param("sim", {"tokens": 200}, marks=pytest.mark.lab),
    ],
)
def test_an_assistant_proposes_what_float64_finds(tmp_path: Path, attention: str, options: dict[str, Any]) -> None:
    """It reads the model's own keys and values, in whole and in windowed layers, in the arena and in the tail."""
    model, assistant, tensors = write_pair(tmp_path, clusters=True)
    options = options | {"attention": attention, "block_size": 8}
    wanted = [answer.token_ids for answer in plain(model, *PROMPTS, max_tokens=36)]
    driver = Driver(model, speculate=True, draft=assistant, **options)
    if "tokens" in options:
        driver.limit_blocks(options["tokens"])
    asked = asking(driver)
    handles = [driver.add(prompt, 36) for prompt in PROMPTS]
    while not driver.core.idle:
        driver.core.step()
        driver.core.check_invariants()
    assert len(asked) > 15 and all(len(tokens) == CHAIN for _, tokens in asked)
    assert [driver.result(handle).token_ids for handle in handles] == wanted
    for text, tokens in asked[:: 1 if "pipeline" in options else 5]:
        assert list(tokens) == drafted_by_float64(model, tensors, text, CHAIN)
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "n": 2}, {"repetition_penalty": 1.3}])
def test_right_proposals_save_steps_and_change_no_token(
    params: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: dict[int, Sequence[int]] = {}
    own = ModelRunner.propose

    def propose(runner: ModelRunner, query: HeadQuery) -> list[Sequence[int]]:
        ends = [wanted[job][position + 2 :] for job, _, position, *_ in query.rows]
        return [end[: len(tokens)] for tokens, end in zip(own(runner, query), ends, strict=True)]

    monkeypatch.setattr(ModelRunner, "propose", propose)
    prompt = PROMPTS[1]
    (answer,) = plain(folder, prompt, max_tokens=60, **params)
    driver = Driver(folder, speculate=True, forced_tokens=False)
    asking(driver)
    handle = driver.add(prompt, 60, **params)
    every = (answer, *answer.others)
    while not driver.core.idle:
        for job in driver.core.scheduler.jobs:
            index = driver.core.requests.answers[job.id].index
            wanted[job.id] = [*prompt, *every[index].token_ids]
        driver.core.step()
        driver.core.check_invariants()
    result = driver.result(handle)
    assert [each.token_ids for each in (result, *result.others)] == [each.token_ids for each in every]
    counts = driver.core.stats().speculation
    assert counts.accepted == counts.drafted > 20 * len(every)


def test_a_prompt_whose_beginning_is_cached_has_the_heads_keys_too(folder: Path) -> None:
    driver = Driver(folder, speculate=True)
    driver.result_of(tokens_of(64, seed=5), 8)
    asked = asking(driver)
    text = [*tokens_of(64, seed=5), 7, 8, 9]
    answer = driver.result_of(text, 12)
    assert answer.usage.cached_tokens >= 48
    assert answer.token_ids == plain(folder, text, max_tokens=12)[0].token_ids
    assert all(tokens[:1] == proposed(folder, text, 1) for text, tokens in asked[::3]) and len(asked) > 5


def test_turns_begin_behind_tokens_that_the_head_drafted(folder: Path) -> None:
    """vllm-metal#610: a head and a prefix cache, and states to be taken back: one of the three was refused."""
    turn, (driver, other) = PROMPTS[0], [Driver(folder, tokens=2048, speculate=on) for on in (True, False)]
    for number in range(5):
        known = other.result_of(turn, 19)
        asking(driver, [[]] * number + [known.token_ids])
        answer = driver.result_of(turn, 19)
        assert (answer.token_ids, answer.usage.cached_tokens) == (known.token_ids, known.usage.cached_tokens)
        assert not number or answer.usage.cached_tokens == len(turn) - 4
        turn = [*turn, *answer.token_ids, 7, 8, 9]
    counts = driver.core.stats().speculation
    assert counts.drafted > counts.accepted > 20


def test_a_batch_of_rows_that_begin_in_the_cache(folder: Path) -> None:
    """mlx-vlm#1471: several rows, drafts and a prefix cache: only two of the three at once."""
    prompts = [[*tokens_of(45, seed=9), *tokens_of(3 + n, seed=n)] for n in range(4)]
    wanted = [answer.token_ids for answer in plain(folder, *prompts, max_tokens=24)]
    driver = Driver(folder, tokens=2048, speculate=True)
    for number in (0, 1):  # the second leaves a state where the two part
        assert driver.result_of(prompts[number], 24).token_ids == wanted[number]
    asking(driver, [(), (), *wanted])
    handles = [driver.add(prompt, 24) for prompt in prompts]
    driver.finish()
    answers = [driver.result(handle) for handle in handles]
    assert [answer.token_ids for answer in answers] == wanted
    assert min(answer.usage.cached_tokens for answer in answers) >= 40
    assert min(answer.usage.accepted_tokens for answer in answers) > 5


def test_rows_that_join_and_leave_a_batch(folder: Path) -> None:
    """omlx#1550: what the head knew of one row was another's when one joined late, or left: answers were corrupted."""
    lengths = (60, 9, 31, 5, 44, 20)
    prompts = [tokens_of(5 + 3 * n, seed=n) for n in range(len(lengths))]
    wanted = [plain(folder, prompts[n], max_tokens=length)[0].token_ids for n, length in enumerate(lengths)]
    driver = Driver(folder, tokens=2048, max_rows=3, speculate=True)
    asked, handles = asking(driver, wanted), []
    for prompt, length in zip(prompts, lengths, strict=True):
        handles.append(driver.add(prompt, length))
        driver.step(4)
    driver.finish()
    assert [driver.result(handle).token_ids for handle in handles] == wanted
    known = [(text, tokens) for text, tokens in asked if tokens]
    assert len(known) > 30
    assert all(tokens == proposed(folder, text)[: len(tokens)] for text, tokens in known[::5])


def test_a_window_without_it_flushes_nothing_of_it(folder: Path) -> None:
    """What the head had left of a window whose rows all ended was written with the rows of one in which it slept."""
    driver = Driver(folder, speculate=True, prefix_cache=False)
    for rows in (2, 3):
        driver.core.scheduler.set_head_awake(rows == 2)
        driver.core.speculation.draft = lambda: None
        asked = [driver.add(prompt, 9 * rows) for prompt in PROMPTS[:rows]]
        driver.finish()
    wanted = [answer.token_ids for answer in plain(folder, *PROMPTS, max_tokens=27)]
    assert [driver.result(handle).token_ids for handle in asked] == wanted


def test_of_a_step_in_which_it_slept_it_says_nothing(folder: Path) -> None:
    """What it had made of a rejected draft was taken for what follows the token that came in its place."""
    driver = Driver(folder, speculate=True)
    core, asked = driver.core, asking(driver)
    ask, handle = core.speculation.draft, driver.add(PROMPTS[0], 24)
    driver.step(4)
    core.drain()
    core.scheduler.set_head_awake(False)
    core.speculation.draft = lambda: None
    driver.step()
    core.drain()
    ask()
    assert len(asked) > 1 and asked[0][1] and not asked[-1][1]
    driver.finish()
    assert driver.result(handle).token_ids == plain(folder, PROMPTS[0], max_tokens=24)[0].token_ids


def test_without_speculation_it_is_not_even_read(folder: Path) -> None:
    for options in ({"speculate": False}, {"reproducible": True}):
        core = Driver(folder, **({"speculate": True} | options)).core
        assert core.model.head is None and not any("draft head" in note for note in core.info.notes)
    core = Driver(folder, speculate=True).core
    assert any("draft head drafts tokens" in note for note in core.info.notes)
    without = Driver(folder, speculate=False).core
    assert core.info.kv_bytes_per_token == without.info.kv_bytes_per_token * 3 // 2, "two layers keep keys and values"


def test_a_damaged_head_is_said_and_the_model_answers(folder: Path, tmp_path: Path) -> None:
    broken = written(tmp_path / "broken", "qwen3_5")
    tensors = mx.load(str(broken / "model.safetensors"))
    tensors.pop("mtp.fc.weight")
    mx.eval(tensors)
    mx.save_safetensors(str(broken / "model.safetensors"), tensors, metadata={"format": "mlx"})
    driver = Driver(broken, speculate=True)
    assert any("draft head is not used" in note and "mtp.fc.weight" in note for note in driver.core.info.notes)
    assert driver.result_of(PROMPTS[0], 8).token_ids == plain(folder, PROMPTS[0], max_tokens=8)[0].token_ids


def test_it_wakes_between_windows_and_a_refusal_makes_it_pause(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(folder, speculate=True)
    driver.core.speculation._retry_waits["head"] = (77, 64)
    monkeypatch.setattr(ModelRunner, "propose", Mock(side_effect=RuntimeError("[malloc] Unable to allocate")))
    assert driver.result_of(PROMPTS[0], 99).token_ids == plain(folder, PROMPTS[0], max_tokens=99)[0].token_ids


def test_it_is_asked_for_what_follows_the_newest_token() -> None:
    seen: list[HeadQuery] = []
    drafter = HeadDrafter(lambda asked: seen.append(asked) or [(7,), ()], len, clock=itertools.count().__next__)
    jobs: Any = [
        SimpleNamespace(id=3, generation=2, tokens=[5, 6, 7], position_shift=0),
        SimpleNamespace(id=4, generation=0, tokens=[1, 2], position_shift=5),
    ]
    assert drafter.estimate_seconds(2, 1) is None
    assert drafter.propose(jobs, 1) == [TokenDraft((7,)), None]
    rows = [(3, 2, 1, 7, 0), (4, 0, 0, 2, 5)]
    assert seen == [HeadQuery(rows, 1, 2)], "the position whose next token is the newest one"
    assert drafter.estimate_seconds(2, 1) == drafter.estimate_seconds(16, 1) == 1
    drafter._propose = lambda asked: [(7, 8, 9), ()]
    drafter._clock = itertools.count(step=9).__next__
    assert drafter.propose(jobs, 3) == [TokenDraft((7, 8, 9)), None]
    assert [drafter.estimate_seconds(2, tokens) for tokens in (1, 2, 3)] == [1, 5, 9]


def test_a_head_whose_drafts_are_hardly_ever_right_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    drafter = HeadDrafter(lambda asked: [(1,)] * len(asked.rows), len)
    drafter.judge(499, 0)
    drafter.judge(500, 51)
    assert drafter.needs_drained_pipeline and not caplog.records
    drafter.judge(510, 51)
    drafter.judge(600, 51)
    assert not drafter.needs_drained_pipeline
    (record,) = caplog.records
    assert "51 of the 510 tokens" in record.getMessage() and "may be misread" in record.getMessage()


def test_a_guess_leaves_the_rows_own_tail_as_it_was() -> None:
    """It may be refused memory. Decoding goes on from that tail, and waits for nothing of the guess."""
    own = tuple(mx.zeros((2, 1, 4, 8)) for _ in "kv")
    memory: Any = SimpleNamespace(arena=SimpleNamespace(group_of={3: 0}, quantization=lambda layer: None))
    step: Any = SimpleNamespace()
    keys = RowKeys(memory, Mock(), [step], [step], {3: own}, 1, 4)
    for column in (1, 2):
        handle = keys.add(3, mx.ones((2, 1, 1, 8)), mx.ones((2, 1, 1, 8)))
        assert handle.tail is not None and [int(array[:, :, column].sum()) for array in handle.tail] == [16, 16]
    assert not any(array.any() for array in own) and handle.tail_tokens == 3
