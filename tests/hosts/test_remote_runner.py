"""A RemoteRunner does what one runner does: the same tokens, and the same answers to refusals of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.errors import HostLost, InvalidRequest, KVBlockError, MemoryRefused, ModelNotFound
from cortexmlx.execution.boundary import Refused
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.hosts.remote_runner import RemoteRunner
from cortexmlx.hosts.wire.messages import CALL, Dispatch, Forward
from cortexmlx.hosts.wire.window_step import WindowStep
from cortexmlx.kv import sizing
from cortexmlx.kv.disk_tier import STATE
from cortexmlx.kv.state.snapshots import NOTHING
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.steps.plan import StepKind, StepPlan
from support.engine.core_driver import Driver
from support.engine.refusals import SAID
from support.engine.same_tokens import TIGHT, prompts_of
from support.hosts.whole_ranks import Ranks, WholeModel, changed, engines_on_ranks, options_for
from support.models.tiny import tokens_of, write_tiny

Tiny = Callable[[str], Path]
PERSON = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog", "horse"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2}


def _answers(model: Path, **config: Any) -> list[Any]:
    """Greedy answers, then sampled ones to the same prompts, which find their beginnings in the cache."""
    driver = Driver(model, **{"tokens": TIGHT, "max_rows": 8} | config)
    handles = [driver.add(prompt, 24) for prompt in prompts_of()]
    driver.finish()
    handles += [driver.add(prompt, 12, seed=i, n=1 + i % 2, **SAMPLED) for i, prompt in enumerate(prompts_of())]
    driver.step(9)
    driver.core.cancel(handles.pop(9).id)
    driver.finish()
    stats = driver.core.stats()
    assert stats.cached_tokens and (stats.preemptions or config.get("tokens", TIGHT) > TIGHT)
    return _ended(driver, handles)


@cache
def _expected(model: Path, tokens: int = TIGHT) -> list[Any]:
    """The same in one process."""
    return _answers(model, tokens=tokens)


def _ended(driver: Driver, handles: list[Any]) -> list[Any]:
    """The tokens of all answers, and their log-probabilities."""
    driver.core.check_invariants()
    results = [each for handle in handles for each in (driver.result(handle), *driver.result(handle).others)]
    driver.core.release()
    return [(each.token_ids, each.logprobs, each.prompt_logprobs) for each in results]


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_tokens_are_those_of_one_runner(tiny: Tiny, ranks: int) -> None:
    expected = _expected(tiny("llama"))
    with engines_on_ranks(ranks, tiny("llama"), compare_every=1):
        assert _answers(tiny("llama")) == expected


@pytest.mark.parametrize(("name", "tokens"), [("windowed llama", 256), ("qwen3_5", 2048)])
def test_the_tokens_are_those_of_one_runner_with_several_groups_and_with_states(
    tiny: Tiny, name: str, tokens: int
) -> None:
    expected = _answers(tiny(name), tokens=tokens)
    with engines_on_ranks(2, tiny(name), compare_every=1):
        assert _answers(tiny(name), tokens=tokens) == expected


def test_quantized_keys_and_values_cross(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", head_dim=32)
    expected = _answers(model, kv_bits=8)
    with engines_on_ranks(2, model, kv_bits=8, compare_every=1):
        assert _answers(model, kv_bits=8) == expected


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
            for job in driver.core.scheduler.draftable:
                driver.core.scheduler.draft(job.id, [*job.tokens[-3:], 70])
            driver.core.step()
        assert driver.core.stats().steps_by_reason["verify"] > 0
        return _ended(driver, handles)

    expected = answers()
    with engines_on_ranks(2, tiny("llama"), compare_every=1) as made:
        assert answers() == expected
    [ranks] = made
    sent = [[CALL.decode(message).asks for message in channel.sent] for channel in ranks.channels]
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


# -- within a window --------------------------------------------------------------------------------------------------


def test_a_step_within_a_window_takes_a_few_bytes(tiny: Tiny) -> None:
    with engines_on_ranks(1, tiny("llama")) as made:
        driver = Driver(tiny("llama"), tokens=1024, max_rows=8)
        driver.answers([tokens_of(30, seed=n) for n in range(8)], 30)
        driver.core.release()
    calls = [(len(message), CALL.decode(message).asks) for message in made[0].channels[0].sent]
    steps = [size for size, call in calls if isinstance(call, Dispatch) and not hasattr(call.plan, "kind")]
    assert len(steps) > 20 and sorted(steps)[len(steps) // 2] <= 16


# -- refused memory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas begin with a few blocks, so that they grow soon."""
    monkeypatch.setattr(sizing, "_FIRST_TOKENS", 96)


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
    expected = _expected(tiny("llama"), TIGHT * 4)
    change = Refusing(where, {1}, error)
    with engines_on_ranks(2, tiny("llama"), changed({rank: change}), compare_every=1) as made:
        assert _answers(tiny("llama"), tokens=TIGHT * 4) == expected
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
        assert runner.resize(larger) == Refused("no", of_arena=second is None)
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


# -- ranks that fail --------------------------------------------------------------------------------------------------


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
        driver.add(tokens_of(20), 40)
        with pytest.raises(HostLost, match=why) as raised:
            driver.finish()
        assert f"rank {rank}" in str(raised.value)
        runner = made[0].runner
        for call in (runner.collect, lambda: runner.resize((1,)), lambda: runner.settle(NOTHING)):
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
        ranks.runner.arrange([(), ()])
    ranks.close()


def test_calls_in_another_order_are_refused() -> None:
    ranks = Ranks(1, lambda rank, options: WholeModel(options))
    with pytest.raises(HostLost, match="before the model was opened"):
        ranks.runner.can_resize((1,))
    ranks.close()


# -- other plans ------------------------------------------------------------------------------------------------------


def _altered(ranks: Ranks, rank: int, alter: Callable[[Any], Any]) -> None:
    """Change the calls that a rank gets."""
    end = ranks.channels[rank].other
    own = end.arrive

    def arrive(message: bytes) -> None:
        call = CALL.decode(message)
        asks = alter(call.asks)
        own(message if asks is call.asks else bytes(CALL.encode(replace(call, asks=asks))))

    end.arrive = arrive  # type: ignore[method-assign]


def _other_lane(asks: Any) -> Any:
    """A step of a window in which a lane has died."""
    if isinstance(asks, Dispatch) and isinstance(asks.plan, WindowStep):
        return Dispatch(replace(asks.plan, live=bytes(len(asks.plan.live))))
    return asks


def _other_table(asks: Any) -> Any:
    """Block tables with two blocks exchanged."""
    plan = getattr(asks, "plan", None)
    if not isinstance(plan, StepPlan) or plan.kind is not StepKind.DECODE or plan.groups is None:
        return asks
    groups = tuple(replace(group, tables=group.tables[:, ::-1].copy()) for group in plan.groups)
    return replace(asks, plan=replace(plan, groups=groups))


@pytest.mark.parametrize(("alter", "every"), [(_other_lane, 8), (_other_table, 1)])
def test_a_rank_with_another_plan_is_found(tiny: Tiny, every: int, alter: Callable[[Any], Any]) -> None:
    with engines_on_ranks(3, tiny("llama"), compare_every=every) as made:
        driver = Driver(tiny("llama"))
        _altered(made[0], 2, alter)
        driver.add(tokens_of(20), 60)
        with pytest.raises(HostLost, match=r"rank 2 has carried out other plans or block tables.*at step") as raised:
            driver.finish()
        assert raised.value.host == "rank 2"
        assert int(str(raised.value).split("at step ")[1].split(":")[0]) % every == 0
        driver.core.release()


def test_a_rank_with_an_arena_of_another_size_is_found(tiny: Tiny, small_arenas: None) -> None:
    def other(runner: ModelRunner) -> None:
        runner.memory.resize = lambda blocks: None  # type: ignore[method-assign]

    with engines_on_ranks(2, tiny("llama"), changed({1: other}), compare_every=1):
        driver = Driver(tiny("llama"), tokens=1024)
        with pytest.raises(HostLost, match="rank 1"):
            driver.answers([tokens_of(60, seed=n) for n in range(6)], 30)
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


def test_copies_of_a_block_have_the_parts_of_all_ranks(tiny: Tiny) -> None:
    with engines_on_ranks(2, tiny("llama")):
        driver = Driver(tiny("llama"))
        driver.answers([tokens_of(20)], 8)
        runner = driver.core.runner
        copies = runner.copy_out(0, [0, 1])
        assert not isinstance(copies, Refused)
        for copy in copies:
            assert copy is not None
            assert [(a.shape, a.dtype.str) for a in copy] == list(runner.shapes[0])
            assert all(np.array_equal(a, b) for a, b in zip(copy[:2], copy[2:], strict=True)) and copy[0].any()
        assert runner.copy_out(STATE, [5]) == [None]
        assert runner.command_buffers is None and runner.computes_at_dispatch
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
            driver.core.begin_anew()
        driver.core.release()


def test_an_engine_begins_anew_on_the_same_ranks(tiny: Tiny) -> None:
    """As after an exception that landed between two statements: what was in flight is dropped on all ranks."""
    expected = _expected(tiny("llama"))
    with engines_on_ranks(2, tiny("llama"), compare_every=1):
        driver = Driver(tiny("llama"), tokens=TIGHT, max_rows=8)
        for prompt in prompts_of():
            driver.add(prompt, 24)
        driver.step(7)
        driver.core.begin_anew()
        assert driver.answers(prompts_of(), 24) == [tokens for tokens, _, _ in expected[:8]]
        driver.core.release()


def test_close_may_be_called_again_and_ends_all_workers(tiny: Tiny) -> None:
    ranks = Ranks(2, lambda rank, options: WholeModel(options))
    ranks.runner.open(options_for(tiny("llama")))
    ranks.close()
    ranks.close()
    with pytest.raises(HostLost, match="closed"):
        ranks.runner.can_resize((1,))
    assert isinstance(ranks.runner, RemoteRunner)
