"""Load a model from a folder in the hub's layout, through mlx-lm's own loader. Every failure becomes one clear line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cortexmlx.errors import CortexError, ModelCorrupt, ModelUnsupported
from cortexmlx.mlx_lm.package import missing_package, mlx_lm_utils
from cortexmlx.models.embedding import MODULES, lacks_head, load_options
from cortexmlx.models.folder_config import (
    check_layers,
    end_ids,
    foreign_quantization,
    missing_settings,
    read_config,
    unread_inputs,
)
from cortexmlx.models.messages import one_line
from cortexmlx.models.safetensors_check import check_weights
from cortexmlx.models.tokenizers.folder import load_tokenizer
from cortexmlx.types.arrays import dtype_name


def load_folder(
    folder: Path, on_built: Callable[[Any], None] = lambda model: None, *, lazy: bool = False
) -> tuple[Any, Any, dict[str, Any], tuple[str, ...]]:
    """Return the model, tokenizer and config of `folder`, and notes for the user. Weights are evaluated on this thread;
    with `lazy`, they are not evaluated.

    `on_built(model)` is called before the weights are read: their shapes and dtypes are known, and nothing else.

    Raises ModelNotFound if the folder holds no model, and ModelCorrupt for damaged or missing files. Raises
    ModelUnsupported for an architecture that mlx-lm does not have, and for a model that needs code of its own.
    """
    tokenizer, config, notes = read_folder(folder)
    tensors = check_weights(folder)
    if lacks_head(tensors, config, _embeds(folder)):
        notes += ("its weights have no output matrix: it embeds texts, and what it writes means nothing",)
    return _load_weights(folder, config, tensors, on_built, lazy), tokenizer, config, notes


def read_folder(folder: Path) -> tuple[Any, dict[str, Any], tuple[str, ...]]:
    """Return the tokenizer, the config and the notes of `load_folder`, after a check of the weights' files. Raises what
    it raises before it reads weights.
    """
    config = read_config(folder)
    tensors = check_weights(folder)
    if not tensors:
        raise _no_weights(folder)
    check_layers(folder, config, len(tensors))
    if missing := missing_package(config["model_type"]):
        raise _package_error(folder, config, missing)
    eos_ids = end_ids(folder, config)
    # The tokenizer comes first because it fails sooner.
    tokenizer, notes = load_tokenizer(folder, eos_ids)
    return tokenizer, config, (*unread_inputs(config), *notes)


def check_settings(folder: Path) -> None:
    """Raise what `load_folder` would raise because of config.json alone. The weights need not be there yet."""
    config = read_config(folder)
    if missing := missing_package(config["model_type"]):
        raise _package_error(folder, config, missing)
    _check_code(folder, config)
    try:
        mlx_lm_utils()._get_classes(config)
    except Exception as error:
        raise _load_error(folder, config, error) from error


def _package_error(folder: Path, config: dict[str, Any], missing: str) -> ModelUnsupported:
    return ModelUnsupported(f"{folder} cannot run: mlx-lm says of {config['model_type']!r}: {missing}")


def _check_code(folder: Path, config: dict[str, Any]) -> None:
    if config.get("model_file") is not None:
        raise ModelUnsupported(f"{folder} brings its own model code ({config['model_file']}), which is not run.")


def _no_weights(folder: Path) -> CortexError:
    others = sorted({path.suffix for path in folder.iterdir()} & {".bin", ".pt", ".pth", ".gguf", ".npz"})
    if strangers := sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("adapter")):
        return ModelUnsupported(
            f"{folder} has weights in {strangers[0]}, but model*.safetensors are read: if mlx-lm made it, rename it."
        )
    if others:
        return ModelUnsupported(
            f"{folder} has weights in {', '.join(others)} files only; model*.safetensors are read. "
            f"Convert it with `mlx_lm.convert --hf-path {folder} --mlx-path NEW_FOLDER`."
        )
    return ModelCorrupt(f"{folder} has a config.json but no weights (model*.safetensors). Download it again.")


@contextmanager
def unreadable_weights(folder: Path) -> Iterator[None]:
    """Raise ModelCorrupt for what mlx raises in this context when it cannot read weights."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise ModelCorrupt(f"the weights in {folder} cannot be read: {one_line(error)}") from error


def _embeds(folder: Path) -> bool:
    return (folder / MODULES).is_file()


def _load_weights(
    folder: Path, config: dict[str, Any], tensors: Collection[str], on_built: Callable[[Any], None], lazy: bool
) -> Any:
    import mlx.core as mx

    _check_code(folder, config)
    utils = mlx_lm_utils()
    options = load_options(tensors, config, _embeds(folder), utils._get_classes)
    try:
        with unreadable_weights(folder):
            model, _ = utils.load_model(folder, lazy=True, **options)
            on_built(model)
            if not lazy:
                mx.eval(model.parameters())
    except ModelCorrupt:
        raise
    except Exception as error:  # mlx-lm's code raises anything for a configuration that it does not expect
        raise _load_error(folder, config, error) from error
    _check_types(folder, model)
    return model


def _load_error(folder: Path, config: dict[str, Any], error: Exception) -> CortexError:
    kind, why = config["model_type"], one_line(error)
    if why.startswith("Model type"):
        from mlx_lm._version import __version__ as version

        return ModelUnsupported(f"mlx-lm {version} has no architecture {kind!r}, so {folder} cannot run.")
    if quantized := foreign_quantization(config):
        return ModelUnsupported(
            f"{folder} is quantized as {quantized}, which mlx-lm does not read for {kind!r}: {why}. Take one that "
            "mlx_lm.convert made, or convert its original."
        )
    if "nsupported" in why:
        return ModelUnsupported(f"mlx-lm does not load {folder}: {why}")
    if fault := missing_settings(error, kind):
        return ModelCorrupt(f"{folder / 'config.json'} {fault}")
    if isinstance(error, ValueError):
        return ModelCorrupt(
            f"the weights in {folder} do not fit its config.json: {why}. They may be of two models: download it again."
        )
    if isinstance(error, KeyError):
        return ModelCorrupt(
            f"mlx-lm looks for {why} in the config.json or among the weights of {folder}, which {kind!r} needs: one of "
            "the two is incomplete, or names its parts in a way that mlx-lm does not know."
        )
    return ModelCorrupt(f"{folder / 'config.json'} does not describe a model: {why}")


def _check_types(folder: Path, model: Any) -> None:
    """Raise ModelUnsupported for an integer matrix whose layer has no scales. A file may hold the codes of 8-bit floats
    so, and mlx-lm would compute with the codes.
    """
    import mlx.core as mx

    for path, layer in model.named_modules():
        weight = layer.get("weight")
        integers = isinstance(weight, mx.array) and not mx.issubdtype(weight.dtype, mx.floating)
        if integers and not any("scale" in name for name in layer):
            raise ModelUnsupported(
                f"{folder} holds {path}.weight as {dtype_name(weight.dtype)} without scales, "
                "which mlx-lm would take for its numbers. Take one that mlx_lm.convert made."
            )
