"""Tiny models that see images, and images to show them."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from cortexmlx.types.images import BidirectionalLayers, PlacedImage, PreparedImage
from support.models.tiny import BASE, write_tiny
from support.models.towers import tower_tensor

VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "hidden_act": "gelu_pytorch_tanh",
}
PLACEHOLDER = 300
ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "patch_size": 4,
    "hidden_act": "silu",
}
SCALED = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
SCALED["original_max_position_embeddings"] = 16
PIXTRALS: dict[str, dict[str, Any]] = {
    "mistral3": {
        "text_config": BASE | {"model_type": "ministral3", "rope_parameters": SCALED, "tie_word_embeddings": False},
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    },
    "llava": {
        "text_config": BASE | {"model_type": "mistral", "tie_word_embeddings": False},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
}
"""Mistral 3 with its own text model, and Pixtral, as config.json states them."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
EXPERTS |= {"mlp_only_layers": [], "norm_topk_prob": True}
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_sighted(
    folder: Path,
    name: str = "qwen3_5",
    vision: dict[str, Any] | None = None,
    most_pixels: int = 64 * 40,
    **changes: Any,
) -> Path:
    """Write the tiny model `name` with a vision tower, whose sizes `vision` changes, and what says how images are
    prepared.
    """
    if name in PIXTRALS:
        return write_pixtral(folder, name, **changes)
    vision = VISION | ({"deepstack_visual_indexes": [0, 1]} if "qwen3_vl" in name else {}) | (vision or {})
    settings = {"vision_config": vision, "image_token_id": PLACEHOLDER, "model_type": name}
    settings |= {"rope_scaling": ROPE, "rope_theta": 100.0} if "qwen3_vl" in name else {"rope_parameters": ROPE}
    if name == "qwen3_vl_moe":
        text = BASE | EXPERTS | settings | {"model_type": "qwen3_moe", "tie_word_embeddings": False}
        settings["text_config"] = {key: value for key, value in text.items() if key != "vision_config"} | changes
    write_tiny(folder, {"qwen3_vl": "qwen3", "qwen3_vl_moe": "llama"}.get(name, name), **settings | changes)
    return add_sight(folder, name, vision, most_pixels)


def write_pixtral(folder: Path, name: str, **changes: Any) -> Path:
    """Write a tiny Mistral 3 or Pixtral, as mlx-vlm converts them. `changes` are its text part's."""
    from cortexmlx.vision.pixtral import PixtralConfig, PixtralTower

    config = PIXTRALS[name] | {"model_type": name, "vision_config": PIXTRAL, "image_token_index": PLACEHOLDER}
    config["text_config"] = config["text_config"] | changes
    write_tiny(folder, "llama", **config)
    tensors = mx.load(str(folder / "model.safetensors"))
    for path, array in tree_flatten(PixtralTower(PixtralConfig.from_config(config)).parameters()):
        part = "" if path.startswith("multi_modal_projector") else "vision_tower.vision_model."
        tensors[part + path] = mx.array(tower_tensor(path, array.shape))
    tensors["language_model.lm_head.weight"][PLACEHOLDER : PLACEHOLDER + 3] = 0
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    settings = {"image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 4, "width": 4}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"size": {"longest_edge": 64}}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for number, text in enumerate(("[IMG]", "[IMG_BREAK]", "[IMG_END]"), PLACEHOLDER):
        tokenizer["model"]["vocab"][text] = tokenizer["model"]["vocab"].pop(f"<unused{number}>")
        tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": number, "content": text})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def add_sight(folder: Path, name: str, vision: dict[str, Any] | None = None, most_pixels: int = 64 * 40) -> Path:
    """Add a vision tower to the model in a folder, and what says how images are prepared."""
    from cortexmlx.vision.qwen import TowerConfig, VisionTower

    if vision is None:
        vision = VISION
        config = json.loads((folder / "config.json").read_text())
        config |= {"vision_config": vision, "image_token_id": PLACEHOLDER, "rope_parameters": ROPE}
        (folder / "config.json").write_text(json.dumps(config))
    tensors = mx.load(str(folder / "model.safetensors"))
    if (head := tensors.get("language_model.lm_head.weight")) is not None:
        head[PLACEHOLDER] = 0  # no answer has it: transformers would look for its image
    for path, array in tree_flatten(VisionTower(TowerConfig.from_config(vision)).parameters()):
        tensors[f"vision_tower.{path}"] = mx.array(tower_tensor(path, array.shape))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    settings = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 4, "merge_size": 2}
    settings |= {"temporal_patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": most_pixels}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class SightedJudge:
    """mlx-lm's own model in one pass over a whole text, whose negative tokens are those of the images in `images`."""

    images: dict[int, Any] = {}  # noqa: RUF012
    """Prepared images, by their first token, of all judges."""

    def __init__(self, model: Any, folder: Path) -> None:
        from cortexmlx.vision.families import FAMILIES

        self._model, self._axes, self._deep = model, None, []
        config = json.loads((folder / "config.json").read_text())
        family = FAMILIES[config["model_type"]]
        self._tower, self._bidirectional = (
            family.read_tower(folder, config, mx.float32),
            family.bidirectional_layers(config),
        )
        assert self._tower is not None
        for index, layer in enumerate(model.layers):
            layer.__class__ = self._deeper(type(layer), index)
            rope = getattr(getattr(layer, "self_attn", None), "rope", None)
            if rope is not None and self._tower.turns_by_axes:
                rope.__class__ = self._turned(type(rope))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        from cortexmlx.vision.qwen import rope_positions
        from cortexmlx.vision.towers import run_pieces

        text = tokens[0].tolist()
        embeddings = self._model.language_model.model.embed_tokens(mx.maximum(tokens, 0))
        spans, self._deep, at = [], [], 0
        of_image = -1 - np.arange(len(text))
        while at < len(text):
            if text[at] >= 0:
                at += 1
                continue
            image = self.images[text[at]]
            end = at + len(image.tokens)
            assert tuple(text[at:end]) == image.tokens
            features, deep = run_pieces(self._tower.see(mx.array(image.patches), image.grid))
            is_image = tokens[0, at:end, None] < 0  # and the ends of rows are not
            embeddings[0, at:end] = mx.where(is_image, features, embeddings[0, at:end])
            of_image[at:end] = at
            self._deep = self._deep or [mx.zeros_like(embeddings) for _ in deep]
            for whole, own in zip(self._deep, deep, strict=True):
                whole[0, at:end] = own
            spans.append(PlacedImage(at, image))
            at = end
        self._axes = rope_positions(len(text), spans)[0]
        tokens, module = mx.maximum(tokens, 0), sys.modules[type(self._model.language_model).__module__]
        with pytest.MonkeyPatch.context() as patch:
            if self._bidirectional is not BidirectionalLayers.NONE:
                patch.setattr(module, "create_attention_mask", partial(self._mask, of_image))
            logits: mx.array = self._model(tokens, cache=cache, input_embeddings=embeddings)
        return logits

    def _mask(self, of_image: Any, h: mx.array, cache: Any = None, window_size: int | None = None) -> mx.array:
        query, token = np.arange(len(of_image))[:, None], np.arange(len(of_image))
        seen = token <= query
        if window_size or self._bidirectional is BidirectionalLayers.ALL:
            seen |= of_image[:, None] == of_image
        return mx.array(seen & (token > query - (window_size or len(of_image))))

    def _deeper(self, kind: Any, index: int) -> Any:
        class Deeper(kind):  # type: ignore[misc]
            def __call__(module, *inputs: Any, **options: Any) -> Any:
                out = super().__call__(*inputs, **options)
                return out + self._deep[index] if index < len(self._deep) else out

        return Deeper

    def _turned(self, kind: Any) -> Any:
        from cortexmlx.vision.qwen import rotate

        class Turned(kind):  # type: ignore[misc]
            def __call__(module, x: mx.array, offset: int = 0) -> Any:
                flat = x[0].swapaxes(0, 1)[:, :, None]  # as `rotate` has it: each token is a row of its own
                turned = rotate(flat, mx.array(self._axes), ROPE["mrope_section"], module.dims, super().__call__)
                return turned[:, :, 0].swapaxes(0, 1)[None]

        return Turned


def picture(width: int, height: int, seed: int = 0) -> Any:
    """A PIL image of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def shown(text: str, *images: Any) -> dict[str, Any]:
    """A user's message of images and a text."""
    parts: list[Any] = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def prompts() -> list[list[dict[str, Any]]]:
    """Prompts with none, one, three, two and four images, one of them twice, the four of different sizes."""
    first, wide, square, tall = picture(24, 32, 0), picture(64, 16, 1), picture(32, 32, 2), picture(8, 48, 3)
    return [
        [{"role": "user", "content": "plain text"}],
        [shown("what?", first)],
        [shown("a", first, wide), {"role": "assistant", "content": "then"}, shown("b?", square)],
        [shown("x " * 40, wide), {"role": "assistant", "content": "so"}, shown("tell", wide)],
        [shown("all", tall, wide), {"role": "assistant", "content": "of"}, shown("four", square, first)],
    ]


def prepare_prompts(folder: Path, name: str, step_tokens: int) -> Iterator[tuple[list[int], Sequence[PreparedImage]]]:
    """Yield the tokens of each of `prompts` for the model in `folder`, of the family `name`, and the images in it."""
    from cortexmlx.core.prompt import tokenize
    from cortexmlx.models import load_model
    from cortexmlx.models.tokenizers.shared import SharedTokenizer
    from cortexmlx.vision.families import FAMILIES

    loaded, family = load_model(folder), FAMILIES[name]
    reader = family.make_reader(loaded, family.read_tower(folder, loaded.config, mx.float32), step_tokens)
    tokenizer = SharedTokenizer(loaded.tokenizer, reader)
    for prompt in prompts():
        tokens = list(tokenize(tokenizer, prompt))
        layout = reader.find_images(tokens)
        yield tokens, () if layout is None else layout.images


SIZES = ((8, 8), (16, 16), (16, 16), (16, 16), (24, 16), (32, 8), (16, 40), (32, 32))
"""Of the pictures in prompts. Three are of one size. They have 1 to 16 tokens, or as many as the processor makes."""


@cache
def pictures() -> tuple[bytes, ...]:
    """The files."""
    files = []
    for number, (width, height) in enumerate(SIZES):
        picture(width, height, number).save(file := io.BytesIO(), "PNG")
        files.append(file.getvalue())
    return tuple(files)


def show(driver: Any) -> list[tuple[int, ...]]:
    """Have the reader of a driver's engine know all pictures. Return their tokens."""
    reader = driver.core.model.images
    assert reader is not None
    reader.begin()
    images: list[Any] = []
    for file in pictures():
        reader.write({"type": "image", "image": file})
        images.append(reader._thread.written[-1])
    SightedJudge.images |= {image.tokens[0]: image for image in images}
    return [image.tokens for image in images]
