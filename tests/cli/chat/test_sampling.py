"""How a chat samples: as the model's makers recommend, but for what the user says."""

from __future__ import annotations

from dataclasses import replace

import typer
from typer.testing import CliRunner

from cortexmlx.cli import options
from cortexmlx.cli.chat.sampling import (
    FALLBACK_SAMPLING,
    carry_over_sampling,
    default_sampling,
    describe_default_source,
)
from cortexmlx.cli.options import given_sampling
from cortexmlx.stats import ModelInfo
from cortexmlx.types.sampling_params import SamplingParams

MODEL = ModelInfo("m", "/m", "llama", 100, 10, 1000, 4000, "float32", 8, True)
COOL = replace(MODEL, sampling=(("temperature", 0.2), ("top_p", 0.9)))
WARM = replace(MODEL, sampling=(("temperature", 0.7), ("top_k", 20)))


def test_the_makers_values_take_the_place_of_all_of_the_chats() -> None:
    assert default_sampling(COOL) == SamplingParams(max_tokens=2048, temperature=0.2, top_p=0.9)
    assert default_sampling(MODEL) == SamplingParams(**FALLBACK_SAMPLING)
    assert describe_default_source(COOL) == "recommended by the model's makers: temperature 0.2, top_p 0.9"
    assert "recommend none" in describe_default_source(MODEL)


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
