"""What a model thinks of each token of a prompt: mlx-lm's logits, however the prompt is cut, shared or interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from cortexmlx import Completion, Engine, PromptLogprobs, SamplingParams
from cortexmlx.cli.start import run
from cortexmlx.errors import PromptTooLong
from cortexmlx.execution import prompt_scores as kept_states
from cortexmlx.execution import serial_runner
from cortexmlx.kv.arena import Quantization
from cortexmlx.types.request import FinishReason, RequestState
from support.engine.core_driver import Driver, assert_nothing_lost
from support.models.recurrent import RECURRENT
from support.models.tiny import CONFIGS, VOCAB, tokens_of, write_tiny

PROMPT = tokens_of(53, seed=5)
LENGTHS = (2, 8, 9, 33, 61)
TOLERANCE = 1e-4

slow = pytest.mark.slow
FAST = ("windowed llama", "deepseek_v3", "qwen3_next")


@pytest.fixture(autouse=True)
def few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of these tiny models, too, take several slices of logits."""
    for module in (kept_states, serial_runner):
        monkeypatch.setattr(module, "rows_at_once", lambda vocab: 5)


def judge(model: Any, prompt: Sequence[int], piece: int = 1 << 20) -> np.ndarray:
    """mlx-lm's log-probabilities at every place of a prompt, `[len - 1, vocab]` in float64, on its own caches: in one
    pass, or `piece` by piece.
    """
    cache = make_prompt_cache(model)
    logits = []
    for first in range(0, len(prompt), piece):
        out = model(mx.array([list(prompt[first : first + piece])]), cache=cache)[0].astype(mx.float32)
        logits.append(np.array(out, np.float64))
    every = np.concatenate(logits)[:-1]
    every -= every.max(axis=-1, keepdims=True)
    return every - np.log(np.exp(every).sum(axis=-1, keepdims=True))


def assert_judged(model: Any, prompt: Sequence[int], told: PromptLogprobs | None, top: int = 0) -> None:
    """Every token has mlx-lm's log-probability, and the likeliest are likeliest. Random weights can make much of a
    rounding: where mlx-lm token by token is far from itself in one pass, a few times that is near enough.
    """
    assert told is not None and len(told) == len(prompt) and told[0] is None
    wanted, places = judge(model, prompt), np.arange(len(prompt) - 1)[:, None]
    mine, ids = told.logprobs[1:], np.zeros((len(prompt) - 1, top), np.int64)
    for entry, token, row in zip(told[1:], prompt[1:], ids, strict=True):
        assert entry is not None and entry.token_id == token and len(entry.top) == top
        row[:] = [each for each, _ in entry.top]
    likeliest = np.array([[value for _, value in entry.top] for entry in told[1:] if entry]).reshape(ids.shape)
    errors = [mine - wanted[places[:, 0], prompt[1:]], (likeliest - wanted[places, ids]).ravel()]
    errors.append((wanted[places, ids] - np.sort(wanted)[:, ::-1][:, :top]).ravel())
    error = np.abs(np.concatenate(errors)).max()
    assert error < TOLERANCE or error < TOLERANCE + 4 * np.abs(wanted - judge(model, prompt, 1)).max()


def scored(driver: Driver, prompt: Sequence[int], max_tokens: int | None = 0, **params: Any) -> Completion:
    return driver.result_of(prompt, max_tokens, **{"prompt_logprobs": 0} | params)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else slow) for name in (*CONFIGS, *RECURRENT)]
)
def test_they_are_mlx_lms_for_a_crowd_in_pieces(name: str, tiny: Any, judged: Callable[[str], Any]) -> None:
    """Prompts of several lengths in pieces of a few tokens, beside others that decode, and beside each other."""
    driver = Driver(tiny(name), prefill_budget=12, max_rows=4)
    prompts = [tokens_of(n, seed=n) for n in LENGTHS]
    others = driver.add(tokens_of(20, seed=1), 40)
    driver.step(4)
    handles = [driver.add(p, i % 2, prompt_logprobs=3) for i, p in enumerate(prompts)]
    driver.finish()
    for prompt, handle in zip(prompts, handles, strict=True):
        assert_judged(judged(name)[0], prompt, driver.result(handle).prompt_logprobs, top=3)
    alone = Driver(tiny(name)).result_of(tokens_of(20, seed=1), 40)
    assert driver.result(others).token_ids == alone.token_ids
    driver.core.check_invariants()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("windowed llama", "mamba") else slow) for n in (*CONFIGS, *RECURRENT)]
)
def test_they_are_mlx_lms_where_one_request_runs_at_a_time(
    name: str, tiny: Any, judged: Callable[[str], Any], unpaged: None
) -> None:
    driver = Driver(tiny(name), prefill_budget=12)
    prompts = [tokens_of(n, seed=n) for n in LENGTHS]
    handles = [driver.add(p, i % 3, prompt_logprobs=2) for i, p in enumerate(prompts)]
    driver.finish()
    for prompt, handle in zip(prompts, handles, strict=True):
        assert_judged(judged(name)[0], prompt, driver.result(handle).prompt_logprobs, top=2)


@pytest.mark.parametrize("bits", [8, 4])
def test_with_quantized_keys_and_values_they_are_mlx_lms_with_its_own(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt sees what is kept of it, however it is cut. Rounding decides the code of a number at the border of two,
    so mlx-lm's cache quantizes the engine's numbers, after a check that they are mlx-lm's own up to rounding.
    """
    folder = write_tiny(tmp_path / "model", head_dim=64)
    driver = Driver(folder, prefill_budget=12, kv_bits=bits, kv_group_size=64)
    model = mlx_lm.load(str(folder))[0]
    pieces: list[list[np.ndarray]] = []
    quantize = Quantization.quantize

    def recorded(form: Quantization, *numbers: mx.array) -> tuple[mx.array, ...]:
        pieces.append([np.array(array[:, :, 0].swapaxes(0, 1)) for array in numbers])
        return quantize(form, *numbers)

    monkeypatch.setattr(Quantization, "quantize", recorded)
    told = scored(driver, PROMPT).prompt_logprobs
    assert told is not None and len(pieces) > 2 * len(model.layers), "the prompt is cut"

    class Judge(QuantizedKVCache):
        """mlx-lm's cache of one layer."""

        def __init__(self, layer: int) -> None:
            super().__init__(group_size=64, bits=bits)
            own_pieces = pieces[layer :: len(model.layers)]
            self.engines = [np.concatenate(parts, axis=1)[None] for parts in zip(*own_pieces, strict=True)]

        def update_and_fetch(self, *numbers: mx.array) -> Any:
            for mine, engines in zip(map(np.array, numbers), self.engines, strict=True):
                error = np.abs(mine - engines).max()
                assert error < 1e-5 * np.abs(mine).max()
            return super().update_and_fetch(*map(mx.array, self.engines))

    caches = [Judge(layer) for layer in range(len(model.layers))]
    own = np.array(model(mx.array([PROMPT[:-1]]), cache=caches)[0].astype(mx.float32), np.float64)
    own = own[np.arange(len(PROMPT) - 1), PROMPT[1:]] - np.log(np.exp(own).sum(axis=-1))
    plain = judge(model, PROMPT)[np.arange(len(PROMPT) - 1), PROMPT[1:]]
    assert np.abs(told.logprobs[1:] - own).max() < TOLERANCE < np.abs(plain - own).max() / 10


def test_nothing_is_generated_with_no_tokens(tiny: Any, judged: Any) -> None:
    driver = Driver(tiny("llama"))
    completion = scored(driver, PROMPT, ignore_eos=False)
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", (), FinishReason.LENGTH)
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (len(PROMPT), 0)
    assert completion.logprobs is None and completion.cumulative_logprob is None
    assert_judged(judged("llama")[0], PROMPT, completion.prompt_logprobs)
    only = scored(driver, PROMPT[:1])
    assert only.prompt_logprobs is not None and list(only.prompt_logprobs) == [None] and only.usage.prompt_tokens == 1
    assert driver.core.stats().generated_tokens == 0
    assert_nothing_lost(driver.core.stats())


def test_scoring_alone_ends_for_its_length_whatever_token_would_come(tiny: Any) -> None:
    """The token after the prompt is computed and dropped, so it cannot stop anything."""
    completion = Driver(tiny("llama")).result_of(tokens_of(9), 0, prompt_logprobs=0, stop_token_ids=tuple(range(VOCAB)))
    assert completion.finish_reason is FinishReason.LENGTH and completion.token_ids == ()


def test_a_text_as_long_as_the_context_can_be_scored(tiny: Any, judged: Any) -> None:
    """Its last token is not computed, and none comes behind it."""
    driver = Driver(tiny("llama"), tokens=1024)
    whole = tokens_of(512, seed=4)
    assert_judged(judged("llama")[0], whole, scored(driver, whole).prompt_logprobs)
    with pytest.raises(PromptTooLong, match="513 tokens and the model's context is 512"):
        driver.result(driver.add([*whole, 1], 0, prompt_logprobs=0))
    with pytest.raises(PromptTooLong, match="512 tokens"):
        driver.result(driver.add(whole, 1, prompt_logprobs=0))


def test_the_answer_is_what_it_is_without_them(tiny: Any, theirs: Any, judged: Any) -> None:
    driver = Driver(tiny("llama"))
    handle = driver.add(PROMPT, 24, prompt_logprobs=0, ignore_eos=False, logprobs=1)
    events = []
    while not driver.core.idle:
        driver.core.step()
        if handle.state is RequestState.DECODING:
            events.append(handle.prompt_logprobs)
    completion = driver.result(handle)
    assert list(completion.token_ids) == theirs("llama", PROMPT, 24)
    assert_judged(judged("llama")[0], PROMPT, completion.prompt_logprobs)
    assert events[0] == completion.prompt_logprobs, "they are there with the first token"
    assert completion.logprobs is not None and len(completion.logprobs) == 24
    plain = driver.result_of(PROMPT, 24)
    assert plain.prompt_logprobs is None


def test_what_is_cached_is_computed_again_and_others_share_what_was(tiny: Any, judged: Any) -> None:
    driver = Driver(tiny("llama"))
    driver.result_of(PROMPT, 8)
    first = scored(driver, PROMPT, 1)
    assert first.usage.cached_tokens == 0
    assert_judged(judged("llama")[0], PROMPT, first.prompt_logprobs)
    other = tokens_of(40, seed=77)
    scored(driver, other)
    assert driver.result_of([*other, 3], 4).usage.cached_tokens == 39
    driver.core.check_invariants()


def test_what_is_on_disk_is_computed_again(tiny: Any, tmp_path: Path, judged: Any) -> None:
    options: dict[str, Any] = {"kv_memory": "256KB", "block_size": 8, "kv_store": tmp_path}
    prompt = tokens_of(400, seed=3)
    with Engine(tiny("llama"), **options) as engine:
        engine.generate(prompt, SamplingParams(max_tokens=8))
    with Engine(tiny("llama"), **options) as engine:
        completion = engine.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert completion.usage.cached_tokens == 0
        assert_judged(judged("llama")[0], prompt, completion.prompt_logprobs)
    with Engine(tiny("llama"), **options) as engine:
        assert engine.generate(prompt, SamplingParams(max_tokens=1)).usage.cached_tokens > 300, "it was there"


def test_it_does_not_wait_for_a_neighbour_with_the_same_beginning(tiny: Any, judged: Any) -> None:
    """It would compute what the other has computed, all the same. The other's first block is not full yet."""
    driver = Driver(tiny("llama"), prefill_budget=4, tokens=1024)
    plain = driver.add(PROMPT, 4)
    driver.step()
    handle = driver.add(PROMPT, 0, prompt_logprobs=0)
    driver.step(2)
    assert (plain.state, handle.state) == (RequestState.PREFILLING, RequestState.PREFILLING)
    driver.finish()
    assert_judged(judged("llama")[0], PROMPT, driver.result(handle).prompt_logprobs)


@pytest.mark.parametrize("n", [3])
def test_several_answers_have_them_once(n: int, tiny: Any, judged: Any) -> None:
    driver = Driver(tiny("llama"), tokens=1024, prefill_budget=12)
    before = driver.core.stats().prompt_tokens
    completion = driver.result_of(PROMPT, 6, n=n, temperature=1.0, prompt_logprobs=1)
    answers = (completion, *completion.others)
    assert len(answers) == n and driver.core.stats().prompt_tokens - before == len(PROMPT)
    for answer in answers:
        assert answer.prompt_logprobs is completion.prompt_logprobs
    assert_judged(judged("llama")[0], PROMPT, completion.prompt_logprobs, top=1)
    best = driver.result_of(PROMPT, 6, best_of=3, temperature=1.0, prompt_logprobs=1)
    assert best.prompt_logprobs == completion.prompt_logprobs


@pytest.mark.parametrize(("name", "prefix_cache"), [("llama", False), ("windowed llama", True), ("qwen3_next", True)])
def test_a_prompt_that_loses_its_row_goes_on_where_it_was(
    name: str, prefix_cache: bool, tiny: Any, judged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted again and again on its way: no token is scored twice, none is missing."""
    driver = Driver(tiny(name), prefill_budget=10, prefix_cache=prefix_cache, max_rows=2)
    asked: list[int] = []
    score = kept_states.score_tokens

    def counting(logits: Any, tokens: Any, *others: Any) -> Any:
        asked.extend(tokens.tolist())
        return score(logits, tokens, *others)

    monkeypatch.setattr(kept_states, "score_tokens", counting)
    handle = driver.add(PROMPT, 5, prompt_logprobs=2)
    for place in range(40):
        driver.step()
        driver.core.drain()
        job = next((a.job for a in driver.core.requests.answers.values()), None)
        if place % 3 == 2 and job is not None and job.is_running and job.preemptions < 4:
            driver.core.scheduler._preempt(job)
            driver.core.check_invariants()
    driver.finish()
    completion = driver.result(handle)
    assert driver.core.stats().preemptions >= 1 + prefix_cache
    assert_judged(judged(name)[0], PROMPT, completion.prompt_logprobs, top=2)
    assert asked == PROMPT[1:]
    monkeypatch.undo()
    assert completion.token_ids == Driver(tiny(name)).result_of(PROMPT, 5).token_ids


def test_a_row_preempted_while_its_scores_are_in_flight_has_them_computed_again(tiny: Any, judged: Any) -> None:
    driver = Driver(tiny("llama"))
    handle = driver.add(PROMPT, 5, prompt_logprobs=0)
    plan = driver.core._plan()
    assert plan is not None
    driver.core._dispatch(plan)
    (answer,) = driver.core.requests.answers.values()
    assert answer.job.num_scored_tokens == 1
    driver.core.scheduler._preempt(answer.job)
    driver.core.drain()
    assert answer.job.num_scored_tokens == 1, "the result is of a row that is gone"
    driver.finish()
    assert_judged(judged("llama")[0], PROMPT, driver.result(handle).prompt_logprobs)


@pytest.mark.parametrize("serial", [False, True])
def test_a_cancelled_prompt_has_those_that_were_computed(
    serial: bool, tiny: Any, judged: Any, request: pytest.FixtureRequest
) -> None:
    if serial:
        request.getfixturevalue("unpaged")
    driver = Driver(tiny("llama"), prefill_budget=10)
    handle = driver.add(PROMPT, 5, prompt_logprobs=0)
    driver.step(3)
    driver.core.drain()
    driver.core.cancel(handle.id)
    completion = driver.result(handle)
    assert completion.finish_reason is FinishReason.CANCELLED and completion.prompt_logprobs is not None
    known = len(completion.prompt_logprobs)
    assert 11 <= known < len(PROMPT) and handle.prompt_logprobs == completion.prompt_logprobs
    assert_judged(judged("llama")[0], PROMPT[:known], completion.prompt_logprobs)
    driver.finish()
    nothing = driver.add(PROMPT, 5, prompt_logprobs=0)
    driver.core.cancel(nothing.id)
    assert list(driver.result(nothing).prompt_logprobs or ()) == [None]
    assert_nothing_lost(driver.core.stats())


def test_a_batch_file_echoes_them(tiny: Any, judged: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"prompt": "the cat and the hat", "echo": True, "logprobs": 0, "max_tokens": 0}
    (tmp_path / "in.jsonl").write_text(json.dumps({"custom_id": "a", "url": "/v1/completions", "body": body}))
    assert run(["batch", str(tiny("llama")), str(tmp_path / "in.jsonl"), "--kv-memory", "256KB"]) == 0
    [choice] = json.loads(capsys.readouterr().out)["response"]["body"]["choices"]
    told = choice["logprobs"]
    with Engine(tiny("llama"), kv_memory="256KB") as engine:
        tokens = engine.encode(body["prompt"])
    assert "".join(told["tokens"]) == body["prompt"]
    wanted = judge(judged("llama")[0], tokens)[np.arange(len(tokens) - 1), tokens[1:]]
    assert choice["text"] == body["prompt"] and choice["finish_reason"] == "length"
    assert told["token_logprobs"][0] is None and told["top_logprobs"][1:] == [{}] * len(wanted)
    np.testing.assert_allclose(told["token_logprobs"][1:], wanted, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("lengths", "vocab"), [((256, 1024), 12_000), pytest.param((1024, 4096, 16384), 20_000, marks=slow)]
)
def test_memory_does_not_grow_with_the_prompt_but_for_keys_and_values(
    lengths: Sequence[int], vocab: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the peaks with and without them, the difference: attention's scores grow with the prompt on a CPU, and may
    hide them. There are two layers, since nobody needs the attention of a last one where no token has logits.
    """
    monkeypatch.undo()
    folder = write_tiny(tmp_path / "model", vocab_size=vocab, max_position_embeddings=1 << 15, num_hidden_layers=2)
    driver = Driver(folder, tokens=lengths[-1] + 64, block_size=32, prefill_budget=64)

    def peak(length: int, top: int | None) -> int:
        mx.reset_peak_memory()
        kept = mx.get_active_memory() - driver.core.runner.arena.nbytes
        driver.result_of(tokens_of(length, seed=length + (top or 0)), 1, prompt_logprobs=top)  # nothing is cached
        return mx.get_peak_memory() - driver.core.runner.arena.nbytes - kept

    peak(lengths[-1], 5)  # the arena grows
    more = [peak(n, 5) - peak(n, None) for n in lengths]
    print([f"{n}: {size / 2**20:.1f} MiB" for n, size in zip(lengths, more, strict=True)])
    assert max(more) < 12 * 64 * vocab * 4, "a dozen arrays of a slice's logits"
    assert max(more) < 1.2 * more[0] + (1 << 20), "those of the shortest prompt"


def test_an_engine_tells_them(tiny: Any, judged: Any) -> None:
    with Engine(tiny("llama"), kv_memory="256KB", block_size=8, max_rows=2, prefill_budget=32) as engine:
        text = "the cat and the hat"
        tokens = engine.encode(text)
        asked = SamplingParams(max_tokens=0, prompt_logprobs=1)
        assert_judged(judged("llama")[0], tokens, engine.generate(text, asked).prompt_logprobs, top=1)
        events = list(engine.submit(text, asked))
        assert len(events) == 1 and events[0].completion is not None
        params = [SamplingParams(max_tokens=i % 2, prompt_logprobs=0) for i in range(9)]
        for i, completion in enumerate(engine.generate_batch([tokens_of(5 + 9 * i, seed=i) for i in range(9)], params)):
            assert_judged(judged("llama")[0], tokens_of(5 + 9 * i, seed=i), completion.prompt_logprobs)
