"""Load the tokenizer of a model's folder with mlx-lm's loader or sentencepiece. The folder's own code is never run.

What cannot be read is refused with the name of its file, and with what can be read instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cortexmlx.errors import CortexError, ModelCorrupt, ModelUnsupported
from cortexmlx.host.package import mlx_lm_utils
from cortexmlx.models.json_file import read_json_object
from cortexmlx.models.messages import logged, one_line
from cortexmlx.models.tokenizers.exact_text import use_exact_detokenizer
from cortexmlx.models.tokenizers.sentencepiece_folder import load_sentencepiece_folder
from cortexmlx.models.tokenizers.templates import use_default_template

_PLAIN = "glm4"
"""A tokenizer type for which transformers reads tokenizer.json as it is, whatever class the folder asks for."""

_TIKTOKEN = "a tiktoken vocabulary, which says nothing of how text is cut into words: that is in Python code"
"""Why a tiktoken file alone is not enough."""


def load_tokenizer(folder: Path, eos_ids: set[int]) -> tuple[Any, tuple[str, ...]]:
    """Return the tokenizer of `folder`, with notes for the user. `eos_ids` are the ids that end a generation by the
    model's configuration.

    Raises ModelCorrupt if its files cannot be read, and ModelUnsupported if they need code, which is not run.
    """
    if (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file():
        return load_sentencepiece_folder(folder, eos_ids), ()
    notes: tuple[str, ...] = ()
    mlx_lm_utils()  # this imports transformers, so its logger exists from here on
    try:
        with logged("transformers"):
            try:
                wrapper = _load(folder, eos_ids)
            except ValueError as error:
                if "trust_remote_code" not in str(error) or not (folder / "tokenizer.json").is_file():
                    raise
                wrapper = _load(folder, eos_ids, tokenizer_type=_PLAIN)
                notes += ("its tokenizer's own Python code is not run: tokenizer.json is read as it is",)
        tokenizer = use_exact_detokenizer(wrapper)
    except Exception as error:  # transformers and tokenizers raise anything, plain Exception included
        raise _unreadable(folder, error) from error
    return tokenizer, notes + use_default_template(tokenizer, folder)


def _load(folder: Path, eos_ids: set[int], **options: Any) -> Any:
    settings = {"trust_remote_code": False, **options}
    return mlx_lm_utils().load_tokenizer(folder, settings, eos_token_ids=sorted(eos_ids) or None)


def _unreadable(folder: Path, error: Exception) -> CortexError:
    if _is_config_error(folder, error):
        return ModelCorrupt(f"{folder / 'config.json'} does not describe a model: {one_line(error)}")
    if (folder / "tokenizer.json").is_file():
        return _damaged(folder, error)
    advice = "Take a folder with tokenizer.json or a sentencepiece tokenizer.model."
    if tiktoken := [*folder.glob("*.tiktoken"), *folder.glob("tiktoken.model")]:
        return ModelUnsupported(f"{tiktoken[0]} is {_TIKTOKEN}, which is not run. {advice}")
    if (folder / "tekken.json").is_file():
        return ModelUnsupported(f"{folder / 'tekken.json'} is a tokenizer of the mistral-common package only. {advice}")
    if "trust_remote_code" in str(error):
        return ModelUnsupported(f"the tokenizer in {folder} wants to run code of its own, which is refused. {advice}")
    if (folder / "tokenizer.json").is_dir():
        return ModelCorrupt(f"{folder / 'tokenizer.json'} is a folder, and should be a file: download the model again.")
    if not any((folder / name).is_file() for name in ("vocab.json", "vocab.txt")):
        return ModelCorrupt(
            f"{folder} has no tokenizer: no tokenizer.json in it, and no tokenizer.model. Download it again."
        )
    return _damaged(folder, error)


def _damaged(folder: Path, error: Exception) -> ModelCorrupt:
    """Return the error for the file that is not valid JSON, otherwise an error with what the tokenizer's library
    says.
    """
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            try:
                read_json_object(folder / name)
            except ModelCorrupt as damage:
                return damage
    return ModelCorrupt(f"the tokenizer in {folder} cannot be read: {one_line(error)}. Download it again.")


def _is_config_error(folder: Path, error: Exception) -> bool:
    """Return whether the error is about config.json, which transformers reads before a tokenizer's files."""
    from transformers import AutoConfig

    try:
        with logged("transformers"):
            AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as again:  # a configuration's class raises anything
        return "trust_remote_code" not in str(again) and str(again) == str(error)
    return False
