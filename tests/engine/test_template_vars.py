"""Variables of the chat template, through the whole library: the tokens are mlx-lm's with the same variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import ChatPrompt, Engine, InvalidRequest, SamplingParams
from support.models.thinking import OTHER_NAME, SWITCHED, write_thinking

MESSAGES = [{"role": "user", "content": "hi"}]
SILENT = ChatPrompt(MESSAGES, {"enable_thinking": False})
FEW = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinking(tmp_path_factory.mktemp("m") / "switched", SWITCHED, ("<think>", "</think>"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model, kv_memory="1MB", block_size=8) as opened:
        yield opened


def test_the_tokens_are_mlx_lms(engine: Engine, model: Path) -> None:
    from mlx_lm.utils import load_tokenizer

    judge = load_tokenizer(model)
    for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        wanted = judge.apply_chat_template(MESSAGES, add_generation_prompt=True, **variables)
        assert engine.encode(ChatPrompt(MESSAGES, variables)) == wanted
    assert engine.encode(SILENT) != engine.encode(MESSAGES)
    assert engine.info.template_vars == ("enable_thinking",)


def test_every_way_of_asking_takes_them(engine: Engine) -> None:
    wanted = engine.generate(engine.encode(SILENT), FEW).token_ids
    assert engine.generate(SILENT, FEW).token_ids == wanted
    assert engine.submit(SILENT, FEW).result().token_ids == wanted
    assert [event.token_id for event in engine.stream(SILENT, FEW)][:3] == list(wanted)
    assert [c.token_ids for c in engine.generate_batch([MESSAGES, SILENT], FEW)][1] == wanted
    with engine.pin(ChatPrompt([{"role": "system", "content": "a long text"}], {"enable_thinking": False})) as pin:
        assert pin.tokens >= 8


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (ChatPrompt(MESSAGES, {"thinkin": 1}), "does not read thinkin"),
        (ChatPrompt(MESSAGES, {1: 1}), "template_vars is"),  # type: ignore[dict-item]
        (ChatPrompt(MESSAGES, 3), "template_vars is 3"),  # type: ignore[arg-type]
        (ChatPrompt([]), "a prompt is"),
        (ChatPrompt([1, 2]), "a prompt is"),  # type: ignore[list-item]
    ],
)
def test_what_a_template_does_not_read_is_refused(engine: Engine, prompt: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        engine.generate(prompt, FEW)


def test_a_conversation_keeps_them_in_turns_forks_and_files(engine: Engine, tmp_path: Path) -> None:
    talk = engine.conversation(params=FEW, template_vars={"enable_thinking": False})
    with talk.stream("hi") as reply:
        assert list(reply.prompt) == engine.encode(SILENT)
        reply.result()
    assert talk.fork().template_vars == talk.template_vars == {"enable_thinking": False}
    talk.save(tmp_path / "talk.json")
    other = engine.conversation()
    other.load(tmp_path / "talk.json")
    assert other.template_vars == {"enable_thinking": False}
    other.template_vars = {}
    with other.stream("again") as reply:
        assert "</think>" not in "".join(map(chr, [t for t in reply.prompt if t < 256]))
    with pytest.raises(InvalidRequest, match="template_vars is 'x'"):
        engine.conversation(template_vars="x")  # type: ignore[arg-type]


def test_the_switch_works_by_its_common_name_where_a_template_has_another(tmp_path: Path) -> None:
    with Engine(write_thinking(tmp_path / "m", OTHER_NAME), kv_memory="1MB") as engine:
        on, off = (engine.encode(ChatPrompt(MESSAGES, {"enable_thinking": value})) for value in (True, False))
        assert len(off) == len(on) + len("/")


def test_a_file_of_another_model_goes_on_without_those_that_this_one_does_not_read(
    engine: Engine, tiny: Any, tmp_path: Path
) -> None:
    talk = engine.conversation(template_vars={"enable_thinking": False}, params=FEW)
    talk.ask("hi")
    talk.save(tmp_path / "talk.json")
    with Engine(tiny("llama"), kv_memory="1MB", block_size=8) as plain:
        there = plain.conversation()
        there.load(tmp_path / "talk.json")
        assert there.template_vars == {} and "does not read enable_thinking: not set any more" in there.notes[1]
        there.ask("and on")
    other = write_thinking(tmp_path / "other", OTHER_NAME, ("<think>", "</think>"))
    with Engine(other, kv_memory="1MB", block_size=8) as switched:
        there = switched.conversation()
        there.load(tmp_path / "talk.json")
        assert there.template_vars == {"enable_thinking": False} and len(there.notes) == 1
        there.ask("and on")
