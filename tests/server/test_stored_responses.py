"""Stored responses: kept within bounds for each client apart, continued, read and deleted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2 as httpx
import openai
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cortexmlx import Engine
from cortexmlx.protocols.request import Request
from cortexmlx.protocols.responses.reader import ResponseDetails
from cortexmlx.protocols.seal import Seal
from cortexmlx.server.stored_responses import RESPONSE_OVERHEAD, ClientResponses, StoredResponses
from cortexmlx.types.sampling_params import SamplingParams
from support.effort import examples
from support.open_responses import RESPONSE, faults
from support.patience import PATIENCE

MAX_BYTES, MOST, CLIENTS = 24_000, 8, ("alice", "bob")


def body_of(number: int, text: str) -> Any:
    message = {"id": f"msg_{number:032x}", "type": "message", "content": text}
    return {"id": f"resp_{number:032x}", "output": [message], "model": "m"}


def asked(text: str, previous: Any = None, store: bool = True) -> Request:
    item = {"type": "message", "role": "user", "content": text, "status": "completed"}
    return Request(
        ("",), SamplingParams(), details=ResponseDetails(input_items=(item,), previous=previous, store=store)
    )


def add(kept: ClientResponses, number: int, text: str = "a", previous: int | None = None, store: bool = True) -> str:
    before = None if previous is None else kept.find_response(f"resp_{previous:032x}")
    body = body_of(number, text)
    kept.store(asked(text, before, store), body)
    return str(body["id"])


def texts(kept: ClientResponses, id: str) -> list[str] | None:
    found = kept.find_response(id)
    return None if found is None else [item["content"] for item in found.items()]


class StoreMachine(RuleBasedStateMachine):
    """The model: for each client a list of responses, least recently used first, each with all that it says."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = StoredResponses(MAX_BYTES * 2, MOST * 2, len(CLIENTS))
        self.model: dict[str, dict[str, list[str]]] = {client: {} for client in CLIENTS}
        self.turns: dict[str, dict[str, list[tuple[str, int]]]] = {client: {} for client in CLIENTS}
        self.ids: list[str] = []

    def touch(self, client: str, id: str) -> list[str] | None:
        known = self.model[client]
        if id in known:
            known[id] = known.pop(id)
        return known.get(id)

    def size(self, client: str) -> int:
        """What the kept responses hold: each turn once, however many continue it."""
        held = {turn for id in self.model[client] for turn in self.turns[client][id]}
        rest = len(json.dumps({"id": body_of(0, "")["id"], "model": "m"}, separators=(",", ":")))
        return sum(size for _, size in held) + rest * len(self.model[client])

    @rule(
        client=st.sampled_from(CLIENTS),
        length=st.integers(0, 9000),
        back=st.integers(0, 12),
        store=st.sampled_from([True] * 5 + [False]),
    )
    def answer(self, client: str, length: int, back: int, store: bool) -> None:
        kept, text = self.stored.for_client(client), "x" * length
        previous = self.ids[-back] if 0 < back <= len(self.ids) else None
        before = None if previous is None else kept.find_response(previous)
        said = (self.touch(client, previous) if previous else None) or []
        assert (before is not None) == bool(said)
        body = body_of(len(self.ids), text)
        kept.store(asked(text, before, store), body)
        self.ids.append(body["id"])
        if not store:
            return
        number = body["id"].removeprefix("resp_")
        item = {"id": f"in_{number}_0", **asked(text).details.input_items[0]}  # type: ignore[attr-defined]
        size = RESPONSE_OVERHEAD + sum(len(json.dumps(each, separators=(",", ":"))) for each in (item, *body["output"]))
        earlier = self.turns[client].get(previous or "", []) if said else []
        self.turns[client][body["id"]] = [*earlier, (body["id"], size)]
        self.model[client][body["id"]] = [*said, text, text]
        while self.model[client] and (self.size(client) > MAX_BYTES or len(self.model[client]) > MOST):
            del self.model[client][next(iter(self.model[client]))]

    @precondition(lambda self: self.ids)
    @rule(client=st.sampled_from(CLIENTS), data=st.data())
    def read(self, client: str, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.ids))
        assert texts(self.stored.for_client(client), id) == self.touch(client, id)

    @precondition(lambda self: self.ids)
    @rule(client=st.sampled_from(CLIENTS), data=st.data())
    def delete(self, client: str, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.ids))
        assert self.stored.for_client(client).delete(id) == (self.model[client].pop(id, None) is not None)

    @precondition(lambda self: self.ids)
    @rule(client=st.sampled_from(CLIENTS), data=st.data())
    def find_item(self, client: str, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.ids))
        number, mine = id.removeprefix("resp_"), id in self.model[client]
        for item in (f"msg_{number}", f"in_{number}_0"):
            found = self.stored.for_client(client).find_item(item)
            assert (found is not None and found["id"] == item) == mine

    @invariant()
    def within_bounds_and_in_order(self) -> None:
        for client in CLIENTS:
            kept = self.stored.for_client(client)
            assert list(kept) == list(self.model[client])
            assert kept.size == self.size(client) <= MAX_BYTES and len(kept) <= MOST


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


@pytest.fixture
def kept() -> ClientResponses:
    return ClientResponses(1 << 20, 100)


def test_what_continues_a_deleted_response_keeps_its_items(kept: ClientResponses) -> None:
    first, second = add(kept, 1, "a"), add(kept, 2, "b", previous=1)
    assert kept.delete(first) and texts(kept, first) is None
    assert texts(kept, second) == ["a", "a", "b", "b"]
    assert kept.delete(second) and kept.size == 0 and not kept.delete(second)


def test_a_response_that_went_while_it_was_continued_is_held_again(kept: ClientResponses) -> None:
    first = add(kept, 1, "a")
    previous = kept.find_response(first)
    kept.delete(first)
    kept.store(asked("b", previous), body_of(2, "b"))
    assert texts(kept, f"resp_{2:032x}") == ["a", "a", "b", "b"]
    kept.delete(f"resp_{2:032x}")
    assert kept.size == 0


def test_nothing_is_kept_that_is_larger_than_the_bound() -> None:
    small = ClientResponses(5000, 100)
    assert texts(small, add(small, 1)) == ["a", "a"]
    assert texts(small, add(small, 2, "x" * 5000)) is None
    assert small.size == 0 and len(small) == 0
    none = ClientResponses(5000, 0)
    assert texts(none, add(none, 1)) is None and none.size == 0


def test_a_long_chain_is_shared_not_copied() -> None:
    kept, turns, text = ClientResponses(1 << 30, 1 << 20), 2000, "x" * 1000
    add(kept, 0, text)
    one = kept.size
    for number in range(1, turns):
        add(kept, number, text, previous=number - 1)
    assert kept.size == turns * one
    assert len(texts(kept, f"resp_{turns - 1:032x}") or ()) == 2 * turns
    for number in range(turns - 1):
        kept.delete(f"resp_{number:032x}")
    assert len(texts(kept, f"resp_{turns - 1:032x}") or ()) == 2 * turns
    kept.delete(f"resp_{turns - 1:032x}")
    assert kept.size == 0


NOBODYS: list[Callable[[str], str]] = [
    lambda number: number,
    lambda number: f"msg_{number}\n",
    lambda number: f"msg_{number.upper()}x",
    lambda number: f"resp_{number}",
    lambda number: f"in_{number}_1",
    lambda number: "\ud800" * 40,
]


@pytest.mark.parametrize("id", NOBODYS)
def test_an_id_that_was_never_given_finds_nothing(kept: ClientResponses, id: Callable[[str], str]) -> None:
    add(kept, 0xABC)
    assert kept.find_item(id(f"{0xABC:032x}")) is None
    assert kept.find_response(id("msg")) is None


def test_half_a_surrogate_is_kept(kept: ClientResponses) -> None:
    assert texts(kept, add(kept, 1, "\ud800")) == ["\ud800", "\ud800"]


# Stored responses over the API: continued, read, listed and deleted, by their own client only.


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
    asked: Any = [{"role": "user", "content": f"{number}", "id": "same"} for number in range(5)]
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
