"""The transcripts of each model, of which the nearest is found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cortexmlx.server import transcripts as tables
from cortexmlx.server.transcripts import RememberedAnswer, RememberedTurn, TranscriptTable, TranscriptTables
from cortexmlx.sessions.turn import Transcript
from cortexmlx.structured.tools import ToolCall
from support.effort import examples

CLIENTS = st.sampled_from(["", "a", "b"])
TEXTS = st.text("xy", max_size=12)
MOST = 16000


def encode(text: str) -> list[int]:
    return [ord(each) for each in text]


def remembered(text: str, calls: tuple[str, ...] = ()) -> RememberedTurn:
    made = tuple(ToolCall(id, "f", "{}") for id in calls)
    return RememberedTurn(Transcript().with_prompt(text, encode), 1, RememberedAnswer("z", "", made, "z", (1,), "$"))


class Kept(RuleBasedStateMachine):
    """A table beside a list of what was kept, in the order of its use."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[RememberedTurn] = []
        self.shelf: dict[str, str] = {}
        self.table = TranscriptTable(MOST, self)
        self.model: list[tuple[str, RememberedTurn]] = []

    def read(self, max_bytes: int) -> list[tuple[str, RememberedTurn]]:
        return []

    def put(self, client: str, turn: RememberedTurn) -> None:
        self.shelf[turn.id] = client

    def remove(self, turn: RememberedTurn) -> None:
        del self.shelf[turn.id]
        self.lost.append(turn)

    entries = Bundle("entries")

    @rule(target=entries, client=CLIENTS, text=TEXTS, calls=st.lists(st.sampled_from("pqr"), max_size=2))
    def keep(self, client: str, text: str, calls: list[str]) -> Any:
        each = remembered(text, tuple(calls))
        self.table.add(client, each)
        self._kept(client, each)
        return client, each

    @rule(target=entries, old=consumes(entries), more=TEXTS)
    def continue_one(self, old: Any, more: str) -> Any:
        client, before = old
        each = remembered(before.transcript.text + "z" + more)
        self.table.add(client, each, before)
        self.model = [(c, e) for c, e in self.model if e is not before]
        self._kept(client, each)
        return client, each

    @rule(entry=entries)
    def use(self, entry: Any) -> None:
        self.table.mark_used(*entry)
        if any(each is entry[1] for _, each in self.model):
            self.model = [(c, e) for c, e in self.model if e is not entry[1]] + [entry]

    def _kept(self, client: str, each: RememberedTurn) -> None:
        self.model.append((client, each))
        while sum(e.size for _, e in self.model) > MOST:
            sizes = {name: sum(e.size for c, e in self.model if c == name) for name, _ in self.model}
            largest = max(sizes.values())
            first = next((e for e in self.lost if any(e is kept for _, kept in self.model)), None)
            assert first is not None, "the table dropped nothing, though there was too much"
            owner = next(c for c, e in self.model if e is first)
            assert sizes[owner] == largest, "the client with the most loses"
            assert next(e for c, e in self.model if c == owner) is first, "what was used least recently goes first"
            self.model = [(c, e) for c, e in self.model if e is not first]

    @invariant()
    def the_same_is_there(self) -> None:
        assert self.table.size == sum(e.size for _, e in self.model) <= MOST
        assert {(c, e.id) for c, e in self.table.all()} == {(c, e.id) for c, e in self.model}
        assert self.shelf == {e.id: c for c, e in self.model}
        for client in ("", "a", "b"):
            own = [e for c, e in self.model if c == client]
            for call in "pqr":
                answers = [e.answer for e in own for each in e.answer.calls if each.id == call]
                assert Counter(self.table.answers_with_call(client, call)) == Counter(answers)

    @rule(client=CLIENTS, text=TEXTS)
    def look(self, client: str, text: str) -> None:
        own = [e for c, e in self.model if c == client]
        common = [_common(e.transcript.text, text) for e in own]
        found = self.table.find_closest(client, text, [])
        if not max(common, default=0):
            assert found is None
        else:
            assert found is [e for e, n in zip(own, common, strict=True) if n == max(common)][-1], "the last used"


def _common(one: str, other: str) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


TestKept = Kept.TestCase
TestKept.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("text", ["The system prompt. User {n}: hello", "Hi"])
def test_the_nearest_of_many_is_found_without_a_look_at_all(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Those of agents share a long beginning, those of a health check are all the same."""
    table, kept = TranscriptTable(1 << 30), [remembered(text.format(n=n * 7919 % 5003)) for n in range(5003)]
    looked: list[Any] = []
    for each in kept:
        table.add("a", each)
    compare, answers = tables.common_length, RememberedTurn.match_score
    monkeypatch.setattr(tables, "common_length", lambda *of: looked.append(of) or compare(*of))
    monkeypatch.setattr(RememberedTurn, "match_score", lambda *of: looked.append(of) or answers(*of))
    for said in ("z$ and on", "", " other"):
        looked.clear()
        found = table.find_closest("a", kept[7].transcript.text + said, ())
        assert found is kept[7] or (text == "Hi" and found is kept[-1])
        assert len(looked) < 3 * tables.MAX_COMPARED


def test_one_that_is_too_large_is_not_kept() -> None:
    table = TranscriptTable(MOST)
    table.add("a", remembered("x" * MOST))
    assert table.all() == [] and table.size == 0


# Each model has a table of its own, on disk if there is a folder that can be used.


ONE = RememberedTurn(Transcript("a", (1,), ((0, 0), (1, 1))), 1, RememberedAnswer("b", "", (), "b", (2,), "$"))


def test_each_model_has_its_own() -> None:
    tables = TranscriptTables(1 << 20)
    table = tables.for_model("one")
    assert table is not None and table is tables.for_model("one") and table is not tables.for_model("another")
    assert TranscriptTables(0).for_model("one") is None


def test_a_folder_that_cannot_be_used_is_told_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    table = TranscriptTables(1 << 20, tmp_path / "file").for_model("one")
    assert table is not None and "not kept on disk" in caplog.text
    table.add("key", ONE)
    assert table.all() == [("key", ONE)]
