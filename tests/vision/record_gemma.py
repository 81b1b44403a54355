"""Record what transformers' own torch models say of tiny models of Gemma 4 and Gemma 3. It is no test. In two
environments:

    python tests/vision/record_gemma.py write FOLDER    # this project's: tiny models, as their makers write them
    python tests/vision/record_gemma.py judge FOLDER    # one with torch and transformers 5.24: see `record.py`
    python tests/vision/record_gemma.py second FOLDER   # the same with mlx-vlm 0.7: how far its features are from those

`judge` writes `tests/vision/recorded/gemma.npz`: for each model the features of images, and for each prompt 32
tokens and their log-probabilities.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

RECORDED = Path(__file__).parent / "recorded" / "gemma.npz"
TOKENS = 32
NAMES = ("gemma3", "gemma4 small", "gemma4 large", "gemma4 unified")


def write(root: Path) -> None:
    import mlx.core as mx

    from support.models.sighted import prepare_prompts
    from support.models.sighted_gemma import CONFIGS, PLACEHOLDER, write_sighted_gemma

    for name, config in CONFIGS.items():
        made, raw = write_sighted_gemma(root / f"{name}-mlx", name), root / name
        stored = {}
        for path, value in mx.load(str(made / "model.safetensors")).items():
            value = value.moveaxis(-1, 1) if value.ndim == 4 else value
            path = path.replace("language_model.model.", "language_model.")
            path = path if path.startswith("language_model.lm_head") else f"model.{path}"
            stored[path.removeprefix("language_model.")] = mx.contiguous(value)
        raw.mkdir()
        mx.save_safetensors(str(raw / "model.safetensors"), stored, metadata={"format": "pt"})
        (raw / "config.json").write_text(json.dumps(config))
        for number, (tokens, images) in enumerate(prepare_prompts(made, config["model_type"], 512)):
            np.savez(
                raw / f"{number}.npz",
                tokens=[PLACEHOLDER if token < 0 else token for token in tokens],
                grids=np.array([image.grid for image in images], np.int64).reshape(-1, 3),
                **{f"patches {index}": image.patches for index, image in enumerate(images)},
            )


def shown_images(file: Any) -> list[tuple[tuple[int, int], np.ndarray]]:
    """The rows and columns of each image's grid, and its patches."""
    return [((int(rows), int(columns)), file[f"patches {i}"]) for i, (_, rows, columns) in enumerate(file["grids"])]


def positions(rows: int, columns: int) -> np.ndarray:
    """The column and the row of each patch."""
    row, column = np.indices((rows, columns)).reshape(2, -1)
    return np.stack([column, row], axis=1)


def square(grid: tuple[int, int], patches: np.ndarray) -> np.ndarray:
    """The pixels `[channels, height, width]` of an image whose patches are those of its tokens."""
    side = int((patches.shape[1] // 3) ** 0.5)
    blocks = patches.reshape(*grid, side, side, 3).transpose(4, 0, 2, 1, 3)
    return blocks.reshape(3, grid[0] * side, grid[1] * side)


def merged(grid: tuple[int, int], patches: np.ndarray) -> tuple[tuple[int, int], np.ndarray]:
    """The same image with one patch for a token of nine."""
    rows, columns, side = grid[0] // 3, grid[1] // 3, int((patches.shape[1] // 3) ** 0.5)
    cut = patches.reshape(rows, 3, columns, 3, side, side, 3).transpose(0, 2, 1, 4, 3, 5, 6)
    return (rows, columns), cut.reshape(rows * columns, -1)


def judge(root: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma4Config,
        Gemma4ForConditionalGeneration,
        Gemma4UnifiedConfig,
        Gemma4UnifiedForConditionalGeneration,
    )

    torch.set_grad_enabled(False)
    recorded: dict[str, Any] = {}
    for folder in sorted(path for path in root.iterdir() if path.name in NAMES):
        config = json.loads((folder / "config.json").read_text())
        is_new, is_unified = config["model_type"] != "gemma3", config["model_type"] == "gemma4_unified"
        text = dict(config.pop("text_config"))
        if not is_new:
            text["layer_types"] = [
                "full_attention" if (i + 1) % text["sliding_window_pattern"] == 0 else "sliding_attention"
                for i in range(text["num_hidden_layers"])
            ]
            text["rope_parameters"] = {
                "full_attention": {"rope_type": "default", "rope_theta": text["rope_theta"]},
                "sliding_attention": {"rope_type": "default", "rope_theta": text["rope_local_base_freq"]},
            }
        kinds: Any = (Gemma4Config, Gemma4ForConditionalGeneration)
        kinds = kinds if is_new else (Gemma3Config, Gemma3ForConditionalGeneration)
        kinds = (Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration) if is_unified else kinds
        weights = load_file(folder / "model.safetensors")
        if is_unified:  # as transformers renames them
            inside = {
                path.replace("embed_vision.", "embed_vision.multimodal_embedder."): v for path, v in weights.items()
            }
            weights = {path.replace("vision_embedder", "embed_vision"): value for path, value in inside.items()}
        tied = "lm_head.weight" not in weights
        vision = config["vision_config"] | ({} if is_new else {"model_type": "siglip_vision_model"})
        config |= {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}
        model = kinds[1](kinds[0](**config)).eval().float()
        result = model.load_state_dict(weights, strict=False)
        assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}, result
        for file in sorted(folder.glob("?.npz")):
            shown = np.load(file)
            images, inputs = shown_images(shown), {}
            images = [merged(*image) for image in images] if is_unified else images
            if images and is_new:
                most = max(len(patches) for _, patches in images) + 9  # patches that stand for nothing follow
                padded = [np.pad(patches, ((0, most - len(patches)), (0, 0))) for _, patches in images]
                places = [
                    np.pad(positions(*grid), ((0, most - len(patches)), (0, 0)), constant_values=-1)
                    for grid, patches in images
                ]
                inputs = {
                    "pixel_values": torch.tensor(np.stack(padded)),
                    "image_position_ids": torch.tensor(np.stack(places)),
                }
            elif images:
                inputs = {"pixel_values": torch.tensor(np.stack([square(*image) for image in images]))}
            if file.stem == "2":  # it has all sizes
                features = model.model.get_image_features(**inputs).pooler_output
                for index, each in enumerate(features):
                    recorded[f"{folder.name} features {index}"] = each.numpy()
            ids, answer = torch.tensor(shown["tokens"])[None], []
            for _ in range(TOKENS):
                types = (ids == 300).long()
                kind = {"mm_token_type_ids" if is_new else "token_type_ids": types}
                if is_unified:  # `forward` alone would show an image's tokens each other in all layers
                    states = model.get_input_embeddings()(ids)
                    place = torch.arange(ids.shape[1])[None]
                    made = model.create_masks_for_generate(model.config, states, None, None, place, types)
                    kind["attention_mask"] = made
                logits = model(input_ids=ids, use_cache=False, **kind, **inputs).logits[0, -1]
                token = int(logits.argmax())
                answer.append((token, float(torch.log_softmax(logits.double(), -1)[token])))
                ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
            recorded[f"{folder.name} {file.stem} answer"] = np.array(answer)
    np.savez_compressed(RECORDED, **recorded)


def second(root: Path) -> None:
    import mlx.core as mx
    from mlx_vlm.models import gemma3, gemma4
    from mlx_vlm.models.gemma3.gemma3 import Gemma3MultiModalProjector

    recorded = np.load(RECORDED)
    for name in NAMES:
        config = json.loads((root / name / "config.json").read_text())
        weights = mx.load(str(root / name / "model.safetensors"))
        if name == "gemma4 unified":
            second_unified(config, weights, shown_images(np.load(root / name / "2.npz")), recorded)
            continue
        module, is_new = (gemma4, True) if config["model_type"] == "gemma4" else (gemma3, False)
        vision = module.VisionConfig.from_dict(config["vision_config"] | {"model_type": config["model_type"]})
        tower, furthest = module.VisionModel(vision), 0.0
        tower = tower if is_new else tower.vision_model
        own = {path.removeprefix("model.vision_tower."): value for path, value in weights.items() if "tower" in path}
        own = own if is_new else {p: v.moveaxis(1, -1) if v.ndim == 4 else v for p, v in own.items()}
        tower.load_weights(list(own.items()))
        for index, (grid, patches) in enumerate(shown_images(np.load(root / name / "2.npz"))):
            if is_new:
                hidden = tower(mx.array(patches)[None], mx.array(positions(*grid))[None])[0]
                normed = mx.fast.rms_norm(hidden, None, 1e-6)
                told = normed @ weights["model.embed_vision.embedding_projection.weight"].T
            else:
                text = config["text_config"] | {"mm_tokens_per_image": 16}
                whole = SimpleNamespace(vision_config=vision, text_config=SimpleNamespace(**text))
                project = Gemma3MultiModalProjector(whole)
                start = "model.multi_modal_projector."
                project.load_weights([(p[len(start) :], v) for p, v in weights.items() if p.startswith(start)])
                told = project(tower(mx.array(square(grid, patches).transpose(1, 2, 0))[None])[0])[0]
            furthest = max(furthest, float(np.abs(np.array(told) - recorded[f"{name} features {index}"]).max()))
        print(f"{name}: mlx-vlm's features are within {furthest:.1e} of transformers'")


def second_unified(config: Any, weights: Any, images: Any, recorded: Any) -> None:
    import mlx.core as mx
    from mlx_vlm.models.gemma4_unified.config import VisionConfig
    from mlx_vlm.models.gemma4_unified.gemma4_unified import VisionEmbedder

    embedder, furthest = VisionEmbedder(VisionConfig.from_dict(config["vision_config"] | {"model_patch_size": 12})), 0.0
    start = "model.vision_embedder."
    embedder.load_weights([(path[len(start) :], v) for path, v in weights.items() if path.startswith(start)])
    for index, image in enumerate(images):
        grid, patches = merged(*image)
        hidden = embedder(mx.array(patches)[None], mx.array(positions(*grid))[None])[0]
        told = mx.fast.rms_norm(hidden, None, 1e-6) @ weights["model.embed_vision.embedding_projection.weight"].T
        wanted = recorded[f"gemma4 unified features {index}"]
        furthest = max(furthest, float(np.abs(np.array(told) - wanted).max()))
    print(f"gemma4 unified: mlx-vlm's features are within {furthest:.1e} of transformers'")


if __name__ == "__main__":
    {"write": write, "judge": judge, "second": second}[sys.argv[1]](Path(sys.argv[2]))
