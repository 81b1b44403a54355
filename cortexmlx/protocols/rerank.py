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
    """Parse a `/v1/rerank` body. `max_tokens` is the model's own limit; None: not known yet. Raises InvalidRequest."""
    fields = FIELDS.validate(body)
    return RerankRequest(
        _read_text(fields, "query"),
        _read_documents(fields.get("documents")),
        _read_text(fields, "instruction") if "instruction" in fields else None,
        _read_top_n(fields.get("top_n")),
        require_type("return_documents", fields.get("return_documents", True), bool, "true or false"),
        read_truncate(fields, max_tokens),
    )


def result_items(request: RerankRequest, reranking: Reranking) -> Iterator[Body]:
    """Yield the items of the `top_n` best documents, the best first; equal scores keep the documents' order."""
    order = sorted(range(len(reranking.scores)), key=lambda place: -reranking.scores[place])
    return (_result_item(request, index, reranking.scores[index]) for index in order[: request.top_n])


def reply_without_items(reranking: Reranking, model: str, id: str) -> Body:
    """Return the body of a reply without its `result_items`, for a server that writes them one by one."""
    usage = usage_body(reranking.prompt_tokens, reranking.cached_tokens)
    return {"id": f"rerank-{id}", "object": "list", "model": model, "usage": usage}


def _result_item(request: RerankRequest, index: int, score: float) -> Body:
    """Return a reply's item for one document: its index and score, and its text if asked for."""
    document = {"document": {"text": request.documents[index]}} if request.return_documents else {}
    return {"index": index, "relevance_score": score, **document}


def _read_text(fields: Mapping[str, Any], name: str) -> str:
    """Return a field that must be a text. Raises InvalidRequest."""
    if name not in fields:
        raise InvalidRequest(f"`{name}` is missing", field=name)
    with prefix_error_field(name):
        if not isinstance(fields[name], str):
            raise InvalidRequest(f"`{name}` is {fields[name]!r:.80}, but must be a text")
        return require_text(fields[name], f"`{name}`")


def _read_documents(documents: Any) -> tuple[str, ...]:
    """Return the texts in the field `documents`. Raises InvalidRequest."""
    with prefix_error_field("documents"):
        if documents is None or documents == []:
            raise InvalidRequest("`documents` is missing" if documents is None else "`documents` is empty")
        if not isinstance(documents, list):
            raise InvalidRequest(f"`documents` is {documents!r:.80}, but must be a list of texts")
        if len(documents) > MAX_DOCUMENTS:
            message = (
                f"`documents` has {len(documents):,}, but must have {MAX_DOCUMENTS:,} at most: send several requests"
            )
            raise InvalidRequest(message)
        return tuple(_read_document(each, index) for index, each in enumerate(documents))


def _read_document(document: Any, index: int) -> str:
    """Return the text of one document, which may be an object with a `text`. Raises InvalidRequest."""
    with prefix_error_field(f"[{index}]"):
        if isinstance(document, Mapping):
            reject_unknown_fields(document, ("text",), "a document")
            document = document.get("text")
        if not isinstance(document, str):
            raise InvalidRequest(
                f"document {index} is {document!r:.80}, but must be a text, or an object with a `text`"
            )
        return require_text(document, f"document {index}")


def _read_top_n(count: Any) -> int | None:
    """Return how many results `top_n` asks for; None: all. 0 means all, as in vLLM. Raises InvalidRequest."""
    if count is None:
        return None
    if type(count) is not int or count < 0:
        raise InvalidRequest(f"top_n is {count!r:.80}, but must be an integer above 0, or 0 for all", field="top_n")
    return count or None
