"""Stored responses: within their bounds, each client's apart, and the one that was used least recently goes first."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cortexmlx.protocols.request import Request
from cortexmlx.protocols.responses.reader import Details
from cortexmlx.server.stored_responses import OVERHEAD, ClientResponses, StoredResponses
from cortexmlx.types.sampling_params import SamplingParams
from support.effort import examples

MOST_BYTES, MOST, CLIENTS = 24_000, 8, ("alice", "bob")


def body_of(number: int, text: str) -> Any:
    message = {"id": f"msg_{number:032x}", "type": "message", "content": text}
    return {"id": f"resp_{number:032x}", "output": [message], "model": "m"}


def asked(text: str, previous: Any = None, store: bool = True) -> Request:
    item = {"type": "message", "role": "user", "content": text, "status": "completed"}
    return Request(("",), SamplingParams(), details=Details(items=(item,), previous=previous, store=store))


def add(kept: ClientResponses, number: int, text: str = "a", previous: int | None = None, store: bool = True) -> str:
    before = None if previous is None else kept.response(f"resp_{previous:032x}")
    body = body_of(number, text)
    kept.keep(asked(text, before, store), body)
    return str(body["id"])


def texts(kept: ClientResponses, id: str) -> list[str] | None:
    found = kept.response(id)
    return None if found is None else [item["content"] for item in found.items()]


class StoreMachine(RuleBasedStateMachine):
    """The model: for each client a list of responses, least recently used first, each with all that it says."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = StoredResponses(MOST_BYTES * 2, MOST * 2, len(CLIENTS))
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
        kept, text = self.stored.of(client), "x" * length
        previous = self.ids[-back] if 0 < back <= len(self.ids) else None
        before = None if previous is None else kept.response(previous)
        said = (self.touch(client, previous) if previous else None) or []
        assert (before is not None) == bool(said)
        body = body_of(len(self.ids), text)
        kept.keep(asked(text, before, store), body)
        self.ids.append(body["id"])
        if not store:
            return
        number = body["id"].removeprefix("resp_")
        item = {"id": f"in_{number}_0", **asked(text).details.items[0]}  # type: ignore[attr-defined]
        size = OVERHEAD + sum(len(json.dumps(each, separators=(",", ":"))) for each in (item, *body["output"]))
        earlier = self.turns[client].get(previous or "", []) if said else []
        self.turns[client][body["id"]] = [*earlier, (body["id"], size)]
        self.model[client][body["id"]] = [*said, text, text]
        while self.model[client] and (self.size(client) > MOST_BYTES or len(self.model[client]) > MOST):
            del self.model[client][next(iter(self.model[client]))]

    @precondition(lambda self: self.ids)
    @rule(client=st.sampled_from(CLIENTS), data=st.data())
    def read(self, client: str, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.ids))
        assert texts(self.stored.of(client), id) == self.touch(client, id)

    @precondition(lambda self: self.ids)
    @rule(client=st.sampled_from(CLIENTS), data=st.data())
    def delete(self, client: str, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.ids))
        assert self.stored.of(client).delete(id) == (self.model[client].pop(id, None) is not None)

    @precondition(lambda self: self.ids)
    @rule(client=st.sampled_from(CLIENTS), data=st.data())
    def find_item(self, client: str, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.ids))
        number, mine = id.removeprefix("resp_"), id in self.model[client]
        for item in (f"msg_{number}", f"in_{number}_0"):
            found = self.stored.of(client).item(item)
            assert (found is not None and found["id"] == item) == mine

    @invariant()
    def within_bounds_and_in_order(self) -> None:
        for client in CLIENTS:
            kept = self.stored.of(client)
            assert list(kept) == list(self.model[client])
            assert kept.size == self.size(client) <= MOST_BYTES and len(kept) <= MOST


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
    previous = kept.response(first)
    kept.delete(first)
    kept.keep(asked("b", previous), body_of(2, "b"))
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
    assert kept.item(id(f"{0xABC:032x}")) is None
    assert kept.response(id("msg")) is None


def test_half_a_surrogate_is_kept(kept: ClientResponses) -> None:
    assert texts(kept, add(kept, 1, "\ud800")) == ["\ud800", "\ud800"]
