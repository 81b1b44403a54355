"""Checkpoints with a vision part, in the layouts that mlx-lm reads: their language part gives mlx-lm's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.core.prompt import tokenize
from cortexmlx.errors import InvalidRequest, ModelCorrupt
from cortexmlx.models import load_model
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.vision.families import FAMILIES
from support.engine.core_driver import Driver
from support.engine.judge import disagreement, greedy
from support.models.tiny import CONFIGS, tokens_of, write_tiny, write_tokenizer

pytestmark = pytest.mark.usefixtures("a_linux_cpu")

PROMPTS = [tokens_of(n, seed=n) for n in (5, 33)]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
QWEN3_MOE = {"model_type": "qwen3_moe", "mlp_only_layers": [], "norm_topk_prob": True, "tie_word_embeddings": False}
TEXT: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"model_type": "qwen2"},
    "qwen2_5_vl": {"model_type": "qwen2"},
    "qwen3_vl": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_vl_moe": QWEN3_MOE | EXPERTS,
    "gemma3": CONFIGS["gemma3_text"],
    "mistral3": {"model_type": "ministral3", "rope_parameters": ROPE},
    "llava": {"model_type": "ministral3", "rope_parameters": ROPE},
    "pixtral": {"model_type": "mistral"},
}
"""The language part of each, beside what a tiny llama has."""


def as_mlx_community(name: str) -> str:
    return name


def as_first_published(name: str) -> str:
    return name.removeprefix("language_model.")


def as_transformers_now(name: str) -> str:
    inner = name.removeprefix("language_model.")
    return inner.replace("model.", "model.language_model.", 1) if inner.startswith("model.") else inner


def write_vision(folder: Path, kind: str, renamed: Callable[[str], str], *towers: str) -> Path:
    """A checkpoint whose tensors have the names of a layout, with towers of one tensor each."""
    import mlx.core as mx

    text = CONFIGS["llama"] | TEXT[kind]
    config = {"model_type": kind, "text_config": text, "vision_config": {"hidden_size": 24}, "eos_token_id": 257}
    config["tie_word_embeddings"] = text.get("tie_word_embeddings", True)
    CONFIGS[f"vision {kind}"] = config
    try:
        write_tiny(folder, f"vision {kind}")
    finally:
        del CONFIGS[f"vision {kind}"]
    file = str(folder / "model.safetensors")
    weights: Any = {renamed(name): array for name, array in dict(mx.load(file)).items()}
    mx.eval(weights)
    mx.save_safetensors(file, weights | {f"{tower}.patch.weight": mx.zeros((8, 8)) for tower in towers})
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "renamed", "tower"),
    [
        ("qwen2_vl", as_mlx_community, "vision_tower"),
        ("qwen2_vl", as_first_published, "visual"),
        ("qwen2_5_vl", as_transformers_now, "model.visual"),
        ("qwen3_vl", as_transformers_now, "model.visual"),
        ("qwen3_vl_moe", as_mlx_community, "vision_tower"),
        pytest.param("gemma3", as_mlx_community, "multi_modal_projector", marks=pytest.mark.slow),
        ("mistral3", as_transformers_now, "model.vision_tower"),
        ("llava", as_mlx_community, "vision_tower"),
        ("pixtral", as_mlx_community, "vision_tower"),
    ],
)
def test_the_language_part_gives_mlx_lms_tokens(
    tmp_path: Path, kind: str, renamed: Callable[[str], str], tower: str
) -> None:
    from mlx_lm import load

    folder = write_vision(tmp_path / "m", kind, renamed, tower)
    judge, tokenizer = load(str(folder))
    driver = Driver(folder)
    for prompt, mine in zip(PROMPTS, driver.answers(PROMPTS, 5, ignore_eos=False), strict=True):
        assert disagreement(judge, prompt, mine, greedy(judge, tokenizer, prompt, 5)) is None
    first, *why = driver.core.info.notes  # the towers are made up
    assert first == "its language part runs: images are not read"
    assert all(note.startswith("images are not seen: the vision_config") for note in why)
    assert bool(why) == (kind in FAMILIES)


def test_a_layout_that_mlx_lm_does_not_know_is_told_as_that(tmp_path: Path) -> None:
    folder = write_vision(tmp_path / "m", "qwen3_vl_moe", as_first_published, "visual")
    with pytest.raises(ModelCorrupt, match=r"mlx-lm looks for 'language_model'.*'qwen3_vl_moe'.*names its parts"):
        load_model(folder)


def test_an_image_in_a_message_is_refused_and_text_parts_are_read(tmp_path: Path) -> None:
    """The template is the one that processors of images read."""
    folder = write_vision(tmp_path / "m", "qwen2_vl", as_mlx_community, "vision_tower")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.content if m.content is string else '<|image_pad|>' }}{% endfor %}"
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = SharedTokenizer(load_model(folder).tokenizer)
    text = {"type": "text", "text": "Hello"}
    assert tokenize(tokenizer, [{"role": "user", "content": [text, text]}]) == tokenizer.encode("HelloHello")
    with pytest.raises(InvalidRequest, match="part of type 'image'"):
        tokenize(tokenizer, [{"role": "user", "content": [text, {"type": "image", "image": "cat.png"}]}])
