"""Record what transformers' own torch models answer to prompts with images. It is no test. In two environments:

    python tests/vision/record_answers.py write FOLDER     # this project's: tiny models, as their makers write them
    python tests/vision/record_answers.py judge FOLDER     # one with torch and transformers 5.24: see `record.py`

The second writes `tests/vision/recorded/answers.json`: for each model and prompt twelve tokens and log-probabilities.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ANSWERS = Path(__file__).parent / "recorded" / "answers.json"
NAMES = ("qwen3_5", "qwen3_vl")
TOKENS = 12


def write(root: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import mlx.core as mx

    from cortexmlx.core.prompt import tokenize
    from cortexmlx.models import load_model
    from cortexmlx.models.tokenizers.shared import SharedTokenizer
    from cortexmlx.vision.images import ImageProcessor
    from cortexmlx.vision.reader import ImageReader
    from support.models.draft_heads import NORMS, less_one
    from support.models.sighted import PLACEHOLDER, prompts, write_sighted

    for name in NAMES:
        made, raw = write_sighted(root / f"{name}-mlx", name), root / name
        tensors, stored = mx.load(str(made / "model.safetensors")), {}
        if name == "qwen3_5":
            tensors = less_one(tensors, *NORMS, "model.norm.weight")
        for path, value in tensors.items():
            if path.startswith("vision_tower."):
                path = path.replace("vision_tower.", "model.visual.")
                value = value.moveaxis(-1, 1) if "patch_embed.proj.weight" in path else value
            else:
                text = path.removeprefix("language_model.")
                path = text.replace("model.", "model.language_model.", 1) if text.startswith("model.") else text
                value = value.moveaxis(1, 2) if "conv1d" in path else value
            stored[path] = mx.contiguous(value)
        raw.mkdir()
        mx.save_safetensors(str(raw / "model.safetensors"), stored, metadata={"format": "pt"})
        (raw / "config.json").write_text((made / "config.json").read_text())
        reader = ImageReader(ImageProcessor(made), PLACEHOLDER)
        tokenizer = SharedTokenizer(load_model(made).tokenizer, reader)
        for number, prompt in enumerate(prompts()):
            tokens = list(tokenize(tokenizer, prompt))
            layout = reader.find_images(tokens)
            images = () if layout is None else layout.images
            np.savez(
                raw / f"{number}.npz",
                tokens=[PLACEHOLDER if token < 0 else token for token in tokens],
                grids=np.array([image.grid for image in images], np.int64).reshape(-1, 3),
                patches=np.concatenate([image.patches for image in images]) if images else np.zeros((0, 96)),
            )


def judge(root: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import (
        Qwen3_5Config,
        Qwen3_5ForConditionalGeneration,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )

    torch.set_grad_enabled(False)
    answers: dict[str, Any] = {}
    for name in NAMES:
        config = json.loads((root / name / "config.json").read_text())
        text = {
            key: value for key, value in config.items() if key not in ("vision_config", "image_token_id", "model_type")
        }
        rope, classes = "rope_scaling", (Qwen3VLConfig, Qwen3VLForConditionalGeneration)
        if name == "qwen3_5":
            rope, classes = "rope_parameters", (Qwen3_5Config, Qwen3_5ForConditionalGeneration)
            kinds = ("linear_attention", "full_attention")
            every = config["full_attention_interval"]
            text["layer_types"] = [kinds[(i + 1) % every == 0] for i in range(config["num_hidden_layers"])]
        text["rope_parameters"] = config[rope] | {"mrope_interleaved": True}
        placeholder, tied = config["image_token_id"], config.get("tie_word_embeddings", False)
        model = classes[1](
            classes[0](
                text_config=text,
                vision_config=config["vision_config"],
                image_token_id=placeholder,
                tie_word_embeddings=tied,
            )
        )
        result = model.eval().float().load_state_dict(load_file(root / name / "model.safetensors"), strict=False)
        assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}, result
        answers[name] = []
        for file in sorted((root / name).glob("?.npz")):
            shown, answer = np.load(file), []
            ids = torch.tensor(shown["tokens"])[None]
            images = {"pixel_values": torch.tensor(shown["patches"]), "image_grid_thw": torch.tensor(shown["grids"])}
            for _ in range(TOKENS):
                kinds_of_tokens = (ids == placeholder).long()
                logits = model(
                    input_ids=ids,
                    mm_token_type_ids=kinds_of_tokens,
                    use_cache=False,
                    **(images if len(shown["grids"]) else {}),
                ).logits[0, -1]
                token = int(logits.argmax())
                answer.append((token, float(torch.log_softmax(logits.double(), -1)[token])))
                ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
            answers[name].append(answer)
    ANSWERS.write_text(json.dumps(answers, indent=0) + "\n")


if __name__ == "__main__":
    {"write": write, "judge": judge}[sys.argv[1]](Path(sys.argv[2]))
