"""`/v1/embeddings`: what is read, what is refused and by which name, and vectors that the OpenAI package reads."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import CreateEmbeddingResponse, EmbeddingCreateParams

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.openai.embeddings import (
    FIELDS,
    MAX_INPUTS,
    EmbeddingRequest,
    embedding_items,
    read,
    reply_without_items,
    write,
)
from cortexmlx.types.embeddings import EmbeddingInfo, Embeddings

INFO = EmbeddingInfo(8, 512, "lasttoken", True, {"query": "Instruct: find it\nQuery: ", "document": ""})
VOCABULARY = 100


def made(count: int, dimensions: int = 8, **changes: Any) -> Embeddings:
    vectors = np.random.default_rng(count).normal(size=(count, dimensions)).astype(np.float32)
    return Embeddings(vectors, **{"prompt_tokens": (3,) * count, "cached_tokens": (1,) * count, **changes})


@pytest.mark.parametrize(
    ("sent", "inputs"),
    [
        ("one", ("one",)),
        (["one"], ("one",)),
        (["one", "two"], ("one", "two")),
        ([1, 2, 99], ([1, 2, 99],)),
        ([[1, 2], [3]], ([1, 2], [3])),
        (["one", [3]], ("one", [3])),
    ],
)
def test_texts_and_token_ids_are_read(sent: Any, inputs: tuple[Any, ...]) -> None:
    assert read({"input": sent, "model": "m", "user": "u"}, INFO, VOCABULARY) == EmbeddingRequest(inputs)


def test_every_option_is_read() -> None:
    body = {"input": "a", "dimensions": 4, "encoding_format": "base64", "prompt_name": "query", "truncate": True}
    assert read(body, INFO, VOCABULARY) == EmbeddingRequest(("a",), "query", 4, True, True)
    for limit in (-1, 512, 4096):
        assert read({"input": "a", "truncate_prompt_tokens": limit}, INFO).truncate
    assert read({"input": "a", "dimensions": None, "encoding_format": None}, INFO) == EmbeddingRequest(("a",))


def test_every_field_of_the_openai_package_is_known() -> None:
    assert EmbeddingCreateParams.__annotations__.keys() <= FIELDS.served | FIELDS.no_effect


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({}, "input", "`input` is missing"),
        ({"input": []}, "input", "has no texts"),
        ({"input": ""}, "input", "is empty"),
        ({"input": {}}, "input", "must be a text"),
        ({"input": 7}, "input", "must be a text"),
        ({"input": ["a", ""]}, "input[1]", "is empty"),
        ({"input": ["a", None]}, "input[1]", "must be a text"),
        ({"input": ["a", []]}, "input[1]", "no tokens"),
        ({"input": ["a", 1]}, "input[1]", "must be a text"),
        ({"input": [1, "a"]}, "input", "must be integers"),
        ({"input": [True]}, "input[0]", "must be a text"),
        ({"input": [1, True]}, "input", "must be integers"),
        ({"input": [[1.5]]}, "input[0]", "must be integers"),
        ({"input": [[[1]]]}, "input[0]", "must be integers"),
        ({"input": [100]}, "input", "below 100"),
        ({"input": [[1], [-1]]}, "input[1]", "from 0"),
        ({"input": [10**4000]}, "input", "below 100"),
        ({"input": "\ud800"}, "input", "half"),
        ({"input": ["a"] * 100_000}, "input", "100,000 texts"),
        ({"input": "a", "dimensions": float("nan")}, "dimensions", "nan"),
        ({"input": "a", "dimensions": 4.0}, "dimensions", "4.0"),
        ({"input": "a", "dimensions": True}, "dimensions", "True"),
        ({"input": "a", "dimensions": 0}, "dimensions", "above 0"),
        ({"input": "a", "dimensions": -3}, "dimensions", "above 0"),
        ({"input": "a", "dimensions": 9}, "dimensions", "have 8"),
        ({"input": "a", "dimensions": 10**400}, "dimensions", "have 8"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float or base64"),
        ({"input": "a", "encoding_format": ["float"]}, "encoding_format", "float or base64"),
        ({"input": "a", "prompt_name": "qery"}, "prompt_name", "did you mean 'query'"),
        ({"input": "a", "prompt_name": 7}, "prompt_name", "must be a text"),
        ({"input": ["a", [1]], "prompt_name": "query"}, "prompt_name", "token ids are taken as they are"),
        ({"input": "a", "truncate": "END"}, "truncate", "true or false"),
        ({"input": "a", "truncate_prompt_tokens": 100}, "truncate_prompt_tokens", "512"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-1"),
        ({"input": "a", "truncate_prompt_tokens": True}, "truncate_prompt_tokens", "True"),
        ({"input": "a", "prompt": "Query: "}, "prompt", "prompt_name"),
        ({"input": "a", "input_type": "query"}, "input_type", "prompt_name"),
        ({"input": "a", "normalize": False}, "normalize", "not served"),
        ({"input": "a", "messages": []}, "messages", "not served"),
        ({"input": "a", "dimension": 3}, "dimension", "did you mean 'dimensions'"),
    ],
)
def test_what_is_refused_names_its_field(body: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as told:
        read(body, INFO, VOCABULARY)
    assert told.value.field == field and says in str(told.value)
    assert len(str(told.value)) < 500


def test_a_body_can_be_read_before_the_model_is_known() -> None:
    body = {"input": [10**6], "dimensions": 10**6, "truncate_prompt_tokens": 3}
    assert read(body).inputs == ([10**6],) and read({"input": "a", "prompt_name": "other"}).prompt == "other"
    assert len(read({"input": ["a"] * MAX_INPUTS}).inputs) == MAX_INPUTS


@given(st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_the_package_reads_the_vectors_that_were_written(count: int, dimensions: int, packed: bool) -> None:
    asked = EmbeddingRequest(("a",) * count, base64=packed)
    vectors = made(count, dimensions, truncated=(False,) * count)
    body = json.loads(json.dumps(write(asked, vectors, "m")))
    theirs = CreateEmbeddingResponse.model_validate(body) if not packed else None
    for index, item in enumerate(body["data"]):
        found = np.frombuffer(base64.b64decode(item["embedding"]), "<f4") if packed else item["embedding"]
        assert np.array_equal(np.array(found, np.float32), vectors.vectors[index])
        assert item["index"] == index and item["object"] == "embedding" and "truncated" not in item
    assert theirs is None or (theirs.usage.prompt_tokens, theirs.usage.total_tokens) == (3 * count, 3 * count)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": count}


def test_items_that_are_written_one_by_one_are_those_of_the_whole_body() -> None:
    asked, vectors = EmbeddingRequest(("a", "b")), made(2, truncated=(True, False))
    whole = write(asked, vectors, "m")
    assert {**reply_without_items(vectors, "m"), "data": list(embedding_items(asked, vectors))} == whole
    assert [item.get("truncated") for item in whole["data"]] == [True, None]


def test_a_record_that_is_written_again_has_the_same_bytes() -> None:
    asked, computed = EmbeddingRequest(("a",)), made(1, truncated=(False,))
    cached = made(1, truncated=(False,), cached_tokens=(3,))
    assert write(asked, computed, "m", repeatable=True) == write(asked, cached, "m", repeatable=True)
