"""Thoughts apart from the answer, through the whole engine: a model that was made to write what it writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import ChatPrompt, Completion, Engine, FinishReason, SamplingParams
from support.models.thinking import SWITCHED, dictated, write_thinking

MESSAGES = [{"role": "user", "content": "hi"}]
SAYS = "<think>\nI see. Stop.\n</think>\n\nYes. Stop. No."
OPENED = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]{{ '<think>\n' }}"
APART = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}\n"
    "{% endfor %}[assistant]"
)


def opened(path: Path, template: str, tokens: tuple[str, ...] = ("<think>", "</think>")) -> Engine:
    return Engine(write_thinking(path, template, tokens), kv_memory="1MB", block_size=8)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with opened(tmp_path_factory.mktemp("m") / "m", SWITCHED) as made:
        yield made


@pytest.fixture(scope="module")
def says(engine: Engine) -> Any:
    """Sampling parameters with which the model writes a text."""
    return lambda text, **params: dictated(engine, text, **params)


def test_completion_and_events_tell_thoughts_from_the_answer(engine: Engine, says: Any) -> None:
    events = list(engine.stream(MESSAGES, says(SAYS)))
    done = events[-1].completion
    assert done is not None
    assert (done.thinking, done.text, done.raw_text) == ("I see. Stop.", "Yes. Stop. No.", SAYS)
    assert "".join(e.thinking for e in events) == done.thinking
    assert "".join(e.text for e in events) == done.text
    assert not any(e.text and e.thinking for e in events)


def test_a_plain_text_and_token_ids_are_answered_with_all_that_was_written(engine: Engine, says: Any) -> None:
    for prompt in ("hi", engine.encode("hi")):
        done = engine.generate(prompt, says(SAYS))
        assert (done.thinking, done.text, done.raw_text) == ("", SAYS, SAYS)


def test_a_prompt_that_opened_the_thoughts_is_answered_within_them(tmp_path: Path) -> None:
    with opened(tmp_path / "m", OPENED) as engine:
        done = engine.generate(MESSAGES, dictated(engine, "so\n</think>\n\nYes."))
        assert (done.thinking, done.text) == ("so", "Yes.")
        cut = engine.generate(MESSAGES, dictated(engine, "so it is </think>", max_tokens=8))
        assert (cut.thinking, cut.text, cut.finish_reason) == ("so it is", "", FinishReason.LENGTH)
        talk = engine.conversation(params=dictated(engine, "so\n</think>\n\nYes."))
        assert talk.ask("hi").text == "Yes."
        assert talk.messages[-1] == {"role": "assistant", "content": "<think>\nso\n</think>\n\nYes."}


def test_tags_that_are_no_tokens_are_known_from_the_template(tmp_path: Path) -> None:
    with opened(tmp_path / "m", SWITCHED, tokens=()) as engine:
        assert len(engine.encode("<think>")) > 1
        done = engine.generate(MESSAGES, dictated(engine, SAYS))
        assert (done.thinking, done.text) == ("I see. Stop.", "Yes. Stop. No.")


def test_stop_strings_are_of_the_answer(engine: Engine, says: Any) -> None:
    """Those with a tag in them are the exception: they cannot be meant otherwise."""
    done = engine.generate(MESSAGES, says(SAYS, stop=["Stop."]))
    assert (done.thinking, done.text, done.finish_reason) == ("I see. Stop.", "Yes. ", FinishReason.STOP)
    assert done.raw_text == "<think>\nI see. Stop.\n</think>\n\nYes. "
    thought = engine.generate(MESSAGES, says(SAYS, stop=["</think>"]))
    assert (thought.thinking, thought.text, thought.finish_reason) == ("I see. Stop.\n", "", FinishReason.STOP)
    raw = engine.generate("hi", says(SAYS, stop=["Stop."]))
    assert raw.text == "<think>\nI see. ", "a plain text has no thoughts"


def test_the_thoughts_go_back_as_the_template_wants_them(tmp_path: Path) -> None:
    with opened(tmp_path / "m", APART) as engine:
        talk = engine.conversation(params=dictated(engine, SAYS))
        talk.ask("hi")
        said = {"role": "assistant", "content": "Yes. Stop. No.", "reasoning_content": "I see. Stop."}
        assert talk.messages[-1] == said
        before = talk.tokens
        with talk.stream("and?") as reply:
            assert len(reply.prompt) > before
            done = reply.result()
        assert done.usage.cached_tokens >= before - 16, "the template writes what the model wrote"


def test_without_thoughts_nothing_is_dropped(engine: Engine, says: Any) -> None:
    text = "\n In code: `<think>` and `</think>` \n"
    done = engine.generate(ChatPrompt(MESSAGES, {"enable_thinking": False}), says(text))
    assert (done.thinking, done.text, done.raw_text) == ("", text, text)


def test_each_of_several_answers_has_its_own(engine: Engine, says: Any) -> None:
    done = engine.generate(MESSAGES, says(SAYS, n=2))
    assert [each.thinking for each in (done, *done.others)] == ["I see. Stop."] * 2


def test_a_cancelled_answer_has_the_thoughts_so_far(engine: Engine, says: Any) -> None:
    handle = engine.submit(MESSAGES, says(SAYS + "x" * 200))
    for event in handle:
        if event.thinking:
            handle.cancel()
    done = handle.result()
    assert done.thinking and done.raw_text.startswith("<think>\n")
    assert done == done.__class__(**{**vars(done), "raw_text": done.raw_text})


def counted(engine: Engine, done: Completion) -> int:
    """Tokens that have a byte of the thoughts, found by what each stands for by itself."""
    pieces = [engine.token_bytes(token) for token in done.token_ids]
    begin = b"".join(pieces).index(done.thinking.encode())
    end, place, count = begin + len(done.thinking.encode()), 0, 0
    for piece in pieces:
        count += place < end and begin < place + len(piece)
        place += len(piece)
    return count if done.thinking else 0


def test_the_tokens_of_thoughts_are_counted(engine: Engine, says: Any) -> None:
    for text in (SAYS, "<think>\n\n</think>\n\nYes.", "Yes.", "<think>\n日本 \U0001f600.\n</think>\n日本"):
        done = engine.generate(MESSAGES, says(text))
        assert done.raw_text == text and done.usage.thinking_tokens == counted(engine, done)
        assert bool(done.usage.thinking_tokens) is bool(done.thinking)
    for params in ({"stop": ["Stop."]}, {"stop": ["</think>"]}, {"n": 2}):
        done = engine.generate(MESSAGES, says(SAYS, **params))
        for each in (done, *done.others):
            assert each.usage.thinking_tokens == counted(engine, each) > 3
    for prompt in ("hi", ChatPrompt(MESSAGES, {"enable_thinking": False})):
        assert engine.generate(prompt, says("so\n</think>\n\nYes.")).usage.thinking_tokens == 0


def test_thoughts_that_were_cut_off_are_counted_as_far_as_they_came(engine: Engine, says: Any) -> None:
    whole = engine.generate(MESSAGES, says(SAYS))
    counts = []
    for most in range(1, len(whole.token_ids)):
        done = engine.generate(MESSAGES, says(SAYS, max_tokens=most))
        assert done.usage.thinking_tokens == counted(engine, done)
        counts.append(done.usage.thinking_tokens)
    assert counts[0] == 0 and counts[-1] == whole.usage.thinking_tokens > 3
    handle = engine.submit(MESSAGES, says(SAYS + "x" * 200))
    for event in handle:
        if event.thinking:
            handle.cancel()
    assert (cancelled := handle.result()).usage.thinking_tokens == counted(engine, cancelled) > 0


def test_tokens_with_a_part_of_a_tag_are_the_thoughts_if_they_have_a_part_of_those(tmp_path: Path) -> None:
    with opened(tmp_path / "m", OPENED, tokens=()) as engine:
        for text in ("so it is</think>Yes.", "so\n</think>\n\nYes.", "</think>Yes.", "<think>so</think>"):
            done = engine.generate(MESSAGES, dictated(engine, text))
            assert done.usage.thinking_tokens == counted(engine, done)


def test_sampling_is_not_touched(engine: Engine) -> None:
    """The tokens are those of the same prompt as plain token ids."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    assert (
        engine.generate(MESSAGES, params).token_ids == engine.generate(list(engine.encode(MESSAGES)), params).token_ids
    )


REFUSES_ITS_OWN = (
    "{% for m in messages %}{% if '<|channel|>' in m.content %}{{ raise_exception('pass it as thinking') }}{% endif %}"
    "[{{ m.role }}]{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}\n{% endfor %}<|start|>assistant"
)
"""As gpt-oss's does."""


def test_channels_are_taken_apart_and_a_template_that_refuses_them_has_a_second_turn(tmp_path: Path) -> None:
    tokens = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
    with opened(tmp_path / "m", REFUSES_ITS_OWN, tokens) as engine:
        final = "<|channel|>final<|message|>Yes."
        said = f"<|channel|>analysis<|message|>so<|end|><|start|>assistant{final}"
        talk = engine.conversation(params=dictated(engine, said))
        first = talk.ask("hi")
        assert (first.thinking, first.text) == ("so", "Yes.") and talk.thinking == "so"
        second = talk.ask("and?", dictated(engine, final))
        assert (second.thinking, second.text) == ("", "Yes.")
        assert [m["content"] for m in talk.messages] == ["hi", "Yes.", "and?", "Yes."]
