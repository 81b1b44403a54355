"""Measures writing keys and values a token at a time, as decoding does: into a preallocated pool of blocks, and
without one. What was written is read back and compared.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache as MlxLmCache

from cortexmlx.errors import CortexError
from cortexmlx.kv.allocator import KVBlockAllocator
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import TAIL_COLUMNS, KVSpec, LayerGroup


@dataclass(frozen=True)
class PoolSizes:
    """How much is written: `tokens` tokens for each of `rows` sequences, in every layer."""

    layers: int = 8
    rows: int = 16
    heads: int = 4
    dim: int = 64
    tokens: int = 256
    block: int = 32
    """Tokens of a block."""


class KVWriter(Protocol):
    """One way to store keys and values, which is measured.

    `append` takes `[rows, heads, 1, dim]` for the token at `place` of every row. `evaluate` waits until it is written.
    `read` returns a layer's `[rows, heads, tokens, dim]`.
    """

    def append(self, position: int, keys: mx.array, values: mx.array) -> None: ...

    def evaluate(self) -> None: ...

    def read(self, layer: int) -> tuple[mx.array, mx.array]: ...


class ArenaWriter:
    """Writes as cortexmlx does: each token is a column of a small tail, and every 16 columns are written to their
    blocks, in one write per layer. Nothing is allocated meanwhile.
    """

    def __init__(self, sizes: PoolSizes) -> None:
        self._sizes = sizes
        per_row = -(-sizes.tokens // sizes.block)
        spec = KVSpec(sizes.heads, sizes.dim, sizes.dim, "float16")
        self._arena = KVArena([LayerGroup(spec, tuple(range(sizes.layers)))], sizes.rows * per_row, sizes.block)
        allocator = KVBlockAllocator(sizes.rows * per_row)
        # Rows get their blocks in turn, as rows that grow together do.
        blocks = np.array([allocator.allocate(1).start for _ in range(sizes.rows * per_row)], np.int32)
        self._tables = blocks.reshape(per_row, sizes.rows).T
        shape = (sizes.rows, sizes.heads, TAIL_COLUMNS, sizes.dim)
        self._tail = [(mx.zeros(shape, mx.float16), mx.zeros(shape, mx.float16)) for _ in range(sizes.layers)]
        self._column_count = 0
        self._end = 0
        mx.eval(self._tail)

    def _slots(self, positions: np.ndarray) -> mx.array:
        """Return the arena slots of tokens, `[rows, places]`."""
        block, offset = np.divmod(positions, self._sizes.block)
        return mx.array((self._tables[:, block] * self._sizes.block + offset).astype(np.int32))

    def append(self, position: int, keys: mx.array, values: mx.array) -> None:
        """Write the keys and values of every row's token at `position` into the tail."""
        for tail in self._tail:
            for tail_array, new in zip(tail, (keys, values), strict=True):
                tail_array[:, :, self._column_count] = new[:, :, 0]
        self._column_count, self._end = self._column_count + 1, position + 1

    def evaluate(self) -> None:
        """Wait until the token is in the tail, and flush a full tail."""
        mx.eval(self._tail)
        if self._column_count == TAIL_COLUMNS:
            self._flush()

    def _flush(self) -> None:
        """Write the tail's columns to their blocks."""
        if not self._column_count:
            return
        sizes, slots = self._sizes, self._slots(np.arange(self._end - self._column_count, self._end)).reshape(-1)
        for layer, tail in enumerate(self._tail):
            columns = (t[:, :, : self._column_count].swapaxes(0, 1).reshape(sizes.heads, -1, sizes.dim) for t in tail)
            self._arena.write(layer, slots, *columns)
        mx.eval(self._arena.arrays())
        self._column_count = 0

    def read(self, layer: int) -> tuple[mx.array, mx.array]:
        """Return a layer's keys and values from the arena, `[rows, heads, tokens, dim]`."""
        self._flush()
        slots = self._slots(np.arange(self._sizes.tokens))
        keys, values = (array[:, slots].swapaxes(0, 1) for array in self._arena.slab(layer))
        return keys, values


class BlockBufferWriter:
    """Writes into blocks without a pool: a buffer for each block, created for its first token."""

    def __init__(self, sizes: PoolSizes) -> None:
        self._sizes = sizes
        self._blocks: dict[tuple[int, int], list[tuple[mx.array, mx.array]]] = {}
        self._newest_blocks: list[mx.array] = []

    def append(self, position: int, keys: mx.array, values: mx.array) -> None:
        """Write the keys and values of every row's token at `position` into the rows' newest blocks."""
        sizes, offset = self._sizes, position % self._sizes.block
        self._newest_blocks = []
        for layer in range(sizes.layers):
            for row in range(sizes.rows):
                blocks = self._blocks.setdefault((layer, row), [])
                if offset == 0:
                    shape = (sizes.heads, sizes.block, sizes.dim)
                    blocks.append((mx.zeros(shape, mx.float16), mx.zeros(shape, mx.float16)))
                for block, new in zip(blocks[-1], (keys, values), strict=True):
                    block[:, offset] = new[row, :, 0]
                self._newest_blocks += blocks[-1]

    def evaluate(self) -> None:
        mx.eval(self._newest_blocks)

    def read(self, layer: int) -> tuple[mx.array, mx.array]:
        rows = [self._blocks[layer, row] for row in range(self._sizes.rows)]
        keys, values = (mx.stack([mx.concatenate([b[i] for b in row], axis=1) for row in rows]) for i in (0, 1))
        return keys[:, :, : self._sizes.tokens], values[:, :, : self._sizes.tokens]


class GrowingArrayWriter:
    """Writes into one array that is copied into a longer array at every token."""

    def __init__(self, sizes: PoolSizes) -> None:
        self._layers: list[tuple[mx.array, mx.array] | None] = [None] * sizes.layers

    def append(self, position: int, keys: mx.array, values: mx.array) -> None:
        """Copy each layer's keys and values into arrays that are a token longer."""
        for layer, layer_arrays in enumerate(self._layers):
            if layer_arrays is None:
                self._layers[layer] = (keys, values)
            else:
                self._layers[layer] = tuple(  # type: ignore[assignment]
                    mx.concatenate([old, new], axis=2) for old, new in zip(layer_arrays, (keys, values), strict=True)
                )

    def evaluate(self) -> None:
        mx.eval(self._layers)

    def read(self, layer: int) -> tuple[mx.array, mx.array]:
        layer_arrays = self._layers[layer]
        assert layer_arrays is not None
        return layer_arrays


class MlxLmCacheWriter:
    """Writes into mlx-lm's cache for rows of the same length. It grows by 256 tokens at a time."""

    def __init__(self, sizes: PoolSizes) -> None:
        self._caches = [MlxLmCache() for _ in range(sizes.layers)]

    def append(self, position: int, keys: mx.array, values: mx.array) -> None:
        for cache in self._caches:
            cache.update_and_fetch(keys, values)

    def evaluate(self) -> None:
        mx.eval([(cache.keys, cache.values) for cache in self._caches])

    def read(self, layer: int) -> tuple[mx.array, mx.array]:
        cache = self._caches[layer]
        return cache.keys[:, :, : cache.offset], cache.values[:, :, : cache.offset]


POOL, NAIVE = "a pool of blocks", "a buffer for each block"
WRITERS: dict[str, Callable[[PoolSizes], KVWriter]] = {
    POOL: ArenaWriter,
    NAIVE: BlockBufferWriter,
    "copied at each token": GrowingArrayWriter,
    "mlx-lm's cache": MlxLmCacheWriter,
}


@dataclass(frozen=True)
class WriterResult:
    """The measured speed of one way to write, and the memory that it added."""

    name: str
    rates: tuple[float, ...]
    """Tokens per second, for each repetition."""
    bytes_added: int
    """Bytes that MLX held after the tokens, minus the bytes before them."""


def measure_writers(
    sizes: PoolSizes, repetitions: int, on_run: Callable[[str], None], names: Sequence[str] = tuple(WRITERS)
) -> list[WriterResult]:
    """Measure all ways to write, in turns. Raises CortexError if one does not return what was written."""
    rates: dict[str, list[float]] = {name: [] for name in names}
    bytes_added: dict[str, int] = {}
    for repetition in range(repetitions):
        for name in names if repetition % 2 == 0 else reversed(names):
            on_run(f"pool, run {repetition + 1} of {repetitions}: {name}")
            rate, bytes_added[name] = _measure_writer(WRITERS[name], name, sizes)
            rates[name].append(rate)
    return [WriterResult(name, tuple(values), bytes_added[name]) for name, values in rates.items()]


def _measure_writer(make: Callable[[PoolSizes], KVWriter], name: str, sizes: PoolSizes) -> tuple[float, int]:
    """Write all tokens one way, and check them. Return tokens per second, and the bytes that MLX holds more."""
    gc.collect()
    mx.clear_cache()
    first = mx.arange(sizes.rows * sizes.heads * sizes.dim).reshape(sizes.rows, sizes.heads, 1, sizes.dim) % 512
    news = [(first + t).astype(mx.float16) for t in range(sizes.tokens)]
    mx.eval(news)
    writer = make(sizes)
    bytes_before, started = mx.get_active_memory(), time.perf_counter()
    for position, new in enumerate(news):
        writer.append(position, new, -new)
        writer.evaluate()
    seconds, bytes_added = time.perf_counter() - started, mx.get_active_memory() - bytes_before
    expected = np.arange(sizes.tokens)[None, None, :, None] + np.array(first)
    for layer in range(sizes.layers):
        keys, values = (np.array(array).astype(np.int64) for array in writer.read(layer))
        if not (np.array_equal(keys, expected) and np.array_equal(values, -expected)):
            raise CortexError(f"{name} does not give back what was written to layer {layer}: no figure")
    return sizes.rows * sizes.tokens / seconds, bytes_added
