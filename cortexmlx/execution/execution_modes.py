"""Execution modes: many rows on paged attention, or one row on mlx-lm's own caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import mlx.core as mx
import mlx.nn as nn

from cortexmlx.attention.backends import Backend, choose_backend
from cortexmlx.attention.probe import NotPaged, probe
from cortexmlx.attention.selfcheck import KernelCheck
from cortexmlx.errors import InvalidRequest, ModelUnsupported
from cortexmlx.execution.boundary import Runner, granted
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.execution.serial_runner import COUNTED, OneSequence, SerialRunner, kept_by, not_always_cut, sees_ahead
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.sizing import (
    Load,
    arena_blocks,
    bytes_per_token,
    first_blocks,
    format_bytes,
    row_bytes,
    sequence_bytes,
    split_memory,
    tokens_that_fit,
)
from cortexmlx.kv.snapshots import Snapshots
from cortexmlx.kv.spec import Counts, LayerGroup, group_layers, paged, quantized, unquantized
from cortexmlx.metal.kernels import KernelFactory
from cortexmlx.products.autotuning import ProductChoices
from cortexmlx.products.served import QuantizedProducts


class ExecutionMode(Protocol):
    """One way to run a model."""

    groups: tuple[LayerGroup, ...]
    """What the model's layers keep."""
    most_rows: int | None
    """How many requests may run at once; None: any number."""
    pipelined: bool
    """Whether a step may be built before the last one is read."""
    notes: tuple[str, ...]
    """Notes for the user, one line each."""

    def blocks(self, memory: int, load: Load, context: int) -> Counts:
        """Return how many blocks of each group fit into `memory` bytes, for rows of at most `context` tokens. Raises
        InvalidRequest if none fits.
        """

    def backend(self, name: str) -> Backend:
        """Return the attention backend with this name: see `choose_backend`."""

    def kernel_checks(self, backend: Backend, block_size: int) -> Sequence[KernelCheck]:
        """Return what must be compiled and checked before the first step: see `Backend.checks`."""

    def write_checks(self, backend: Backend) -> Sequence[KernelCheck]:
        """Return the same for what only shows when there is a runner: the kernel that writes the tail."""

    def runner(self, block_size: int, vocab_size: int, backend: Backend) -> Runner:
        """Return the runner. Its arena has no blocks yet. Raises ModelUnsupported if a short check shows that answers
        would depend on how prompts are cut.
        """

    def begin(self, blocks: Counts, prefix: PrefixCache, anew: bool = False) -> KVCache:
        """Let the runner begin an empty arena of at most `blocks` blocks. Return the owner of these blocks. Raises
        MemoryRefused, unless it begins `anew`: then the next step has the arena made.
        """


class PagedMode:
    """Many rows at once, on one arena."""

    most_rows: int | None = None
    pipelined: bool = True
    notes: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, groups: tuple[LayerGroup, ...]) -> None:
        self.groups = groups
        self._model = model
        self._runner: ModelRunner
        self._snapshots: int | None = None

    def blocks(self, memory: int, load: Load, context: int) -> Counts:
        memory, snapshots = split_memory(self.groups, memory, load.rows)
        self._snapshots = snapshots if row_bytes(self.groups) else None
        if bytes_per_token(self.groups):
            return arena_blocks(memory, paged(self.groups), load)
        return (load.rows * -(-context // load.block_size),)

    def backend(self, name: str) -> Backend:
        return choose_backend(name)

    def kernel_checks(self, backend: Backend, block_size: int) -> Sequence[KernelCheck]:
        return backend.checks(self._model, paged(self.groups), block_size)

    def write_checks(self, backend: Backend) -> Sequence[KernelCheck]:
        return () if backend.writer is None else backend.writer.checks(self._model)

    def runner(self, block_size: int, vocab_size: int, backend: Backend) -> ModelRunner:
        self._runner = ModelRunner(
            self._model, paged(self.groups), block_size, vocab_size, backend.attend, backend.writer, _products(backend)
        )
        return self._runner

    def begin(self, blocks: Counts, prefix: PrefixCache, anew: bool = False) -> KVCache:
        return begin_paged(self._runner, self.groups, blocks, prefix, self._snapshots, self._runner.can_resize, anew)


def begin_paged(
    runner: Runner,
    groups: Sequence[LayerGroup],
    blocks: Counts,
    prefix: PrefixCache,
    snapshots: int | None,
    may_resize: Callable[[Counts], bool],
    anew: bool,
) -> KVCache:
    """Let a runner begin an empty arena of at most `blocks` blocks of `groups`, with `snapshots` snapshots if there are
    states. `anew` and the rest: see `ExecutionMode.begin`.
    """
    size = prefix.block_size
    first = tuple(first_blocks(count, size) for count in blocks)
    refused = runner.begin(first)
    if refused is not None:
        first = (1,) * len(first) if anew else granted(refused)
    pools = BlockPools(
        paged(groups),
        first,
        size,
        max_blocks=blocks,
        prefix=prefix,
        snapshots=None if snapshots is None else Snapshots(snapshots),
        may_resize=may_resize,
    )
    return KVCache(pools)


class SerialMode:
    """One row at a time, on mlx-lm's own caches, because of `why`."""

    most_rows: int | None = 1

    def __init__(self, model: nn.Module, why: NotPaged) -> None:
        """Raises ModelUnsupported if mlx-lm's code fails with one sequence, too."""
        with _refused(why):
            self.groups = kept_by(model)
        self.notes: tuple[str, ...] = (f"one request runs at a time, on mlx-lm's own caches. {why}",)
        kept = not_always_cut(model)
        # A step that is built before the last one is read would compute one token after an answer's last.
        self.pipelined = not kept
        if kept:
            self.notes += (
                "a prompt goes on where the last answer ended, or is computed anew: "
                f"{' and '.join(kept)} cannot always be cut back",
            )
        self._model = model
        self._why = why
        self._runner: SerialRunner

    def blocks(self, memory: int, load: Load, context: int) -> Counts:
        block_size = load.block_size
        most = -(-context // block_size)
        fit = tokens_that_fit(self.groups, memory)
        if fit is not None and fit < block_size:
            least = sequence_bytes(self.groups, block_size)
            raise InvalidRequest(
                f"a KV memory of {format_bytes(memory)} holds no {block_size} tokens: "
                f"give it at least {format_bytes(least)}"
            )
        return (most if fit is None else min(most, fit // block_size),)

    def backend(self, name: str) -> Backend:
        return Backend("mlx-lm's own", choose_backend(name).attend)

    def kernel_checks(self, backend: Backend, block_size: int) -> Sequence[KernelCheck]:
        return ()

    def write_checks(self, backend: Backend) -> Sequence[KernelCheck]:
        return ()

    def runner(self, block_size: int, vocab_size: int, backend: Backend) -> SerialRunner:
        with _refused(self._why):
            ahead = sees_ahead(self._model)
        if ahead:
            raise ModelUnsupported(
                f"{self._why}, and in mlx-lm's own code a token of a prompt sees those after it: answers would depend "
                "on how their prompts are cut"
            )
        self._runner = SerialRunner(self._model, self.groups, block_size, vocab_size)
        return self._runner

    def begin(self, blocks: Counts, prefix: PrefixCache, anew: bool = False) -> KVCache:
        self._runner.begin((1,))
        resize = self._runner.can_resize
        pools = BlockPools(COUNTED, 1, prefix.block_size, max_blocks=blocks, prefix=prefix, may_resize=resize)
        return OneSequence(self.groups, pools, self._runner.rewind)


@contextmanager
def _refused(why: NotPaged) -> Iterator[None]:
    """Refuse the model for whatever mlx-lm's code for it raises in this context."""
    try:
        yield
    except Exception as error:
        raise ModelUnsupported(f"{why}, and mlx-lm's own code for it fails here, too") from error


def execution_mode(model: nn.Module, kv_bits: int | None = None, kv_group_size: int | None = None) -> ExecutionMode:
    """Paged if the model can be, with keys and values of `kv_bits` bits (`quantized`), else one request at a time.
    Raises ModelUnsupported for a model that mlx-lm cannot run here, or whose answers would depend on how its prompts
    are cut, or whose keys and values cannot be quantized.
    """
    try:
        return PagedMode(model, quantized(group_layers(probe(model)), kv_bits, kv_group_size))
    except NotPaged as why:
        if kv_bits is not None:
            raise unquantized(kv_bits, str(why)) from why
        return SerialMode(model, why)


def _products(backend: Backend) -> QuantizedProducts | None:
    """Return what may multiply with quantized weights, on a GPU. Nothing is chosen yet."""
    if backend.name != "metal":
        return None
    return QuantizedProducts(cast(KernelFactory, mx.fast.metal_kernel), ProductChoices())


def not_stored(way: ExecutionMode) -> tuple[str, ...]:
    """Return why nothing of a model goes to a store: one note, or none if it can."""
    return () if way.most_rows is None else ("nothing goes to the KV store: mlx-lm's own caches are not in blocks",)
