"""A folder in the layout of the model hub, through mlx-lm's own loader, with every failure turned into one clear
line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cortexmlx.errors import CortexError, ModelCorrupt, ModelNotFound, ModelUnsupported
from cortexmlx.host.package import missing_package, mlx_lm_utils
from cortexmlx.models.json_file import read_json_object
from cortexmlx.models.messages import one_line
from cortexmlx.models.safetensors_check import check_weights
from cortexmlx.models.tokenizers.exact_text import with_exact_text
from cortexmlx.models.tokenizers.sentencepiece_folder import load_sentencepiece_folder


def load_folder(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Model, tokenizer and config of `folder`; weights are evaluated on this thread.

    Raises ModelNotFound when it holds no model, ModelCorrupt for damaged or missing files, ModelUnsupported for an
    architecture that mlx-lm does not have or a model that wants to run code of its own.
    """
    config = read_config(folder)
    if not check_weights(folder):
        raise _no_weights(folder)
    kind = config["model_type"]
    if missing := missing_package(kind):
        raise ModelUnsupported(f"{folder} cannot run: mlx-lm says of {kind!r}: {missing}")
    eos_ids = end_ids(folder, config)
    # The tokenizer first: it fails sooner.
    tokenizer = _load_tokenizer(folder, eos_ids)
    return _load_weights(folder, config), tokenizer, config


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dictionary with a `model_type`. Raises ModelNotFound where there is none, ModelCorrupt if
    broken.
    """
    path = folder / "config.json"
    if not path.is_file():
        gguf = sorted(folder.glob("*.gguf"))
        if (folder / "adapter_config.json").is_file():
            raise ModelNotFound(f"{folder} holds an adapter, not a model: give its model, and --adapter {folder}.")
        if gguf:
            raise ModelNotFound(f"{folder} has no config.json; give one of its files instead, such as {gguf[0]}.")
        raise ModelNotFound(f"{folder} holds no model: there is no config.json in it.")
    config = read_json_object(path)
    if not isinstance(config.get("model_type"), str):
        raise ModelCorrupt(f"{path} does not say which model_type it is.")
    return config


def end_ids(folder: Path, config: dict[str, Any]) -> set[int]:
    """All token ids that end a generation, by config.json and generation_config.json together."""
    text_config = config.get("text_config")
    sources = [config, text_config if isinstance(text_config, dict) else {}]
    generation = folder / "generation_config.json"
    if generation.is_file():
        sources.append(read_json_object(generation))
    found: set[int] = set()
    for source in sources:
        ids = source.get("eos_token_id")
        found.update(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))
    return found


def _no_weights(folder: Path) -> CortexError:
    others = sorted({path.suffix for path in folder.iterdir()} & {".bin", ".pt", ".pth", ".gguf", ".npz"})
    if others:
        return ModelUnsupported(
            f"{folder} has weights in {', '.join(others)} files only; model*.safetensors are read. "
            f"Convert it with `mlx_lm.convert --hf-path {folder} --mlx-path NEW_FOLDER`."
        )
    return ModelCorrupt(f"{folder} has a config.json but no weights (model*.safetensors). Download it again.")


def _load_tokenizer(folder: Path, eos_ids: set[int]) -> Any:
    if (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file():
        return load_sentencepiece_folder(folder, eos_ids)
    load = mlx_lm_utils().load_tokenizer
    try:
        wrapper = load(folder, {"trust_remote_code": False}, eos_token_ids=sorted(eos_ids) or None)
        return with_exact_text(wrapper)
    except Exception as error:  # transformers and tokenizers raise anything, plain Exception included
        if "trust_remote_code" in str(error):
            raise ModelUnsupported(
                f"the tokenizer in {folder} wants to run code of its own, which is refused."
            ) from error
        raise ModelCorrupt(f"the tokenizer in {folder} cannot be read: {one_line(error)}") from error


def _load_weights(folder: Path, config: dict[str, Any]) -> Any:
    if config.get("model_file") is not None:
        raise ModelUnsupported(f"{folder} brings its own model code ({config['model_file']}), which is not run.")
    try:
        model, _ = mlx_lm_utils().load_model(folder)
        return model
    except ValueError as error:
        if str(error).startswith("Model type"):
            from mlx_lm._version import __version__ as version

            kind = config["model_type"]
            raise ModelUnsupported(f"mlx-lm {version} has no architecture {kind!r}, so {folder} cannot run.") from error
        raise ModelCorrupt(f"the weights in {folder} do not fit its config.json: {one_line(error)}") from error
    except (KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError, AssertionError) as error:
        raise ModelCorrupt(f"{folder / 'config.json'} does not describe a model: {one_line(error)}") from error
    except (RuntimeError, OSError) as error:
        raise ModelCorrupt(f"the weights in {folder} cannot be read: {one_line(error)}") from error
