"""The JSON files of a model's folder, read and checked before a model is built from them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cortexmlx.errors import InvalidRequest, ModelCorrupt, ModelNotFound, ModelUnsupported
from cortexmlx.models.messages import LFS_POINTER, lfs_pointer_message, one_line, unreadable_message
from cortexmlx.types.sampling_params import NUMBERS, SamplingParams

ASSISTANT = "gemma4_assistant"
"""The `model_type` of a folder that only drafts tokens for a model of Gemma 4: see `models/assistant.py`."""

MTP_MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""The `model_type` of models whose checkpoints have a draft head in `mtp.*`."""

LAST_LAYER_MODELS = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")
"""The `model_type` of models whose checkpoints have a draft head as one more layer."""

_NEWER_NAMES = {
    "num_experts": "num_local_experts",
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "n_ctx": "n_positions",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
    "block_dim": "hidden_size",
}
"""What mlx-lm's classes read, and the names under which transformers 5 writes it."""

_PERIODS = dict.fromkeys(("gemma3_text", "cohere2"), "sliding_window_pattern") | dict.fromkeys(
    ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "full_attention_interval"
)
"""By model type, the setting from which mlx-lm counts the layers with full attention: every n-th."""

_SILU: tuple[str, ...] = ("llama", "mistral", "ministral3", "mistral4", "mixtral", "qwen2", "qwen3", "qwen3_moe")
_SILU += ("qwen2_moe", "qwen3_next", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text")
_ONLY: dict[str, dict[str, Any]] = {
    **{kind: {"hidden_act": "silu"} for kind in _SILU},
    **{kind: {"rope_interleave": True} for kind in ("deepseek_v3", "glm4_moe_lite")},
    **{kind: {"layer_norm_epsilon": 1e-5} for kind in ("falcon_mamba", "mamba")},
    "falcon_h1": {"attention_in_multiplier": 1.0},
    "gemma3_text": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gpt2": {"scale_attn_by_inverse_layer_idx": False},
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    "olmoe": {"clip_qkv": None},
}
"""By model type, settings that mlx-lm's class does not read, and the only value for which it computes the model."""

_LIKE_LLAMA = ("llama", "mistral", "ministral3", "mistral4")
_LANGUAGE_PARTS: dict[str, tuple[str, ...]] = dict.fromkeys(("llava", "mistral3", "pixtral"), _LIKE_LLAMA)
"""By the type of models that transformers has with any language part, its types that mlx-lm computes as they are."""

_TEXT_ALONE = ("qwen3_5_text", "qwen3_5_moe_text")
"""What transformers 5 calls the language part that it saves alone. mlx-lm's class of the whole model reads it."""

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MAX_LAYERS = 4096


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises ModelNotFound if it is missing, ModelCorrupt if it is broken or lacks `model_type`."""
    path = folder / "config.json"
    try:
        exists = path.is_file()
    except OSError as error:
        raise ModelCorrupt(unreadable_message(folder, error)) from error
    if not exists:
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
    if config["model_type"] in _TEXT_ALONE:
        config["model_type"] = config["model_type"].removesuffix("_text")
    for name, value in _walk_floats(config):
        if math.isnan(value):
            raise ModelCorrupt(f"{path} says that {name} is not a number (NaN). Download it again.")
    file = folder / "hf_quant_config.json"  # NVIDIA's
    if not config.keys() & {"quantization", "quantization_config"} and file.is_file():
        settings = read_json_object(file).get("quantization")
        config["quantization_config"] = {"quant_method": "modelopt"} | (settings if isinstance(settings, dict) else {})
    return config


def translate_settings(config: Mapping[str, Any], tensors: Collection[str] = ()) -> dict[str, Any]:
    """Translate settings from the names and forms of transformers 5 to those that mlx-lm's classes read. Return
    what to override in `config`: single settings, and all of `text_config`. `tensors` are the weights' names.
    """
    _check_unread_settings(config)
    settings = _translate_rope_settings(config)
    stated = {**settings, **config}
    settings |= {old: stated[new] for old, new in _NEWER_NAMES.items() if new in stated and old not in config}
    layers = config.get("per_layer_config")
    if isinstance(layers, Mapping) and isinstance(layer := next(iter(layers.values()), None), Mapping):
        names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
        settings |= {names[name]: layer[name] for name in names if name in layer}  # it has full attention, as all there
    settings |= _translate_layer_types(config)
    if config.get("model_type") == "qwen3_vl_moe_text":
        settings["norm_topk_prob"] = True  # whatever it says, transformers divides by the sum
    text = config.get("text_config")
    if isinstance(text, Mapping):
        inner = translate_settings(text)
        if "tie_word_embeddings" in config:  # for transformers 5, the outer one counts, but the weights know better
            has_head = any(name.endswith("lm_head.weight") for name in tensors)
            is_tied = config["tie_word_embeddings"] or (tensors and text.get("tie_word_embeddings"))
            inner["tie_word_embeddings"] = bool(is_tied) and not has_head
        if "vocab_size" in text.keys() - config.keys():
            settings["vocab_size"] = text["vocab_size"]
        settings["text_config"] = {**text, **inner}
    return settings


def _check_unread_settings(config: Mapping[str, Any]) -> None:
    """Raise ModelUnsupported for settings that mlx-lm's class ignores, so that it would compute another model."""
    kind, text = str(config.get("model_type")), config.get("text_config")
    for name, only in _ONLY.get(kind, {}).items():
        value = config.get(name, only)
        if value != only and (value, only) != ("swish", "silu"):
            raise ModelUnsupported(
                f"config.json has {name} {json.dumps(value):.60}, but mlx-lm computes {kind} only as with "
                f"{json.dumps(only)}: its answers would be wrong. Run this model with transformers."
            )
    part = text.get("model_type") if isinstance(text, Mapping) else None
    if part is not None and part not in _LANGUAGE_PARTS.get(kind, (part,)):
        raise ModelUnsupported(
            f"the language part is {part!r:.60}, but mlx-lm computes that of {kind!r} as a llama: its answers would be "
            "wrong. Run this model with transformers."
        )


def _translate_layer_types(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `layer_types` as the settings of mlx-lm's class. Raises ModelUnsupported if they cannot express them."""
    kind, layers = str(config.get("model_type")), config.get("layer_types")
    if not isinstance(layers, list) or "full_attention" not in layers:
        return {}
    if kind == "granitemoehybrid":
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        position = config.get("position_embedding_type") or "nope"
        return {"layer_types": [names.get(str(x), x) for x in layers], "position_embedding_type": position}
    if kind == "exaone4" and "sliding_attention" in layers:
        return {"sliding_window_pattern": "".join("G" if layer == "full_attention" else "L" for layer in layers)}
    if kind not in _PERIODS:
        return {}
    full = [i for i, layer in enumerate(layers, 1) if layer == "full_attention"]
    if full != list(range(full[0], len(layers) + 1, full[0])):
        raise ModelUnsupported(
            f"config.json has layer_types with full attention in the layers {full}, but mlx-lm computes {kind} only "
            "with it in every n-th: its answers would be wrong. Run this model with transformers."
        )
    return {_PERIODS[kind]: full[0]}


def _translate_rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of transformers 5's `rope_parameters` under the older names that config.json lacks."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return {}
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    if not isinstance(rope, Mapping):
        return {}
    names = ("rope_theta", "partial_rotary_factor")
    values = {name: rope[name] for name in names if name in rope}
    if isinstance(local, Mapping) and "rope_theta" in local:
        values["rope_local_base_freq"] = local["rope_theta"]
        if local.get("partial_rotary_factor") != rope.get("partial_rotary_factor"):
            values.pop("partial_rotary_factor", None)  # it is not of all layers
    kind = rope.get("rope_type", rope.get("type", "default"))
    values["rope_scaling"] = {"type": kind, **rope} if rope.keys() - {*names, "rope_type", "type"} else None
    return {name: value for name, value in values.items() if config.get(name) is None}


def head_prefix(config: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Return the pattern with which names of the draft head's tensors begin; None if no draft head of the model type is
    known. The pattern allows for converters, which put `language_model.`, `model.` or both before a name.
    """
    kind, layers = config.get("model_type"), config.get("num_hidden_layers")
    if kind in MTP_MODELS:
        return re.compile(r"(?:.*\.)?mtp\.")
    if kind in LAST_LAYER_MODELS and isinstance(layers, int):
        return re.compile(rf"(?:.*\.)?layers\.{layers}\.")
    return None


def is_same_model(config: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two config.json are of the same model, of a kind with a draft head. Quantization may differ."""
    stated = []
    for each in (config, other):
        text = each.get("text_config") or each
        names = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_experts")
        stated.append((each.get("model_type"), *(text.get(name) for name in names)))
    return stated[0] == stated[1] and head_prefix(config) is not None


def has_draft_head(config: Mapping[str, Any], tensors: Iterable[str]) -> bool:
    """Return whether a folder with this config.json and tensors of these names has a draft head of a known kind."""
    prefix = head_prefix(config)
    return prefix is not None and any(map(prefix.match, tensors))


def check_layer_count(folder: Path, config: Mapping[str, Any], tensors: int) -> None:
    """Raise ModelCorrupt if config.json asks for more layers than there are tensors. Building them takes minutes."""
    for name, layers in _stated_layers(config):
        if layers > tensors:
            raise ModelCorrupt(
                f"{folder / 'config.json'} asks for {name}={layers}, but the weights are {tensors} tensors in all: "
                "they are not of the same model."
            )


def check_layer_limit(config: Mapping[str, Any]) -> None:
    """Raise ModelCorrupt for more layers than any model has. For a config without weights; see `check_layer_count`."""
    for name, layers in _stated_layers(config):
        if layers > _MAX_LAYERS:
            raise ModelCorrupt(f"the configuration asks for {name}={layers}: no model has more than {_MAX_LAYERS}.")


def _stated_layers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield each setting that states a number of layers, with that number."""
    for source in language_configs(config):
        for name in _LAYERS:
            layers = source.get(name)
            if isinstance(layers, int):
                yield name, layers


def read_eos_ids(folder: Path, config: dict[str, Any]) -> set[int]:
    """Return all token ids that end a generation, from config.json and generation_config.json."""
    sources = list(language_configs(config))
    generation = folder / "generation_config.json"
    if generation.is_file():
        sources.append(read_json_object(generation))
    eos_ids: set[int] = set()
    for source in sources:
        ids = source.get("eos_token_id")
        eos_ids.update(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))
    return eos_ids


def read_recommended_sampling(folder: Path) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the sampling parameters that a model's makers recommend, and notes on values that cannot be used.

    They are read from generation_config.json. `do_sample: false` there recommends greedy answers. A file that sets none
    of the values recommends nothing. Raises ModelCorrupt if the file cannot be read.
    """
    path = folder / "generation_config.json"
    generation_config = read_json_object(path) if path.is_file() else {}
    recommended: dict[str, float] = {}
    unusable = []
    for name in (name for name, number in NUMBERS.items() if number.recommended):
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidRequest:
            unusable.append(f"{name} {json.dumps(value)[:40]}")
        else:
            recommended[name] = value
    notes = (f"generation_config.json: {', '.join(unusable)} cannot be used",) if unusable else ()
    if generation_config.get("do_sample") is False:
        return {name: value for name, value in recommended.items() if name == "repetition_penalty"} | {
            "temperature": 0.0
        }, notes
    return (
        {"temperature": 1.0} | recommended if recommended or generation_config.get("do_sample") is True else {}
    ), notes


def note_unread_inputs(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note if the model was made for images, audio or videos, too. mlx-lm loads only its language part."""
    parts = {"vision_config": "images", "audio_config": "audio", "video_config": "videos"}
    unread = [input_kind for name, input_kind in parts.items() if isinstance(config.get(name), Mapping)]
    return (f"its language part runs: {' and '.join(unread)} are not read",) if unread else ()


def note_differences_from_transformers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes on what mlx-lm computes in another way than transformers, so that answers differ."""
    kind, window = config["model_type"], ignored_window(config)
    differ = "differ from transformers': mlx-lm"
    notes = {
        f"answers beyond {window} tokens {differ} does not compute the sliding_window": window is not None
        and window < (stated_context_length(config) or 0),
        f"answers {differ} scales the weights of the chosen experts to a sum of 1": kind == "jamba"
        and config.get("num_experts", 16) != 1,
        f"answers {differ} chooses experts without e_score_correction_bias": kind == "ernie4_5_moe",
        f"answers {differ} normalizes the groups of a layer together": kind == "mamba2"
        and config.get("n_groups", 1) != 1,
        f"answers {differ} shows no token of a text those after it": any(
            part.get("use_bidirectional_attention") in (True, "all") for part in language_configs(config)
        ),
    }
    return tuple(note for note, applies in notes.items() if applies)


def foreign_quantization(config: Mapping[str, Any]) -> str | None:
    """Return the name of the weights' quantization if a program other than mlx-lm made it; None otherwise."""
    if (settings := foreign_settings(config)) is None:
        return None
    setting_values = (settings.get(name) for name in ("quant_method", "format", "quant_algo"))
    return " ".join(value for value in setting_values if isinstance(value, str)) or "an unnamed way"


def foreign_settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization settings that a program other than mlx-lm wrote; None if there are none."""
    if "quantization" in config:
        return None
    stated = (source.get("quantization_config") for source in language_configs(config))
    return next((each for each in stated if isinstance(each, Mapping)), None)


def describe_missing_settings(error: Exception, kind: str) -> str | None:
    """Return what to say of a model if the error is about settings that config.json lacks; None for other errors."""
    names = re.findall(r"'(\w+)'", str(error)) if isinstance(error, TypeError) and "missing" in str(error) else []
    if not names:
        return None
    return (
        f"does not say {', '.join(names)}, which mlx-lm needs for {kind!r}: it is incomplete, or its maker left that "
        "to other code. Take a model that mlx_lm.convert made."
    )


def _walk_floats(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield every float in a JSON value with its path, such as `rope_scaling.factor`."""
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _walk_floats(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _walk_floats(item, name)


# The part of a configuration that describes the language model, and the context length that it states.
#
# Both `plan` and the engine use it, so they agree.


_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "model_max_length",
    "seq_length",
    "n_ctx",
)
"""The names that makers of models give to the context length. The first one that is present counts."""

_IGNORED_WINDOWS = {"gemma2", "mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
"""Types of which all or every other layer has the stated window in transformers, and none in mlx-lm."""

DEFAULT_CONTEXT = 2048
"""The context in tokens that is assumed if the configuration states none."""


def language_configs(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return config.json's parts that can describe the language model: top level and `text_config` (empty if none)."""
    text = config.get("text_config")
    return config, text if isinstance(text, Mapping) else {}


def stated_context_length(config: Mapping[str, Any]) -> int | None:
    """Return the context length in tokens that a config.json states; None if it states none."""
    for source in language_configs(config):
        for key in _CONTEXT_KEYS:
            value = source.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def ignored_window(config: Mapping[str, Any]) -> int | None:
    """Return the window of tokens, newest included, that transformers applies but mlx-lm ignores; None without one."""
    for source in language_configs(config):
        value = source.get("sliding_window")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            is_used = source.get("use_sliding_window", str(source.get("model_type")) in _IGNORED_WINDOWS)
            return value if is_used is True else None
    return None


def context_length_or_default(config: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Return the context length in tokens that a config.json states, or the default with a note that it is assumed."""
    context = stated_context_length(config)
    if context is not None:
        return context, ()
    note = f"the model does not state its context length: {DEFAULT_CONTEXT} tokens are assumed"
    return DEFAULT_CONTEXT, (note,)


# JSON files of a model folder.


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that must be a JSON object. Raises ModelCorrupt with the file's name if it is not."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelCorrupt(unreadable_message(path, error)) from error
    if data.startswith(LFS_POINTER):
        raise ModelCorrupt(lfs_pointer_message(path))
    if not data.strip():
        raise ModelCorrupt(f"{path} is empty. Download it again.")
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelCorrupt(f"{path} cannot be read as JSON: {one_line(error)}. Download it again.") from error
    if not isinstance(content, dict):
        raise ModelCorrupt(f"{path} is not a JSON object. Download it again.")
    return content
