"""Which models attend only backwards, as mlx-lm's classes compute them. Vectors of others would look right and be
wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortexmlx.errors import EmbeddingRefused
from cortexmlx.models.context import language_configs

_ENDINGS = ("ForCausalLM", "Model", "LMHeadModel", "ForConditionalGeneration")
"""What transformers puts after a model's name in the name of a class that attends as in text generation."""


def check_causal(name: str, config: Mapping[str, Any]) -> None:
    """Raise EmbeddingRefused, with the model's `name` and what its `config` says, if its tokens see later ones, or if
    it was made with code of its own, which is not run.
    """
    for part in language_configs(config):
        said = [f"{key} is {part[key]!r}" for key in ("use_bidirectional_attention", "bidirectional") if part.get(key)]
        said += ["is_causal is false"] if part.get("is_causal") is False else []
        said += ["is_decoder is false"] if part.get("is_decoder") is False else []
        if said:
            raise EmbeddingRefused(
                f"{name} cannot be embedded with: its tokens see later ones ({said[0]} in config.json), and this "
                "engine computes text from left to right. Its vectors would look right and be wrong. Take a model "
                "such as Qwen3-Embedding"
            )
    code = config.get("auto_map")
    own = sorted(str(value) for key, value in code.items() if "Model" in str(key)) if isinstance(code, Mapping) else []
    if own:
        raise EmbeddingRefused(
            f"{name} cannot be embedded with: it was made with code of its own ({own[0]}), which is not run and may "
            "attend in another way. Take a model such as Qwen3-Embedding"
        )
    kind, classes = str(config.get("model_type")), config.get("architectures")
    for each in classes if isinstance(classes, list) else ():
        if not _is_class_of(str(each), kind):
            raise EmbeddingRefused(
                f"{name} cannot be embedded with: it was made for the class {each} (architectures in config.json), "
                f"which is not known to be the causal model of {kind}"
            )


def _is_class_of(name: str, kind: str) -> bool:
    """Return whether a class is transformers' causal model of a type, by its name: such as Qwen3ForCausalLM of
    "qwen3".
    """
    plain = kind.replace("_", "").replace("-", "").lower()
    names = {plain, plain.removesuffix("text"), plain + "text"}
    return any(name.removesuffix(end).lower() in names for end in _ENDINGS if name.endswith(end))
