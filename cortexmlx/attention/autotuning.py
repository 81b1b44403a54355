"""Timing jobs that find the fastest attention for each layer: single tokens by the class of steps, and prefill."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import numpy as np

from cortexmlx.attention.decode_methods import (
    BatchClass,
    DecodeMethod,
    LayerAttention,
    LayerKey,
    SelectableBackend,
    batch_classes,
    make_variant,
    mlx_methods_for,
)
from cortexmlx.attention.metal import MetalAttention, PrefillKey, chunks_fit_blocks
from cortexmlx.attention.paged import Attend, AttentionCall, AttentionParams, PagedKV
from cortexmlx.autotune.chooser import Autotuner
from cortexmlx.autotune.job import Candidate, CannotServe, TuningJob
from cortexmlx.autotune.table import TimingIdentity
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import TAIL_COLUMNS, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep, PrefillPiece
from cortexmlx.metal.prefill import PrefillVariant, refusal
from cortexmlx.system.machine import metal_device, uses_matrix_units

AttentionJobs = dict[tuple[LayerKey, BatchClass], TuningJob]
"""The jobs, by the layer and the class."""


def attention_jobs(
    layers: Mapping[LayerKey, LayerAttention], backend: SelectableBackend, max_rows: int, max_tokens: int
) -> AttentionJobs:
    """Return a timing job for each layer shape and each class of steps up to `max_rows` rows and `max_tokens` tokens.
    The most common classes come first. Nothing is allocated before a job's candidates are prepared.
    """
    bench = _CandidatePreparer()
    jobs: AttentionJobs = {}
    for key, layer in layers.items():
        visible_tokens = max_tokens if layer.window is None else min(max_tokens, layer.window)
        for batch in batch_classes(max_rows, visible_tokens):
            methods = (*backend.kernel_methods(layer), *mlx_methods_for(layer, batch))
            sample = batch.sample_size(max_rows, visible_tokens)
            times = attentions_per_run(layer, *sample)
            problem = partial(TimedProblem, layer, batch, *sample, bench.slabs)
            candidates = tuple(
                Candidate(
                    method.value,
                    partial(
                        bench.prepare, (layer, batch), problem, partial(backend.attend_with, method, layer), method
                    ),
                    times,
                )
                for method in methods
            )
            name = f"{layer.label}; {batch.label}; {sample[0]} x {sample[1]}"
            jobs[key, batch] = TuningJob(name, layer.label, batch.label, candidates)
    return jobs


def apply_chosen_methods(backend: SelectableBackend, jobs: AttentionJobs, chooser: Autotuner) -> None:
    """Set in a backend the decode method that `chooser` chose for each layer and class of steps. Where the default won,
    nothing is set: the backend's rules go on deciding, and reporting where no kernel serves.
    """
    chosen_methods = {key: chooser.chosen_candidate(job.key) for key, job in jobs.items()}
    non_default_methods = {
        key: name for key, name in chosen_methods.items() if name is not None and name != jobs[key].default_candidate
    }
    backend.choices.set_methods({key: DecodeMethod(name) for key, name in non_default_methods.items()})


PREFILL_KERNEL, PREFILL_BY_MLX = "prefill kernel", "MLX over pieces"
"""The two ways to compute prefill pieces, as they are called in tables and on disk."""

_PIECE_TOKENS, _PIECE_CONTEXT = 512, 2048
"""The piece on which prefill is timed, and the tokens before it."""


def prefill_jobs(
    layers: Iterable[tuple[AttentionCall, KVSpec]], attention: MetalAttention, block_size: int
) -> dict[PrefillKey, TuningJob]:
    """Return a timing job for each kind of layer whose prefill pieces the kernel can compute: by the kernel, or by MLX.
    The default candidate is the one that the rules prefer.
    """
    bench, prefill = _CandidatePreparer(), attention.prefill
    jobs: dict[PrefillKey, TuningJob] = {}
    for call, spec in layers:
        variant, window = make_variant(PrefillVariant, call, spec, block_size), spec.attention_window
        if (variant, window) in jobs or refusal(variant) is not None or not chunks_fit_blocks(variant, window):
            continue
        problem = partial(TimedPiece, call, spec, block_size, bench.slabs)
        ways = (PREFILL_KERNEL, PREFILL_BY_MLX)
        candidates = tuple(
            Candidate(
                name,
                partial(
                    bench.prepare,
                    (variant, window),
                    problem,
                    partial(_attend_pieces_with, attention, (variant, window), name == PREFILL_KERNEL),
                    name,
                ),
            )
            for name in (ways if prefill.is_preferred_by_rules(variant, window) else ways[::-1])
        )
        width = "" if window.tokens is None else f", {'chunks' if window.chunked else 'windows'} of {window.tokens:,}"
        label = f"prefill {variant.label}, {call.query_heads} heads{width}"
        batch = f"{_PIECE_TOKENS} tokens after {_PIECE_CONTEXT:,}"
        jobs[variant, window] = TuningJob(f"{label}; {batch}", label, batch, candidates)
    return jobs


def _attend_pieces_with(attention: MetalAttention, key: PrefillKey, by_kernel: bool) -> Attend:
    """Return `attention.attend` with or without the prefill kernel for layers of this `key`. Raises CannotServe."""
    if by_kernel and not attention.prefill.is_approved(*key):
        raise CannotServe("it does not run here, or disagrees with float64")

    def attend(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
        with attention.prefill.choose_temporarily(key, by_kernel):
            return attention.attend(queries, kv, params)

    return attend


def apply_prefill_choices(attention: MetalAttention, jobs: Mapping[PrefillKey, TuningJob], chooser: Autotuner) -> None:
    """Set whether the kernel or MLX computes each layer's prefill pieces, as `chooser` chose; else the rules decide."""
    attention.prefill.choices.clear()
    for key, job in jobs.items():
        chosen = chooser.chosen_candidate(job.key)
        if chosen is not None and chosen != job.default_candidate:
            attention.prefill.choices[key] = chosen == PREFILL_KERNEL and attention.prefill.is_approved(*key)


def reproducible_jobs(layers: Mapping[LayerKey, LayerAttention], backend: SelectableBackend) -> list[TuningJob]:
    """Return a job for each layer, for `Autotuner.choose_default`. The reproducible method is its only candidate, so
    nothing is timed.
    """
    return [
        TuningJob(
            layer.label,
            layer.label,
            "every step",
            (Candidate(backend.reproducible_method(layer).value, _fail_if_timed),),
        )
        for layer in layers.values()
    ]


def _fail_if_timed() -> Callable[[], object]:
    """Raise AssertionError: a job with a single candidate is never timed."""
    raise AssertionError("a fixed choice is not timed")


class _CandidatePreparer:
    """Prepares the candidates of timing jobs. Only the problem of the current job is in memory."""

    def __init__(self) -> None:
        self.slabs = TimedArena()
        self._job: object = None
        self._problem: TimedProblem | None = None
        self._checked_methods: set[object] = set()

    def prepare(
        self, job: object, make_problem: Callable[[], TimedProblem], make_attend: Callable[[], Attend], method: object
    ) -> Callable[[], object]:
        """Return a function that runs a method on a job's problem. Raises CannotServe, or the method's error."""
        with _synchronize_on_error():
            if self._problem is None or self._job != job:
                self._problem, self._checked_methods = None, set()  # before there is another one
                self._problem, self._job = make_problem(), job
            attend = make_attend()
            if method not in self._checked_methods:
                self._problem.require_agreement(attend)
                self._checked_methods.add(method)
            run = self._problem.build_run(attend)

        def compute() -> None:
            with _synchronize_on_error():
                run()

        return compute


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
the time to begin and to wait would count for more than the attention.
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
        self._kv = PagedKV(arena, 0, step, tail, _TAIL_TOKENS, dtype, _fail_if_called, quantization=form)
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


class TimedPiece(TimedProblem):
    """A random input for timing: a layer's attention for a piece of `_PIECE_TOKENS` tokens of a prompt, in one run."""

    def __init__(self, call: AttentionCall, spec: KVSpec, block_size: int, slabs: TimedArena) -> None:
        tokens, scale = _PIECE_CONTEXT + _PIECE_TOKENS, spec.key_dim**-0.5
        sinks = call.dtype if call.sinks else None
        softcap = 30.0 if call.softcap else None
        layer = LayerAttention(
            call.dtype,
            call.query_heads,
            replace(spec, window=None, chunked=False),
            block_size,
            scale,
            softcap,
            sinks,
            False,
            spec.window,
        )
        self._layer, self._times, self._expected = layer, 1, None
        blocks = -(-tokens // block_size)
        arena = slabs.arena_for(layer, blocks)
        piece = PrefillPiece(0, _PIECE_TOKENS, _PIECE_CONTEXT, KVHandle(0, blocks), None)
        step = GroupStep(np.zeros((0, 0), np.int32), np.zeros(0, np.int32), (), (piece,), spec.attention_window)
        self._queries = _random_array((_PIECE_TOKENS, call.query_heads, 1, spec.key_dim), call.dtype, 2)
        self._params = AttentionParams(
            scale, None if sinks is None else _random_array((call.query_heads,), sinks, 3), softcap
        )
        self._kv = PagedKV(arena, 0, step, None, 0, getattr(mx, spec.dtype), _fail_if_called)
        mx.eval(self._queries, *([] if self._params.sinks is None else [self._params.sinks]))


def _random_array(shape: tuple[int, ...], dtype: str, seed: int) -> mx.array:
    """Return an array of random normal numbers."""
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(getattr(mx, dtype))


def _fail_if_called(*_: object, **__: object) -> mx.array:
    """Raise AssertionError: a timed problem calls attention methods directly, never through the `PagedKV`."""
    raise AssertionError("the methods are called directly")


# The identity of times: the machine, the versions and the texts for which they are true.


def current_identity() -> TimingIdentity:
    """Return the identity of this machine and its software, under which timings that are measured now are stored."""
    if mx.default_device() == mx.cpu:
        device = f"CPU, {platform.machine()}, {os.cpu_count()} cores"
    else:
        device = metal_device() or "GPU"
    mlx = version("mlx") + " with NAX" * uses_matrix_units()
    return TimingIdentity(device, platform.release(), mlx, kernel_digest(), version("cortexmlx"))


def kernel_digest() -> str:
    """Return a hash of the kernel sources, and of the Python modules that launch and time them."""
    digest = hashlib.sha256()
    package = files("cortexmlx.metal")
    for folder, suffixes in (
        (package, (".py",)),
        (package / "matmul", (".py",)),
        (package / "shaders", (".metal", ".h")),
    ):
        for file in sorted(folder.iterdir(), key=lambda file: file.name):
            if file.name.endswith(suffixes):
                digest.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    for room in ("attention", "matmul"):
        digest.update((Path(__file__).parents[1] / room / "autotuning.py").read_bytes())
    return digest.hexdigest()[:16]
