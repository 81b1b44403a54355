"""Timing jobs that find the fastest decode attention method for each layer and class of steps."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from importlib.resources import files

import mlx.core as mx
import numpy as np

from cortexmlx.attention.decode_methods import (
    BatchClass,
    DecodeMethod,
    LayerAttention,
    LayerKey,
    SelectableBackend,
    batch_classes,
    mlx_methods_for,
)
from cortexmlx.attention.paged import Attend, AttentionParams, PagedKV
from cortexmlx.autotune.chooser import Autotuner
from cortexmlx.autotune.job import Candidate, CannotServe, TuningJob
from cortexmlx.autotune.table import TimingIdentity
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import TAIL_COLUMNS, LayerGroup
from cortexmlx.kv.step import GroupStep
from cortexmlx.system.machine import metal_device, uses_matrix_units

AttentionJobs = dict[tuple[LayerKey, BatchClass], TuningJob]
"""The jobs, by the layer and the class."""


def attention_jobs(
    layers: Mapping[LayerKey, LayerAttention], backend: SelectableBackend, max_rows: int, max_tokens: int
) -> AttentionJobs:
    """Return a timing job for each layer shape and each class of steps up to `max_rows` rows and `max_tokens` tokens.
    The most common classes come first. Nothing is allocated before a job's candidates are prepared.
    """
    bench = _CandidatePreparer(backend)
    jobs: AttentionJobs = {}
    for key, layer in layers.items():
        visible_tokens = max_tokens if layer.window is None else min(max_tokens, layer.window)
        for batch in batch_classes(max_rows, visible_tokens):
            methods = (*backend.kernel_methods(layer), *mlx_methods_for(layer, batch))
            sample = batch.sample_size(max_rows, visible_tokens)
            times = attentions_per_run(layer, *sample)
            candidates = tuple(
                Candidate(method.value, partial(bench.prepare, layer, batch, sample, method), times)
                for method in methods
            )
            name = f"{layer.label}; {batch.label}; {sample[0]} x {sample[1]}"
            jobs[key, batch] = TuningJob(name, layer.label, batch.label, candidates)
    return jobs


def apply_choices(backend: SelectableBackend, jobs: AttentionJobs, chooser: Autotuner) -> None:
    """Set the chosen method for each layer and class in a backend. Where the default method won, the backend's own
    rules stay in charge, and say so if no kernel serves.
    """
    chosen_methods = {key: chooser.chosen_candidate(job.key) for key, job in jobs.items()}
    non_default_methods = {
        key: name for key, name in chosen_methods.items() if name is not None and name != jobs[key].default_candidate
    }
    backend.choices.set_methods({key: DecodeMethod(name) for key, name in non_default_methods.items()})


def fixed_jobs(layers: Mapping[LayerKey, LayerAttention], backend: SelectableBackend) -> list[TuningJob]:
    """Return one untimed job per layer, its only candidate the reproducible method, for `Autotuner.choose_default`."""
    return [
        TuningJob(
            layer.label,
            layer.label,
            "every step",
            (Candidate(backend.reproducible_method(layer).value, _raise_untimed),),
        )
        for layer in layers.values()
    ]


def _raise_untimed() -> Callable[[], object]:
    """Raise AssertionError: the candidate of a fixed job is never timed."""
    raise AssertionError("a fixed choice is not timed")


class _CandidatePreparer:
    """Prepares the candidates of timing jobs. Only the problem of the current job is in memory."""

    def __init__(self, backend: SelectableBackend) -> None:
        self._backend = backend
        self._slabs = TimedArena()
        self._job: tuple[LayerAttention, BatchClass] | None = None
        self._problem: TimedProblem | None = None
        self._checked_methods: set[DecodeMethod] = set()

    def prepare(
        self, layer: LayerAttention, batch: BatchClass, sample: tuple[int, int], method: DecodeMethod
    ) -> Callable[[], object]:
        """Return a function that runs a method on a layer and class. Raises CannotServe, and what the method raises."""
        with _synchronize_on_error():
            problem = self._problem_for(layer, batch, sample)
            attend = self._backend.attend_with(method, layer)
            if method not in self._checked_methods:
                problem.require_agreement(attend)
                self._checked_methods.add(method)
            run = problem.build_run(attend)

        def compute() -> None:
            with _synchronize_on_error():
                run()

        return compute

    def _problem_for(self, layer: LayerAttention, batch: BatchClass, sample: tuple[int, int]) -> TimedProblem:
        """Return the timed problem of a layer and class, made at its first use."""
        if self._problem is None or self._job != (layer, batch):
            self._problem, self._checked_methods = None, set()
            self._problem = TimedProblem(layer, batch, *sample, self._slabs)
            self._job = layer, batch
        return self._problem


@contextmanager
def _synchronize_on_error() -> Iterator[None]:
    """Context: on an exception, wait for all work, so that a failed command buffer is reported here, not in a step."""
    try:
        yield
    except Exception:
        with suppress(Exception):
            mx.synchronize()
        raise


# TimedProblem: random keys, values and queries on which the methods of a layer are timed.


MAX_KV_BYTES = 128 << 20
"""Bytes of keys and values that are made, in float32. If a class needs more, its rows share blocks: a cache of the GPU
may then hold more of them than of an engine's.
"""

_TAIL_TOKENS = TAIL_COLUMNS // 2
"""Tokens of each row in the tail: as many as on average."""

_BYTES_PER_RUN = 32 << 20
"""Bytes that the attentions of a run read together on a GPU, at most `_MAX_ATTENTIONS_PER_RUN` of them: with one,
the time to
begin and to wait would count for more than the attention.
"""
_MAX_ATTENTIONS_PER_RUN = 8

_TOLERANCE = {"float32": 2e-3, "float16": 2e-2, "bfloat16": 8e-2}
"""The largest difference, as a share of the largest number, of two methods. A launch that a GPU drops leaves zeros, and
would be the fastest.
"""


def attentions_per_run(layer: LayerAttention, rows: int, tokens: int) -> int:
    """Return how many times a timed run computes the attention of a step, so that launch overhead does not dominate."""
    if mx.default_device() == mx.cpu:
        return 1
    return max(1, min(_MAX_ATTENTIONS_PER_RUN, _BYTES_PER_RUN // (rows * tokens * layer.spec.bytes_per_token)))


class TimedArena:
    """An arena of random keys and values for the layer that is being timed, shared by all problems of that layer."""

    def __init__(self) -> None:
        self._layer: LayerAttention | None = None
        self._arena: KVArena | None = None

    def arena_for(self, layer: LayerAttention, blocks: int) -> KVArena:
        """Return an arena with at least `blocks` blocks of random numbers for a layer. Raises MemoryRefused."""
        cached_arena = self._arena
        if self._layer == layer and cached_arena is not None and cached_arena.blocks[0] >= blocks:
            return cached_arena
        self._arena = cached_arena = None  # before there is another one
        arena = KVArena([LayerGroup(layer.spec, (0,))], blocks, layer.block_size)
        form, tokens = arena.quantization(0), blocks * layer.block_size
        unquantized = tuple(
            mx.random.normal((layer.spec.kv_heads, tokens, dim), key=mx.random.key(number)).astype(
                getattr(mx, layer.spec.dtype)
            )
            for number, dim in enumerate(layer.spec.dims)
        )
        arena.write(0, slice(0, tokens), *(unquantized if form is None else form.quantize(*unquantized)))
        mx.eval(arena.arrays())
        self._layer, self._arena = layer, arena
        return arena


class TimedProblem:
    """A random input for timing: a layer's attention in a step of `rows` rows with `tokens` tokens each."""

    def __init__(self, layer: LayerAttention, batch: BatchClass, rows: int, tokens: int, slabs: TimedArena) -> None:
        self._layer = layer
        self._times = attentions_per_run(layer, rows, tokens)
        self._expected: mx.array | None = None
        in_arena = max(tokens - _TAIL_TOKENS, 1)
        each = -(-in_arena // layer.block_size)
        block_bytes = layer.block_size * layer.spec.kv_heads * sum(layer.spec.dims) * 4
        blocks = min(rows * each, max(each, MAX_KV_BYTES // block_bytes))
        arena = slabs.arena_for(layer, blocks)
        order = np.random.default_rng(0).permutation(blocks) if not batch.run else np.arange(blocks)
        tables = order[np.arange(rows * each) % blocks].reshape(rows, each).astype(np.int32)
        run = KVHandle(0, each) if batch.run else None
        lengths = np.full(rows, in_arena, np.int32)
        step = GroupStep(tables, lengths, (run,) * rows, (), layer.spec.attention_window)
        self._queries = _random_array((rows, layer.query_heads, 1, layer.spec.key_dim), layer.dtype, 2)
        sinks = None if layer.sinks is None else _random_array((layer.query_heads,), layer.sinks, 3)
        slopes = mx.abs(_random_array((layer.query_heads,), "float32", 4)) if layer.slopes else None
        self._params = AttentionParams(layer.scale, sinks, layer.softcap, slopes)
        shape = (rows, layer.spec.kv_heads, TAIL_COLUMNS)
        unquantized = tuple(
            _random_array((*shape, dim), layer.spec.dtype, 5 + n) for n, dim in enumerate(layer.spec.dims)
        )
        form = arena.quantization(0)
        tail = unquantized if form is None else form.quantize(*unquantized)
        dtype = getattr(mx, layer.spec.dtype)
        self._kv = PagedKV(arena, 0, step, tail, _TAIL_TOKENS, dtype, _raise_unused, quantization=form)
        mx.eval(self._queries, *tail, *([] if sinks is None else [sinks]))

    def build_run(self, attend: Attend) -> Callable[[], None]:
        """Build `attentions_per_run` attentions in sequence, and return a function that evaluates them and waits."""
        queries = self._queries
        for _ in range(self._times):
            out = attend(queries, self._kv, self._params)
            queries = self._queries + out[..., :1] * 0
        return lambda: mx.eval(out)

    def require_agreement(self, attend: Attend) -> None:
        """Raise CannotServe unless the result of `attend` agrees with that of the first method that was checked."""
        result = attend(self._queries, self._kv, self._params).astype(mx.float32)
        mx.eval(result)
        expected = result if self._expected is None else self._expected
        difference = mx.max(mx.abs(result - expected)) / mx.maximum(mx.max(mx.abs(expected)), 1e-30)
        share = float(np.array(difference))
        if not share <= _TOLERANCE[self._layer.dtype]:
            raise CannotServe(f"its result differs by {share:.2g} of the largest number")
        self._expected = expected


def _random_array(shape: tuple[int, ...], dtype: str, seed: int) -> mx.array:
    """Return an array of random normal numbers."""
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(getattr(mx, dtype))


def _raise_unused(*_: object, **__: object) -> mx.array:
    """Raise AssertionError: a timed problem calls its methods directly, never through the handle."""
    raise AssertionError("the methods are called directly")


# The identity of times: the machine, the versions and the texts for which they are true.


def current_identity() -> TimingIdentity:
    """Return the identity of this machine and software, under which times measured now are stored."""
    if mx.default_device() == mx.cpu:
        device = f"CPU, {platform.machine()}, {os.cpu_count()} cores"
    else:
        device = metal_device() or "GPU"
    mlx = version("mlx") + " with NAX" * uses_matrix_units()
    return TimingIdentity(device, platform.release(), mlx, kernel_digest(), version("cortexmlx"))


def kernel_digest() -> str:
    """Return a hash of the kernel sources and of the Python modules that launch them."""
    digest = hashlib.sha256()
    package = files("cortexmlx.metal")
    for folder, suffixes in (
        (package, (".py",)),
        (package / "products", (".py",)),
        (package / "shaders", (".metal", ".h")),
    ):
        for file in sorted(folder.iterdir(), key=lambda file: file.name):
            if file.name.endswith(suffixes):
                digest.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
