"""Embedding models and rerankers: read from sentence-transformers' files how vectors and scores are made. These are
modules.json, the folders that it names, and config_sentence_transformers.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cortexmlx.errors import EmbeddingRefused, ModelCorrupt
from cortexmlx.models.folder_config import ignored_window, language_configs, read_json_object
from cortexmlx.models.messages import one_line, unreadable_message
from cortexmlx.models.safetensors_check import read_safetensors_header
from cortexmlx.structured.schemas import is_text
from cortexmlx.types.embeddings import EmbeddingInfo

MODULES_FILE = "modules.json"

_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The flags that older versions of sentence-transformers write, and the names that newer ones write."""

_SUPPORTED_POOLINGS = ("lasttoken", "mean", "cls", "weightedmean", "mean_sqrt_len_tokens")

_UNLIMITED_LENGTH = 10**9
"""A stated length above this means that there is none."""


@dataclass(frozen=True, eq=False)
class EmbeddingSettings:
    """How a model makes embeddings, from its files: the pooling, the layers after that, prompts and limits."""

    pooling: str
    """One of `_SUPPORTED_POOLINGS`."""
    include_prompt: bool
    """Whether the tokens of the prompt before a text are pooled, too."""
    width: int
    """Numbers of a pooled vector."""
    layers: tuple[EmbeddingLayer, ...]
    """What comes after pooling, in order."""
    prompts: Mapping[str, str]
    default_prompt: str | None
    max_tokens: int | None
    """Tokens that the model was trained for, and that see all before them; None: the context is the only bound."""
    lowercase: bool
    """Whether texts are written in lower case first."""

    def to_info(self, most_tokens: int) -> EmbeddingInfo:
        """Return the public description of the embeddings. No text may have more than `most_tokens` tokens."""
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
        """Whether the last layer scales vectors to length 1."""
        return bool(self.layers) and isinstance(self.layers[-1], Normalize)


@dataclass(frozen=True)
class LogitScore:
    """The ids of the two tokens whose logits a reranker compares: the document fits, or does not."""

    true_token: int
    false_token: int


def read_modules(folder: Path) -> list[tuple[str, Path]]:
    """Return each module's class and folder, in modules.json's order; empty without the file. Raises ModelCorrupt."""
    path = folder / MODULES_FILE
    if not path.is_file():
        return []
    try:
        entries = json.loads(path.read_text("utf-8"))
        modules = [(str(m["type"]).rpartition(".")[2], _module_folder(folder, str(m.get("path", "")))) for m in entries]
    except OSError as error:
        raise ModelCorrupt(unreadable_message(path, error)) from error
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelCorrupt(f"{path} does not list a model's modules: {one_line(error)}. Download it again.") from error
    if not modules:
        raise ModelCorrupt(f"{path} is an empty list. Download it again.")
    return modules


def read_logit_score(modules: list[tuple[str, Path]]) -> LogitScore | None:
    """Return the LogitScore module's two tokens; None without the module. Raises EmbeddingRefused if one is missing."""
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


def read_embedding_settings(name: str, folder: Path, config: Mapping[str, Any]) -> EmbeddingSettings:
    """Read how the model `name` makes embeddings, from `folder` and its `config`. Raises EmbeddingRefused if the files
    do not say it, or ask for what this version does not compute, and ModelCorrupt if they cannot be read.
    """
    modules = read_modules(folder) if folder.is_dir() else []
    if not modules:
        raise _no_settings_error(name, folder)
    check_causal(name, config)
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or modules[0][1] != folder:
        raise EmbeddingRefused(
            f"{name} cannot be embedded with: its {MODULES_FILE} lists {', '.join(kinds)}, and this version computes a "
            "Transformer in the model's folder, a Pooling, and Dense, Dropout and Normalize after them"
        )
    pooling, include_prompt, width = _read_pooling(modules[1][1], config)
    layers: list[EmbeddingLayer] = []
    numbers = width
    for kind, module_folder in modules[2:]:
        if kind == "Dense":
            dense = read_dense(module_folder, numbers)
            numbers = dense.weight.shape[0]
            layers.append(dense)
        elif kind == "Normalize":
            layers.append(Normalize())
        elif kind != "Dropout":  # which does nothing outside of training
            raise EmbeddingRefused(
                f"{name} cannot be embedded with: its {MODULES_FILE} lists {kind}, and this version computes Dense, "
                "Dropout "
                "and Normalize after pooling"
            )
    prompts, default = _read_prompts(folder)
    max_tokens, lowercase = _read_text_settings(folder)
    if (window := ignored_window(config)) is not None:  # a longer text would have other vectors
        max_tokens = min(max_tokens or window, window)
    return EmbeddingSettings(pooling, include_prompt, width, tuple(layers), prompts, default, max_tokens, lowercase)


def _no_settings_error(name: str, folder: Path) -> EmbeddingRefused:
    """Return the error for a model whose files do not say how embeddings are made."""
    if not folder.is_dir():
        return EmbeddingRefused(
            f"{name} cannot be embedded with: it is a GGUF file, which does not say how vectors are made. Take the "
            "folder of an embedding model, such as Qwen3-Embedding: it has a modules.json"
        )
    return EmbeddingRefused(
        f"{name} cannot be embedded with: {folder} has no {MODULES_FILE}, so nothing says how its vectors are made. "
        "If it "
        "was converted from an embedding model, copy modules.json, config_sentence_transformers.json and the folders "
        "that modules.json names (1_Pooling) from the original. A chat model is none: take one such as Qwen3-Embedding"
    )


def _module_folder(folder: Path, path: str) -> Path:
    """Return the folder of a module. Raises ValueError if it is outside the model's folder."""
    parts = Path(path).parts
    if Path(path).is_absolute() or ".." in parts:
        raise ValueError(f"the path {path!r} leaves the model's folder")
    return folder / path if path else folder


def _read_pooling(folder: Path, config: Mapping[str, Any]) -> tuple[str, bool, int]:
    """Return the name of the pooling, whether it includes the prompt's tokens, and the width of the pooled vector."""
    path = folder / "config.json"
    pooling_config = read_json_object(path)
    modes: Any = pooling_config.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _POOLINGS.items() if pooling_config.get(flag)]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _SUPPORTED_POOLINGS:
        modes_text = " and ".join(map(str, modes)) if isinstance(modes, list) and modes else "no pooling"
        raise EmbeddingRefused(
            f"{path} asks for {modes_text}, and this version computes one of {', '.join(_SUPPORTED_POOLINGS)}"
        )
    width = pooling_config.get("embedding_dimension", pooling_config.get("word_embedding_dimension"))
    hidden = None if "text_config" in config else config.get("hidden_size")
    if not isinstance(width, int) or width < 1 or (isinstance(hidden, int) and width != hidden):
        raise ModelCorrupt(f"{path} is for states of {width} numbers, and the model's have {hidden}: take both of one")
    return modes[0], pooling_config.get("include_prompt", True) is not False, width


def _read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default prompt."""
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, None
    prompt_config = read_json_object(path)
    kind, prompts, default = (
        prompt_config.get("model_type"),
        prompt_config.get("prompts") or {},
        prompt_config.get("default_prompt_name"),
    )
    if kind not in (None, "SentenceTransformer"):
        raise EmbeddingRefused(f"{path} says that the model is a {kind}, and not a SentenceTransformer")
    if not isinstance(prompts, dict) or not all(map(_is_text, (*prompts, *prompts.values()))):
        raise ModelCorrupt(f"the prompts in {path} are not texts by name. Download it again.")
    if default is not None and (not _is_text(default) or default not in prompts):
        raise ModelCorrupt(f"{path} has the default prompt {default!r}, but no prompt of that name. Download it again.")
    return {str(name): text for name, text in prompts.items()}, default


def _is_text(value: object) -> bool:
    """Return whether a JSON value is a string of valid text."""
    return isinstance(value, str) and is_text(value)


def _read_text_settings(folder: Path) -> tuple[int | None, bool]:
    """Return the most tokens that a text may have (None if not stated), and whether texts are lower-cased first."""
    config_file, tokenizer_file = folder / "sentence_bert_config.json", folder / "tokenizer_config.json"
    text_config = read_json_object(config_file) if config_file.is_file() else {}
    max_length = text_config.get("max_seq_length")
    if max_length is None and tokenizer_file.is_file():
        max_length = read_json_object(tokenizer_file).get("model_max_length")
    lowercase = text_config.get("do_lower_case") is True
    if isinstance(max_length, int | float) and not isinstance(max_length, bool) and 1 <= max_length < _UNLIMITED_LENGTH:
        return int(max_length), lowercase
    return None, lowercase


# What comes after pooling: dense layers and normalization, in NumPy.


Vectors = npt.NDArray[np.float32]

_MIN_LENGTH = 1e-12
"""A shorter vector is divided by this length, as torch's `normalize` does it, so that zeros stay zeros."""

_ACTIVATIONS: Mapping[str, Callable[[Vectors], Vectors]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
}
"""By the name of torch's class."""


@dataclass(frozen=True)
class Normalize:
    """sentence-transformers' Normalize layer: scales each vector to length 1."""

    def __call__(self, vectors: Vectors) -> Vectors:
        """Return the vectors `[n, width]` with length 1."""
        return normalize(vectors)


@dataclass(frozen=True, eq=False)
class Dense:
    """sentence-transformers' Dense layer: `activation(x @ weight.T + bias)`."""

    weight: Vectors = field(repr=False)
    """`[out, in] float32`."""
    bias: Vectors | None = field(repr=False)
    """`[out] float32`."""
    activation: str
    """The name of torch's class, such as "Tanh"."""

    def __call__(self, vectors: Vectors) -> Vectors:
        """Return the outputs `[n, out]` for `[n, in]`."""
        out = vectors @ self.weight.T
        return _ACTIVATIONS[self.activation](out if self.bias is None else out + self.bias)


EmbeddingLayer = Dense | Normalize


def normalize(vectors: Vectors) -> Vectors:
    """Divide vectors `[n, width]` by their lengths."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    unit: Vectors = (vectors / np.maximum(lengths, _MIN_LENGTH)).astype(np.float32)
    return unit


def read_dense(folder: Path, width: int) -> Dense:
    """Read the Dense layer in `folder`, which takes vectors of `width` numbers. Raises ModelCorrupt if its files are
    damaged, and EmbeddingRefused if this version cannot compute it.
    """
    config = read_json_object(folder / "config.json")
    source, target = (config.get(name, "sentence_embedding") for name in ("module_input_name", "module_output_name"))
    if (source, target if target is not None else source) != ("sentence_embedding", "sentence_embedding"):
        raise EmbeddingRefused(f"{folder} changes {source}, and not the whole vector: this version does not compute it")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        activation_names = ", ".join(_ACTIVATIONS)
        raise EmbeddingRefused(
            f"the activation of {folder} is {activation}, and this version computes {activation_names}"
        )
    file = folder / "model.safetensors"
    if not file.is_file():
        raise EmbeddingRefused(
            f"{folder} has no model.safetensors: other files of weights, such as pytorch_model.bin, may run code and "
            "are not read. Save the model again with sentence-transformers, which writes safetensors"
        )
    tensors = _read_tensors(file)
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    if weight is None or weight.ndim != 2 or weight.shape[1] != width:
        shape_text = "none" if weight is None else f"one of shape {weight.shape}"
        raise ModelCorrupt(f"{file} should have a linear.weight for vectors of {width} numbers, and has {shape_text}")
    if (bias is None) is bool(config.get("bias", True)) or (bias is not None and bias.shape != weight.shape[:1]):
        raise ModelCorrupt(f"the linear.bias in {file} does not fit its config.json and its linear.weight")
    return Dense(weight, bias, activation)


def _read_tensors(file: Path) -> dict[str, Vectors]:
    """Return the tensors of a safetensors file by name, as float32 arrays of NumPy."""
    import mlx.core as mx

    read_safetensors_header(file)
    loaded: Any = mx.load(str(file))
    return {name: np.array(array.astype(mx.float32)) for name, array in loaded.items()}


# How a model judges documents, as Qwen3-Reranker does it: a prompt asks whether a document fits a query, and the logits
# of "yes" and "no" after it are the answer.
#
# The format is that of the model card. Other formats of reranking are refused by name.


DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

_BEGINNING = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_TAGS = ("<|im_start|>", "<|im_end|>", "yes", "no")

_NAME, _TYPE = "qwen3-reranker", "qwen3"

Encode = Callable[[str], list[int]]
"""Returns the tokens of a text without special tokens around it."""


@dataclass(frozen=True)
class RerankerPrompt:
    """The prompt with which a Qwen3-Reranker judges a document, and the tokens of its answers yes and no."""

    yes: int
    """The token for a document that fits."""
    no: int

    def encode_document(
        self, encode: Encode, instruction: str, query: str, document: str, max_tokens: int
    ) -> tuple[list[int], int]:
        """Return the prompt's tokens, cut within the document to `max_tokens`, and how many the uncut prompt has."""
        prefix, suffix = encode(_BEGINNING), encode(_END)
        pair = encode(_format_query(instruction, query, f" {document}"))
        max_pair_tokens = max(max_tokens - len(prefix) - len(suffix), 0)
        return [*prefix, *pair[:max_pair_tokens], *suffix], len(prefix) + len(pair) + len(suffix)

    def encode_shared_prefix(self, encode: Encode, instruction: str, query: str) -> list[int]:
        """Return the tokens with which the prompts for all documents of a query begin."""
        return [*encode(_BEGINNING), *encode(_format_query(instruction, query, ""))]

    def count_fixed_tokens(self, encode: Encode, instruction: str, query: str) -> int:
        """Return how many tokens the prompt takes without its document."""
        return len(self.encode_shared_prefix(encode, instruction, query)) + len(encode(_END))


def read_reranker_prompt(name: str, folder: Path, config: Mapping[str, Any], encode: Encode) -> RerankerPrompt:
    """Return the prompt of the model `name`, which must be a Qwen3-Reranker. Raises EmbeddingRefused if its files, or
    its name, do not say that it is one, and ModelCorrupt if they cannot be read.
    """
    modules = read_modules(folder) if folder.is_dir() else []
    logit_score = read_logit_score(modules)
    has_reranker_name = any(_NAME in part.lower() for part in (name, *folder.parts))
    if logit_score is None and (not has_reranker_name or modules):
        raise EmbeddingRefused(
            f"{name} cannot judge documents: neither its name nor a LogitScore in its modules.json says that it is a "
            "Qwen3-Reranker, and a score of another model would mean nothing. Take a model such as "
            "Qwen/Qwen3-Reranker-0.6B; its folder must keep that name"
        )
    if config.get("model_type") != _TYPE:
        raise EmbeddingRefused(
            f"{name} cannot judge documents: it is of the type {config.get('model_type')}, and only the format of "
            "Qwen3-Reranker is known"
        )
    check_causal(name, config)
    tags = [encode(tag) for tag in _TAGS]
    if any(len(tokens) != 1 for tokens in tags):
        missing_tags = ", ".join(tag for tag, tokens in zip(_TAGS, tags, strict=True) if len(tokens) != 1)
        raise EmbeddingRefused(f"{name} cannot judge documents: its tokenizer has no single token for {missing_tags}")
    yes, no = tags[2][0], tags[3][0]
    if logit_score is not None and (logit_score.true_token, logit_score.false_token) != (yes, no):
        raise EmbeddingRefused(
            f"{name} cannot judge documents: its LogitScore compares the tokens {logit_score.true_token} and "
            f"{logit_score.false_token}, and Qwen3-Reranker {yes} (yes) and {no} (no), so its prompts may differ, too"
        )
    return RerankerPrompt(yes, no)


def _format_query(instruction: str, query: str, document: str) -> str:
    """Return the instruction, query and document as a Qwen3-Reranker's prompt has them."""
    return f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>:{document}"


# Which models attend only backwards, as mlx-lm's classes compute them. Vectors of others would look right and be wrong.


_ENDINGS = ("ForCausalLM", "Model", "LMHeadModel", "ForConditionalGeneration")
"""What transformers puts after a model's name in the name of a class that attends as in text generation."""


def check_causal(name: str, config: Mapping[str, Any]) -> None:
    """Raise EmbeddingRefused unless the model's attention is known to be causal. `name` is the model's, for errors."""
    for part in language_configs(config):
        reasons = [
            f"{key} is {part[key]!r}" for key in ("use_bidirectional_attention", "bidirectional") if part.get(key)
        ]
        reasons += ["is_causal is false"] if part.get("is_causal") is False else []
        reasons += ["is_decoder is false"] if part.get("is_decoder") is False else []
        if reasons:
            raise EmbeddingRefused(
                f"{name} cannot be embedded with: its tokens see later ones ({reasons[0]} in config.json), and this "
                "engine computes text from left to right. Its vectors would look right and be wrong. Take a model "
                "such as Qwen3-Embedding"
            )
    code = config.get("auto_map")
    custom_classes = (
        sorted(str(value) for key, value in code.items() if "Model" in str(key)) if isinstance(code, Mapping) else []
    )
    if custom_classes:
        raise EmbeddingRefused(
            f"{name} cannot be embedded with: it was made with code of its own ({custom_classes[0]}), which is not run "
            "and may attend in another way. Take a model such as Qwen3-Embedding"
        )
    kind, classes = str(config.get("model_type")), config.get("architectures")
    for each in classes if isinstance(classes, list) else ():
        if not _is_causal_class(str(each), kind):
            raise EmbeddingRefused(
                f"{name} cannot be embedded with: it was made for the class {each} (architectures in config.json), "
                f"which is not known to be the causal model of {kind}"
            )


def _is_causal_class(name: str, kind: str) -> bool:
    """Return whether a class name is transformers' causal model of a type, such as Qwen3ForCausalLM of "qwen3"."""
    plain_kind = kind.replace("_", "").replace("-", "").lower()
    names = {plain_kind, plain_kind.removesuffix("text"), plain_kind + "text"}
    return any(name.removesuffix(end).lower() in names for end in _ENDINGS if name.endswith(end))


# Weights of a model without its output matrix, as embedding models are often saved: under the names that transformers'
# AutoModel gives them (`layers.0...`), which mlx-lm's classes do not know (`model.layers.0...`).


_BODY = "model."
_FIRST, _HEAD = "layers.0.", "lm_head."
_HEADLESS_PARTS = {"model", "embed_tokens", "layers", "norm"}
"""The first parts of the names of tensors of a model without its output matrix."""

FindClasses = Callable[[dict[str, Any]], tuple[Any, Any]]
"""mlx-lm's function that finds a model's class, and the class of its arguments, by config.json."""


def headless_load_options(
    tensors: Collection[str], config: Mapping[str, Any], embeds: bool, classes: FindClasses
) -> dict[str, Any]:
    """Return the extra arguments of mlx-lm's `load_model` for a model that was saved without its output matrix, or
    whose weights' names lack the prefix "model."; empty for a whole model.

    embeds: whether the model's files say that it makes embeddings.
    classes: mlx-lm's own function that finds classes.
    """
    flat = any(name.startswith(_FIRST) for name in tensors) and not any(name.startswith(_BODY) for name in tensors)
    options: dict[str, Any] = {}
    if flat:
        options["get_model_classes"] = lambda config: _add_weight_prefix(*classes(config))
    if lacks_head(tensors, config, embeds):
        options["model_config"] = {"tie_word_embeddings": True}
    return options


def lacks_head(tensors: Collection[str], config: Mapping[str, Any], embeds: bool) -> bool:
    """Return whether an embedding model was saved without the output matrix that its `config` promises. It is loaded
    as if its output matrix were its input matrix, which makes no difference to its states.
    """
    is_untied = config.get("tie_word_embeddings") is False
    return embeds and is_untied and {name.partition(".")[0] for name in tensors} <= _HEADLESS_PARTS


def _add_weight_prefix(model_class: Callable[[Any], Any], args_class: Any) -> tuple[Any, Any]:
    """Wrap a model class to load weights whose names lack the prefix "model.". Return it with its arguments' class."""

    def make_model(args: Any) -> Any:
        model = model_class(args)
        class_sanitize = getattr(model, "sanitize", None)
        if not hasattr(model, "model"):
            return model

        def sanitize(weights: dict[str, Any]) -> dict[str, Any]:
            del model.sanitize  # the model is as its class makes it from here on
            prefixed_weights = {key if key.startswith(_HEAD) else _BODY + key: value for key, value in weights.items()}
            return prefixed_weights if class_sanitize is None else dict(class_sanitize(prefixed_weights))

        model.sanitize = sanitize
        return model

    return make_model, args_class
