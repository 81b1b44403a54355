"""Ranks that fail, are lost or have other plans end the group, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cortexmlx.core.config import EngineConfig
from cortexmlx.distributed import ranks as ranks_module
from cortexmlx.distributed.group import rank_options
from cortexmlx.distributed.messages import CALL, Dispatch, NumberedCall
from cortexmlx.distributed.overdue import HangLimits
from cortexmlx.distributed.remote_runner import RemoteRunner
from cortexmlx.errors import HostLost, KVBlockError, ModelCorrupt, ModelNotFound
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.kv.snapshots import NO_STATE_OPS
from cortexmlx.scheduling.plan import StepKind, StepPlan
from support.engine.core_driver import Driver
from support.engine.refusals import SAID
from support.hosts.whole_ranks import Ranks, WholeModel, changed, engines_on_ranks, options_for
from support.models.tiny import tokens_of
from support.patience import PATIENCE, soon

Tiny = Callable[[str], Path]


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
        asks = alter(call.asks)
        own(message if asks is call.asks else CALL.encode(NumberedCall(call.number, asks)))

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


@pytest.mark.parametrize(("alter", "every"), [(_other_lane, 8), (_other_table, 1)])
def test_a_rank_with_another_plan_is_found(tiny: Tiny, every: int, alter: Callable[[Any], Any]) -> None:
    with engines_on_ranks(3, tiny("llama"), compare_every=every) as made:
        driver = Driver(tiny("llama"))
        _altered(made[0], 2, alter)
        handle = driver.add(tokens_of(20), 60)
        driver.finish()
        with pytest.raises(HostLost, match=r"rank 2 has carried out other plans or block tables.*at step") as raised:
            driver.result(handle)
        assert raised.value.host == "rank 2"
        assert int(str(raised.value).split("at step ")[1].split(":")[0]) % every == 0
        driver.core.release()


@pytest.mark.parametrize("alter", [_other_lane, _other_table])
def test_debug_runs_find_another_plan_in_the_step_in_which_it_came(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, alter: Callable[[Any], Any]
) -> None:
    monkeypatch.setenv("CORTEXMLX_COMPARE_EVERY", "1")
    every = rank_options(EngineConfig(str(tiny("llama"))), "x", None).compare_every
    altered: list[int] = []

    def once(asks: Any) -> Any:
        other = alter(asks)
        if other is asks or altered:
            return asks
        altered.append(asks.plan.number)
        return other

    with engines_on_ranks(2, tiny("llama"), compare_every=every) as made:
        driver = Driver(tiny("llama"))
        _altered(made[0], 1, once)
        handle = driver.add(tokens_of(20), 60)
        driver.finish()
        with pytest.raises(HostLost, match="rank 1 has carried out other plans") as raised:
            driver.result(handle)
        assert f"at step {altered[0]}:" in str(raised.value) and raised.value.host == "rank 1"
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
