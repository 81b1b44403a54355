"""Weights of a model without its output matrix, as embedding models are often saved: under the names that transformers'
AutoModel gives them (`layers.0...`), which mlx-lm's classes do not know (`model.layers.0...`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

_BODY = "model."
_FIRST, _HEAD = "layers.0.", "lm_head."
_PARTS = {"model", "embed_tokens", "layers", "norm"}
"""The first parts of the names of tensors of a model without its output matrix."""

Classes = Callable[[dict[str, Any]], tuple[Any, Any]]
"""mlx-lm's function that finds a model's class, and the class of its arguments, by config.json."""


def load_options(tensors: Collection[str], config: Mapping[str, Any], embeds: bool, classes: Classes) -> dict[str, Any]:
    """Return the arguments for mlx-lm's `load_model` that a model with these `tensors` needs; none for a whole model.

    embeds: whether the model's files say that it makes embeddings.
    classes: mlx-lm's own function that finds classes.
    """
    flat = any(name.startswith(_FIRST) for name in tensors) and not any(name.startswith(_BODY) for name in tensors)
    options: dict[str, Any] = {}
    if flat:
        options["get_model_classes"] = lambda config: _renaming(*classes(config))
    if lacks_head(tensors, config, embeds):
        options["model_config"] = {"tie_word_embeddings": True}
    return options


def lacks_head(tensors: Collection[str], config: Mapping[str, Any], embeds: bool) -> bool:
    """Return whether a model that makes embeddings was saved without the output matrix that its `config` promises. It
    is loaded as if its output matrix were its input matrix, which makes no difference to its states.
    """
    untied = config.get("tie_word_embeddings") is False
    return embeds and untied and {name.partition(".")[0] for name in tensors} <= _PARTS


def _renaming(model_class: Callable[[Any], Any], args_class: Any) -> tuple[Any, Any]:
    """Return the classes, the first as a function that makes a model to which the names of its weights are adapted."""

    def make(args: Any) -> Any:
        model = model_class(args)
        own = getattr(model, "sanitize", None)
        if not hasattr(model, "model"):
            return model

        def sanitize(weights: dict[str, Any]) -> dict[str, Any]:
            del model.sanitize  # the model is as its class makes it from here on
            named = {key if key.startswith(_HEAD) else _BODY + key: value for key, value in weights.items()}
            return named if own is None else dict(own(named))

        model.sanitize = sanitize
        return model

    return make, args_class
