"""What Ollama's API says of models: `/api/tags`, `/api/show` and `/api/ps`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import BodyFields, require_type
from cortexmlx.protocols.request import Body
from cortexmlx.stats import ModelInfo
from cortexmlx.types.progress import Progress

API_VERSION = "0.12.11"
"""The version of Ollama whose API this is: programs refuse to talk to older ones."""

TAG = ":latest"
"""What a name without a tag stands for. Names in lists have it."""

_NEVER = "9000-01-01T00:00:00Z"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LOGIN = frozenset({"insecure", "password", "username"})
_PULL_FIELDS = BodyFields("an /api/pull body", frozenset({"model", "name", "stream"}), _LOGIN, {})
_SHOWN_AS = frozenset({"options", "system", "template", "verbose"})
_SHOW_FIELDS = BodyFields("a /api/show body", frozenset({"model", "name"}), _SHOWN_AS, {})


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model by one of its names."""

    name: str
    parent: str
    """The model that an adapter belongs to; empty for a model."""
    started: int
    """When the server began, in seconds since 1970."""
    memory: int
    """Bytes that it takes when it is loaded, if that is planned; else 0."""
    context_length: int | None
    info: ModelInfo | None
    """None: it was never loaded."""
    skills: Sequence[str] = ()
    """What it can do beside writing text, in Ollama's words: vision, tools, thinking."""

    @property
    def capabilities(self) -> list[str]:
        """What the model can do, in Ollama's words. Whether it embeds texts is known only after it was loaded."""
        is_embedder = self.info is not None and self.info.embedding is not None
        return ["embedding"] if is_embedder else ["completion", *self.skills]


def read_show(body: Mapping[str, Any]) -> object:
    """Return the model name in the body of an `/api/show` call. Raises InvalidRequest."""
    fields = _SHOW_FIELDS.validate(body)
    name = fields.get("model") or fields.get("name")  # Ollama's own command sends both, one of them empty
    if not name:
        raise InvalidRequest("`model` is missing: it is the name of a model", field="model")
    return name


def read_pull(body: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the model name in the body of an `/api/pull` call, and whether to stream. Raises InvalidRequest."""
    fields = _PULL_FIELDS.validate(body)
    name = require_type("model", read_show({"model": fields.get("model") or fields.get("name")}), str, "a text")
    return name, require_type("stream", fields.get("stream", True), bool, "true or false")


def hub_id(name: str) -> str:
    """Return the hub id for the model name of a pull. Raises InvalidRequest if it is none, such as a path."""
    plain_name = name.removesuffix(TAG)
    if not _HUB_ID.fullmatch(plain_name):
        message = f"model is {name!r:.80}, but must be the hub id of a model in mlx-lm's format: org/name"
        raise InvalidRequest(message, field="model")
    return plain_name


def pull_status(name: str, progress: Progress) -> Body:
    """Return a line of a pull's stream: how many of the download's bytes have arrived."""
    return {"status": f"pulling {name}", "digest": name, "total": progress.total, "completed": progress.done}


def list_models(models: Sequence[ModelFacts]) -> Body:
    """Return the body of `/api/tags`: all models that are served."""
    return {"models": [_shared_fields(model) | {"modified_at": _modified_time(model)} for model in models]}


def list_loaded(models: Sequence[ModelFacts]) -> Body:
    """Return the body of `/api/ps`. It does not tell when a model will be unloaded."""
    return {
        "models": [
            {
                **_shared_fields(model),
                "size_vram": _size_bytes(model),
                "expires_at": _NEVER,
                "context_length": model.context_length or 0,
            }
            for model in models
        ]
    }


def show(model: ModelFacts) -> Body:
    """Return the body of `/api/show`: the description of a model."""
    info, architecture = model.info, _details(model)["family"]
    facts: Body = {"general.architecture": architecture, "general.basename": model.name}
    if info is not None:
        facts |= {"general.parameter_count": info.parameters, f"{architecture}.vocab_size": info.vocab_size}
        if info.embedding is not None:
            facts[f"{architecture}.embedding_length"] = info.embedding.dimensions
    if model.context_length is not None:
        facts[f"{architecture}.context_length"] = model.context_length
    return {
        "modelfile": f"FROM {model.name}\n",
        "parameters": "" if info is None else "\n".join(f"{name} {value:g}" for name, value in info.sampling),
        "template": "",
        "license": "",
        "details": _details(model),
        "model_info": facts,
        "capabilities": model.capabilities,
        "modified_at": _modified_time(model),
    }


def _shared_fields(model: ModelFacts) -> Body:
    """Return a model's fields that `/api/tags` and `/api/ps` share. The digest is of the name, not of the files."""
    name = model.name if ":" in model.name else model.name + TAG
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return {
        "name": name,
        "model": name,
        "size": _size_bytes(model),
        "digest": digest,
        "details": _details(model),
        "capabilities": model.capabilities,
    }


def _details(model: ModelFacts) -> Body:
    info = model.info
    family = "unknown" if info is None else info.architecture
    return {
        "parent_model": model.parent,
        "format": "" if info is None else "gguf" if info.path.endswith(".gguf") else "mlx",
        "family": family,
        "families": [family],
        "parameter_size": "" if info is None else _short_count(info.parameters),
        "quantization_level": "" if info is None else info.dtype,
    }


def _size_bytes(model: ModelFacts) -> int:
    return model.memory if model.info is None else model.info.weight_bytes


def _short_count(number: int) -> str:
    """Return a count of parameters in billions or millions, such as "7.6B" or "135M"."""
    return f"{number / 1e9:.1f}B" if number >= 999_500_000 else f"{number / 1e6:.0f}M"


def _modified_time(model: ModelFacts) -> str:
    return datetime.fromtimestamp(model.started, UTC).isoformat().replace("+00:00", "Z")
