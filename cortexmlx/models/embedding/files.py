"""Reads the files in which sentence-transformers says how a model makes embeddings: modules.json, the folders that it
names, and config_sentence_transformers.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortexmlx.errors import EmbeddingRefused, ModelCorrupt
from cortexmlx.models.context import unserved_window
from cortexmlx.models.embedding.causal import check_causal
from cortexmlx.models.embedding.layers import Layer, Normalize, read_dense
from cortexmlx.models.json_file import read_json_object
from cortexmlx.models.messages import one_line, unreadable_message
from cortexmlx.structured.schemas import is_text
from cortexmlx.types.embeddings import EmbeddingInfo

MODULES = "modules.json"

_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The flags that older versions of sentence-transformers write, and the names that newer ones write."""

_COMPUTED = ("lasttoken", "mean", "cls", "weightedmean", "mean_sqrt_len_tokens")

_ENDLESS = 10**9
"""A stated length above this means that there is none."""


@dataclass(frozen=True, eq=False)
class EmbeddingFiles:
    """What a model's files say of its embeddings."""

    pooling: str
    """One of `_COMPUTED`."""
    include_prompt: bool
    """Whether the tokens of the prompt before a text are pooled, too."""
    width: int
    """Numbers of a pooled vector."""
    layers: tuple[Layer, ...]
    """What comes after pooling, in order."""
    prompts: Mapping[str, str]
    default_prompt: str | None
    max_tokens: int | None
    """Tokens that the model was trained for, and that see all before them; None: the context is the only bound."""
    lowercase: bool
    """Whether texts are written in lower case first."""

    def info(self, most_tokens: int) -> EmbeddingInfo:
        """Return what callers see, where no text may have more than `most_tokens` tokens."""
        dense = [layer.weight.shape[0] for layer in self.layers if not isinstance(layer, Normalize)]
        return EmbeddingInfo(
            dimensions=dense[-1] if dense else self.width,
            max_tokens=min(self.max_tokens or most_tokens, most_tokens),
            pooling=self.pooling,
            normalized=self.normalized,
            prompts=self.prompts,
            default_prompt=self.default_prompt,
        )

    @property
    def normalized(self) -> bool:
        """Whether normalization is the last thing that happens to a vector."""
        return bool(self.layers) and isinstance(self.layers[-1], Normalize)


@dataclass(frozen=True)
class LogitScore:
    """The two tokens by whose logits a model judges documents."""

    true_token: int
    false_token: int


def read_modules(folder: Path) -> list[tuple[str, Path]]:
    """Return the modules of a model in order: the name of sentence-transformers' class, and its folder. Empty if there
    is no modules.json. Raises ModelCorrupt.
    """
    path = folder / MODULES
    if not path.is_file():
        return []
    try:
        listed = json.loads(path.read_text("utf-8"))
        modules = [(str(m["type"]).rpartition(".")[2], _inside(folder, str(m.get("path", "")))) for m in listed]
    except OSError as error:
        raise ModelCorrupt(unreadable_message(path, error)) from error
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelCorrupt(f"{path} does not list a model's modules: {one_line(error)}. Download it again.") from error
    if not modules:
        raise ModelCorrupt(f"{path} is an empty list. Download it again.")
    return modules


def read_logit_score(modules: list[tuple[str, Path]]) -> LogitScore | None:
    """Return the tokens that sentence-transformers' LogitScore names; None if a model has no such module. Raises
    EmbeddingRefused if there is only one token.
    """
    if [kind for kind, _ in modules] != ["Transformer", "LogitScore"]:
        return None
    path = modules[1][1] / "config.json"
    config = read_json_object(path)
    ids = [config.get("true_token_id"), config.get("false_token_id")]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids):
        raise EmbeddingRefused(
            f"{path} names {ids[0]} and {ids[1]}, but two tokens are needed: one for yes, one for no"
        )
    return LogitScore(int(str(ids[0])), int(str(ids[1])))


def read_embedding(name: str, folder: Path, config: Mapping[str, Any]) -> EmbeddingFiles:
    """Return what the files in `folder` say of embeddings; `name` and `config` are the model's. Raises
    EmbeddingRefused if they say nothing, or something that this version does not compute, and ModelCorrupt if they
    cannot be read.
    """
    modules = read_modules(folder) if folder.is_dir() else []
    if not modules:
        raise _says_nothing(name, folder)
    check_causal(name, config)
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or modules[0][1] != folder:
        raise EmbeddingRefused(
            f"{name} cannot be embedded with: its {MODULES} lists {', '.join(kinds)}, and this version computes a "
            "Transformer in the model's folder, a Pooling, and Dense, Dropout and Normalize after them"
        )
    pooling, include_prompt, width = _read_pooling(modules[1][1], config)
    layers: list[Layer] = []
    numbers = width
    for kind, where in modules[2:]:
        if kind == "Dense":
            dense = read_dense(where, numbers)
            numbers = dense.weight.shape[0]
            layers.append(dense)
        elif kind == "Normalize":
            layers.append(Normalize())
        elif kind != "Dropout":  # which does nothing outside of training
            raise EmbeddingRefused(
                f"{name} cannot be embedded with: its {MODULES} lists {kind}, and this version computes Dense, Dropout "
                "and Normalize after pooling"
            )
    prompts, default = _read_prompts(folder)
    longest, lowercase = _read_texts(folder)
    if (window := unserved_window(config)) is not None:  # a longer text would have other vectors
        longest = min(longest or window, window)
    return EmbeddingFiles(pooling, include_prompt, width, tuple(layers), prompts, default, longest, lowercase)


def _says_nothing(name: str, folder: Path) -> EmbeddingRefused:
    if not folder.is_dir():
        return EmbeddingRefused(
            f"{name} cannot be embedded with: a GGUF file does not say all of how its vectors are made (pooling, "
            "normalization, prompts). Take the model's folder, with modules.json of sentence-transformers"
        )
    return EmbeddingRefused(
        f"{name} cannot be embedded with: {folder} has no {MODULES}, so nothing says how its vectors are made. If it "
        "was converted from an embedding model, copy modules.json, config_sentence_transformers.json and the folders "
        "that modules.json names (1_Pooling) from the original. A chat model is none: take one such as Qwen3-Embedding"
    )


def _inside(folder: Path, path: str) -> Path:
    """Return a module's folder. Raises ValueError if it is outside of the model's folder."""
    parts = Path(path).parts
    if Path(path).is_absolute() or ".." in parts:
        raise ValueError(f"the path {path!r} leaves the model's folder")
    return folder / path if path else folder


def _read_pooling(folder: Path, config: Mapping[str, Any]) -> tuple[str, bool, int]:
    """Return the pooling, whether the prompt's tokens are pooled, and the width of the pooled vector."""
    path = folder / "config.json"
    said = read_json_object(path)
    modes: Any = said.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _POOLINGS.items() if said.get(flag)]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _COMPUTED:
        named = " and ".join(map(str, modes)) if isinstance(modes, list) and modes else "no pooling"
        raise EmbeddingRefused(f"{path} asks for {named}, and this version computes one of {', '.join(_COMPUTED)}")
    width = said.get("embedding_dimension", said.get("word_embedding_dimension"))
    hidden = None if "text_config" in config else config.get("hidden_size")
    if not isinstance(width, int) or width < 1 or (isinstance(hidden, int) and width != hidden):
        raise ModelCorrupt(f"{path} is for states of {width} numbers, and the model's have {hidden}: take both of one")
    return modes[0], said.get("include_prompt", True) is not False, width


def _read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, None
    said = read_json_object(path)
    kind, prompts, default = said.get("model_type"), said.get("prompts") or {}, said.get("default_prompt_name")
    if kind not in (None, "SentenceTransformer"):
        raise EmbeddingRefused(f"{path} says that the model is a {kind}, and not a SentenceTransformer")
    if not isinstance(prompts, dict) or not all(map(_is_text, (*prompts, *prompts.values()))):
        raise ModelCorrupt(f"the prompts in {path} are not texts by name. Download it again.")
    if default is not None and (not _is_text(default) or default not in prompts):
        raise ModelCorrupt(f"{path} has the default prompt {default!r}, but no prompt of that name. Download it again.")
    return {str(name): text for name, text in prompts.items()}, default


def _is_text(value: object) -> bool:
    return isinstance(value, str) and is_text(value)


def _read_texts(folder: Path) -> tuple[int | None, bool]:
    """Return how many tokens a text may have (None: nothing is said), and whether it is written in lower case."""
    own, tokenizer = folder / "sentence_bert_config.json", folder / "tokenizer_config.json"
    said = read_json_object(own) if own.is_file() else {}
    longest = said.get("max_seq_length")
    if longest is None and tokenizer.is_file():
        longest = read_json_object(tokenizer).get("model_max_length")
    lowercase = said.get("do_lower_case") is True
    if isinstance(longest, int | float) and not isinstance(longest, bool) and 1 <= longest < _ENDLESS:
        return int(longest), lowercase
    return None, lowercase
