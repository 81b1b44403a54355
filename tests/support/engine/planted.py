"""A failure at any allocation of the modules that own memory, and an engine's day in which all of them change it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from cortexmlx.errors import CortexError, KVCacheFull, OutOfMemory
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.kv.arena import KVArena
from cortexmlx.types.request import FinishReason, RequestState
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.refusals import SAID
from support.models.tiny import tokens_of

MODULES = (
    "cortexmlx.attention.recurrent",
    "cortexmlx.execution.adapters",
    "cortexmlx.execution.head_pass",
    "cortexmlx.execution.output_projection",
    "cortexmlx.execution.paged_memory",
    "cortexmlx.execution.runner",
    "cortexmlx.execution.sampling",
    "cortexmlx.execution.states",
    "cortexmlx.kv.arena",
    "cortexmlx.models.draft_head",
    "cortexmlx.vision.sight",
    "cortexmlx.vision.towers",
)

ALLOCATES = frozenset(
    ("array", "zeros", "pad", "take", "concatenate", "quantize", "dequantize", "eval", "async_eval", "synchronize")
)
"""Functions of MLX that allocate, or wait for what does. A command buffer's refusal is raised by those that wait."""

ERRORS: dict[str, Callable[[], Exception]] = {
    "refusal": lambda: RuntimeError(SAID),
    "exception": lambda: ValueError("planted"),
}

KINDS = (
    "llama",
    "windowed llama",
    "lfm2",
    "deepseek_v3",
    "llama with adapters",
    "llama with a draft model",
    "lfm2 with a store",
    "qwen3_5 with a head",
    "qwen3_5 with images",
)
"""All tokens seen, a window beside them, recurrent states, latents; and what else changes memory."""

TEXT = 20
"""Tokens of a long answer: more than the columns of a decode window, so that it is flushed in the middle."""

SHORT = 6
"""Tokens of an answer that tells whether the prompt's memory is right. Each step costs all runs its time."""


@dataclass
class Plan:
    """Raises `error` at allocation number `at`, counted from 0, and at the `times - 1` after it."""

    error: str = "refusal"
    at: int = -1
    times: int = 1
    sites: list[str] = field(default_factory=list)
    """Module, function and line of each allocation so far."""
    live: bool = True
    """Whether allocations count now."""

    def allocate(self, site: str) -> None:
        """Count an allocation, or raise."""
        if not self.live:
            return
        number = len(self.sites)
        self.sites.append(site)
        if 0 <= self.at <= number < self.at + self.times:
            raise ERRORS[self.error]()


class _Watched:
    """mlx.core as one module sees it."""

    def __init__(self, plan: Plan, name: str) -> None:
        self._plan, self._name = plan, name.rpartition(".")[2]

    def __getattr__(self, name: str) -> Any:
        function = getattr(mx, name)
        if name not in ALLOCATES:
            return function

        def allocate(*args: Any, **settings: Any) -> Any:
            frame = sys._getframe(2 if function is mx.array else 1)
            self._plan.allocate(f"{self._name}.{frame.f_code.co_name}:{frame.f_lineno}")
            return function(*args, **settings)

        return _Arrays("array", (), {"make": staticmethod(allocate)}) if function is mx.array else allocate


class _Arrays(type):
    """`mx.array`, which is a function that allocates and a type, too."""

    make: Any

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        return cls.make(*args, **settings)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, mx.array)


@contextmanager
def planted(plan: Plan) -> Iterator[None]:
    """Allocations follow the plan in this context. A write outside of the arena, and a pass on layers of different
    sizes, are AssertionErrors.
    """
    write, build = KVArena.write, ModelRunner.build_pass

    def watched_write(arena: KVArena, layer: int, slots: Any, *values: Any) -> None:
        plan.allocate("arena.write")
        every = np.arange(slots.start, slots.stop) if isinstance(slots, slice) else np.array(slots)
        size = min(array.shape[1] for array in arena.slab(layer))
        if every.size and not -1 <= every.min() <= every.max() < size:
            raise _Broken(f"slots up to {every.max()} of {size} are written")
        write(arena, layer, slots, *values)

    def watched_build(runner: ModelRunner, step: Any) -> Any:
        arena = runner.arena
        for layer, group in arena.group_of.items():
            sizes = {array.shape[1] for array in arena.slab(layer)}
            if sizes != {arena.slots_per_slab(group)}:
                raise _Broken(f"layer {layer} has {sizes} slots instead of {arena.slots_per_slab(group)}")
        return build(runner, step)

    with ExitStack() as patches:
        for name in MODULES:
            patches.enter_context(patch.object(import_module(name), "mx", _Watched(plan, name)))
        patches.enter_context(patch.object(KVArena, "write", watched_write))
        patches.enter_context(patch.object(ModelRunner, "build_pass", watched_build))
        yield


class _Broken(BaseException):
    """What no engine may do. It is no Exception, so that no engine catches it."""


@dataclass(frozen=True, eq=False)
class Kind:
    """A model, and what its engine is given."""

    model: Path
    right: Callable[[tuple[int, ...], bool], Sequence[int]]
    """The `TEXT` tokens that mlx-lm has for a prompt, with the adapter or without."""
    adapter: Path | None = None
    draft: Path | None = None
    extra: str = ""


def kind_of(name: str, root: Path) -> Kind:
    """Return a kind of `KINDS`. Its files are written to `root`."""
    from mlx_lm import load

    from support.engine.judge import greedy
    from support.models.adapters import write_adapter
    from support.models.draft_heads import write_draft_head
    from support.models.sighted import SightedJudge, write_sighted
    from support.models.tiny import write_tiny

    model, _, extra = name.partition(" with ")
    folder = root / model.replace(" ", "-")
    {"a head": write_draft_head, "images": write_sighted}.get(extra, write_tiny)(folder, model)
    adapter = write_adapter(root / "adapter", folder) if extra == "adapters" else None
    draft = write_tiny(root / "draft", "one layer") if extra == "a draft model" else None
    plain = load(str(folder))
    seeing = SightedJudge(plain[0], folder) if extra == "images" else None
    adapted = None if adapter is None else load(str(folder), adapter_path=str(adapter))

    @cache
    def right(prompt: tuple[int, ...], with_adapter: bool) -> Sequence[int]:
        loaded = adapted if with_adapter else plain
        assert loaded is not None
        if seeing is not None:
            text = list(prompt)
            for _ in range(TEXT):
                text.append(int(mx.argmax(seeing(mx.array([text]))[0, -1])))
            return text[-TEXT:]
        return greedy(loaded[0], loaded[1], prompt, TEXT)

    return Kind(folder, right, adapter, draft, extra)


class Day:
    """One engine, and a day in which memory is given back and grows, texts share beginnings and fork, blocks move,
    adapters come and go. Everything is the same each time but for what the plan raises.
    """

    def __init__(self, kind: Kind, plan: Plan, store: Path | None = None) -> None:
        self.kind, self.plan, self.store = kind, plan, store
        self.outcomes: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Return how many answers ended how. Raises AssertionError for a wrong one, and for books that do not fit."""
        settings: dict[str, Any] = {"tokens": 512, "max_rows": 3, "prefill_budget": 24}
        if self.kind.draft is not None:
            settings["draft"] = str(self.kind.draft)
        settings |= {"speculate": True} if self.kind.extra == "a head" else {}
        if self.store is not None:
            settings["kv_store"] = str(self.store)
        self.driver = driver = Driver(self.kind.model, **settings)
        if self.kind.draft is not None or self.kind.extra == "a head":
            from support.drafting.draft_models import make_eager

            eager = make_eager(driver.core)
            eager.model = eager.model or driver.core.model.make_head_drafter(driver.core.scheduler)
            driver.core.scheduler.set_head_awake(True)
        if self.kind.extra == "images":
            from support.models.sighted import show

            self.images = show(driver)
        self.plan.live = False
        with planted(self.plan):
            try:
                self._asked: list[tuple[tuple[int, ...], bool, int, Any]] = []
                with self._live():
                    self._morning()
                    self._noon()
                self._evening()
            except _Broken as broken:
                raise AssertionError(str(broken)) from broken
            finally:
                driver.core.release()
        return self.outcomes

    @contextmanager
    def _live(self) -> Iterator[None]:
        self.plan.live = True
        try:
            yield
        finally:
            self.plan.live = False

    def _morning(self) -> None:
        """The arena has been given back. It grows for rows that share a beginning, and is given back beside them."""
        core = self.driver.core
        core.relieve(True)
        shared = tokens_of(40, seed=7)
        for prompt in ([*shared, 3, 4, 5], tokens_of(9, seed=2), [*shared, 8, 9]):
            self._ask(prompt)
        self._step(9)
        core.relieve(True)
        self._ask([*shared, 3, 4, 5], n=2)
        self._step(12)
        core.relieve(False)
        self._finish()

    def _noon(self) -> None:
        """Idle: blocks are moved, given back, and an adapter comes and goes."""
        core = self.driver.core
        core.cache.pools.drop_cached(2)
        core.compact()
        self._ask([*tokens_of(40, seed=7), 8, 9], SHORT)
        self._finish()
        core.relieve(True)
        if self.kind.adapter is not None:
            self._load("one")
            self._ask(tokens_of(20, seed=5), SHORT, adapter="one")
            self._finish()
            with suppress(CortexError, ValueError):
                core.adapters.unload("one", core.scheduler.jobs)

    def _evening(self) -> None:
        """Nothing is refused any more: all is right."""
        self._check(strict=self.plan.at < 0 or (self.plan.error == "refusal" and self.plan.times == 1))
        for prompt in ([*tokens_of(40, seed=7), 3, 4, 5], tokens_of(60, seed=4), tokens_of(9, seed=2)):
            self._ask(prompt, SHORT)
        if self.kind.adapter is not None:
            self._load("one")
            self._ask(tokens_of(20, seed=5), SHORT, adapter="one")
        self._finish()
        self._check(strict=True)
        self.driver.core.relieve(True)
        assert_nothing_lost(self.driver.core.stats())

    def _load(self, name: str) -> None:
        from cortexmlx.models.adapters.low_rank import read_low_rank_adapter

        assert self.kind.adapter is not None
        content = read_low_rank_adapter(name, self.kind.adapter, 1 << 10, 1 << 30)
        for _ in range(2 + self.plan.times):
            try:
                self.driver.core.adapters.load(name, content, self.driver.core.scheduler.jobs)
                return
            except (CortexError, ValueError) as error:
                self.outcomes[f"load: {type(error).__name__}"] += 1
        raise AssertionError("the adapter can never be loaded again")

    def _ask(self, prompt: Sequence[int], tokens: int = TEXT, n: int = 1, adapter: str | None = None) -> None:
        if self.kind.extra == "images":
            prompt = [*self.images[2 + len(prompt) % 3], *prompt]
        handle = self.driver.add(prompt, tokens, n=n, temperature=0.0, adapter=adapter)
        self._asked.append((tuple(prompt), adapter is not None, tokens, handle))

    def _step(self, count: int) -> None:
        """What the engine's thread does: see `Worker`."""
        core = self.driver.core
        for _ in range(count):
            while not self.driver.calls.empty():
                self.driver.calls.get()(core)
            if core.idle:
                return
            try:
                core.step()
            except Exception as error:
                assert self.plan.error == "exception", f"a refusal came out as {error!r}"
                core.fail_all(CortexError(f"the step failed: {error}"))
            core.check_invariants()

    def _finish(self) -> None:
        core = self.driver.core
        for _ in range(400):
            if core.idle and not core.scheduler.jobs:
                core.tidy()
                core.check_invariants()
                return
            if core.idle:  # all wait for the disk
                self.driver.calls.get(timeout=60)(core)
            self._step(1)
        raise AssertionError("the engine never comes to an end")

    def _check(self, strict: bool) -> None:
        for prompt, adapted, tokens, handle in self._asked:
            wanted = tuple(self.kind.right(prompt, adapted)[:tokens])
            if handle.state is RequestState.FAILED:
                try:
                    handle.result(0)
                except (OutOfMemory, KVCacheFull) as error:
                    assert self.plan.error == "refusal" and not strict, repr(error)
                    self.outcomes["refused"] += 1
                except CortexError as error:
                    assert self.plan.error == "exception" and not strict, repr(error)
                    self.outcomes["failed"] += 1
                continue
            result = handle.result(0)
            for answer in (result, *result.others):
                got = tuple(answer.token_ids)
                whole = got == wanted
                assert whole or (not strict and answer.finish_reason is FinishReason.LENGTH), (prompt, got, wanted)
                assert got == wanted[: len(got)], f"wrong tokens: {got} instead of {wanted}"
                self.outcomes["right" if whole else "cut short"] += 1
        self._asked.clear()
