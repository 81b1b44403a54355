"""The model configuration that a GGUF file's metadata describes, in the words of config.json.

Only what is known to give the same logits is accepted: an architecture, a rope or a head layout that is not served here
is refused by name, never run approximately.
"""

from __future__ import annotations

from typing import Any

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models.gguf.file import GGUFHeader

ARCHITECTURES = ("llama", "qwen2", "qwen3")


class Metadata:
    """Typed look-ups in a GGUF header's metadata; `arch_` ones are prefixed with the architecture's name."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.file = header.path.name
        self.architecture = self.text("general.architecture")

    def _missing(self, key: str) -> ModelCorrupt:
        return ModelCorrupt(f"{self.file} lacks the metadata {key!r}. Convert it again with a current converter.")

    def _wrong(self, key: str, wanted: str) -> ModelCorrupt:
        found = self.header.metadata.get(key)
        shown = f"a list of {len(found)}" if isinstance(found, list) else repr(found)
        return ModelCorrupt(f"{self.file}: the metadata {key!r} is {shown}, not {wanted}.")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.header.metadata.get(key, default)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def integer(self, key: str, default: int | None = None) -> int | None:
        value = self.header.metadata.get(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._wrong(key, "a whole number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.header.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        value = self.header.metadata.get(key, [])
        if not isinstance(value, list) or (value and not isinstance(value[0], kind)):
            raise self._wrong(key, f"a list of {kind.__name__}")
        return value

    def arch_integer(self, key: str, default: int | None = None) -> int:
        full = f"{self.architecture}.{key}"
        if isinstance(self.header.metadata.get(full), list):
            raise ModelUnsupported(f"{self.file}: {full!r} differs from layer to layer, which is not served here.")
        value = self.integer(full, default)
        if value is None:
            raise self._missing(full)
        if not 0 < value < 1 << 31:
            raise self._wrong(full, "a sensible positive number")
        return value

    def arch_number(self, key: str, default: float | None = None) -> float:
        full = f"{self.architecture}.{key}"
        value = self.header.metadata.get(full, default)
        if value is None:
            raise self._missing(full)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._wrong(full, "a positive number")
        return float(value)

    def arch_has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.header.metadata


def model_config(header: GGUFHeader) -> dict[str, Any]:
    """config.json's equivalent for `header`: enough to build mlx-lm's model of that architecture.

    Raises ModelUnsupported for architectures and variants that are not served, ModelCorrupt for missing metadata.
    """
    meta = Metadata(header)
    architecture = meta.architecture
    parts = meta.integer("split.count", 1)
    if parts is not None and parts > 1:
        raise ModelUnsupported(
            f"{meta.file} is one of {parts} parts of a model; join them first: `llama-gguf-split --merge FIRST OUT`."
        )
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelUnsupported(
            f"{meta.file} has the architecture {architecture!r}; GGUF files of {known} are served. "
            "Use the model's original folder or hub id instead."
        )
    if meta.arch_has("expert_count") and meta.header.metadata[f"{architecture}.expert_count"]:
        raise ModelUnsupported(f"{meta.file} is a mixture of experts in GGUF form, which is not served here.")
    heads = meta.arch_integer("attention.head_count")
    kv_heads = meta.arch_integer("attention.head_count_kv", heads)
    hidden = meta.arch_integer("embedding_length")
    if heads > hidden:
        raise ModelCorrupt(f"{meta.file} claims {heads} heads for {hidden} values.")
    head_dim = meta.arch_integer("attention.key_length", hidden // heads)
    if meta.arch_integer("attention.value_length", head_dim) != head_dim:
        raise ModelUnsupported(f"{meta.file} has values of another size than its keys, which is not served here.")
    if head_dim % 2 or heads % kv_heads:
        raise ModelCorrupt(f"{meta.file} claims {heads} heads of {head_dim} values for {kv_heads} key heads.")
    if meta.arch_integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelUnsupported(f"{meta.file} rotates a part of each head only, which is not served here.")
    if architecture == "qwen2" and head_dim * heads != hidden:
        raise ModelUnsupported(f"{meta.file}: qwen2 with heads of {head_dim} values on {hidden} is not served here.")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelCorrupt(f"{meta.file} has no token embedding. Download the file again.")
    config: dict[str, Any] = {
        "model_type": architecture,
        "hidden_size": hidden,
        "num_hidden_layers": meta.arch_integer("block_count"),
        "intermediate_size": meta.arch_integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": meta.arch_number("attention.layer_norm_rms_epsilon"),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": meta.arch_integer("context_length"),
        "rope_theta": meta.arch_number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }
    scaling = _rope_scaling(meta)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


_ROPE_SCALING = "rope.scaling."
_KNOWN_SCALING_KEYS = ("type", "factor", "original_context_length", "finetuned")


def _rope_scaling(meta: Metadata) -> dict[str, Any] | None:
    prefix = f"{meta.architecture}.{_ROPE_SCALING}"
    for key in meta.header.metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in _KNOWN_SCALING_KEYS:
            raise ModelUnsupported(f"{meta.file} sets {key!r}, which is not served here.")
    has_factor = meta.arch_has(f"{_ROPE_SCALING}factor")
    kind = meta.text(f"{prefix}type", "linear" if has_factor else "none")
    if kind == "none":
        return None
    factor = meta.arch_number(f"{_ROPE_SCALING}factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = meta.arch_integer(f"{_ROPE_SCALING}original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelUnsupported(f"{meta.file} uses the rope scaling {kind!r}, which is not served here.")
