"""Runs recurrent layers (with a state instead of keys and values) in a step of flat tokens: cuts the step into spans,
and calls a layer once per span.

A step is flat tokens `[T, 1]`, which suits every module that looks at one token only. A recurrent module needs its
row's state and the tokens in order. So the classes that touch a state (the probe finds them) are called in parts: once
with single tokens as a batch `[rows, 1, ...]`, and for each prefill piece with `[1, L, ...]`. Each part has one of
mlx-lm's own caches, so the original method runs unchanged. A step that is one part is one call, on the unchanged
arrays. With any cache but a `RecurrentCache`, the original runs as always.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.pipeline import PipelineMixin

from cortexmlx.attention.mlx_lm_hook import PipelineSender
from cortexmlx.errors import ModelUnsupported
from cortexmlx.kv.spec import ITEMSIZE, KVSpec
from cortexmlx.mlx_lm.modules import replace_method
from cortexmlx.types.arrays import IntArray, dtype_name


@dataclass(frozen=True)
class TokenSpan:
    """Tokens of a step that a recurrent module gets in one call, as `[rows, length]`: one token of each of some rows, a
    run of tokens of one row, or equally long runs of rows that verify drafts. With `continues_previous`, it begins with
    the state after the previous span.
    """

    tokens: IntArray
    continues_previous: bool = False
    is_verified: bool = False
    """Whether some of its last tokens may be taken back, so that its calls are recorded."""

    @property
    def is_piece(self) -> bool:
        """Whether the span has several tokens, all of one row."""
        return len(self.tokens) == 1 and self.tokens.size > 1

    def select(self, array: mx.array, tokens: int) -> mx.array:
        """Return the span's part of an array: its tokens of an array `[tokens, 1, ...]`, or each row's first position
        of positions `[tokens]`. Any other array does not belong to tokens, and is returned unchanged.
        """
        if array.ndim > 1 and array.shape[:2] == (tokens, 1):
            return _take_tokens(array, self.tokens.ravel()).reshape(*self.tokens.shape, *array.shape[2:])
        return _take_tokens(array, self.tokens[:, 0]) if array.shape == (tokens,) else array

    def flatten(self, array: mx.array) -> mx.array:
        """Return a result for the span as `[tokens, 1, ...]`."""
        if array.shape[:2] != self.tokens.shape:
            raise ModelUnsupported("a recurrent layer gives results that do not belong to single tokens")
        return array.reshape(-1, 1, *array.shape[2:])


def _take_tokens(array: mx.array, tokens: IntArray) -> mx.array:
    """Return some flat tokens of an array, in ascending order; a view if they are consecutive."""
    first, last = int(tokens[0]), int(tokens[-1])
    return array[first : last + 1] if last - first + 1 == len(tokens) else array[mx.array(tokens)]


class SpanStep:
    """A step of flat tokens, cut into spans for recurrent layers. All leaves share it."""

    def __init__(self, parts: Sequence[TokenSpan]) -> None:
        self.parts = tuple(parts)
        order = np.concatenate([part.tokens.ravel() for part in parts])
        self.tokens = len(order)
        in_order = bool((order == np.arange(self.tokens)).all())
        self._inverse_order = None if in_order else mx.array(np.argsort(order).astype(np.int32))
        self.is_single_call = in_order and len(parts) == 1 and parts[0].tokens.shape[1] == 1
        self.current_span: TokenSpan | None = None
        """The part with which a module is being called; None: modules get all tokens."""

    def join_results(self, results: Sequence[Any]) -> Any:
        """Join the results for the spans into one for the whole step: arrays, tuples of arrays, or None."""
        first = results[0]
        if first is None:
            return None
        if isinstance(first, tuple | list):
            return type(first)(self.join_results(each) for each in zip(*results, strict=True))
        return self.restore_order(
            mx.concatenate([part.flatten(result) for part, result in zip(self.parts, results, strict=True)])
        )

    def restore_order(self, flat: mx.array) -> mx.array:
        """Reorder an array, which has span after span, into the order of the flat tokens."""
        return flat if self._inverse_order is None else flat[self._inverse_order]


class RecurrentCache(PipelineSender):
    """A recurrent layer's cache as an mlx-lm model sees it in a step. It has no arrays itself. From `begin` to `end` it
    has `caches`, one of mlx-lm's for each span of `step`. Before a module is called, `feed` gets its input arrays.
    """

    lengths = left_padding = None

    def __init__(self, size: int, feed: Callable[..., None] = lambda *_: None) -> None:
        self.size = size
        self._feed = feed
        self.step: SpanStep | None = None
        self.caches: list[ArraysCache] = []
        self._calls: list[list[RecordedCall]] = []

    def begin(self, step: SpanStep, states: Iterable[Sequence[mx.array | None]]) -> None:
        """Begin a step with each span's state: for each slot an array `[rows, ...]`, or None if it is empty. A span
        that continues another gets its state during the step.
        """
        self.step, self.caches, self._calls = step, [], [[] for _ in step.parts]
        for state in states:
            cache = ArraysCache(self.size)
            cache.cache = list(state)
            self.caches.append(cache)

    def end(self) -> tuple[list[list[mx.array | None]], list[list[RecordedCall]]]:
        """End the step. Return the states after each span, and the recorded calls of each span that is verified."""
        states, calls = [cache.cache for cache in self.caches], self._calls
        self.step, self.caches, self._calls = None, [], []
        return states, calls

    def make_mask(self, *_: Any, **__: Any) -> None:
        """Return None: no token of a step is padding."""
        return None

    def call_by_spans(
        self, original: Callable[..., Any], module: Any, inputs: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Call a module's method once per span, and join the results."""
        step = self.step
        assert step is not None, "a model runs outside of a step"
        self._feed(*(value for value in inputs if isinstance(value, mx.array)))
        results: list[Any] = []
        old_states: list[mx.array | None] = []
        for index, (part, cache) in enumerate(zip(step.parts, self.caches, strict=True)):
            if part.continues_previous:  # the states that the module changed in the span before
                for slot, (old, new) in enumerate(zip(old_states, self.caches[index - 1].cache, strict=True)):
                    if new is not old:
                        cache.cache[slot] = new
            old_states = list(cache.cache)
            span_inputs = [self._select_argument(value, part, cache) for value in inputs]
            span_kwargs = {name: self._select_argument(value, part, cache) for name, value in kwargs.items()}
            step.current_span = None if step.is_single_call else part
            if part.is_verified:
                self._calls[index].append(RecordedCall(original, module, span_inputs, span_kwargs, part.tokens.shape))
                results.append(self._calls[index][-1].run(cache))
            else:
                results.append(original(module, *span_inputs, **span_kwargs))
        step.current_span = None
        return results[0] if step.is_single_call else step.join_results(results)

    def shift_by_token(self, slot: int, new: mx.array) -> mx.array:
        """Return, for each flat token of `new` `[tokens, ...]`, the value of the token before it in its row (zeros
        before the first), and keep each row's newest value as its state in `slot`. For modules that see a whole
        step.
        """
        step = self.step
        assert step is not None, "a model runs outside of a step"
        shifted = []
        for index, (part, cache) in enumerate(zip(step.parts, self.caches, strict=True)):
            values = _take_tokens(new, part.tokens.ravel()).reshape(*part.tokens.shape, *new.shape[1:])
            previous_values = self.caches[index - 1].cache[slot] if part.continues_previous else cache.cache[slot]
            previous_values = mx.zeros_like(values[:, -1]) if previous_values is None else previous_values
            shifted.append(
                mx.concatenate([previous_values[:, None], values[:, :-1]], axis=1).reshape(-1, *new.shape[1:])
            )
            cache.cache[slot] = values[:, -1]
            if part.is_verified:
                keep = partial(_keep_newest, slot)
                self._calls[index].append(RecordedCall(keep, None, (values, cache), {}, part.tokens.shape))
        return step.restore_order(mx.concatenate(shifted))

    def _select_argument(self, value: Any, part: TokenSpan, cache: ArraysCache) -> Any:
        """Return a module argument as one span gets it: the span's tokens, or the span's cache."""
        assert self.step is not None
        if value is self:
            return cache
        if isinstance(value, mx.array) and not self.step.is_single_call:
            return part.select(value, self.step.tokens)
        return value


def _keep_newest(slot: int, _: None, values: mx.array, cache: ArraysCache) -> None:
    """Keep each row's newest value of `[rows, tokens, ...]` as its state in `slot`."""
    cache.cache[slot] = values[:, -1]


class RecordedCall:
    """A recurrent module's call with tokens of some rows, of which the last ones are drafts. It can compute the state
    after the accepted tokens if drafts are rejected.

    A token's results depend on no later token. So what the module's own modules gave (its products, say) is kept, and
    its method runs again with their first tokens. No weights are read: all that is left is the recurrence.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        module: Any,
        inputs: Sequence[Any],
        kwargs: dict[str, Any],
        shape: tuple[int, ...],
    ) -> None:
        """`inputs` and `kwargs`, the module's cache among them, are for `shape` `[rows, tokens]`."""
        self._original = original
        self._module = module
        self._inputs = [_CACHE if isinstance(value, ArraysCache) else value for value in inputs]
        self._kwargs = {n: _CACHE if isinstance(value, ArraysCache) else value for n, value in kwargs.items()}
        self._shape = shape
        self._outputs: dict[tuple[int, int], mx.array] = {}
        self._token_outputs: dict[tuple[int, int], mx.array] = {}

    def run(self, cache: ArraysCache) -> Any:
        """Call the module, which changes `cache`, and record what its submodules return. Return the module's result."""

        def call_and_record(child: nn.Module, number: int, call: Callable[[], Any]) -> Any:
            output = call()
            if isinstance(output, mx.array) and output.ndim == 3 and output.shape[:2] == self._shape:
                self._outputs[id(child), number] = output
            elif isinstance(output, mx.array) and output.shape[:-1] in ((rows,), (rows, 1)):
                self._token_outputs[id(child), number] = output
            return output

        rows, tokens = self._shape
        result = self._call(cache, call_and_record, lambda array: array)
        counts = Counter(child for child, _ in self._token_outputs)  # of those that are called token by token
        self._token_outputs = {key: a for key, a in self._token_outputs.items() if counts[key[0]] == tokens}
        return result

    def arrays(self) -> Iterator[mx.array]:
        """Yield all arrays that the record keeps in memory: inputs and outputs."""
        yield from (value for value in (*self._inputs, *self._kwargs.values()) if isinstance(value, mx.array))
        yield from (*self._outputs.values(), *self._token_outputs.values())

    def replay(self, cache: ArraysCache, rows: Sequence[int], tokens: int) -> None:
        """Change `cache` from the states of some `rows` before the call to their states after `tokens` tokens."""
        index = None if list(rows) == list(range(self._shape[0])) else mx.array(list(rows), mx.int32)

        def cut_to_rows_and_tokens(array: mx.array) -> mx.array:
            if array.shape[:1] != self._shape[:1]:
                return array
            array = array if index is None else mx.take(array, index, axis=0)
            return array[:, :tokens] if array.ndim > 1 and array.shape[1] == self._shape[1] else array

        def get_recorded(child: nn.Module, number: int, call: Callable[[], Any]) -> Any:
            output = self._token_outputs.get((id(child), number))
            if output is not None:
                return output if index is None else mx.take(output, index, axis=0)
            output = self._outputs.get((id(child), number))
            return call() if output is None else cut_to_rows_and_tokens(output)

        self._call(cache, get_recorded, cut_to_rows_and_tokens)

    def _call(
        self,
        cache: ArraysCache,
        on_call: Callable[[nn.Module, int, Callable[[], Any]], Any],
        cut: Callable[[mx.array], mx.array],
    ) -> Any:
        """Call the module with inputs that `cut` has cut. `on_call` calls the submodules that do not get the cache."""
        counts: Counter[int] = Counter()

        def call_child(child: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if any(value is cache for value in (*inputs, *kwargs.values())):
                return child(*inputs, **kwargs)
            counts[id(child)] += 1
            return on_call(child, counts[id(child)], lambda: child(*inputs, **kwargs))

        def prepare_input(value: Any) -> Any:
            return cache if value is _CACHE else cut(value) if isinstance(value, mx.array) else value

        module = self._module if self._module is None else _with_watched_children(self._module, call_child)
        inputs = map(prepare_input, self._inputs)
        return self._original(module, *inputs, **{n: prepare_input(v) for n, v in self._kwargs.items()})


def replay_calls(
    calls: Sequence[RecordedCall], states: Sequence[mx.array | None], rows: Sequence[int], tokens: int
) -> tuple[mx.array | None, ...]:
    """Return a layer's states of some `rows` after the first `tokens` tokens of its recorded calls. `states` are those
    rows' states before the calls.
    """
    cache = ArraysCache(len(states))
    cache.cache = list(states)
    for call in calls:
        call.replay(cache, rows, tokens)
    return tuple(cache.cache)


_CACHE = object()
"""Stands for the cache in a recorded call's inputs."""


class _WatchedChild:
    """A module within a recurrent module, whose calls go through `call(module, inputs, kwargs)`."""

    def __init__(self, child: nn.Module, call: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._child = child
        self._call = call

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._call(self._child, inputs, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)

    def __getitem__(self, name: str) -> Any:
        return self._child[name]

    def __contains__(self, name: str) -> bool:
        return name in self._child


def _with_watched_children(module: Any, call: Callable[..., Any]) -> Any:
    """Return a copy of a module that shares the module's arrays, and whose submodules are watched."""
    kind: Any = type(module)
    copy = kind.__new__(kind)
    dict.update(
        copy, {n: _WatchedChild(each, call) if isinstance(each, nn.Module) else each for n, each in module.items()}
    )
    vars(copy).update(vars(module))
    return copy


def install_recurrent_hook(owners: Iterable[type]) -> None:
    """Make modules of these classes run span by span when they get a recurrent cache. Safe to call again."""
    for owner in owners:
        replace_method(owner, "__call__", _dispatch_call)


def _dispatch_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `original` span by span if an argument is a recurrent cache."""

    def call_by_spans(module: Any, *inputs: Any, **kwargs: Any) -> Any:
        leaf = next((v for v in (*inputs, *kwargs.values()) if isinstance(v, RecurrentCache)), None)
        if leaf is None:
            return original(module, *inputs, **kwargs)
        return leaf.call_by_spans(original, module, inputs, kwargs)

    return call_by_spans


# Finds out how large recurrent states are, and which classes of modules touch them.


PROBE_STEP = SpanStep([TokenSpan(np.array([[0]], np.int32)), TokenSpan(np.array([[1, 2]], np.int32))])
"""A step in which every way of cutting shows: a single token, and two tokens of another row."""


class ObservedState(ArraysCache):  # type: ignore[misc]
    """A recurrent layer's cache in a probe. `on_touch()` is called whenever its arrays are read or written."""

    def __init__(self, size: int, on_touch: Callable[[], None]) -> None:
        super().__init__(size)
        self._on_touch = on_touch

    def __getitem__(self, slot: Any) -> Any:
        self._on_touch()
        return super().__getitem__(slot)

    def __setitem__(self, slot: Any, value: Any) -> None:
        self._on_touch()
        super().__setitem__(slot, value)

    def shift_by_token(self, slot: int, new: mx.array) -> mx.array:
        """Keep `new` in `slot` and return zeros. No touch is recorded: modules that get a whole step may call this."""
        super().__setitem__(slot, new)
        return mx.zeros_like(new)


class _TouchLog:
    """Records which modules are running when a recurrent state is touched.

    It does not refer to the states. They keep arrays that were never evaluated, and so all weights, and a cycle of
    references would keep those until the garbage collector runs.
    """

    def __init__(self) -> None:
        self.running_modules: list[nn.Module] = []
        self.touching_modules: list[nn.Module] = []

    def record_touch(self) -> None:
        """Record that the running module touches a state, unless it is a pipeline's, which only waits for a send."""
        if self.running_modules and not isinstance(self.running_modules[-1], PipelineMixin):
            self.touching_modules.append(self.running_modules[-1])


class RecurrentProbe:
    """Finds which caches (leaves) of a model are recurrent, how large their states are, and which modules use them."""

    def __init__(self, model: nn.Module, caches: Sequence[Any]) -> None:
        self._model = model
        self._touches = _TouchLog()
        self._attending_modules: list[nn.Module] = []
        on_touch = self._touches.record_touch
        self._caches = {
            leaf: ObservedState(len(c.cache), on_touch) for leaf, c in enumerate(caches) if is_recurrent_cache(c)
        }

    @property
    def leaves(self) -> list[int]:
        """The indices of the recurrent leaves."""
        return list(self._caches)

    def insert_observed(self, caches: Sequence[Any]) -> list[Any]:
        """Return a probe's caches, with each recurrent leaf replaced by an observed state."""
        return [self._caches.get(leaf, cache) for leaf, cache in enumerate(caches)]

    @contextmanager
    def watch_touches(self) -> Iterator[None]:
        """Context: record which modules touch a recurrent state, if the model has any."""
        if not self._caches:
            yield
            return
        with track_running_modules(self._model) as self._touches.running_modules:
            yield

    def record_attention(self) -> None:
        """Record that the running modules attend now."""
        self._attending_modules += self._touches.running_modules

    def install_hooks(self) -> None:
        """Make the modules that touch a state run span by span, by their classes. Raises ModelUnsupported if one of
        them also attends, or calls a module that does: attention needs a whole step.
        """
        conflicting_names = {
            type(m).__name__
            for m in self._touches.touching_modules
            if any(m is other for other in self._attending_modules)
        }
        if conflicting_names:
            raise ModelUnsupported(
                f"{', '.join(sorted(conflicting_names))} keeps a state and attends to keys and values at once"
            )
        install_recurrent_hook({type(module) for module in self._touches.touching_modules})

    def insert_step_caches(self, caches: Sequence[Any]) -> list[Any]:
        """Return a probe's caches, with each recurrent leaf replaced by a real cache, in the step `PROBE_STEP`."""
        leaves = {leaf: RecurrentCache(len(cache.cache)) for leaf, cache in self._caches.items()}
        for leaf in leaves.values():
            leaf.begin(PROBE_STEP, [[None] * leaf.size for _ in PROBE_STEP.parts])
        return [leaves.get(leaf, cache) for leaf, cache in enumerate(caches)]

    def state_spec(self, leaf: int, rows: int) -> KVSpec:
        """Return a recurrent leaf's KVSpec, from its state of `rows` rows. Raises ModelUnsupported if that is empty."""
        arrays = [array for array in self._caches[leaf].cache if array is not None]
        if not arrays:
            raise ModelUnsupported(f"nothing was left in the state of layer {leaf}")
        names = [dtype_name(array.dtype) for array in arrays]
        dtype = next((name for name in names if name in ITEMSIZE), "float32")
        return KVSpec(0, 0, 0, dtype, row_bytes=sum(array.nbytes for array in arrays) // rows)


def is_recurrent_cache(cache: Any) -> bool:
    """Return whether one of mlx-lm's own caches belongs to a recurrent layer."""
    return type(cache) is ArraysCache


# Tracks which module of a model is running, so that a probe sees which one touches a cache.


_WATCH_LOCK = threading.Lock()
"""Two that watch models of the same classes at once would restore each other's methods."""


@contextmanager
def track_running_modules(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Context: yield a live list of modules in `__call__` on this thread, innermost last; restore the classes after."""
    with _WATCH_LOCK:
        yield from _patch_calls(model)


def _patch_calls(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Patch `__call__` of the model's classes, yield the list of running modules, and restore the classes."""
    running_modules: list[nn.Module] = []
    original_calls = {owner: owner.__dict__.get("__call__") for owner in {type(module) for module in model.modules()}}
    try:
        for owner in original_calls:
            if any("__call__" in base.__dict__ for base in owner.__mro__):
                _record_calls(owner, running_modules)
        yield running_modules
    finally:
        for owner, method in original_calls.items():
            if method is not None:
                owner.__call__ = method
            elif "__call__" in owner.__dict__:
                del owner.__call__


def _record_calls(owner: Any, running_modules: list[nn.Module]) -> None:
    """Replace `__call__` of a class by one that adds the module to `running_modules` while it runs."""
    original: Callable[..., Any] = owner.__call__
    thread_id = threading.get_ident()

    def call_tracked(module: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread_id:  # another engine runs a model of the same class
            return original(module, *inputs, **kwargs)
        running_modules.append(module)
        try:
            return original(module, *inputs, **kwargs)
        finally:
            running_modules.pop()

    owner.__call__ = call_tracked
