"""Load a model from a folder in the hub's layout, through mlx-lm's own loader. Every failure becomes one clear line."""

from __future__ import annotations

import glob
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cortexmlx.errors import CortexError, ModelCorrupt, ModelUnsupported
from cortexmlx.mlx_lm.package import import_mlx_lm_utils, missing_package_message
from cortexmlx.models.embedding import MODULES_FILE, headless_load_options, lacks_head
from cortexmlx.models.folder_config import (
    ASSISTANT,
    check_layer_count,
    describe_missing_settings,
    foreign_quantization,
    note_differences_from_transformers,
    note_unread_inputs,
    read_config,
    read_eos_ids,
    translate_settings,
)
from cortexmlx.models.messages import one_line
from cortexmlx.models.safetensors_check import check_weights
from cortexmlx.models.tokenizers.folder import load_tokenizer
from cortexmlx.types.arrays import dtype_name

_EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(\w+\.\w+)")


def load_folder(
    folder: Path, on_built: Callable[[Any], None] = lambda model: None, *, lazy: bool = False
) -> tuple[Any, Any, dict[str, Any], tuple[str, ...]]:
    """Load the model of a folder: return the model, its tokenizer, its config and notes for the user. Weights are
    evaluated on this thread. With `lazy`, for a host that will keep a part of the model, weights are not evaluated,
    and the tokenizer is None.

    `on_built(model)` is called before the weights are read: their shapes and dtypes are known, and nothing else.

    Raises ModelNotFound if the folder holds no model, and ModelCorrupt for damaged or missing files. Raises
    ModelUnsupported for an architecture that mlx-lm does not have, and for a model that needs code of its own.
    """
    tokenizer, config, notes = load_folder_without_weights(folder, tokenizes=not lazy)
    tensors = check_weights(folder)
    if lacks_head(tensors, config, _is_embedding_model(folder)):
        notes += ("its weights have no output matrix: it embeds texts, and what it writes means nothing",)
    return _build_model(folder, config, tensors, on_built, lazy), tokenizer, config, notes


def load_folder_without_weights(folder: Path, *, tokenizes: bool = True) -> tuple[Any, dict[str, Any], tuple[str, ...]]:
    """Return the tokenizer (None unless the caller `tokenizes`), the config and the notes of `load_folder`. The weight
    files are only checked. Raises what `load_folder` raises before it reads weights.
    """
    config = read_config(folder)
    if config["model_type"] == ASSISTANT:
        raise ModelUnsupported(
            f"{folder} is an assistant, which only drafts tokens for a model of Gemma 4: give that model, and --draft "
            f"{folder}."
        )
    tensors = check_weights(folder)
    if not tensors:
        raise _no_weights_error(folder)
    check_layer_count(folder, config, len(tensors))
    if package_message := missing_package_message(config["model_type"]):
        raise _missing_package_error(folder, config, package_message)
    # The tokenizer comes first because it fails sooner.
    tokenizer, notes = load_tokenizer(folder, read_eos_ids(folder, config)) if tokenizes else (None, ())
    return tokenizer, config, (*note_unread_inputs(config), *note_differences_from_transformers(config), *notes)


def check_folder_config(folder: Path) -> None:
    """Check config.json alone, before the weights are downloaded. Raises what `load_folder` would raise for it."""
    config = read_config(folder)
    if config["model_type"] == ASSISTANT:  # mlx-lm has no class for it, and needs none
        return
    if package_message := missing_package_message(config["model_type"]):
        raise _missing_package_error(folder, config, package_message)
    _check_no_own_code(folder, config)
    translate_settings(config)
    try:
        import_mlx_lm_utils()._get_classes(config)
    except Exception as error:
        raise _load_error(folder, config, error) from error


def _missing_package_error(folder: Path, config: dict[str, Any], package_message: str) -> ModelUnsupported:
    """Return the error for a model whose class needs a package that is not installed."""
    return ModelUnsupported(f"{folder} cannot run: mlx-lm says of {config['model_type']!r}: {package_message}")


def _check_no_own_code(folder: Path, config: dict[str, Any]) -> None:
    """Raise ModelUnsupported if the folder brings Python code of its own, which is not run."""
    if config.get("model_file") is not None:
        raise ModelUnsupported(f"{folder} brings its own model code ({config['model_file']}), which is not run.")


def _no_weights_error(folder: Path) -> CortexError:
    """Return the error for a folder without model*.safetensors, with the next step."""
    other_suffixes = sorted({path.suffix for path in folder.iterdir()} & {".bin", ".pt", ".pth", ".gguf", ".npz"})
    if foreign_files := sorted(
        path.name for path in folder.glob("*.safetensors") if not path.name.startswith("adapter")
    ):
        return ModelUnsupported(
            f"{folder} has weights in {foreign_files[0]}, but model*.safetensors are read: if mlx-lm made it, rename "
            "it."
        )
    if other_suffixes:
        return ModelUnsupported(
            f"{folder} has weights in {', '.join(other_suffixes)} files only; model*.safetensors are read. "
            f"Convert it with `mlx_lm.convert --hf-path {folder} --mlx-path NEW_FOLDER`."
        )
    return ModelCorrupt(f"{folder} has a config.json but no weights (model*.safetensors). Download it again.")


@contextmanager
def translate_weight_errors(folder: Path) -> Iterator[None]:
    """Context: turn the errors with which mlx fails to read weights into ModelCorrupt."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise ModelCorrupt(f"the weights in {folder} cannot be read: {one_line(error)}") from error


def _is_embedding_model(folder: Path) -> bool:
    """Return whether the folder is of an embedding model: it has sentence-transformers' modules.json."""
    return (folder / MODULES_FILE).is_file()


class _LiteralPath(type(Path())):  # type: ignore[misc]
    """A folder's path whose own characters are escaped when mlx-lm appends a glob pattern: `m[1]` is no pattern."""

    def __truediv__(self, name: Any) -> Path:
        """Return the path of a file `name` in the folder; if `name` is a pattern, escape the folder's path."""
        return Path(glob.escape(str(self)) if glob.has_magic(name) else self, name)


def _build_model(
    folder: Path, config: dict[str, Any], tensors: Collection[str], on_built: Callable[[Any], None], lazy: bool
) -> Any:
    """Build the model with mlx-lm and load its weights. Raises what `load_folder` documents."""
    import mlx.core as mx

    _check_no_own_code(folder, config)
    utils = import_mlx_lm_utils()
    options = headless_load_options(tensors, config, _is_embedding_model(folder), utils._get_classes)
    prepare = _decode_fp8 if foreign_quantization(config) == "fp8" else _CONVERSIONS.get(config["model_type"])
    if prepare is not None:
        classes = options.get("get_model_classes", utils._get_classes)
        options["get_model_classes"] = lambda config: _wrap_with_prepare(prepare, *classes(config))
    settings = {"model_type": config["model_type"], **translate_settings(config, tensors)}
    options["model_config"] = settings | options.get("model_config", {})
    try:
        with translate_weight_errors(folder):
            model, _ = utils.load_model(_LiteralPath(folder), lazy=True, **options)
            _apply_unread_settings(model, settings | config)
            on_built(model)
            if not lazy:
                mx.eval(model.parameters())
    except ModelCorrupt:
        raise
    except Exception as error:  # mlx-lm's code raises anything for a configuration that it does not expect
        raise _load_error(folder, config, error) from error
    _check_weight_types(folder, model)
    return model


def _apply_unread_settings(model: Any, config: dict[str, Any]) -> None:
    """Apply to a model the settings that mlx-lm's class ignores: `partial_rotary_factor` of `glm`, and `key_multiplier`
    of `falcon_h1`, which multiplies the attention's scale here.
    """
    if config["model_type"] == "glm" and "partial_rotary_factor" in config:
        for layer in model.layers:
            layer.self_attn.rope.dims = int(layer.self_attn.head_dim * config["partial_rotary_factor"])
    if config["model_type"] == "falcon_h1":
        for layer in model.layers:
            layer.self_attn.scale *= config.get("key_multiplier", 1.0)


def _wrap_with_prepare(
    prepare: Callable[[dict[str, Any]], dict[str, Any]], model_class: Callable[[Any], Any], args_class: Any
) -> tuple[Any, Any]:
    """Wrap a model class so that weights go through `prepare` before it loads them. Return it and `args_class`."""

    def make_model(args: Any) -> Any:
        model = model_class(args)
        class_sanitize = getattr(model, "sanitize", dict)

        def sanitize(weights: dict[str, Any]) -> Any:
            del model.sanitize  # the model is as its class makes it from here on
            return class_sanitize(prepare(weights))

        model.sanitize = sanitize
        return model

    return make_model, args_class


def _decode_fp8(weights: dict[str, Any]) -> dict[str, Any]:
    """Decode FP8 matrices that have a single scale: mlx-lm's `ministral3` would take their codes for numbers. Matrices
    with several scales are left to the class.
    """
    import mlx.core as mx

    for name in [name for name in weights if name.endswith("weight_scale_inv") and weights[name].size == 1]:
        scale, matrix = weights.pop(name), name.removesuffix("_scale_inv")
        weights[matrix] = mx.from_fp8(weights[matrix], dtype=mx.bfloat16) * scale.reshape(()).astype(mx.bfloat16)
    return weights


def _transpose_unpacked_experts(weights: dict[str, Any]) -> dict[str, Any]:
    """Transpose gpt-oss's unpacked experts to the layout of packed ones, `[experts, outputs, inputs]`."""
    import mlx.core as mx

    names = [name for name in weights if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]
    return weights | {f"{name}.weight": mx.contiguous(weights.pop(name).swapaxes(1, 2)) for name in names}


def stack_experts(weights: Mapping[str, Any], part: str = "the model", count: int = 0) -> dict[str, Any]:
    """Stack the tensors of experts that are stored one by one, as mlx-lm's `SwitchGLU` has them. Return all tensors.
    Raises ModelCorrupt, which names the `part`, if there are fewer than `count` experts or their shapes differ.
    """
    import mlx.core as mx

    stacked: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = defaultdict(dict)
    for name, value in weights.items():
        if match := _EXPERT.fullmatch(name):
            experts[f"{match[1]}.switch_mlp.{match[3]}"][int(match[2])] = value
        else:
            stacked[name] = value
    for name, values in experts.items():
        count = count or max(values) + 1
        if missing := sorted(set(range(count)) - set(values)):
            raise ModelCorrupt(
                f"{part} lacks {name} of {len(missing)} of {count} experts, for example of expert {missing[0]}. "
                "Download the model again."
            )
        if len(shapes := {value.shape for value in values.values()}) > 1:
            raise ModelCorrupt(f"{part} has {name} of the shapes {sorted(shapes)}. Download the model again.")
        stacked[name] = mx.stack([values[expert] for expert in sorted(values)])
    return stacked


def _transpose_stored_experts(weights: dict[str, Any]) -> dict[str, Any]:
    """Transpose qwen3_vl_moe's experts, if needed, to the first checkpoints' layout `[experts, inputs, outputs]`."""
    for name in [name for name in weights if name.endswith(".experts.down_proj")]:
        upper, router = name.replace("down_proj", "gate_up_proj"), name.replace("experts.down_proj", "gate.weight")
        if weights[name].shape[1] == weights[upper].shape[2] == weights[router].shape[1]:
            weights |= {each: weights[each].swapaxes(1, 2) for each in (name, upper)}
    return weights


_CONVERSIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    **dict.fromkeys(
        ("gemma4", "gemma4_unified"),
        lambda weights: {"language_model." * (name == "lm_head.weight") + name: w for name, w in weights.items()},
    ),
    "gpt2": lambda weights: {name.removeprefix("transformer."): weight for name, weight in weights.items()},
    "gpt_oss": _transpose_unpacked_experts,
    "qwen3_5_moe": lambda weights: stack_experts({n: w for n, w in weights.items() if "mtp." not in n}),
    "qwen3_vl_moe": _transpose_stored_experts,
}
"""By model type, what brings the tensors that transformers saves to the form of the first checkpoints."""


def _load_error(folder: Path, config: dict[str, Any], error: Exception) -> CortexError:
    """Return the error for the exception that mlx-lm raised while it loaded the model."""
    kind, reason = config["model_type"], one_line(error)
    if reason.startswith("Model type"):
        from mlx_lm._version import __version__ as version

        return ModelUnsupported(f"mlx-lm {version} has no architecture {kind!r}, so {folder} cannot run.")
    if quantized := foreign_quantization(config):
        return ModelUnsupported(
            f"{folder} is quantized as {quantized}, which mlx-lm does not read for {kind!r}: {reason}. Take one that "
            "mlx_lm.convert made, or convert its original."
        )
    if "nsupported" in reason:
        return ModelUnsupported(f"mlx-lm does not load {folder}: {reason}")
    if fault := describe_missing_settings(error, kind):
        return ModelCorrupt(f"{folder / 'config.json'} {fault}")
    if isinstance(error, ValueError):
        return ModelCorrupt(
            f"the weights in {folder} do not fit its config.json: {reason}. They may be of two models: download it "
            "again."
        )
    if isinstance(error, KeyError):
        return ModelCorrupt(
            f"mlx-lm looks for {reason} in the config.json or among the weights of {folder}, which {kind!r} needs: one "
            "of the two is incomplete, or names its parts in a way that mlx-lm does not know."
        )
    return ModelCorrupt(f"{folder / 'config.json'} does not describe a model: {reason}")


def _check_weight_types(folder: Path, model: Any) -> None:
    """Raise ModelUnsupported for integer weights without scales: mlx-lm would take 8-bit floats' codes for numbers."""
    import mlx.core as mx

    for path, layer in model.named_modules():
        weight = layer.get("weight")
        integers = isinstance(weight, mx.array) and not mx.issubdtype(weight.dtype, mx.floating)
        if integers and not any("scale" in name for name in layer):
            raise ModelUnsupported(
                f"{folder} holds {path}.weight as {dtype_name(weight.dtype)} without scales, "
                "which mlx-lm would take for its numbers. Take one that mlx_lm.convert made."
            )
