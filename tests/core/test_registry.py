"""Names of adapters, what they stand for, and when their memory goes: a state machine beside a plain account of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cortexmlx.core.adapter_registry import AdapterLimits, AdapterRegistry
from cortexmlx.errors import AdapterRefused, MemoryRefused, UnknownAdapter
from cortexmlx.execution.boundary import Refusal
from cortexmlx.models.adapters.low_rank import LowRankAdapter
from cortexmlx.types.request import QueuedRequest
from cortexmlx.types.sampling_params import SamplingParams
from support.effort import examples

ONE = 100


def content(number: int, rank: int = 4) -> LowRankAdapter:
    pair = np.full((1, rank), number, np.float32), np.ones((rank, 1), np.float32)
    return LowRankAdapter(Path(f"folder {number}"), rank, {"q": pair}, bytes([number] * 16))


class Tables:
    """Adapters that take `ONE` bytes each."""

    def __init__(self) -> None:
        self.held: dict[int, LowRankAdapter] = {}
        self.refuses = False

    @property
    def nbytes(self) -> int:
        return ONE * len(self.held)

    def check(self, name: str, adapter: LowRankAdapter) -> None:
        if adapter.digest[0] == 99:
            raise AdapterRefused(name)

    def bytes_of(self, adapter: LowRankAdapter) -> int:
        return ONE

    def bytes_with(self, adapter: LowRankAdapter) -> int:
        return self.nbytes + ONE

    def add(self, number: int, adapter: LowRankAdapter) -> Refusal | None:
        assert number > 0 and number not in self.held
        if self.refuses:
            return Refusal("no memory", False)
        self.held[number] = adapter
        return None

    def remove(self, number: int) -> Refusal | None:
        if self.refuses:
            return Refusal("no memory", False)
        del self.held[number]
        return None


def registry(most: int = 3, rank: int = 8, size: int = 10 * ONE) -> tuple[AdapterRegistry, Tables, list[Any]]:
    tables, jobs = Tables(), []  # type: ignore[var-annotated]
    return AdapterRegistry(AdapterLimits(most, rank, size), lambda: tables), tables, jobs


def request(name: str | None) -> QueuedRequest:
    return QueuedRequest((1,), SamplingParams(), adapter=name)


def test_limits_are_said_with_the_numbers_and_change_nothing() -> None:
    adapters, tables, _ = registry(most=2, size=5 * ONE)
    adapters.load("a", content(1), ())
    for wrong, words in ((content(2, rank=9), ("rank 9", "8 at most")), (content(99), ("b",))):
        with pytest.raises(AdapterRefused) as caught:
            adapters.load("b", wrong, ())
        assert all(word in str(caught.value) for word in words)
    adapters.load("b", content(2), ())
    with pytest.raises(AdapterRefused, match="2 adapters, and room for 2"):
        adapters.load("c", content(3), ())
    assert list(adapters.infos) == ["a", "b"] and len(tables.held) == 2
    small, _, _ = registry(size=ONE)
    small.load("a", content(1), ())
    with pytest.raises(AdapterRefused, match=f"{ONE} bytes, and {ONE} of {ONE}"):
        small.load("b", content(2), ())


def test_refused_memory_changes_nothing() -> None:
    adapters, tables, _ = registry()
    tables.refuses = True
    with pytest.raises(MemoryRefused, match="'a'"):
        adapters.load("a", content(1), ())
    tables.refuses = False
    assert not adapters.infos and not adapters.loaded_count
    assert adapters.load("a", content(1), ()).digest == content(1).digest.hex()


def test_content_that_could_not_go_is_never_used_again() -> None:
    """A part of it may be gone."""
    adapters, tables, jobs = registry(most=3)
    adapters.load("a", content(1), jobs)
    first = adapters.resolve(request("a")).adapter_key
    tables.refuses = True
    adapters.unload("a", jobs)
    assert (adapters.loaded_count, adapters.unloading_count) == (1, 0)
    tables.add = lambda number, adapter: tables.held.update({number: adapter})  # type: ignore[method-assign,assignment]
    adapters.load("a", content(1), jobs)
    second = adapters.resolve(request("a")).adapter_key
    assert first is not None and second is not None and first.number != second.number
    assert adapters.loaded_count == 2 and len(tables.held) == 2
    tables.refuses = False
    adapters.free_unused(jobs)
    assert adapters.loaded_count == 1 and list(tables.held) == [second.number] and not jobs


def test_a_name_that_nobody_has_is_told_with_those_there_are() -> None:
    adapters, _, _ = registry()
    with pytest.raises(UnknownAdapter, match="there is none"):
        adapters.unload("a", ())
    adapters.load("a", content(1), ())
    with pytest.raises(UnknownAdapter, match="no adapter 'b' is loaded; there are 'a'"):
        adapters.resolve(request("b"))
    with pytest.raises(UnknownAdapter):
        adapters.cache_salt("b", None)
    assert adapters.resolve(request(None)).adapter_key is None


def test_two_names_of_one_content_share_it() -> None:
    adapters, tables, _ = registry()
    one, other = adapters.load("a", content(1), ()), adapters.load("b", content(1), ())
    assert (one.name, other.name) == ("a", "b") and len(tables.held) == 1
    assert adapters.resolve(request("a")).adapter_key == adapters.resolve(request("b")).adapter_key
    adapters.unload("a", ())
    assert len(tables.held) == 1
    adapters.unload("b", ())
    assert not tables.held


@pytest.mark.parametrize("most", [1, 3])
def test_a_full_registry_loads_a_name_anew_and_has_one_of_both_at_any_time(most: int) -> None:
    adapters, tables, jobs = registry(most=most)
    for number in range(most):
        adapters.load(f"a{number}", content(number), jobs)
    old, seen = adapters.resolve(request("a0")).adapter_key, []
    add = tables.add

    def added(number: int, adapter: LowRankAdapter) -> Refusal | None:
        seen.append(adapters.resolve(request("a0")).adapter_key)
        return add(number, adapter)

    tables.add = added  # type: ignore[method-assign]
    adapters.load("a0", content(9), jobs)
    new = adapters.resolve(request("a0")).adapter_key
    assert seen == [old] and new is not None and new.digest == content(9).digest
    assert adapters.loaded_count == len(tables.held) == most
    jobs.append(SimpleNamespace(adapter=new.number))
    with pytest.raises(AdapterRefused, match=f"{most} adapters, and room for {most}: unload one, load 'a0' when its"):
        adapters.load("a0", content(8), jobs)
    jobs.clear()
    adapters.load("a0", content(8), jobs)
    with pytest.raises(AdapterRefused, match="unload one, or"):
        adapters.load("new", content(7), jobs)


def test_a_second_name_keeps_what_the_first_stood_for() -> None:
    adapters, _, _ = registry(most=1)
    adapters.load("a", content(1), ())
    adapters.load("b", content(1), ())
    with pytest.raises(AdapterRefused, match="1 adapters, and room for 1"):
        adapters.load("a", content(2), ())


def test_a_name_that_cannot_be_loaded_anew_stands_for_what_it_did() -> None:
    """Both are in memory for a moment. Where there are no bytes for both, the old one stays, and the error says so."""
    for size, refuses, error in ((ONE, False, AdapterRefused), (2 * ONE, True, MemoryRefused)):
        adapters, tables, _ = registry(most=1, size=size)
        info = adapters.load("a", content(1), ())
        key = adapters.resolve(request("a")).adapter_key
        tables.refuses = refuses
        says = f"{ONE} of {ONE} are taken, also by what 'a' stands for until this is there: unload 'a', or"
        with pytest.raises(error, match="'a'" if refuses else says):
            adapters.load("a", content(2), ())
        assert adapters.infos == {"a": info} and adapters.resolve(request("a")).adapter_key == key
        assert key is not None and list(tables.held) == [key.number]


def test_what_cannot_go_after_it_was_replaced_makes_no_room_for_more() -> None:
    adapters, tables, _ = registry(most=1)
    adapters.load("a", content(1), ())
    tables.remove = lambda number: Refusal("no memory", False)  # type: ignore[method-assign]
    adapters.load("a", content(2), ())
    assert adapters.loaded_count == len(tables.held) == 2
    with pytest.raises(AdapterRefused, match="2 adapters, and room for 1"):
        adapters.load("a", content(3), ())
    del tables.remove
    adapters.load("a", content(3), ())
    assert [adapter.digest[0] for adapter in tables.held.values()] == [3]


class Machine(RuleBasedStateMachine):
    """Names come and go while requests run."""

    most = 4
    size = 10

    def __init__(self) -> None:
        super().__init__()
        self.adapters, self.tables, self.jobs = registry(most=self.most, size=self.size * ONE)
        self.names: dict[str, int] = {}
        self.running: dict[int, tuple[Any, int]] = {}
        self.count = 0

    @property
    def needed(self) -> set[int]:
        return {*self.names.values(), *(which for _, which in self.running.values())}

    @rule(name=st.sampled_from("abc"), which=st.integers(1, 5), refused=st.sampled_from([False, False, True]))
    def load(self, name: str, which: int, refused: bool) -> None:
        others = {each: held for each, held in self.names.items() if each != name}
        stays = {*others.values(), *(held for _, held in self.running.values())}
        if which not in self.needed and (len(stays) == self.most or len(self.needed) >= self.size):
            with pytest.raises(AdapterRefused):
                self.adapters.load(name, content(which), self.jobs)
        elif which not in self.needed and refused:
            self.tables.refuses = True
            with pytest.raises(MemoryRefused):
                self.adapters.load(name, content(which), self.jobs)
            self.tables.refuses = False
        else:
            self.adapters.load(name, content(which), self.jobs)
            self.names[name] = which

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def unload(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.names)))
        self.adapters.unload(name, self.jobs)
        del self.names[name]

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def begin(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.names)))
        key = self.adapters.resolve(request(name)).adapter_key
        assert key is not None and key.digest == content(self.names[name]).digest
        job = SimpleNamespace(adapter=key.number)
        self.jobs.append(job)
        self.running[self.count] = job, self.names[name]
        self.count += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        job, _ = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        self.jobs.remove(job)
        self.adapters.free_unused(self.jobs)

    @invariant()
    def memory_holds_what_has_a_name_or_a_request(self) -> None:
        assert {adapter.digest[0] for adapter in self.tables.held.values()} == self.needed
        assert self.adapters.loaded_count == len(self.needed) and self.adapters.nbytes == ONE * len(self.needed)
        assert len(self.needed) <= min(self.most, self.size), "one more is there only while a name is loaded anew"
        assert self.adapters.unloading_count == len(self.needed - set(self.names.values()))
        assert {name: info.digest for name, info in self.adapters.infos.items()} == {
            name: content(which).digest.hex() for name, which in self.names.items()
        }
        for job, which in self.running.values():
            assert self.tables.held[job.adapter].digest[0] == which


class FullMachine(Machine):
    """There are as many names as places."""

    most = 2


class FewBytesMachine(Machine):
    """There are bytes for two contents, and places for one more."""

    size = 2
    most = 3


TestMachine = Machine.TestCase
TestFullMachine, TestFewBytesMachine = FullMachine.TestCase, FewBytesMachine.TestCase
for machine in (TestMachine, TestFullMachine, TestFewBytesMachine):
    machine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
