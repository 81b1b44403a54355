"""`/api/embed`, and the older `/api/embeddings`: the readers, and the bodies of replies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cortexmlx.protocols.fields import BodyFields, require_type
from cortexmlx.protocols.ollama.chat import OPTIONS
from cortexmlx.protocols.openai import embeddings
from cortexmlx.protocols.openai.embeddings import EmbeddingRequest, encode_vector
from cortexmlx.protocols.request import Body
from cortexmlx.types.embeddings import EmbeddingInfo, Embeddings

URL = "/api/embed"
OLD_URL = "/api/embeddings"

_NO_EFFECT = frozenset({"keep_alive", "model"})
_FIELDS = BodyFields(f"a {URL} body", frozenset({"dimensions", "input", "options", "truncate"}), _NO_EFFECT, {})
_OLD_FIELDS = BodyFields(f"a {OLD_URL} body", frozenset({"options", "prompt"}), _NO_EFFECT, {})


def read(body: Mapping[str, Any], info: EmbeddingInfo | None = None) -> EmbeddingRequest:
    """Parse the JSON body of an `/api/embed` call. Too long texts are cut off, unless the body says otherwise.
    A body without texts asks only to load the model. `info` is the model's. Raises InvalidRequest.
    """
    fields = _FIELDS.validate(body)
    OPTIONS.validate(require_type("options", fields.pop("options", {}), dict, "an object"))
    if fields.get("input", "") in ("", []):
        return EmbeddingRequest(())
    return embeddings.read({"truncate": True, **fields}, info)


def read_old(body: Mapping[str, Any], info: EmbeddingInfo | None = None) -> EmbeddingRequest:
    """Parse the JSON body of an `/api/embeddings` call, which has one text. Raises InvalidRequest."""
    fields = _OLD_FIELDS.validate(body)
    return read({"input": require_type("prompt", fields.get("prompt", ""), str, "a text")}, info)


def reply_without_items(result: Embeddings | None, model: str, load_seconds: float, seconds: float) -> Body:
    """Return the body of a reply without its `embeddings`, for a server that writes them one by one. `result` is None
    if the model was only to be loaded; `load_seconds` are part of the `seconds` of the request.
    """
    return {
        "model": model,
        "total_duration": round(seconds * 1e9),
        "load_duration": round(load_seconds * 1e9),
        "prompt_eval_count": 0 if result is None else sum(result.prompt_tokens),
    }


def embedding_items(result: Embeddings | None) -> Iterator[Any]:
    """Yield the vector of each text."""
    for vector in () if result is None else result.vectors:
        yield encode_vector(vector, packed=False)


def write_old(result: Embeddings | None) -> Body:
    """Return the JSON body of a reply to `/api/embeddings`: the only text's vector."""
    return {"embedding": next(embedding_items(result), [])}
