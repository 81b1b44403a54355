"""A limit of thoughts in the engine: exactly mlx-lm's tokens with a processor that writes the tag at the same place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine, FinishReason, SamplingParams
from support.models.thinking import dictated, write_thinking
from support.models.tiny import EOS

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
BEGUN = TURNS + "{{ '<think>' }}{{ '</think>' if false }}"
OWN = TURNS + "{{ '<think></think>' if false }}"
USER = [{"role": "user", "content": "What is 12 * 13?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinking(tmp_path_factory.mktemp("budget") / "m", BEGUN, max_position_embeddings=2048)


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), kv_memory="8MB", max_rows=4) as opened:
        yield opened
        opened.check_invariants()


@pytest.fixture(scope="module")
def judge(folder: Path) -> Any:
    """A function from a budget and a number of tokens to mlx-lm's greedy tokens."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    model, tokenizer, *_ = load(str(folder))
    prompt = list(tokenizer.apply_chat_template(USER, add_generation_prompt=True))
    close = list(tokenizer.encode("</think>", add_special_tokens=False))

    def answer(budget: int, count: int) -> list[int]:
        def steer(tokens: mx.array, logits: mx.array) -> mx.array:
            place = tokens.size - len(prompt) - budget
            if 0 <= place < len(close):
                return mx.where(mx.arange(logits.shape[-1]) == close[place], logits, -mx.inf)
            return logits

        steps = generate_step(mx.array(prompt), model, max_tokens=count, logits_processors=[steer])
        return [int(token) for token, _ in steps]

    return answer


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_tokens_are_those_of_the_judge(budget: int, engine: Engine, judge: Any) -> None:
    """In a batch, alone, without pipelining of a row's mask beside rows that need none."""
    asked = SamplingParams(max_tokens=40, max_thinking_tokens=budget, ignore_eos=True)
    free = engine.submit(USER, max_tokens=40, ignore_eos=True)
    answers = [handle.result() for handle in [engine.submit(USER, asked) for _ in range(3)]]
    expected = judge(budget, 40)
    for answer in answers:
        assert list(answer.token_ids) == expected
        assert answer.usage.thinking_tokens <= budget
        assert "</think>" not in answer.text and answer.raw_text.count("</think>") == 1
    assert list(free.result().token_ids) == judge(10_000, 40)


def test_forks_and_a_tight_arena_change_no_token(folder: Path, judge: Any) -> None:
    expected = judge(30, 60)
    with Engine(str(folder), kv_memory="120KB", max_rows=3) as engine:
        asked = SamplingParams(max_tokens=60, max_thinking_tokens=30, ignore_eos=True, n=2)
        for handle in [engine.submit(USER, asked) for _ in range(3)]:
            answer = handle.result()
            assert [list(each.token_ids) for each in (answer, *answer.others)] == [expected] * 2


def test_a_form_begins_after_thoughts_that_were_closed(engine: Engine) -> None:
    form = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    for seed in range(4):
        answer = engine.generate(
            USER, structured=form, max_thinking_tokens=9, max_tokens=300, temperature=1.0, seed=seed
        )
        assert answer.usage.thinking_tokens <= 9
        assert answer.finish_reason is FinishReason.STOP and answer.parsed in ({"a": 1}, {"a": 2})


def test_thoughts_of_the_models_own(tmp_path: Path) -> None:
    with Engine(str(write_thinking(tmp_path / "m", OWN)), kv_memory="8MB") as engine:
        said = "<think>one two three"
        answer = engine.generate(USER, dictated(engine, said, max_thinking_tokens=100))
        assert answer.thinking == "one two three"
        none = engine.generate(USER, dictated(engine, "No thoughts", max_thinking_tokens=0))
        assert (none.text, none.token_ids[-1]) == ("No thoughts", EOS)
        raw = engine.generate("<think>a b c", max_thinking_tokens=0, max_tokens=5, ignore_eos=True)
        assert raw.token_ids == engine.generate("<think>a b c", max_tokens=5, ignore_eos=True).token_ids


def test_a_call_comes_after_thoughts_that_were_closed(tmp_path: Path) -> None:
    from support.models.calling import write_calling

    folder = write_calling(tmp_path / "m", "hermes", begin="{{ '</think>' if false }}<think>")
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    with Engine(str(folder), kv_memory="8MB") as engine:
        for seed in range(4):
            answer = engine.generate(
                USER,
                tools=[tool],
                tool_choice="now",
                parallel_tool_calls=False,
                max_thinking_tokens=20,
                temperature=1.0,
                seed=seed,
                max_tokens=500,
            )
            assert [call.values for call in answer.tool_calls] == [{}]
            assert answer.usage.thinking_tokens <= 20 + 3  # a character is not torn


def test_log_probabilities_are_the_models_own(engine: Engine) -> None:
    answer = engine.generate(USER, max_thinking_tokens=3, max_tokens=20, logprobs=0, ignore_eos=True)
    assert answer.logprobs is not None and [one.token_id for one in answer.logprobs] == list(answer.token_ids)
    assert answer.logprobs[3].logprob < -1  # nobody would write the tag there
