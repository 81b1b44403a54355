"""Record what transformers' own torch models answer to prompts with images. It is no test. In two environments:

    python tests/vision/record_answers.py write FOLDER     # this project's: tiny models, as their makers write them
    python tests/vision/record_answers.py judge FOLDER     # one with torch and transformers 5.24: see `record.py`

The second writes `tests/vision/recorded/answers.json`: for each model and prompt 32 tokens and log-probabilities.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ANSWERS = Path(__file__).parent / "recorded" / "answers.json"
NAMES = ("qwen3_5", "qwen3_vl", "qwen3_5_moe", "qwen3_vl_moe", "mistral3", "llava")
TOKENS = 32


def write(root: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import mlx.core as mx

    from support.models.draft_heads import NORMS, fuse_experts, less_one
    from support.models.sighted import PLACEHOLDER, prepare_prompts, write_sighted

    for name in NAMES:
        made, raw = write_sighted(root / f"{name}-mlx", name), root / name
        tensors, stored = mx.load(str(made / "model.safetensors")), {}
        if name.startswith("qwen3_5"):
            tensors = fuse_experts(less_one(tensors, *NORMS, "model.norm.weight"))
        elif name == "qwen3_vl_moe":
            tensors = {n: v.swapaxes(1, 2) if ".mlp.experts." in n else v for n, v in fuse_experts(tensors).items()}
        for path, value in tensors.items():
            if path.startswith(("vision_tower.", "multi_modal_projector.")):
                path = path.replace("vision_model.", "") if "qwen" not in name else path
                path = f"model.{path}" if "qwen" not in name else path.replace("vision_tower.", "model.visual.")
                value = value.moveaxis(-1, 1) if value.ndim > 3 else value
            else:
                text = path.removeprefix("language_model.")
                path = text.replace("model.", "model.language_model.", 1) if text.startswith("model.") else text
                value = value.moveaxis(1, 2) if "conv1d" in path else value
            stored[path] = mx.contiguous(value)
        raw.mkdir()
        mx.save_safetensors(str(raw / "model.safetensors"), stored, metadata={"format": "pt"})
        (raw / "config.json").write_text((made / "config.json").read_text())
        for number, (tokens, images) in enumerate(prepare_prompts(made, name, 4096)):
            np.savez(
                raw / f"{number}.npz",
                tokens=[PLACEHOLDER if token < 0 else token for token in tokens],
                grids=np.array([image.grid for image in images], np.int64).reshape(-1, 3),
                patches=np.concatenate([image.patches for image in images]) if images else np.zeros((0, 96)),
            )


def judge(root: Path) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PixtralProcessor

    torch.set_grad_enabled(False)
    answers: dict[str, Any] = {}
    for name in NAMES:
        config = json.loads((root / name / "config.json").read_text())
        placeholder = config.get("image_token_id", config.get("image_token_index"))
        if name in ("mistral3", "llava"):
            config |= {"tie_word_embeddings": False, "image_token_id": placeholder}
        else:
            text = {
                key: value
                for key, value in config.get("text_config", config).items()
                if key not in ("vision_config", "image_token_id", "model_type")
            }
            if "qwen3_5" in name:
                kinds, every = ("linear_attention", "full_attention"), config["full_attention_interval"]
                text["layer_types"] = [kinds[(i + 1) % every == 0] for i in range(config["num_hidden_layers"])]
            text["rope_parameters"] = config.get("rope_parameters", config.get("rope_scaling")) | {
                "mrope_interleaved": True
            }
            config = {key: config[key] for key in ("vision_config", "image_token_id")} | {"text_config": text}
            config["tie_word_embeddings"] = text.get("tie_word_embeddings", False)
        config.pop("model_type", None)
        CONFIG_MAPPING[name](**config).save_pretrained(root / name)
        model, result = AutoModelForImageTextToText.from_pretrained(
            root / name, dtype=torch.float32, output_loading_info=True
        )
        model.eval()
        assert not any(result.values()), result
        answers[name] = []
        for file in sorted((root / name).glob("?.npz")):
            shown, answer = np.load(file), []
            ids = torch.tensor(shown["tokens"])[None]
            images = {"pixel_values": torch.tensor(shown["patches"]), "image_grid_thw": torch.tensor(shown["grids"])}
            if name in ("mistral3", "llava"):
                images = pixtral_images(shown, PixtralProcessor, config.get("spatial_merge_size", 1))
            kinds = {} if name in ("mistral3", "llava") else {"mm_token_type_ids": None}
            for _ in range(TOKENS):
                kinds = {each: (ids == placeholder).long() for each in kinds}
                given = images if len(shown["grids"]) else {}
                logits = model(input_ids=ids, use_cache=False, **kinds, **given).logits[0, -1]
                token = int(logits.argmax())
                answer.append((token, float(torch.log_softmax(logits.double(), -1)[token])))
                ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
            answers[name].append(answer)
    ANSWERS.write_text(json.dumps(answers, indent=0) + "\n")


def pixtral_images(shown: Any, processor: Any, merge: int) -> dict[str, Any]:
    """Return a prompt's images as a Pixtral takes them, and check that the text has the tokens of its processor."""
    import torch

    patch = int((shown["patches"].shape[1] // 3) ** 0.5)
    sizes = [(rows * patch, columns * patch) for _, rows, columns in shown["grids"]]
    pixels, at, texts = np.zeros((len(sizes), 3, 64, 64), np.float32), 0, list[str]()
    for number, (height, width) in enumerate(sizes):
        for y in range(0, height, patch):
            for x in range(0, width, patch):
                pixels[number, :, y : y + patch, x : x + patch] = shown["patches"][at].reshape(3, patch, patch)
                at += 1
        judge = SimpleNamespace(patch_size=patch, spatial_merge_size=merge)
        judge.image_token, judge.image_break_token, judge.image_end_token = "IBE"
        texts.append(processor.replace_image_token(judge, {"image_sizes": sizes}, number))
    assert "".join("IBE"[token - 300] for token in shown["tokens"] if 300 <= token < 303) == "".join(texts)
    return {"pixel_values": torch.from_numpy(pixels), "image_sizes": torch.tensor(sizes)}


if __name__ == "__main__":
    {"write": write, "judge": judge}[sys.argv[1]](Path(sys.argv[2]))
