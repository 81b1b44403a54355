"""The JSON files of a model's folder, read and checked before a model is built from them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cortexmlx.errors import InvalidRequest, ModelCorrupt, ModelNotFound
from cortexmlx.models.context import of_language
from cortexmlx.models.json_file import read_json_object
from cortexmlx.models.messages import not_readable
from cortexmlx.sampling_params import SamplingParams

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MOST_LAYERS = 4096


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dictionary with a `model_type`. Raises ModelNotFound where there is none, ModelCorrupt if
    broken.
    """
    path = folder / "config.json"
    try:
        there = path.is_file()
    except OSError as error:
        raise ModelCorrupt(not_readable(folder, error)) from error
    if not there:
        gguf = sorted(folder.glob("*.gguf"))
        if (folder / "adapter_config.json").is_file():
            raise ModelNotFound(f"{folder} holds an adapter, not a model: give its model, and --adapter {folder}.")
        if gguf:
            raise ModelNotFound(f"{folder} has no config.json; give one of its files instead, such as {gguf[0]}.")
        if folder.name.startswith("models--") and (folder / "snapshots").is_dir():
            name = folder.name.removeprefix("models--").replace("--", "/", 1)
            raise ModelNotFound(f"{folder} is the hub's cache of {name}: give {name!r} instead.")
        raise ModelNotFound(
            f"{folder} holds no model: there is no config.json in it. Give a folder with config.json and "
            "model*.safetensors, a .gguf file or a hub id."
        )
    config = read_json_object(path)
    if not isinstance(config.get("model_type"), str):
        raise ModelCorrupt(f"{path} does not say which model_type it is.")
    for name, value in _numbers(config):
        if math.isnan(value):
            raise ModelCorrupt(f"{path} says that {name} is not a number (NaN). Download it again.")
    return config


def check_layers(folder: Path, config: Mapping[str, Any], tensors: int) -> None:
    """Raise ModelCorrupt if config.json asks for more layers than the weight files have tensors: building so many would
    take minutes, only to say then that they are missing.
    """
    for name, layers in _stated_layers(config):
        if layers > tensors:
            raise ModelCorrupt(
                f"{folder / 'config.json'} asks for {name}={layers}, but the weights are {tensors} tensors in all: "
                "they are not of the same model."
            )


def check_layers_without_weights(config: Mapping[str, Any]) -> None:
    """The same where there are no weights to tell: raise ModelCorrupt if it asks for more than any model has."""
    for name, layers in _stated_layers(config):
        if layers > _MOST_LAYERS:
            raise ModelCorrupt(f"the configuration asks for {name}={layers}: no model has more than {_MOST_LAYERS}.")


def _stated_layers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for source in of_language(config):
        for name in _LAYERS:
            layers = source.get(name)
            if isinstance(layers, int):
                yield name, layers


def end_ids(folder: Path, config: dict[str, Any]) -> set[int]:
    """All token ids that end a generation, by config.json and generation_config.json together."""
    sources = list(of_language(config))
    generation = folder / "generation_config.json"
    if generation.is_file():
        sources.append(read_json_object(generation))
    found: set[int] = set()
    for source in sources:
        ids = source.get("eos_token_id")
        found.update(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))
    return found


def recommended_sampling(folder: Path) -> tuple[dict[str, float], tuple[str, ...]]:
    """The sampling that a model's makers recommend, as values of `SamplingParams`, and notes of what cannot be used.

    Read from generation_config.json. It recommends greedy answers if it says `do_sample: false`, and nothing if it
    sets none of the values. Raises ModelCorrupt if the file cannot be read.
    """
    path = folder / "generation_config.json"
    said = read_json_object(path) if path.is_file() else {}
    found: dict[str, float] = {}
    unusable = []
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = said.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidRequest:
            unusable.append(f"{name} {json.dumps(value)[:40]}")
        else:
            found[name] = value
    notes = (f"generation_config.json: {', '.join(unusable)} cannot be used",) if unusable else ()
    if said.get("do_sample") is False:
        return {name: value for name, value in found.items() if name == "repetition_penalty"} | {
            "temperature": 0.0
        }, notes
    return ({"temperature": 1.0} | found if found or said.get("do_sample") is True else {}), notes


def left_out(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the model was made for that is not done here: mlx-lm loads the language part of such a checkpoint."""
    parts = {"vision_config": "images", "audio_config": "audio", "video_config": "videos"}
    unread = [what for name, what in parts.items() if isinstance(config.get(name), Mapping)]
    return (f"its language part runs: {' and '.join(unread)} are not read",) if unread else ()


def foreign_quantization(config: Mapping[str, Any]) -> str | None:
    """How the weights are quantized where it was not mlx-lm that did it, in its maker's words; None if they are not."""
    for source in of_language(config):
        settings = source.get("quantization_config")
        if "quantization" not in config and isinstance(settings, Mapping):
            words = (settings.get(name) for name in ("quant_method", "format", "quant_algo"))
            return " ".join(word for word in words if isinstance(word, str)) or "an unnamed way"
    return None


def unsaid(error: Exception, kind: str) -> str | None:
    """What to say of a config.json without settings that mlx-lm has no default for, if that is what its error means."""
    names = re.findall(r"'(\w+)'", str(error)) if isinstance(error, TypeError) and "missing" in str(error) else []
    if not names:
        return None
    return (
        f"does not say {', '.join(names)}, which mlx-lm needs for {kind!r}: it is incomplete, or its maker left that "
        "to other code. Take a model that mlx_lm.convert made."
    )


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The floats in a JSON value, with where they stand."""
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, name)
