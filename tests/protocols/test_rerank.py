"""`/v1/rerank`: what is read, what is refused and by which name, and the order of results."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.rerank import MAX_DOCUMENTS, RerankRequest, read, reply_without_items, result_items
from cortexmlx.types.embeddings import Reranking

QUERY = {"query": "where?", "documents": ["here", "there"]}


def test_texts_and_objects_with_a_text_are_documents() -> None:
    body = {**QUERY, "documents": ["here", {"text": "there"}], "model": "m", "top_n": 1, "return_documents": False}
    assert read(body) == RerankRequest("where?", ("here", "there"), top_n=1, return_documents=False)
    more = {**QUERY, "instruction": "find places", "truncate": True, "top_n": 0}
    assert read(more) == RerankRequest("where?", ("here", "there"), "find places", truncate=True)
    assert read({**QUERY, "truncate_prompt_tokens": -1}, 64).truncate
    assert len(read({**QUERY, "documents": ["a"] * MAX_DOCUMENTS}).documents) == MAX_DOCUMENTS


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"query": None}, "query", "is missing"),
        ({"query": ""}, "query", "is empty"),
        ({"query": ["a"]}, "query", "must be a text"),
        ({"query": "\udfff"}, "query", "half"),
        ({"documents": None}, "documents", "is missing"),
        ({"documents": []}, "documents", "is empty"),
        ({"documents": "a"}, "documents", "a list of texts"),
        ({"documents": ["a", 7]}, "documents[1]", "must be a text"),
        ({"documents": ["a", ""]}, "documents[1]", "is empty"),
        ({"documents": ["a", {"txt": "b"}]}, "documents[1].txt", "did you mean 'text'"),
        ({"documents": [{"text": None}]}, "documents[0]", "with a `text`"),
        ({"documents": ["a"] * 100_000}, "documents", "100,000"),
        ({"top_n": -1}, "top_n", "above 0"),
        ({"top_n": float("nan")}, "top_n", "nan"),
        ({"top_n": True}, "top_n", "True"),
        ({"return_documents": "no"}, "return_documents", "true or false"),
        ({"instruction": 7}, "instruction", "must be a text"),
        ({"truncate_prompt_tokens": 7}, "truncate_prompt_tokens", "64"),
        ({"max_tokens_per_doc": 7}, "max_tokens_per_doc", "not served"),
        ({"rank_fields": ["title"]}, "rank_fields", "not served"),
        ({"topn": 7}, "topn", "did you mean 'top_n'"),
    ],
)
def test_what_is_refused_names_its_field(change: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as told:
        read({**QUERY, **change}, 64)
    assert told.value.field == field and says in str(told.value) and len(str(told.value)) < 500


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=9), st.integers(1, 12))
def test_the_best_documents_come_first_and_equal_ones_in_their_order(scores: list[float], most: int) -> None:
    asked = RerankRequest("q", tuple(f"d{place}" for place in range(len(scores))), top_n=most)
    found = list(result_items(asked, Reranking(tuple(scores), 10, 4)))
    assert len(found) == min(most, len(scores))
    assert all(one["document"]["text"] == f"d{one['index']}" for one in found)
    assert all(one["relevance_score"] == scores[one["index"]] for one in found)
    keys = [(-one["relevance_score"], one["index"]) for one in found]
    left_out = [(-score, place) for place, score in enumerate(scores) if place not in {o["index"] for o in found}]
    assert keys == sorted(keys) and (not left_out or max(keys) < min(left_out))


def test_a_reply_has_its_tokens() -> None:
    body = reply_without_items(Reranking((0.5,), 10, 4), "m", "7")
    assert body["usage"] == {"prompt_tokens": 10, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
    assert (body["id"], body["model"], body["object"]) == ("rerank-7", "m", "list")


def test_documents_are_left_out_if_they_are_not_asked_for() -> None:
    asked = RerankRequest("q", ("a",), return_documents=False)
    assert list(result_items(asked, Reranking((0.5,), 1, 0))) == [{"index": 0, "relevance_score": 0.5}]
