"""`/v1/rerank`: the reader, and the parts of a reply, as Cohere, Jina and vLLM have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import Fields, Unserved, check_fields, checked, inside
from cortexmlx.protocols.openai.embeddings import checked_text, truncates, usage_body
from cortexmlx.protocols.request import Body
from cortexmlx.types.embeddings import Reranking

URL = "/v1/rerank"
URLS = (URL, "/rerank", "/v2/rerank")
"""The same under the names that clients of vLLM and of Cohere use."""

MOST_DOCUMENTS = 2048
"""Documents of one request."""

_WHOLE = "documents are scored as a whole: with `truncate`, what is too long is cut off"

UNSERVED: Mapping[str, Unserved] = {
    "max_chunks_per_doc": Unserved(_WHOLE, (1,)),
    "max_tokens_per_doc": Unserved(_WHOLE),
    "priority": Unserved("requests of a client go in order", (0,)),
    "rank_fields": Unserved("a document is its `text`", (["text"],)),
    "truncation_side": Unserved("`truncate` cuts off the end", ("right",)),
    "use_activation": Unserved("scores are between 0 and 1", (True,)),
}

FIELDS = Fields(
    f"a {URL} body",
    frozenset({"documents", "instruction", "query", "return_documents", "top_n", "truncate", "truncate_prompt_tokens"}),
    frozenset({"cache_salt", "metadata", "model", "request_id", "user"}),
    UNSERVED,
)


@dataclass(frozen=True)
class RerankRequest:
    """A body that was read and checked."""

    query: str
    documents: tuple[str, ...]
    instruction: str | None = None
    """What makes a document relevant; None: the model's own words."""
    most: int | None = None
    """How many results are returned, the best ones; None: all."""
    returned: bool = True
    """Whether results repeat their documents."""
    truncate: bool = False
    """Whether documents that are too long are cut off. False: they are refused."""


def read(body: Mapping[str, Any], max_tokens: int | None = None) -> RerankRequest:
    """Return the request in a body. `max_tokens` is the model's own limit; None: it is not known yet. Raises
    InvalidRequest, which names the field.
    """
    said = FIELDS.given(body)
    return RerankRequest(
        _text(said, "query"),
        _documents(said.get("documents")),
        _text(said, "instruction") if "instruction" in said else None,
        _most(said.get("top_n")),
        checked("return_documents", said.get("return_documents", True), bool, "true or false"),
        truncates(said, max_tokens),
    )


def results(request: RerankRequest, made: Reranking) -> Iterator[Body]:
    """Yield the item of each document, the best first; equal ones are in the documents' order."""
    order = sorted(range(len(made.scores)), key=lambda place: -made.scores[place])
    return (_result(request, place, made.scores[place]) for place in order[: request.most])


def without_results(made: Reranking, model: str, id: str) -> Body:
    """Return the body of a reply without its items, for a writer that writes them one by one."""
    usage = usage_body(made.prompt_tokens, made.cached_tokens)
    return {"id": f"rerank-{id}", "object": "list", "model": model, "usage": usage}


def _result(request: RerankRequest, place: int, score: float) -> Body:
    document = {"document": {"text": request.documents[place]}} if request.returned else {}
    return {"index": place, "relevance_score": score, **document}


def _text(said: Mapping[str, Any], name: str) -> str:
    if name not in said:
        raise InvalidRequest(f"`{name}` is missing", field=name)
    with inside(name):
        if not isinstance(said[name], str):
            raise InvalidRequest(f"`{name}` is {said[name]!r:.80}, but must be a text")
        return checked_text(said[name], f"`{name}`")


def _documents(given: Any) -> tuple[str, ...]:
    with inside("documents"):
        if given is None or given == []:
            raise InvalidRequest("`documents` is missing" if given is None else "`documents` is empty")
        if not isinstance(given, list):
            raise InvalidRequest(f"`documents` is {given!r:.80}, but must be a list of texts")
        if len(given) > MOST_DOCUMENTS:
            message = f"`documents` has {len(given):,}, but must have {MOST_DOCUMENTS:,} at most: send several requests"
            raise InvalidRequest(message)
        return tuple(_document(each, place) for place, each in enumerate(given))


def _document(given: Any, place: int) -> str:
    with inside(f"[{place}]"):
        if isinstance(given, Mapping):
            check_fields(given, ("text",), "a document")
            given = given.get("text")
        if not isinstance(given, str):
            raise InvalidRequest(f"document {place} is {given!r:.80}, but must be a text, or an object with a `text`")
        return checked_text(given, f"document {place}")


def _most(count: Any) -> int | None:
    """Return how many results are asked for. 0 means all, as in vLLM."""
    if count is None:
        return None
    if type(count) is not int or count < 0:
        raise InvalidRequest(f"top_n is {count!r:.80}, but must be an integer above 0", field="top_n")
    return count or None
