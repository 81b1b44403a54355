"""Stored responses over the API: continued, read, listed and deleted, by their own client only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2 as httpx
import openai
import pytest

from cortexmlx import Engine
from cortexmlx.protocols.seal import Seal
from support.open_responses import RESPONSE, faults
from support.patience import PATIENCE

ASK: Any = {"model": "tiny", "max_output_tokens": 8, "temperature": 0}


@contextmanager
def as_client(url: str, key: str = "none") -> Iterator[openai.OpenAI]:
    web = openai.DefaultHttpxClient(trust_env=False, timeout=PATIENCE)
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=web) as made:
        yield made


def test_three_turns_by_the_id_of_the_one_before(client: openai.OpenAI, engine: Engine) -> None:
    first = client.responses.create(**ASK, input="One?", instructions="Be brief.")
    second = client.responses.create(**ASK, input="Two?", previous_response_id=first.id)
    third = client.responses.create(**ASK, input="Three?", previous_response_id=second.id)
    assert third.previous_response_id == second.id and third.store is True
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": first.output_text}]
    turns += [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": second.output_text}]
    judge = client.responses.create(**ASK, input=[*turns, {"role": "user", "content": "Three?"}], store=False)
    assert third.output_text == judge.output_text, "the instructions are not inherited"
    assert third.usage is not None and judge.usage is not None
    assert third.usage.input_tokens == judge.usage.input_tokens
    assert third.usage.input_tokens_details.cached_tokens > second.usage.input_tokens // 2  # type: ignore[union-attr]


def test_a_streamed_response_can_be_continued_when_its_last_event_is_read(client: openai.OpenAI) -> None:
    id = None
    for turn in range(3):
        with client.responses.stream(**ASK, input=f"{turn}?", previous_response_id=id or openai.omit) as stream:
            for event in stream:
                if event.type in ("response.completed", "response.incomplete"):
                    id = event.response.id
    assert id is not None
    items = client.responses.input_items.list(id, order="asc").data
    assert [item.type for item in items] == ["message"] * 5


def test_a_stored_response_is_read_as_it_was_answered(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASK, input="Hello?", metadata={"a": "b"})
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="was deleted") as refused:
            call(made.id)
        assert refused.value.code == "previous_response_not_found"


def test_the_input_items_are_listed_in_pages(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": f"{number}"} for number in range(5)]
    made = client.responses.create(**ASK, input=asked, instructions="Be brief.")
    for order in ("asc", "desc"):
        pages = client.responses.input_items.list(made.id, order=order, limit=2)
        said = [item.content[0].text for item in pages]  # type: ignore[union-attr, index]
        assert said == [f"{number}" for number in sorted(range(5), reverse=order == "desc")]
    first = client.responses.input_items.list(made.id, limit=2)
    assert first.has_more and [first.data[0].id, first.data[-1].id] == [first.first_id, first.last_id]  # type: ignore[attr-defined]
    assert client.responses.input_items.list(made.id, after=first.data[1].id, limit=2, order="desc").data[0].id
    for wrong in ({"order": "up"}, {"limit": 0}, {"limit": 101}, {"after": "nothing"}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.input_items.list(made.id, **wrong)  # type: ignore[arg-type]
        assert refused.value.param == next(iter(wrong))


def test_an_item_can_be_referred_to(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASK, input="One?")
    [question] = client.responses.input_items.list(made.id).data
    again: Any = [
        {"type": "item_reference", "id": question.id},
        {"type": "item_reference", "id": made.output[0].id},
        {"role": "user", "content": "Two?"},
    ]
    by_reference = client.responses.create(**ASK, input=again)
    continued = client.responses.create(**ASK, input="Two?", previous_response_id=made.id)
    assert by_reference.output_text == continued.output_text
    assert [item.type for item in client.responses.input_items.list(by_reference.id)] == ["message"] * 3
    client.responses.delete(made.id)
    with pytest.raises(openai.BadRequestError, match="Send the item itself") as refused:
        client.responses.create(**ASK, input=again)
    assert refused.value.param == "input[0].id"


def test_nothing_is_stored_that_should_not_be(client: openai.OpenAI, http: httpx.Client) -> None:
    made = client.responses.create(**ASK, input="Hello?", store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    reply = http.post("/v1/responses", json={**ASK, "input": "a", "store": 1})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "store"


def test_another_keys_response_is_as_if_it_had_never_been(serve: Any) -> None:
    url = serve(keys={"a": "alice", "b": "bob", "c": "alice"})
    with ExitStack() as stack:
        alice, bob, also_alice = (stack.enter_context(as_client(url, key)) for key in "abc")
        made = alice.responses.create(**ASK, input="Hello?")
        unknown = f"resp_{'0' * 32}"
        calls: list[Any] = [
            lambda id: bob.responses.retrieve(id),
            lambda id: bob.responses.delete(id),
            lambda id: bob.responses.input_items.list(id),
            lambda id: bob.responses.create(**ASK, input="a", previous_response_id=id),
        ]
        for call in calls:
            said = []
            for id in (made.id, unknown):
                with pytest.raises(openai.NotFoundError) as refused:
                    call(id)
                said.append((str(refused.value).replace(id, "ID"), refused.value.code, refused.value.param))
            assert said[0] == said[1]
        with pytest.raises(openai.BadRequestError):
            bob.responses.create(**ASK, input=[{"type": "item_reference", "id": made.output[0].id}])
        assert also_alice.responses.retrieve(made.id).id == made.id


def test_sealed_thoughts_are_those_of_the_same_key(serve: Any) -> None:
    url = serve(keys={"a": "alice", "b": "bob"}, secret=b"s")
    thoughts: Any = {"type": "reasoning", "summary": [], "encrypted_content": Seal(b"s", "alice").wrap("Hm.")}
    asked: Any = [{"role": "user", "content": "a"}, thoughts, {"role": "assistant", "content": "b"}]
    asked += [{"role": "user", "content": "c"}]
    with as_client(url, "a") as alice, as_client(url, "b") as bob:
        read = alice.responses.create(**ASK, input=asked, include=["reasoning.encrypted_content"])
        other: Any = bob.responses.create(**ASK, input=asked)
        assert not hasattr(read, "notes") and [note.partition(" ")[0] for note in other.notes] == ["thoughts"]


def test_the_least_recently_used_response_makes_room(serve: Any) -> None:
    with as_client(serve(stored_count=2)) as client:
        first, second = (client.responses.create(**ASK, input=text) for text in "ab")
        client.responses.retrieve(first.id)
        third = client.responses.create(**ASK, input="c")
        assert client.responses.retrieve(first.id) and client.responses.retrieve(third.id)
        with pytest.raises(openai.NotFoundError, match="make room for newer ones") as refused:
            client.responses.create(**ASK, input="d", previous_response_id=second.id)
        assert refused.value.param == "previous_response_id"
    with as_client(serve(stored_count=0)) as client, pytest.raises(openai.NotFoundError):
        client.responses.retrieve(client.responses.create(**ASK, input="a").id)


def test_a_response_that_is_being_written_is_not_there_yet(serve: Any, engine: Engine) -> None:
    with as_client(serve()) as client:
        stream = client.responses.create(**{**ASK, "max_output_tokens": 2000}, input="a", stream=True)
        created = next(iter(stream))
        assert created.type == "response.created"
        for call in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                call(created.response.id)
        stream.close()  # the client goes away: nothing is kept
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(created.response.id)


def test_the_stored_body_has_every_field_of_open_responses(http: httpx.Client) -> None:
    made = http.post("/v1/responses", json={**ASK, "input": "a"}).json()
    assert not faults(made, RESPONSE)
    assert http.get(f"/v1/responses/{made['id']}").json() == made
    assert http.get(f"/v1/responses/{made['id']}?stream=true").json()["error"]["param"] == "stream"
    assert http.post(f"/v1/responses/{made['id']}", json={}).status_code == 405
    assert http.delete(f"/v1/responses/{made['id']}").json() == {
        **{"id": made["id"], "object": "response", "deleted": True},
    }
