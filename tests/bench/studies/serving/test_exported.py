"""A model as a folder answers as the model itself."""

from __future__ import annotations

from pathlib import Path

import mlx_lm
import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.bench.studies.serving.exported import export_model


@pytest.mark.model
def test_mlx_lm_reads_the_same_model(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What is 2+2?"}]
    folder = str(export_model("smollm2", tmp_path / "model"))
    model, tokenizer, *_ = mlx_lm.load(folder)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    theirs = mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)
    with Engine(folder, kv_memory="64MB") as engine:
        ours = engine.generate(messages, SamplingParams(max_tokens=12))
    assert (ours.usage.prompt_tokens, ours.text) == (len(prompt), theirs)
