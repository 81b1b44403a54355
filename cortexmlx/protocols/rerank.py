"""`/v1/rerank`: the reader, and the parts of a reply, as Cohere, Jina and vLLM have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import (
    BodyFields,
    UnservedField,
    prefix_error_field,
    reject_unknown_fields,
    require_type,
)
from cortexmlx.protocols.openai.embeddings import read_truncate, require_text, usage_body
from cortexmlx.protocols.request import Body
from cortexmlx.types.embeddings import Reranking

URL = "/v1/rerank"
URLS = (URL, "/rerank", "/v2/rerank")
"""The same under the names that clients of vLLM and of Cohere use."""

MAX_DOCUMENTS = 2048
"""Documents of one request."""

_NO_CHUNKS = "documents are scored as a whole: with `truncate`, what is too long is cut off"

UNSERVED: Mapping[str, UnservedField] = {
    "max_chunks_per_doc": UnservedField(_NO_CHUNKS, (1,)),
    "max_tokens_per_doc": UnservedField(_NO_CHUNKS),
    "priority": UnservedField("requests of a client go in order", (0,)),
    "rank_fields": UnservedField("a document is its `text`", (["text"],)),
    "truncation_side": UnservedField("`truncate` cuts off the end", ("right",)),
    "use_activation": UnservedField("scores are between 0 and 1", (True,)),
}

FIELDS = BodyFields(
    f"a {URL} body",
    frozenset({"documents", "instruction", "query", "return_documents", "top_n", "truncate", "truncate_prompt_tokens"}),
    frozenset({"cache_salt", "metadata", "model", "request_id", "user"}),
    UNSERVED,
)


@dataclass(frozen=True)
class RerankRequest:
    """A checked request to score documents by how well they answer a query."""

    query: str
    documents: tuple[str, ...]
    instruction: str | None = None
    """What makes a document relevant; None: the model's own words."""
    top_n: int | None = None
    """How many results are returned, the best ones; None: all."""
    return_documents: bool = True
    """Whether results repeat their documents."""
    truncate: bool = False
    """Whether documents that are too long are cut off. False: they are refused."""


def read(body: Mapping[str, Any], max_tokens: int | None = None) -> RerankRequest:
    """Parse the JSON body of a `/v1/rerank` call. `max_tokens` is the model's own limit; None: not known yet. Raises
    InvalidRequest.
    """
    said = FIELDS.validate(body)
    return RerankRequest(
        _read_text(said, "query"),
        _read_documents(said.get("documents")),
        _read_text(said, "instruction") if "instruction" in said else None,
        _read_top_n(said.get("top_n")),
        require_type("return_documents", said.get("return_documents", True), bool, "true or false"),
        read_truncate(said, max_tokens),
    )


def result_items(request: RerankRequest, made: Reranking) -> Iterator[Body]:
    """Yield the items of the `top_n` best documents, the best first; equal scores keep the documents' order."""
    order = sorted(range(len(made.scores)), key=lambda place: -made.scores[place])
    return (_result_item(request, place, made.scores[place]) for place in order[: request.top_n])


def reply_without_items(made: Reranking, model: str, id: str) -> Body:
    """Return the body of a reply without its `result_items`, for a server that writes them one by one."""
    usage = usage_body(made.prompt_tokens, made.cached_tokens)
    return {"id": f"rerank-{id}", "object": "list", "model": model, "usage": usage}


def _result_item(request: RerankRequest, place: int, score: float) -> Body:
    """Return the item of one document: its index and score, and its text if asked for."""
    document = {"document": {"text": request.documents[place]}} if request.return_documents else {}
    return {"index": place, "relevance_score": score, **document}


def _read_text(said: Mapping[str, Any], name: str) -> str:
    """Return a field that must be a text. Raises InvalidRequest."""
    if name not in said:
        raise InvalidRequest(f"`{name}` is missing", field=name)
    with prefix_error_field(name):
        if not isinstance(said[name], str):
            raise InvalidRequest(f"`{name}` is {said[name]!r:.80}, but must be a text")
        return require_text(said[name], f"`{name}`")


def _read_documents(given: Any) -> tuple[str, ...]:
    """Return the texts in the field `documents`. Raises InvalidRequest."""
    with prefix_error_field("documents"):
        if given is None or given == []:
            raise InvalidRequest("`documents` is missing" if given is None else "`documents` is empty")
        if not isinstance(given, list):
            raise InvalidRequest(f"`documents` is {given!r:.80}, but must be a list of texts")
        if len(given) > MAX_DOCUMENTS:
            message = f"`documents` has {len(given):,}, but must have {MAX_DOCUMENTS:,} at most: send several requests"
            raise InvalidRequest(message)
        return tuple(_read_document(each, place) for place, each in enumerate(given))


def _read_document(given: Any, place: int) -> str:
    """Return the text of one document, which may be an object with a `text`. Raises InvalidRequest."""
    with prefix_error_field(f"[{place}]"):
        if isinstance(given, Mapping):
            reject_unknown_fields(given, ("text",), "a document")
            given = given.get("text")
        if not isinstance(given, str):
            raise InvalidRequest(f"document {place} is {given!r:.80}, but must be a text, or an object with a `text`")
        return require_text(given, f"document {place}")


def _read_top_n(count: Any) -> int | None:
    """Return how many results `top_n` asks for; None: all. 0 means all, as in vLLM. Raises InvalidRequest."""
    if count is None:
        return None
    if type(count) is not int or count < 0:
        raise InvalidRequest(f"top_n is {count!r:.80}, but must be an integer above 0, or 0 for all", field="top_n")
    return count or None
