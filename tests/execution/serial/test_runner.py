"""The runner of one row: steps where the caches end, and nothing kept of a step that failed."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from cortexmlx.errors import KVBlockError
from cortexmlx.execution import serial_runner
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of

pytestmark = pytest.mark.usefixtures("unpaged")
PROMPT = tokens_of(50, seed=4)


def test_a_prompt_is_computed_in_the_shapes_of_mlx_lm(tiny: Any, judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces without their last token, which comes alone, then one token at a time: bit for bit mlx-lm's logits."""
    driver = Driver(tiny("llama"), prefill_budget=64)
    model = driver.core.loaded.model
    shapes: list[tuple[int, ...]] = []
    call = type(model).__call__

    def noting(self: Any, tokens: mx.array, **options: Any) -> mx.array:
        shapes.append(tokens.shape)
        return call(self, tokens, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(type(model), "__call__", noting)
    done = driver.result_of(PROMPT, 6, logprobs=0)
    mine, shapes = shapes, []
    theirs = list(generate_step(mx.array(PROMPT), model, max_tokens=6))
    # Only mlx-lm computes the token behind the last one, too.
    assert mine == [(1, 49), *[(1, 1)] * 6] == shapes[: len(mine)]
    got = done.logprobs
    assert [p.token_id for p in got] == [int(token) for token, _ in theirs]
    assert [p.logprob for p in got] == pytest.approx([float(logprobs[token]) for token, logprobs in theirs], abs=1e-5)


def test_pieces_keep_within_the_budget(tiny: Any, theirs: Any) -> None:
    driver = Driver(tiny("llama"), prefill_budget=16)
    handle = driver.add(PROMPT, 3)
    lengths = []
    for _ in range(4):
        driver.step()
        lengths.append(driver.core.runner.arena.length)
    assert sorted(set(lengths)) == [16, 32, 48, 50]
    driver.finish()
    assert list(driver.result(handle).token_ids) == theirs("llama", PROMPT, 3)


def test_a_step_that_does_not_begin_where_the_caches_end_is_refused(tiny: Any) -> None:
    driver = Driver(tiny("llama"))
    driver.add(PROMPT, 6)
    driver.step(4)
    driver.core.runner.arena.run(mx.array([[1]]))
    with pytest.raises(KVBlockError, match=r"begins at token \d+, but the caches have \d+"):
        driver.finish()
    assert driver.core.runner.arena.length == 0


@pytest.mark.parametrize("part", ["start", "read"])
def test_what_the_caches_keep_is_forgotten_when_a_step_fails(
    tiny: Any, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tiny("llama"))
    driver.add(PROMPT, 6)
    driver.step(6)
    assert driver.core.runner.arena.length > len(PROMPT)

    def broken(*_: Any) -> Any:
        raise RuntimeError("it broke")

    monkeypatch.setattr(
        *{"start": (driver.core.runner.arena, "run"), "read": (serial_runner, "read_result")}[part], broken
    )
    with pytest.raises(RuntimeError, match="it broke"):
        driver.finish()
    assert driver.core.runner.arena.length == driver.core.runner.arena.nbytes == 0
