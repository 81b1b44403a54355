"""A RemoteRunner does what one runner does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.distributed.messages import CALL, Forward, TellCommandBuffers
from cortexmlx.errors import InvalidRequest
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.scheduling.job import JobId
from support.engine.core_driver import Driver
from support.engine.same_tokens import TIGHT, prompts_of
from support.hosts.answers import answers_of, ended, expected_of
from support.hosts.whole_ranks import changed, engines_on_ranks
from support.models.tiny import tokens_of, write_tiny

Tiny = Callable[[str], Path]
PERSON = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog", "horse"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_the_tokens_are_those_of_one_runner(tiny: Tiny) -> None:
    expected = expected_of(tiny("llama"))
    with engines_on_ranks(2, tiny("llama"), compare_every=1):
        assert answers_of(tiny("llama")) == expected


@pytest.mark.parametrize(("name", "tokens"), [("windowed llama", 256), ("qwen3_5", 2048)])
def test_the_tokens_are_those_of_one_runner_with_several_groups_and_with_states(
    tiny: Tiny, name: str, tokens: int
) -> None:
    expected = answers_of(tiny(name), tokens=tokens)
    with engines_on_ranks(2, tiny(name), compare_every=1):
        assert answers_of(tiny(name), tokens=tokens) == expected


def test_quantized_keys_and_values_cross(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", head_dim=32)
    prompts = [tokens_of(length, seed=length) for length in (9, 30)]
    expected = Driver(model, kv_bits=8).answers(prompts, 12)
    with engines_on_ranks(2, model, kv_bits=8, compare_every=1):
        assert Driver(model, kv_bits=8).answers(prompts, 12) == expected


def test_masks_drafts_and_log_probabilities_cross(tiny: Tiny) -> None:
    def answers() -> list[Any]:
        driver = Driver(tiny("llama"), tokens=1024, speculate=True)
        driver.core.speculation.draft = lambda: None  # type: ignore[method-assign]  # how much depends on times
        seen = tokens_of(24, seed=5)
        handles = [
            driver.add(tokens_of(20), 24, ignore_eos=False, structured=PERSON),
            driver.add(tokens_of(9, seed=1), 20, logprobs=2, logit_bias={65: 3.0}),
            driver.add(tokens_of(40, seed=2), 20, prompt_logprobs=1, seed=3, temperature=1.0, top_k=9),
            driver.add(seen * 3, 24),
        ]
        for _ in range(200):
            if driver.core.idle:
                break
            for job in driver.core.scheduler.draftable_jobs:
                driver.core.scheduler.set_drafts(job.id, [*job.tokens[-3:], 70])
            driver.core.step()
        assert driver.core.stats().steps_by_reason["verify"] > 0
        return ended(driver, handles)

    expected = answers()
    with engines_on_ranks(2, tiny("llama"), compare_every=1) as made:
        assert answers() == expected
    [ranks] = made
    sent = [[CALL.decode(message).asks for message in channel.sent] for channel in ranks.channels]
    assert any(isinstance(call, Forward) for call in sent[0])
    masks = [[call.mask is not None for call in calls if hasattr(call, "mask")] for calls in sent]
    assert any(masks[0]) and not any(masks[1]) and len(masks[0]) == len(masks[1])


def test_an_idle_engine_moves_its_blocks_and_shrinks_on_all_ranks(tiny: Tiny) -> None:
    prompts = [tokens_of(n, seed=n) for n in (40, 20, 60)]
    expected = Driver(tiny("llama"), tokens=1024).answers(prompts, 20)
    with engines_on_ranks(2, tiny("llama"), compare_every=1) as made:
        driver = Driver(tiny("llama"), tokens=1024)
        assert driver.answers(prompts, 20) == expected
        driver.core.relieve(False)
        assert driver.core.compact() > 0
        assert driver.answers(prompts, 20) == expected
        large = driver.core.runner.bytes.arena
        driver.core.relieve(True)
        assert driver.core.runner.bytes.arena < large
        assert driver.answers(prompts, 20) == expected
        [ranks] = made
        assert len({state.blocks for state in ranks.runner.ranks}) == 1
        driver.core.release()


def test_an_engine_begins_anew_on_the_same_ranks(tiny: Tiny) -> None:
    """As after an exception that landed between two statements: what was in flight is dropped on all ranks."""
    expected = expected_of(tiny("llama"))
    with engines_on_ranks(2, tiny("llama"), compare_every=1):
        driver = Driver(tiny("llama"), tokens=TIGHT, max_rows=8)
        for prompt in prompts_of():
            driver.add(prompt, 16)
        driver.step(7)
        driver.core.reset()
        assert driver.answers(prompts_of(), 16) == [tokens for tokens, _, _ in expected[:8]]
        driver.core.release()


# -- what stays here --------------------------------------------------------------------------------------------------


def test_functions_of_the_caller_are_refused_by_name(tiny: Tiny) -> None:
    with engines_on_ranks(1, tiny("llama")):
        driver = Driver(tiny("llama"))
        with pytest.raises(InvalidRequest, match="logits_processors"):
            driver.core.runner.processors[JobId(1)] = [lambda tokens, logits: logits]
        assert not driver.core.runner.processors
        assert driver.core.runner.processors.pop(JobId(1), None) is None
        driver.core.release()


def test_command_buffers_are_asked_once_for_each_size_of_the_arena(
    tiny: Tiny, small_arenas: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda device: {"architecture": "applegpu_g16s"})

    def as_on_gpu(runner: ModelRunner) -> None:
        runner.computes_at_dispatch = False

    with engines_on_ranks(2, tiny("llama"), changed({0: as_on_gpu})) as made:
        driver, runner = Driver(tiny("llama"), tokens=512), made[0].runner
        first = driver.core.stats().command_buffers
        assert first is not None and first == driver.core.stats().command_buffers
        assert runner.resize((20,)) is None and driver.core.stats().command_buffers is not None
        asked = [CALL.decode(message).asks for message in made[0].channels[0].sent]
        assert asked.count(TellCommandBuffers()) == 2
        driver.core.release()
