"""A RemoteRunner does what one runner does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cortexmlx.distributed import remote_runner as ranks_module
from cortexmlx.distributed.messages import CALL, Dispatch, Forward, NumberedCall, TellCommandBuffers
from cortexmlx.distributed.overdue import HangLimits
from cortexmlx.distributed.remote_runner import RemoteRunner
from cortexmlx.errors import HostLost, InvalidRequest, KVBlockError, MemoryRefused, ModelCorrupt, ModelNotFound
from cortexmlx.execution.boundary import Refusal
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.kv.snapshots import NO_STATE_OPS
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import StepKind, StepPlan
from support.effort import examples
from support.engine.core_driver import Driver
from support.engine.refusals import SAID
from support.engine.same_tokens import TIGHT, prompts_of
from support.hosts.whole_ranks import Ranks, WholeModel, changed, engines_on_ranks, options_for
from support.models.tiny import tokens_of, write_tiny
from support.patience import PATIENCE, soon

SAMPLED = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2}


def answers_of(model: Path, **config: Any) -> list[Any]:
    """Greedy answers, then sampled ones to the same prompts, which find their beginnings in the cache."""
    driver = Driver(model, **{"tokens": TIGHT, "max_rows": 8} | config)
    handles = [driver.add(prompt, 12) for prompt in prompts_of()]
    driver.finish()
    handles += [driver.add(prompt, 6, seed=i, n=1 + i % 2, **SAMPLED) for i, prompt in enumerate(prompts_of())]
    driver.step(6)
    driver.core.cancel(handles.pop(9).id)
    driver.finish()
    stats = driver.core.stats()
    assert stats.cached_tokens and (stats.preemptions or config.get("tokens", TIGHT) > TIGHT)
    return ended(driver, handles)


@cache
def expected_of(model: Path, tokens: int = TIGHT) -> list[Any]:
    """The same in one process."""
    return answers_of(model, tokens=tokens)


def ended(driver: Driver, handles: list[Any]) -> list[Any]:
    """The tokens of all answers, and their log-probabilities."""
    driver.core.check_invariants()
    results = [each for handle in handles for each in (driver.result(handle), *driver.result(handle).others)]
    driver.core.release()
    return [(each.token_ids, each.logprobs, each.prompt_logprobs) for each in results]


Tiny = Callable[[str], Path]
PERSON = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog", "horse"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_the_tokens_are_those_of_one_runner(tiny: Tiny) -> None:
    expected = expected_of(tiny("llama"))
    with engines_on_ranks(2, tiny("llama"), compare_every=1):
        assert answers_of(tiny("llama")) == expected


@pytest.mark.parametrize(("name", "tokens"), [("windowed llama", 256), ("qwen3_5", 2048)])
def test_the_tokens_are_those_of_one_runner_with_several_groups_and_with_states(
    tiny: Tiny, name: str, tokens: int
) -> None:
    expected = answers_of(tiny(name), tokens=tokens)
    with engines_on_ranks(2, tiny(name), compare_every=1):
        assert answers_of(tiny(name), tokens=tokens) == expected


def test_quantized_keys_and_values_cross(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", head_dim=32)
    prompts = [tokens_of(length, seed=length) for length in (9, 30)]
    expected = Driver(model, kv_bits=8).answers(prompts, 12)
    with engines_on_ranks(2, model, kv_bits=8, compare_every=1):
        assert Driver(model, kv_bits=8).answers(prompts, 12) == expected


def test_masks_drafts_and_log_probabilities_cross(tiny: Tiny) -> None:
    def answers() -> list[Any]:
        driver = Driver(tiny("llama"), tokens=1024, speculate=True)
        driver.core.speculation.draft = lambda: None  # type: ignore[method-assign]  # how much depends on times
        seen = tokens_of(24, seed=5)
        handles = [
            driver.add(tokens_of(20), 24, ignore_eos=False, structured=PERSON),
            driver.add(tokens_of(9, seed=1), 20, logprobs=2, logit_bias={65: 3.0}),
            driver.add(tokens_of(40, seed=2), 20, prompt_logprobs=1, seed=3, temperature=1.0, top_k=9),
            driver.add(seen * 3, 24),
        ]
        for _ in range(200):
            if driver.core.idle:
                break
            for job in driver.core.scheduler.draftable_jobs:
                driver.core.scheduler.set_drafts(job.id, [*job.tokens[-3:], 70])
            driver.core.step()
        assert driver.core.stats().steps_by_reason["verify"] > 0
        return ended(driver, handles)

    expected = answers()
    with engines_on_ranks(2, tiny("llama"), compare_every=1) as made:
        assert answers() == expected
    [ranks] = made
    sent = [[CALL.decode(message).call for message in channel.sent] for channel in ranks.channels]
    assert any(isinstance(call, Forward) for call in sent[0])
    masks = [[call.mask is not None for call in calls if hasattr(call, "mask")] for calls in sent]
    assert any(masks[0]) and not any(masks[1]) and len(masks[0]) == len(masks[1])


def test_an_idle_engine_moves_its_blocks_and_shrinks_on_all_ranks(tiny: Tiny) -> None:
    prompts = [tokens_of(n, seed=n) for n in (40, 20, 60)]
    expected = Driver(tiny("llama"), tokens=1024).answers(prompts, 20)
    with engines_on_ranks(2, tiny("llama"), compare_every=1) as made:
        driver = Driver(tiny("llama"), tokens=1024)
        assert driver.answers(prompts, 20) == expected
        driver.core.relieve(False)
        assert driver.core.compact() > 0
        assert driver.answers(prompts, 20) == expected
        large = driver.core.runner.bytes.arena
        driver.core.relieve(True)
        assert driver.core.runner.bytes.arena < large
        assert driver.answers(prompts, 20) == expected
        [ranks] = made
        assert len({state.blocks for state in ranks.runner.ranks}) == 1
        driver.core.release()


def test_an_engine_begins_anew_on_the_same_ranks(tiny: Tiny) -> None:
    """As after an exception that landed between two statements: what was in flight is dropped on all ranks."""
    expected = expected_of(tiny("llama"))
    with engines_on_ranks(2, tiny("llama"), compare_every=1):
        driver = Driver(tiny("llama"), tokens=TIGHT, max_rows=8)
        for prompt in prompts_of():
            driver.add(prompt, 12)
        driver.step(7)
        driver.core.reset()
        assert driver.answers(prompts_of(), 12) == [tokens for tokens, _, _ in expected[:8]]
        driver.core.release()


# -- what stays here --------------------------------------------------------------------------------------------------


def test_functions_of_the_caller_are_refused_by_name(tiny: Tiny) -> None:
    with engines_on_ranks(1, tiny("llama")):
        driver = Driver(tiny("llama"))
        with pytest.raises(InvalidRequest, match="logits_processors"):
            driver.core.runner.processors[JobId(1)] = [lambda tokens, logits: logits]
        assert not driver.core.runner.processors
        assert driver.core.runner.processors.pop(JobId(1), None) is None
        driver.core.release()


def test_command_buffers_are_asked_once_for_each_size_of_the_arena(
    tiny: Tiny, small_arenas: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda device: {"architecture": "applegpu_g16s"})

    def as_on_gpu(runner: ModelRunner) -> None:
        runner.computes_at_dispatch = False

    with engines_on_ranks(2, tiny("llama"), changed({0: as_on_gpu})) as made:
        driver, runner = Driver(tiny("llama"), tokens=512), made[0].runner
        first = driver.core.stats().command_buffers
        assert first is not None and first == driver.core.stats().command_buffers
        assert runner.resize((20,)) is None and driver.core.stats().command_buffers is not None
        asked = [CALL.decode(message).call for message in made[0].channels[0].sent]
        assert asked.count(TellCommandBuffers()) == 2
        driver.core.release()


# -- Memory that is refused to some ranks before a pass: it costs no answer, and all ranks stay alike -----------------


class Refusing:
    """Has a part of a runner's memory raise at its n-th call, for the n in `times`."""

    def __init__(self, where: str, times: set[int], error: Exception) -> None:
        self.left = set(times)
        self._where, self._error, self._count = where, error, 0

    def __call__(self, runner: ModelRunner) -> None:
        own = getattr(runner.memory, self._where)

        def refuses(*args: Any) -> Any:
            self._count += 1
            if self._count in self.left:
                self.left.discard(self._count)
                raise self._error
            return own(*args)

        setattr(runner.memory, self._where, refuses)


@pytest.mark.parametrize(
    ("rank", "where", "error"),
    [
        (0, "resize", MemoryRefused("the arena stays as it is")),
        (1, "resize", RuntimeError(SAID)),
        (1, "flush", RuntimeError(SAID)),
        (0, "copy", MemoryError("no")),
    ],
)
def test_memory_that_is_refused_before_a_pass_costs_no_answer(
    tiny: Tiny, small_arenas: None, rank: int, where: str, error: Exception
) -> None:
    expected = expected_of(tiny("llama"), TIGHT * 4)
    change = Refusing(where, {1}, error)
    with engines_on_ranks(2, tiny("llama"), changed({rank: change}), compare_every=1) as made:
        assert answers_of(tiny("llama"), tokens=TIGHT * 4) == expected
    assert not change.left, "it was never refused"
    assert len({state.blocks for state in made[0].runner.ranks}) == 1


@pytest.mark.parametrize("second", [None, MemoryRefused("it stays"), RuntimeError(SAID)])
def test_what_some_ranks_were_granted_is_undone(tiny: Tiny, small_arenas: None, second: Exception | None) -> None:
    """Rank 1 is refused the larger arena. Rank 0, which has it already, goes back, or is refused that, too."""
    changes = {1: Refusing("resize", {1}, MemoryRefused("no"))}
    if second is not None:
        changes[0] = Refusing("resize", {2}, second)
    with engines_on_ranks(2, tiny("llama"), changed(changes)) as made:
        driver, runner = Driver(tiny("llama")), made[0].runner
        before = runner.blocks
        larger = tuple(2 * count for count in before)
        assert runner.resize(larger) == Refusal("no", is_resize=second is None)
        assert runner.blocks == before
        assert [state.blocks for state in runner.ranks] == [before if second is None else larger, before]
        assert runner.resize(larger) is None and {state.blocks for state in runner.ranks} == {larger}
        driver.core.release()


def test_an_arena_grows_only_if_all_ranks_would_be_given_the_memory(tiny: Tiny, small_arenas: None) -> None:
    asked: list[Any] = []

    def refuses(runner: ModelRunner) -> None:
        runner.can_resize = lambda blocks: bool(asked.append(blocks))  # type: ignore[method-assign]

    with engines_on_ranks(2, tiny("llama"), changed({1: refuses}), compare_every=1) as made:
        driver = Driver(tiny("llama"), tokens=1024)
        before = made[0].runner.blocks
        assert not driver.core.runner.can_resize((1,)) and asked.pop() == (1,)
        driver.answers([tokens_of(60, seed=n) for n in range(6)], 30)
        assert asked and made[0].runner.blocks == before
        driver.core.release()


def test_no_rank_has_an_arena_if_one_cannot_begin(tiny: Tiny) -> None:
    change = Refusing("begin", {1}, MemoryRefused("no arena here"))
    with engines_on_ranks(2, tiny("llama"), changed({1: change})) as made:
        with pytest.raises(MemoryRefused, match="no arena here"):
            Driver(tiny("llama"))
        assert {state.blocks for state in made[0].runner.ranks} == {(0,)}


@pytest.mark.parametrize("worse", [0, 1])
def test_an_arena_stays_only_if_it_is_whole_on_all_ranks(tiny: Tiny, small_arenas: None, worse: int) -> None:
    """One rank refuses in words that say that its arena has not changed, another one in words that say nothing."""
    changes = {
        worse: Refusing("resize", {1}, RuntimeError(SAID)),
        1 - worse: Refusing("resize", {1}, MemoryRefused("it stays")),
    }
    with engines_on_ranks(2, tiny("llama"), changed(changes)) as made:
        driver, runner = Driver(tiny("llama")), made[0].runner
        larger = tuple(2 * count for count in runner.blocks)
        assert runner.resize(larger) == Refusal(SAID, is_resize=False)
        driver.core.release()


# -- Ranks that fail, are lost or have other plans end the group, by name ---------------------------------------------


def _failing(method: str, times: set[int], error: Callable[[], Exception]) -> Callable[[ModelRunner], None]:
    """Have a method of the runner raise at its n-th call."""

    def change(runner: ModelRunner) -> None:
        own, count = getattr(runner, method), [0]

        def fails(*args: Any) -> Any:
            count[0] += 1
            if count[0] in times:
                raise error()
            return own(*args)

        setattr(runner, method, fails)

    return change


@pytest.mark.parametrize(
    ("rank", "method", "error", "why"),
    [
        (1, "_forward", RuntimeError(SAID), "memory was refused within a step: .*Unable to allocate"),
        (0, "_forward", ZeroDivisionError("odd"), "ZeroDivisionError: odd"),
        (1, "collect", RuntimeError("the ring broke"), "RuntimeError: the ring broke"),
        (0, "prepare", KVBlockError("slots 9 to 10"), "KVBlockError on rank 0: slots 9 to 10"),
    ],
)
def test_a_rank_that_fails_ends_the_group(tiny: Tiny, rank: int, method: str, error: Exception, why: str) -> None:
    with engines_on_ranks(2, tiny("llama"), changed({rank: _failing(method, {2}, lambda: error)})) as made:
        driver = Driver(tiny("llama"))
        handle = driver.add(tokens_of(20), 40)
        driver.finish()
        with pytest.raises(HostLost, match=why) as raised:
            driver.result(handle)
        assert f"rank {rank}" in str(raised.value)
        runner = made[0].runner
        for call in (runner.collect, lambda: runner.resize((1,)), lambda: runner.settle(NO_STATE_OPS)):
            with pytest.raises(HostLost, match=why):
                call()
        runner.forget()
        runner.release()
        runner.trim()
        assert runner.blocks and runner.bytes.arena
        driver.core.release()
        runner.close()
        with pytest.raises(HostLost, match=why):
            runner.can_resize((1,))


def test_the_first_error_of_opening_keeps_its_class_and_names_the_rank(tmp_path: Path) -> None:
    ranks = Ranks(2, lambda rank, options: WholeModel(options))
    with pytest.raises(ModelNotFound, match=r"^rank [01]: "):
        ranks.runner.open(options_for(tmp_path / "nowhere"))
    with pytest.raises(HostLost):
        ranks.runner.make_runners([(), ()])
    ranks.close()


def test_a_part_that_shows_itself_damaged_keeps_its_error(tiny: Tiny) -> None:
    def damaged(runner: ModelRunner) -> None:
        raise ModelCorrupt("the logits are NaN")

    ranks = Ranks(2, changed({1: damaged}))
    infos = ranks.runner.open(options_for(tiny("llama")))
    with pytest.raises(ModelCorrupt, match=r"^rank 1: the logits are NaN$"):
        ranks.runner.make_runners([info.groups for info in infos])
    ranks.close()


def test_calls_in_another_order_are_refused() -> None:
    ranks = Ranks(1, lambda rank, options: WholeModel(options))
    with pytest.raises(HostLost, match="before the model was opened"):
        ranks.runner.can_resize((1,))
    ranks.close()


def test_a_rank_that_hangs_in_a_step_fails_what_runs_and_is_named(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have answered. Only then it counts, so that the machine may be slow."""
    monkeypatch.setattr(ranks_module, "_LOOK_SECONDS", 0.01)
    over = threading.Event()

    def hang(runner: ModelRunner) -> None:
        own, count = runner.dispatch, iter(range(1000))

        def dispatch(plan: StepPlan) -> Any:
            if next(count) == 5:
                calls = made[0].runner._ranks._calls
                assert soon(lambda: not (calls._ranks[0].open or calls._ranks[2].open))
                calls._limits = HangLimits(0.05, 0.05)
                assert over.wait(PATIENCE)
            return own(plan)

        runner.dispatch = dispatch  # type: ignore[method-assign]

    with engines_on_ranks(3, tiny("llama"), changed({1: hang})) as made:
        driver = Driver(tiny("llama"))
        handle = driver.add(tokens_of(20), 40)
        driver.finish()
        with pytest.raises(HostLost, match=r"^rank 1 hangs: it took") as raised:
            driver.result(handle)
        assert raised.value.host == "rank 1"
        driver.core.release()
        over.set()


# -- other plans ------------------------------------------------------------------------------------------------------


def _altered(ranks: Ranks, rank: int, alter: Callable[[Any], Any]) -> None:
    """Change the calls that a rank gets."""
    end = ranks.channels[rank].other
    own = end.arrive

    def arrive(message: bytes) -> None:
        call = CALL.decode(message)
        asks = alter(call.call)
        own(message if asks is call.call else CALL.encode(NumberedCall(call.number, asks)))

    end.arrive = arrive  # type: ignore[method-assign]


def _other_lane(asks: Any) -> Any:
    """A step of a window in which a lane has died."""
    if not isinstance(asks, Dispatch) or asks.plan is None or asks.plan.groups is not None:
        return asks
    segments = tuple(replace(segment, live=False) for segment in asks.plan.segments)
    return Dispatch(msgspec.structs.replace(asks.plan, segments=segments))  # type: ignore[arg-type]


def _other_table(asks: Any) -> Any:
    """Block tables with two blocks exchanged."""
    plan = getattr(asks, "plan", None)
    if plan is None or plan.kind is not StepKind.DECODE or plan.groups is None:
        return asks
    groups = tuple(replace(group, tables=group.tables[:, ::-1].copy()) for group in plan.groups)
    return type(asks)(msgspec.structs.replace(plan, groups=groups))


@pytest.mark.parametrize(("alter", "every"), [(_other_lane, 8), (_other_lane, 1), (_other_table, 1)])
def test_a_rank_with_another_plan_is_found_when_plans_are_compared(
    tiny: Tiny, every: int, alter: Callable[[Any], Any]
) -> None:
    """In debug runs, in the very step in which it came."""
    altered: list[int] = []

    def once(asks: Any) -> Any:
        other = alter(asks)
        if other is asks or altered:
            return asks
        altered.append(asks.plan.number)
        return other

    with engines_on_ranks(3, tiny("llama"), compare_every=every) as made:
        driver = Driver(tiny("llama"))
        _altered(made[0], 2, once)
        handle = driver.add(tokens_of(20), 60)
        driver.finish()
        with pytest.raises(HostLost, match=r"rank 2 has carried out other plans or block tables.*at step") as raised:
            driver.result(handle)
        assert raised.value.host == "rank 2"
        told = int(str(raised.value).split("at step ")[1].split(":")[0])
        assert told % every == 0 and altered[0] <= told < altered[0] + every
        driver.core.release()


def test_a_rank_with_an_arena_of_another_size_is_found(tiny: Tiny, small_arenas: None) -> None:
    def other(runner: ModelRunner) -> None:
        runner.memory.resize = lambda blocks: None  # type: ignore[method-assign]

    with engines_on_ranks(2, tiny("llama"), changed({1: other}), compare_every=1):
        driver = Driver(tiny("llama"), tokens=1024)
        with pytest.raises(HostLost, match="rank 1"):
            driver.answers([tokens_of(60, seed=n) for n in range(6)], 30)
        driver.core.release()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_that_was_interrupted_is_never_half_sent(tiny: Tiny, rank: int) -> None:
    with engines_on_ranks(2, tiny("llama")) as made:
        driver = Driver(tiny("llama"))
        driver.add(tokens_of(20), 40)
        driver.step(3)
        channel = made[0].channels[rank]
        own = channel.send

        def interrupted(message: Any) -> None:
            raise KeyboardInterrupt

        channel.send = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            driver.step()
        channel.send = own  # type: ignore[method-assign]
        driver.core.runner.forget()
        with pytest.raises(HostLost, match="interrupted"):
            driver.core.reset()
        driver.core.release()


def test_close_may_be_called_again_and_ends_all_workers(tiny: Tiny) -> None:
    ranks = Ranks(2, lambda rank, options: WholeModel(options))
    ranks.runner.open(options_for(tiny("llama")))
    ranks.close()
    ranks.close()
    with pytest.raises(HostLost, match="closed"):
        ranks.runner.can_resize((1,))
    assert isinstance(ranks.runner, RemoteRunner)


# Whatever happens to requests and memory, the arenas of all ranks have the same bytes, and plans cross unchanged.


EVENTS = st.one_of(
    st.tuples(st.just("add"), st.integers(2, 60), st.integers(1, 24), st.integers(1, 2), st.sampled_from([0.0, 0.9])),
    st.tuples(st.just("step"), st.integers(1, 20)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("relieve"), st.booleans()),
    st.tuples(st.just("compact")),
)


@settings(max_examples=examples(8, few=5), suppress_health_check=list(HealthCheck))
@example(  # what a rank keeps of free blocks is nobody's
    [("add", 2, 1, 1, 0.0), ("add", 2, 1, 1, 0.0), ("step", 1), ("step", 1), ("relieve", True)], {1}, "resize"
)
@given(
    st.lists(EVENTS, min_size=4, max_size=14),
    st.sets(st.integers(1, 6), max_size=2),
    st.sampled_from(["resize", "flush", "copy"]),
)
def test_arenas_stay_equal(
    tiny: Callable[[str], Path], small_arenas: None, events: list[Any], refused: set[int], where: str
) -> None:
    """Rank 1 is refused memory now and then, before a pass."""
    copies: list[Any] = []

    def is_copied(runner: ModelRunner) -> None:
        """Copy the arena when the runner is told to trim: on its own thread."""
        runner.trim = lambda: copies.append(runner.copy_out(0, range(runner.blocks[0])))  # type: ignore[method-assign]

    def refuses(runner: ModelRunner) -> None:
        is_copied(runner)
        own, count = getattr(runner.memory, where), [0]

        def call(*args: Any) -> Any:
            count[0] += 1
            if count[0] in refused:
                raise MemoryRefused("now and then") if where == "resize" else MemoryError("now and then")
            return own(*args)

        setattr(runner.memory, where, call)

    with engines_on_ranks(2, tiny("llama"), changed({0: is_copied, 1: refuses}), compare_every=1) as made:
        driver = Driver(tiny("llama"), tokens=256, max_rows=4)
        handles = []
        for number, event in enumerate([*events, ("step", 10_000)]):
            match event:
                case "add", length, tokens, answers, temperature:
                    prompt = tokens_of(60, seed=number % 3)[:length]
                    handles.append(driver.add(prompt, tokens, seed=number, n=answers, temperature=temperature))
                case "step", count:
                    driver.step(count)
                case "cancel", index if index < len(handles):
                    driver.core.cancel(handles[index].id)
                case "relieve", critical:
                    driver.core.relieve(critical)
                case ("compact",):
                    driver.core.compact()
            driver.core.check_invariants()
        driver.core.tidy()
        copies.clear()
        assert len({state.blocks for state in made[0].runner.ranks}) == 1
        made[0].runner.trim()
        free_runs = driver.core.cache.pools[0].allocator.free_runs()
        free = {block for run in free_runs for block in range(run.start, run.stop)}
        for block, (copy, same) in enumerate(zip(*copies, strict=True)):
            assert copy is not None and same is not None
            assert block in free or all(np.array_equal(a, b) for a, b in zip(copy, same, strict=True))
        driver.core.release()
