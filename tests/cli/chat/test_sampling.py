"""How a chat samples: as the model's makers recommend, but for what the user says."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import typer
from typer.testing import CliRunner

from cortexmlx.cli import options
from cortexmlx.cli.chat.sampling import (
    FALLBACK_SAMPLING,
    carry_over_sampling,
    default_sampling,
    describe_default_source,
    ends_in_loop,
    loop_note,
)
from cortexmlx.cli.options import given_sampling
from cortexmlx.stats import ModelInfo
from cortexmlx.types.request import Completion, FinishReason, Timings, Usage
from cortexmlx.types.sampling_params import SamplingParams

MODEL = ModelInfo("m", "/m", "llama", 100, 10, 1000, 4000, "float32", 8, True)
COOL = replace(MODEL, sampling=(("temperature", 0.2), ("top_p", 0.9)))
DONE = Completion("a", (1,), FinishReason.STOP, Usage(1, 1), Timings(0.0, 0.0, 0.0, 0.0, 0.0))
WARM = replace(MODEL, sampling=(("temperature", 0.7), ("top_k", 20)))


def test_the_makers_values_take_the_place_of_all_of_the_chats() -> None:
    assert default_sampling(COOL) == SamplingParams(max_tokens=2048, temperature=0.2, top_p=0.9)
    assert default_sampling(MODEL) == SamplingParams(**FALLBACK_SAMPLING)
    assert describe_default_source(COOL) == "recommended by the model's makers: temperature 0.2, top_p 0.9"
    assert "recommend none" in describe_default_source(MODEL)


def test_the_starter_has_a_light_penalty_of_its_own() -> None:
    starter = replace(COOL, name="smollm2")
    assert default_sampling(starter) == replace(default_sampling(COOL), repetition_penalty=1.05)
    assert describe_default_source(starter).endswith("top_p 0.9; the repetition penalty of 1.05 is ours")


TABLE = "| planet | moons |\n|---|---|\n" + "".join(
    f"| {name} | 0 |\n" for name in ("Mercury", "Venus", "Eris", "Ceres")
)
CODE = (
    "def f(a, b, c):\n" + "".join(f"    if {x} is None:\n        {x} = []\n" for x in "abc") + "    return a + b + c\n"
)
POEM = "Row, row, row your boat\nGently down the stream,\nMerrily, merrily, merrily, merrily,\nLife is but a dream.\n"
NUMBERS = json.dumps([[0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]] * 2)


def tokens(text: str) -> list[int]:
    """A word or sign a token, which is about what tokenizers do."""
    return [hash(word) for word in re.findall(r"\w+|\W", text)]


def test_a_loop_is_noticed_and_tables_code_and_poems_are_none() -> None:
    for piece in ("no ", "I am sorry, I don't know. ", POEM, CODE):
        loop = tokens("Well. " + piece * 60)[:-3]
        assert ends_in_loop(loop) and not ends_in_loop(loop[: len(tokens(piece)) + 20])
    for text in (TABLE, CODE, POEM * 2, NUMBERS, TABLE + CODE + POEM + NUMBERS):
        whole = tokens(text)
        assert not any(ends_in_loop(whole[:length]) for length in range(len(whole) + 1)), text


def test_only_an_answer_that_its_model_did_not_end_is_said_to_repeat_itself() -> None:
    answer = replace(DONE, token_ids=(1, 2, 3) * 40)
    for penalty, reason, said in (
        (1.0, FinishReason.LENGTH, "it repeats itself: /set repetition_penalty 1.1"),
        (1.1, FinishReason.CANCELLED, "it repeats itself: /set repetition_penalty 1.15"),
        (1.0, FinishReason.STOP, ""),
    ):
        assert loop_note(replace(answer, finish_reason=reason), SamplingParams(repetition_penalty=penalty)) == said
    assert loop_note(replace(DONE, finish_reason=FinishReason.LENGTH), SamplingParams()) == ""


def test_with_another_model_only_what_the_user_changed_stays() -> None:
    changed = replace(default_sampling(COOL), temperature=1.0, seed=3)
    assert carry_over_sampling(changed, COOL, WARM) == replace(default_sampling(WARM), temperature=1.0, seed=3)
    assert carry_over_sampling(default_sampling(COOL), COOL, MODEL) == default_sampling(MODEL)


def test_what_is_typed_counts_even_if_it_is_the_default() -> None:
    seen: list[object] = []
    app = typer.Typer()

    @app.command()
    @options.add_sampling_options(**FALLBACK_SAMPLING)
    def command(context: typer.Context, *, params: SamplingParams) -> None:
        seen.append(given_sampling(context, params))

    for argv in ([], ["--temp", "0.5", "-n", "7"], ["--top-p", "1"]):
        assert CliRunner().invoke(app, argv).exit_code == 0
    assert seen == [{}, {"temperature": 0.5, "max_tokens": 7}, {"top_p": 1.0}]
