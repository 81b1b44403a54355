"""The whole engine with the Metal kernels, in the simulator or on an Apple GPU with `-m metal`: the same greedy tokens
as the reference backend, whatever happens to the rows around them, and nothing that quietly took the reference path.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from cortexmlx import CortexError, Engine, SamplingParams
from cortexmlx.attention.backends import AttentionBackend, kernel_backend
from cortexmlx.attention.metal import MetalAttention
from cortexmlx.metal.lab import sim
from cortexmlx.system.machine import metal_device
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.judge import assert_same
from support.kernels.broken_kernels import COMPILE_ERROR, GPU_TIMEOUT, copying, dropped, raising
from support.models.tiny import tokens_of, write_tiny

PROMPTS = [tokens_of(n, seed=n) for n in (5, 41, 17, 30)]


@pytest.fixture(autouse=True)
def fast() -> Any:
    """The engine's tokens are judged here, the kernels' accesses elsewhere."""
    with sim.options(checked=False):
        yield


@pytest.fixture(params=["sim", pytest.param("metal", marks=pytest.mark.metal)])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a backend that runs the kernels here."""
    if request.param == "metal" and metal_device() is None:
        pytest.skip("no metal device")
    name: str = request.param
    return name


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "windowed llama", "gpt_oss", "gpt2", "qwen3_next"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "llama4", "afm7")),
    ],
)
def test_same_tokens_as_the_reference_alone_and_in_a_batch(
    backend: str, name: str, tiny: Callable[[str], Path], judged: Callable[[str], Any]
) -> None:
    kernels, reference = Driver(tiny(name), attention=backend), Driver(tiny(name), attention="reference")
    wanted = reference.answers(PROMPTS, 36)
    for prompt, mine, theirs in zip(PROMPTS, kernels.answers(PROMPTS, 36), wanted, strict=True):
        assert_same(judged(name)[0], prompt, mine, theirs)
    assert_same(judged(name)[0], PROMPTS[1], kernels.answers(PROMPTS[1:2], 36)[0], wanted[1])
    assert kernels.core.backend.notes() == ()
    assert kernels.core.stats().attention_backend == f"{backend}, prefill kernel, vector kernel"


@pytest.mark.parametrize(
    ("heads", "dim", "used"),
    [
        (4, 64, "matrix kernel, prefill kernel"),
        (8, 64, "matrix kernel, prefill kernel"),
        pytest.param(4, 512, "wide kernel; reference for float32, head_dim 512", marks=pytest.mark.slow),
    ],
)
def test_same_tokens_where_several_heads_share_a_kv_head(
    backend: str, heads: int, dim: int, used: str, tmp_path: Path
) -> None:
    """The matrix kernel, or that for wide heads, and for the pieces of window layers, unless their heads are wide, the
    prefill kernel; and `stats()` says so.
    """
    folder = write_tiny(tmp_path, "windowed llama", num_attention_heads=heads, num_key_value_heads=1, head_dim=dim)
    kernels, reference = Driver(folder, attention=backend), Driver(folder, attention="reference")
    model = mlx_lm.load(str(folder))[0]
    wanted = reference.answers(PROMPTS, 24)
    for prompt, mine, theirs in zip(PROMPTS, kernels.answers(PROMPTS, 24), wanted, strict=True):
        assert_same(model, prompt, mine, theirs)
    assert kernels.core.stats().attention_backend.startswith(f"{backend}, {used}")


def test_joining_cancelling_and_draining_rows_do_not_change_their_neighbours(
    backend: str, tiny: Callable[[str], Path], judged: Callable[[str], Any]
) -> None:
    driver, reference = (Driver(tiny("llama"), attention=a) for a in (backend, "reference"))
    first = driver.add(PROMPTS[0], 40)
    driver.step(9)
    second = driver.add(PROMPTS[1], 40)
    driver.step(12)
    driver.core.cancel(first.id)
    third = driver.add(PROMPTS[2], 25)
    driver.finish()
    cut = driver.result(first).token_ids
    assert 0 < len(cut) < 40
    others = [(p, driver.result(h).token_ids) for p, h in ((PROMPTS[1], second), (PROMPTS[2], third))]
    for prompt, tokens in ((PROMPTS[0], cut), *others):
        assert_same(judged("llama")[0], prompt, tokens, reference.answers([prompt], len(tokens))[0])
    assert_nothing_lost(driver.core.stats())


def test_forked_answers_share_their_prompt(
    backend: str, tiny: Callable[[str], Path], judged: Callable[[str], Any]
) -> None:
    driver, reference = (Driver(tiny("llama"), attention=a) for a in (backend, "reference"))
    greedy = reference.answers([PROMPTS[1]], 20)[0]
    done = driver.result_of(PROMPTS[1], 20, n=2)
    for choice in (done, *done.others):
        assert_same(judged("llama")[0], PROMPTS[1], choice.token_ids, greedy)


def test_a_kernel_that_fails_in_use_fails_its_step_and_is_checked_before_the_next(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine goes on, on the reference path, and says why."""
    good = True

    def factory(**options: Any) -> Any:
        right, wrong = sim.metal_kernel(**options), raising(RuntimeError(GPU_TIMEOUT))(**options)
        return lambda **call: (right if good else wrong)(**call)

    def choose(name: str) -> AttentionBackend:
        return kernel_backend("metal", MetalAttention(factory))

    monkeypatch.setattr("cortexmlx.execution.execution_modes.choose_backend", choose)
    with Engine(tiny("llama"), kv_memory="4MB") as engine:
        greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        wanted = engine.generate(PROMPTS[0], greedy).token_ids
        assert engine.stats().attention_backend == "metal, prefill kernel, vector kernel"
        good = False
        with pytest.raises(CortexError, match="GPU Timeout"):
            engine.generate(PROMPTS[0], greedy)
        assert engine.generate(PROMPTS[0], greedy).token_ids == wanted
        described = engine.stats().attention_backend
    assert described.startswith("metal; reference for float32, head_dim ") and GPU_TIMEOUT in described


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (dropped("cortex_", zeros=True), ["launch was dropped: 256 threads in a threadgroup may be more"]),
        (raising(RuntimeError(COMPILE_ERROR)), ["it does not compile (", *COMPILE_ERROR.strip().splitlines()]),
        (copying(all_inputs=False), ["launch read a copy of the keys and values"]),
        (copying(all_inputs=True), ["launch read a copy of the keys and values"]),
    ],
    ids=["zeros", "a compile error", "copies of what is not contiguous", "copies of all"],
)
def test_kernels_that_cannot_be_used_are_told_from_the_first_answer_on(
    factory: Any, says: list[str], tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step runs on the reference path, and the whole reason is in `stats()`, for each kernel."""

    def choose(name: str) -> AttentionBackend:
        return kernel_backend("metal", MetalAttention(factory))

    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with Engine(tiny("llama"), kv_memory="4MB", attention="reference") as engine:
        wanted = [engine.generate(prompt, greedy).token_ids for prompt in PROMPTS[:2]]
        assert engine.stats().attention_notes == ()
    monkeypatch.setattr("cortexmlx.execution.execution_modes.choose_backend", choose)
    with Engine(tiny("llama"), kv_memory="4MB") as engine:
        assert [engine.generate(prompt, greedy).token_ids for prompt in PROMPTS[:2]] == wanted
        stats = engine.stats()
    decode, prefill = stats.attention_notes
    assert "prefill kernel" in prefill.splitlines()[0] and "prefill kernel" not in decode
    assert all(line.replace("its decode", "its prefill") in prefill and line in decode for line in says)
    assert all(note.startswith("float32, head_dim ") for note in stats.attention_notes)
    assert stats.attention_backend.startswith(f"metal; reference for {decode.splitlines()[0]}")
    assert prefill.splitlines()[0] in stats.attention_backend
    assert "\n" not in stats.attention_backend


@pytest.mark.slow
@pytest.mark.model
def test_ten_tokens_of_the_starter_model(backend: str) -> None:
    prompt = [{"role": "user", "content": "Name three colours of the rainbow."}]
    answers = {}
    for attention in (backend, "reference"):
        with Engine("smollm2", kv_memory="64MB", attention=attention) as engine:
            answers[attention] = engine.generate(prompt, SamplingParams(max_tokens=10, temperature=0.0)).token_ids
    assert len(answers[backend]) == 10
    assert answers[backend] == answers["reference"]


@pytest.mark.parametrize(("name", "writes"), [("qwen3", 1), ("gemma3_text", 1), ("gpt2", 0)])
def test_a_layer_of_a_decode_step_takes_two_launches_where_it_is_norm_rotation_and_write(
    name: str, writes: int, tiny: Callable[[str], Path], judged: Callable[[str], Any]
) -> None:
    """One writes the tail, one attends. Learned positions are left alone, and MLX writes their tail."""
    driver = Driver(tiny(name), attention="sim")
    layers = len(driver.core.runner.arena.group_of)
    with sim.recording(coalescing=False) as recorded:
        answers = driver.answers(PROMPTS, 12)
    names = [launch.kernel for launch in recorded.launches]
    decoded = names.count("cortex_paged_decode_whole")
    steps = driver.core.stats().steps
    assert names.count("cortex_paged_decode") == names.count("cortex_paged_reduce") == 0 < decoded
    assert names.count("cortex_tail_write") == writes * 11 * layers <= decoded <= steps * layers
    wanted = Driver(tiny(name), attention="reference").answers(PROMPTS, 12)
    for prompt, mine, theirs in zip(PROMPTS, answers, wanted, strict=True):
        assert_same(judged(name)[0], prompt, mine, theirs)
