"""A pool loads on demand and unloads before: shared loads, failures, idle time, and the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from cortexmlx.errors import CortexError, EngineClosed, InvalidRequest, ModelCorrupt, OutOfMemory
from cortexmlx.server.model_pool import CannotLoad, ModelPool, ServedModel
from cortexmlx.server.residency import FIRST_SECONDS
from cortexmlx.types.progress import Progress
from support.patience import PATIENCE, soon


class FakeEngine:
    """Stands for an engine: it knows whether it is closed."""

    longest_request = 100

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Factory:
    """Makes the engines of pools. A load waits while its gate is closed, and raises what `fails` says."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.engines: list[FakeEngine] = []
        self.said: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.gates: dict[str, threading.Event] = {}
        self.reports = True
        self.now = 0.0

    def model(self, name: str, memory: int = 5, **options: Any) -> ServedModel:
        def open_(on_progress: Callable[[Progress], None]) -> Any:
            self.opened.append(name)
            if (gate := self.gates.get(name)) is not None:
                while not gate.wait(0.01):
                    if self.reports:
                        on_progress(Progress("loading", 0, 1))
            if name in self.fails:
                raise self.fails[name]
            self.engines.append(FakeEngine())
            return self.engines[-1]

        return ServedModel(name, open_, memory, **options)


@pytest.fixture
def factory() -> Factory:
    return Factory()


@pytest.fixture
def pool(factory: Factory) -> Iterator[Callable[..., ModelPool]]:
    """Make a pool of models of 5 bytes each."""
    with ExitStack() as stack:

        def make(*names: str, memory: int | None = None, **options: Any) -> ModelPool:
            models = [factory.model(name) for name in names]
            return stack.enter_context(
                ModelPool(models, memory=memory, tell=factory.said.append, clock=lambda: factory.now, **options)
            )

        yield make


def test_a_model_is_loaded_once_for_all_who_wait(factory: Factory, pool: Any) -> None:
    factory.gates["a"] = threading.Event()
    made, settled = pool("a", "b"), []
    waits = [made.request_model("a", lambda: settled.append(1)) for _ in range(10)]
    assert not any(wait.settled for wait in waits) and not made.is_loaded("a")
    factory.gates["a"].set()
    assert soon(lambda: len(settled) == 10)
    assert {id(wait.lease().engine) for wait in waits} == {id(factory.engines[0])} and factory.opened == ["a"]
    assert made.request_model("a").settled and made.is_ready("a") and not made.is_ready("b")
    assert made.is_loaded("a") and not made.is_loaded("b") and made.context_length("a") == 100


def test_the_context_does_not_change_once_it_is_known(factory: Factory) -> None:
    stated, open_ = factory.model("stated", context_length=70), factory.model("open")
    with ModelPool([stated, open_]) as made:
        assert (made.context_length("stated"), made.context_length("open")) == (70, None)
        made.acquire("stated").release()
        made.acquire("open").release()
        assert (made.context_length("stated"), made.context_length("open")) == (70, 100)


def test_unloading_comes_before_loading_and_after_the_last_request(factory: Factory, pool: Any) -> None:
    made = pool("a", "b", memory=8)
    first, second = made.acquire("a"), made.acquire("a")
    waiting = made.request_model("b")
    first.release()
    first.release()
    behind = made.request_model("a")
    assert not waiting.settled and not behind.settled and not factory.engines[0].closed
    second.release()
    assert soon(lambda: waiting.settled)
    assert factory.engines[0].closed and waiting.lease().engine is factory.engines[1] and not behind.settled
    waiting.end()
    assert soon(lambda: behind.settled)
    assert factory.engines[1].closed and factory.opened == ["a", "b", "a"]
    assert [said.split(" in ")[0] for said in factory.said[:4]] == ["loaded a", "unloaded a", "loaded b", "unloaded b"]


def test_another_model_answers_while_one_is_loaded(factory: Factory, pool: Any) -> None:
    made = pool("a", "b")
    made.acquire("a").release()
    factory.gates["b"] = threading.Event()
    waiting = made.request_model("b")
    assert soon(lambda: factory.opened == ["a", "b"])
    assert made.request_model("a").settled and not waiting.settled
    factory.gates["b"].set()
    assert soon(lambda: waiting.settled)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ModelCorrupt("/secret/path/model.safetensors is cut short"), "its files are damaged"),
        (OutOfMemory("memory was refused at /secret/path"), "memory was refused"),
        (OSError("/secret/path"), "see the server's log"),
        (ZeroDivisionError(), "see the server's log"),
    ],
)
def test_a_model_that_fails_is_named_without_its_path_and_tried_again(
    factory: Factory, pool: Any, error: Exception, says: str
) -> None:
    made = pool("a", "b", memory=8)
    factory.fails["b"], factory.gates["b"] = error, threading.Event()
    waits = [made.request_model("b") for _ in range(3)]
    factory.gates["b"].set()
    assert soon(lambda: all(wait.settled for wait in waits))
    for wait in waits:
        with pytest.raises(CannotLoad, match=f"the model 'b' cannot be loaded: {says}") as refused:
            wait.lease()
        assert "secret" not in str(refused.value)
        wait.end()
    assert factory.opened == ["b"]
    made.acquire("a").release()
    with pytest.raises(type(error)) as raised:
        made.acquire("b")
    assert raised.value is error and factory.opened == ["b", "a"], "not so soon: it would unload a"
    factory.now = FIRST_SECONDS
    with pytest.raises(type(error)) as raised:
        made.acquire("b")
    assert raised.value is error and factory.opened == ["b", "a", "b"]
    factory.now += FIRST_SECONDS
    with pytest.raises(CannotLoad, match="Ask again in 5 s") as told:
        made.request_model("b").lease()
    assert told.value.seconds == FIRST_SECONDS
    factory.now += FIRST_SECONDS
    assert sum(said.startswith("b cannot be loaded: ") for said in factory.said) == 1, "`acquire` raises the others"
    del factory.fails["b"]
    made.acquire("b").release()


def test_defaults_that_fail_close_the_engine(factory: Factory) -> None:
    def wrong(engine: Any) -> Any:
        raise InvalidRequest("the template reads no `x`")

    with ModelPool([factory.model("a", defaults=wrong)], tell=factory.said.append) as made:
        wait = made.request_model("a")
        assert soon(lambda: wait.settled)
        with pytest.raises(CannotLoad, match="it does not fit the server's options"):
            wait.lease()
    assert factory.engines[0].closed


def test_idle_models_are_unloaded_by_the_clock(factory: Factory, pool: Any) -> None:
    made = pool("a", "b", idle=60.0, keep=["b"])
    made.acquire("b").release()
    running = made.acquire("a")
    factory.now = 1000.0
    made.check_clock()
    running.release()
    factory.now = 1059.0
    made.check_clock()
    made.acquire("b").release()
    assert made.is_loaded("a")
    factory.now = 1061.0
    made.check_clock()
    assert soon(lambda: not made.is_loaded("a")) and made.is_loaded("b")
    assert soon(lambda: factory.engines[1].closed) and not factory.engines[0].closed


def test_who_leaves_while_waiting_holds_up_nobody_and_the_load_is_kept(factory: Factory, pool: Any) -> None:
    made = pool("a", "b", memory=8)
    running = made.acquire("a")
    waiting = made.request_model("b")
    behind = made.request_model("a")
    waiting.end()
    waiting.end()
    assert behind.settled
    behind.end()
    running.release()
    factory.gates["b"] = threading.Event()
    alone = made.request_model("b")
    assert soon(lambda: factory.opened == ["a", "b"])
    alone.end()
    factory.gates["b"].set()
    assert soon(lambda: made.is_loaded("b")) and made.is_ready("b")


@pytest.mark.parametrize("reports", [True, False])
def test_the_end_closes_all_also_a_model_that_is_being_loaded(factory: Factory, pool: Any, reports: bool) -> None:
    factory.reports = reports
    made = pool("a", "b")
    running = made.acquire("a")
    factory.gates["b"] = threading.Event()
    waiting = made.request_model("b")
    assert soon(lambda: factory.opened == ["a", "b"])
    ending = threading.Thread(target=made.close)
    ending.start()
    assert soon(lambda: waiting.settled)
    with pytest.raises(EngineClosed, match="the server ends"):
        waiting.lease()
    if not reports:
        factory.gates["b"].set()
    ending.join(PATIENCE)
    assert not ending.is_alive() and all(engine.closed for engine in factory.engines)
    assert len(factory.engines) == (1 if reports else 2)
    with pytest.raises(EngineClosed):
        made.request_model("a")
    running.release()
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "cortexmlx-models"]
    assert not any("cannot be loaded" in said for said in factory.said)


def test_an_engine_that_does_not_close_holds_up_nobody(factory: Factory, pool: Any) -> None:
    made = pool("a", "b", memory=8)
    made.acquire("a").release()

    def fails() -> None:
        raise OSError("the disk is full")

    factory.engines[0].close = fails  # type: ignore[method-assign]
    made.acquire("b").release()
    assert made.is_loaded("b") and not made.is_loaded("a")


def test_an_engine_that_fails_for_good_is_loaded_again_for_the_next_request(factory: Factory, pool: Any) -> None:
    made = pool("a", "b", keep=["a"])
    made.acquire("a").release()
    running, other = made.acquire("a"), made.acquire("b")
    factory.engines[0].closed = True  # as an engine whose thread has ended
    assert not made.is_ready("a") and made.is_ready("b")
    waiting = made.request_model("a")
    assert not waiting.settled, "its last request has not ended"
    running.release()
    assert soon(lambda: waiting.settled)
    assert waiting.lease().engine is factory.engines[2] and factory.opened == ["a", "b", "a"]
    assert other.engine is factory.engines[1] and not factory.engines[1].closed
    factory.engines[2].closed = True
    waiting.end()
    assert soon(lambda: not made.is_loaded("a")), "its memory is given back at once"


def test_an_engine_that_fails_at_its_first_request_does_not_unload_a_good_one_again_and_again(
    factory: Factory, pool: Any
) -> None:
    made = pool("good", "bad", memory=8)
    made.acquire("good").release()
    lease = made.acquire("bad")
    factory.engines[1].closed = True
    lease.release()
    made.acquire("good").release()
    with pytest.raises(CannotLoad, match=r"'bad' cannot be loaded: .* Ask again in 5 s"):
        made.request_model("bad").lease()
    assert factory.opened == ["good", "bad", "good"]
    factory.now = FIRST_SECONDS
    lease = made.acquire("bad")
    factory.engines[3].closed = True
    lease.release()
    with pytest.raises(CannotLoad, match="Ask again in 10 s"):
        made.request_model("bad").lease()
    factory.now += 2 * FIRST_SECONDS
    made.acquire("bad").release()
    assert made.request_model("bad").settled, "it serves now"


def test_a_log_that_nobody_reads_any_more_ends_nothing(factory: Factory) -> None:
    def broken(text: str) -> None:
        raise BrokenPipeError

    factory.fails["c"] = ModelCorrupt("damaged")
    with ModelPool([factory.model(name) for name in "abc"], memory=8, tell=broken) as made:
        made.acquire("a").release()
        with pytest.raises(ModelCorrupt):
            made.acquire("c")
        made.acquire("b").release()
        assert made.is_loaded("b")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"names": ["a", "a"]}, "a name of its own"),
        ({"names": []}, "a pool needs models"),
        ({"names": ["a"], "keep": ["x"]}, "'x' is to be kept"),
        ({"names": ["a"], "idle": 0.0}, "idle is 0.0"),
        ({"names": ["a"], "idle": float("nan")}, "idle is nan"),
        ({"names": ["a"], "memory": 4}, "a takes 5 B when it is loaded, but the models may take 4 B in all: give"),
        ({"names": ["a", "b"], "memory": 9, "keep": ["a"]}, "of which those that are kept loaded take 5 B"),
        ({"names": ["a"], "memory": "lots"}, "is not a size"),
    ],
)
def test_what_can_never_be_is_refused_at_once(factory: Factory, options: dict[str, Any], says: str) -> None:
    names = options.pop("names")
    with pytest.raises(CortexError, match=says):
        ModelPool([factory.model(name) for name in names], **options)
    assert not [thread for thread in threading.enumerate() if thread.name == "cortexmlx-models"]


def test_many_threads_ask_for_three_models_in_the_room_of_one(factory: Factory, pool: Any) -> None:
    made = pool("a", "b", "c", memory=8)
    wrong: list[object] = []

    def ask(number: int) -> None:
        for turn in range(10):
            name = "abc"[(number + turn) % 3]
            lease = made.acquire(name)
            if lease.name != name or lease.engine.closed or sum(not e.closed for e in factory.engines) != 1:
                wrong.append((name, lease))
            lease.release()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not wrong and not any(thread.is_alive() for thread in threads)
