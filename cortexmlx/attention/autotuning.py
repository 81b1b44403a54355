"""The jobs of attention: which method computes the single tokens of a model's layers, in each class of steps."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from importlib.resources import files

import mlx.core as mx
import numpy as np

from cortexmlx.attention.decode_methods import (
    BatchClass,
    ChoosingBackend,
    DecodeMethod,
    LayerAttention,
    LayerKey,
    classes,
    plain_methods,
)
from cortexmlx.attention.paged import Attend, AttentionParams, PagedKV
from cortexmlx.autotune.chooser import Chooser
from cortexmlx.autotune.job import Candidate, CannotServe, Job
from cortexmlx.autotune.table import Identity
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import TAIL_COLUMNS, LayerGroup
from cortexmlx.kv.step import GroupStep
from cortexmlx.system.machine import metal_device

AttentionJobs = dict[tuple[LayerKey, BatchClass], Job]
"""The jobs, by the layer and the class."""


def attention_jobs(
    layers: Mapping[LayerKey, LayerAttention], backend: ChoosingBackend, max_rows: int, longest: int
) -> AttentionJobs:
    """Return a job for each layer and each class of steps of up to `max_rows` rows and `longest` tokens, the usual
    classes first. Nothing is allocated before a job's candidates are prepared.
    """
    bench = _Bench(backend)
    found: AttentionJobs = {}
    for key, layer in layers.items():
        seen = longest if layer.window is None else min(longest, layer.window)
        for batch in classes(max_rows, seen):
            methods = (*backend.own_methods(layer), *plain_methods(layer, batch))
            sample = batch.sample(max_rows, seen)
            times = times_together(layer, *sample)
            candidates = tuple(
                Candidate(method.value, partial(bench.prepare, layer, batch, sample, method), times)
                for method in methods
            )
            name = f"{layer.label}; {batch.label}; {sample[0]} x {sample[1]}"
            found[key, batch] = Job(name, layer.label, batch.label, candidates)
    return found


def take_choices(backend: ChoosingBackend, jobs: AttentionJobs, chooser: Chooser) -> None:
    """Let a backend use what was chosen. Where that is the usual method, the rules choose it, and say so if they find
    that no kernel serves.
    """
    chosen = {key: chooser.chosen(job.key) for key, job in jobs.items()}
    others = {key: name for key, name in chosen.items() if name is not None and name != jobs[key].usual}
    backend.choices.take({key: DecodeMethod(name) for key, name in others.items()})


def fixed_jobs(layers: Mapping[LayerKey, LayerAttention], backend: ChoosingBackend) -> list[Job]:
    """Return a job for each layer whose usual candidate serves all classes, for `Chooser.fix`."""
    return [
        Job(layer.label, layer.label, "every step", (Candidate(backend.fixed_method(layer).value, _not_timed),))
        for layer in layers.values()
    ]


def _not_timed() -> Callable[[], object]:
    raise AssertionError("a fixed choice is not timed")


class _Bench:
    """The problem that is being timed. It is made when its first candidate is prepared, and dropped for the next one,
    so that only one needs memory.
    """

    def __init__(self, backend: ChoosingBackend) -> None:
        self._backend = backend
        self._slabs = Slabs()
        self._job: tuple[LayerAttention, BatchClass] | None = None
        self._problem: TimedProblem | None = None
        self._checked: set[DecodeMethod] = set()

    def prepare(
        self, layer: LayerAttention, batch: BatchClass, sample: tuple[int, int], method: DecodeMethod
    ) -> Callable[[], object]:
        """Return a function that computes a problem by a method. Raises CannotServe, and what the method raises."""
        with _settled():
            problem = self._made(layer, batch, sample)
            attend = self._backend.attend_by(method, layer)
            if method not in self._checked:
                problem.check(attend)
                self._checked.add(method)
            run = problem.run(attend)

        def compute() -> None:
            with _settled():
                run()

        return compute

    def _made(self, layer: LayerAttention, batch: BatchClass, sample: tuple[int, int]) -> TimedProblem:
        if self._problem is None or self._job != (layer, batch):
            self._problem, self._checked = None, set()
            self._problem = TimedProblem(layer, batch, *sample, self._slabs)
            self._job = layer, batch
        return self._problem


@contextmanager
def _settled() -> Iterator[None]:
    """Wait for what is in flight if an exception leaves the context. A command buffer that failed is reported once more
    at the stream's next use: here, and not in a step.
    """
    try:
        yield
    except Exception:
        with suppress(Exception):
            mx.synchronize()
        raise


# TimedProblem: random keys, values and queries on which the methods of a layer are timed.


MOST_BYTES = 128 << 20
"""Bytes of keys and values that are made, in float32. If a class needs more, its rows share blocks: a cache of the GPU
may then hold more of them than of an engine's.
"""

_TAIL = TAIL_COLUMNS // 2
"""Tokens of each row in the tail: as many as on average."""

_TOGETHER = 32 << 20
"""Bytes that the attentions of a run read together on a GPU, at most `_MOST_TOGETHER` of them: with one, the time to
begin and to wait would count for more than the attention.
"""
_MOST_TOGETHER = 8

_AGREES = {"float32": 2e-3, "float16": 2e-2, "bfloat16": 8e-2}
"""The largest difference, as a share of the largest number, of two methods. A launch that a GPU drops leaves zeros, and
would be the fastest.
"""


def times_together(layer: LayerAttention, rows: int, tokens: int) -> int:
    """Return how many attentions of a step a run computes."""
    if mx.default_device() == mx.cpu:
        return 1
    return max(1, min(_MOST_TOGETHER, _TOGETHER // (rows * tokens * layer.spec.bytes_per_token)))


class Slabs:
    """The keys and values of the layer that is being timed. Problems of one layer share them."""

    def __init__(self) -> None:
        self._layer: LayerAttention | None = None
        self._arena: KVArena | None = None

    def of(self, layer: LayerAttention, blocks: int) -> KVArena:
        """Return an arena with at least `blocks` blocks of random numbers for a layer. Raises MemoryRefused."""
        known = self._arena
        if self._layer == layer and known is not None and known.blocks[0] >= blocks:
            return known
        self._arena = known = None  # before there is another one
        arena = KVArena([LayerGroup(layer.spec, (0,))], blocks, layer.block_size)
        form, tokens = arena.quantization(0), blocks * layer.block_size
        plain = tuple(
            mx.random.normal((layer.spec.kv_heads, tokens, dim), key=mx.random.key(number)).astype(
                getattr(mx, layer.spec.dtype)
            )
            for number, dim in enumerate(layer.spec.dims)
        )
        arena.write(0, slice(0, tokens), *(plain if form is None else form.quantize(*plain)))
        mx.eval(arena.arrays())
        self._layer, self._arena = layer, arena
        return arena


class TimedProblem:
    """A layer's attention in a step of `rows` rows that each see `tokens` tokens."""

    def __init__(self, layer: LayerAttention, batch: BatchClass, rows: int, tokens: int, slabs: Slabs) -> None:
        self._layer = layer
        self._times = times_together(layer, rows, tokens)
        self._wanted: mx.array | None = None
        in_arena = max(tokens - _TAIL, 1)
        each = -(-in_arena // layer.block_size)
        block_bytes = layer.block_size * layer.spec.kv_heads * sum(layer.spec.dims) * 4
        blocks = min(rows * each, max(each, MOST_BYTES // block_bytes))
        arena = slabs.of(layer, blocks)
        order = np.random.default_rng(0).permutation(blocks) if not batch.run else np.arange(blocks)
        tables = order[np.arange(rows * each) % blocks].reshape(rows, each).astype(np.int32)
        run = KVHandle(0, each) if batch.run else None
        lengths = np.full(rows, in_arena, np.int32)
        step = GroupStep(tables, lengths, (run,) * rows, (), layer.spec.attention_window)
        self._queries = _random((rows, layer.query_heads, 1, layer.spec.key_dim), layer.dtype, 2)
        sinks = None if layer.sinks is None else _random((layer.query_heads,), layer.sinks, 3)
        slopes = mx.abs(_random((layer.query_heads,), "float32", 4)) if layer.slopes else None
        self._params = AttentionParams(layer.scale, sinks, layer.softcap, slopes)
        shape = (rows, layer.spec.kv_heads, TAIL_COLUMNS)
        plain = tuple(_random((*shape, dim), layer.spec.dtype, 5 + n) for n, dim in enumerate(layer.spec.dims))
        form = arena.quantization(0)
        tail = plain if form is None else form.quantize(*plain)
        dtype = getattr(mx, layer.spec.dtype)
        self._kv = PagedKV(arena, 0, step, tail, _TAIL, dtype, _unused, quantization=form)
        mx.eval(self._queries, *tail, *([] if sinks is None else [sinks]))

    def run(self, attend: Attend) -> Callable[[], None]:
        """Return a function that attends `times_together` times, one after the other as layers do, and waits."""
        queries = self._queries
        for _ in range(self._times):
            out = attend(queries, self._kv, self._params)
            queries = self._queries + out[..., :1] * 0
        return lambda: mx.eval(out)

    def check(self, attend: Attend) -> None:
        """Raise CannotServe unless a method's result agrees with that of the first one that was checked."""
        got = attend(self._queries, self._kv, self._params).astype(mx.float32)
        mx.eval(got)
        wanted = got if self._wanted is None else self._wanted
        difference = mx.max(mx.abs(got - wanted)) / mx.maximum(mx.max(mx.abs(wanted)), 1e-30)
        share = float(np.array(difference))
        if not share <= _AGREES[self._layer.dtype]:
            raise CannotServe(f"its result differs by {share:.2g} of the largest number")
        self._wanted = wanted


def _random(shape: tuple[int, ...], dtype: str, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(getattr(mx, dtype))


def _unused(*_: object, **__: object) -> mx.array:
    raise AssertionError("the methods are called directly")


# The identity of times: the machine, the versions and the texts for which they are true.


def identity_here() -> Identity:
    """Return the identity of times that are taken now."""
    if mx.default_device() == mx.cpu:
        device = f"CPU, {platform.machine()}, {os.cpu_count()} cores"
    else:
        device = metal_device() or "GPU"
    system = platform.mac_ver()[0] if sys.platform == "darwin" else platform.release()
    return Identity(device, system, version("mlx"), kernel_digest(), version("cortexmlx"))


def kernel_digest() -> str:
    """Return a digest of the kernels' texts, and of the modules that say how they are called."""
    digest = hashlib.sha256()
    room = files("cortexmlx.metal")
    for folder, suffixes in ((room, (".py",)), (room / "products", (".py",)), (room / "shaders", (".metal", ".h"))):
        for file in sorted(folder.iterdir(), key=lambda file: file.name):
            if file.name.endswith(suffixes):
                digest.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
