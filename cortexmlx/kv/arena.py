"""The bytes of the KV cache: one preallocated slab per layer and kind, written in place and read through views.

Layout: a layer's slab is a tuple of arrays (keys, values), each head-major `[kv_heads, slots, dim]`, where slot
`block * block_size + offset` is the flat coordinate of a token; where values lie in their keys, it is (keys,) alone.
Quantized keys, and values, are three arrays each (`Quantization`).
Consecutive blocks are therefore one strided view
`[kv_heads, tokens, dim]` of the slab, which matrix products read without a copy.

MLX writes into an array in place only while nobody else holds its buffer: no view, no alias, no operation in flight.
So every write here must happen *drained* (nothing dispatched and unfinished), and no view may outlive the step that
made it.

Two blocks lie behind the ones that are handed out. The *null block* stays zero: padding entries of block tables point
to it. The last block is scratch: its last slot takes writes that belong to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from cortexmlx.errors import KVBlockError, MemoryRefused
from cortexmlx.kv.blocks.allocator import KVHandle
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.kv.spec import Counts, KVSpec, LayerGroup, of_each
from cortexmlx.machine import obtainable

Slab = tuple[mx.array, ...]

PARTS = 3
"""Arrays that say what keys, or values, are: codes, scales, biases."""


@dataclass(frozen=True)
class Quantization:
    """How keys and values are quantized, in MLX's affine format, `number = scale * code + bias`: `bits` of a code, 8 or
    4, and the `group` of numbers along a head that share a scale.

    A quantized slab is a `Slab` of six arrays: of keys the codes `[kv_heads, slots, dim * bits / 32]` uint32, scales
    and biases `[kv_heads, slots, dim / group]`, and the same of values; where these lie in their keys, of three. A tail
    is as many such arrays `[rows, kv_heads, W, ...]`. It keeps codes, too, because what they stand for, quantized once
    more, need not be the same bits: so a token is the same before and after it moves to the arena.
    """

    bits: int
    group: int

    def quantize(self, *numbers: mx.array) -> tuple[mx.array, ...]:
        """Codes, scales and biases of each array `[..., dim]`, one after the other."""
        return tuple(part for array in numbers for part in mx.quantize(array, group_size=self.group, bits=self.bits))

    def dequantize(self, parts: Sequence[mx.array]) -> tuple[mx.array, ...]:
        """What `quantize` gave for some arrays, as numbers again `[..., dim]`, in the dtype of the scales."""
        each = zip(parts[::PARTS], parts[1::PARTS], parts[2::PARTS], strict=True)
        return tuple(mx.dequantize(c, s, b, group_size=self.group, bits=self.bits) for c, s, b in each)


_SPARE = 256 << 20
"""The arena takes bytes only if as many again, up to so many, are left for the steps: logits, activations, copies."""


class KVArena:
    """Owns the slabs of all layers. `blocks` blocks of `block_size` tokens can be handed out: one number for all layer
    groups, or one for each; None: no memory is asked for, as after `release`.

    Raises MemoryRefused if the system does not give that much.
    """

    def __init__(self, groups: Sequence[LayerGroup], blocks: int | Sequence[int] | None, block_size: int) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.group_of: dict[int, int] = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        self._slabs: dict[int, Slab] = {}
        self.blocks: Counts
        self.release()
        if blocks is None:
            return
        self.blocks = of_each(groups, blocks)
        size = sum(group.bytes_per_token * self.slots(g) for g, group in enumerate(self.groups))
        if not obtainable(size + min(size, _SPARE)):
            raise _refused(size, "free memory, or choose a smaller model or KV memory (--kv-memory)")
        for layer, g in self.group_of.items():
            spec, slots = self.groups[g].spec, self.slots(g)
            self._slabs[layer] = tuple(
                mx.zeros((spec.kv_heads, slots, width), getattr(mx, dtype)) for width, dtype in spec.slab_arrays
            )
        mx.eval(self.arrays())

    def null_block(self, group: int) -> int:
        """The block of zeros that padding entries of block tables point to."""
        return self.blocks[group]

    def slots(self, group: int) -> int:
        """Tokens per slab, the null and the scratch block included."""
        return (self.blocks[group] + 2) * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(a.nbytes for a in self.arrays())

    def arrays(self) -> list[mx.array]:
        """Every slab array, for evaluation."""
        return [a for slab in self._slabs.values() for a in slab]

    def spec(self, layer: int) -> KVSpec:
        """What a layer keeps."""
        return self.groups[self.group_of[layer]].spec

    def quantization(self, layer: int) -> Quantization | None:
        """How a layer's keys and values are quantized, if they are."""
        spec = self.spec(layer)
        if spec.kv_bits is None or spec.kv_group_size is None:
            return None
        return Quantization(spec.kv_bits, spec.kv_group_size)

    def value_in_key(self, layer: int) -> int | None:
        """How many of a key's first numbers are the value, or None where values are stored beside the keys."""
        spec = self.spec(layer)
        return spec.value_dim if spec.value_in_key else None

    def slab(self, layer: int) -> Slab:
        """The layer's (keys, values), or (keys,), each `[kv_heads, slots, dim]`, or what `Quantization` says. Drop the
        reference before the next write.
        """
        return self._slabs[layer]

    def view(self, layer: int, run: KVHandle, tokens: int) -> Slab:
        """The first `tokens` tokens of a run as (keys, values), each `[kv_heads, tokens, dim]`: a slice, no copy.

        A view that is still alive at the next write makes MLX copy the whole slab.
        """
        if not 0 <= tokens <= run.count * self.block_size:
            raise ValueError(f"a run of {run.count} blocks of {self.block_size} has no {tokens} tokens")
        start = run.start * self.block_size
        return tuple([a[:, start : start + tokens] for a in self._slabs[layer]])

    def blocks_of(self, layer: int) -> Slab:
        """The slab as matrices for `gather_mm`: `[kv_heads * all blocks, block_size, dim]`, head h block b at `h *
        all + b`.
        """
        return tuple(a.reshape(-1, self.block_size, a.shape[-1]) for a in self._slabs[layer])

    def check_slots(self, group: int, slots: np.ndarray) -> None:
        """Raise KVBlockError unless every slot (`[n]` int) is a block's that is handed out, or -1, the last one.

        MLX checks no index: it reads and writes whatever lies there.
        """
        if slots.size and not -1 <= slots.min() <= slots.max() < self.blocks[group] * self.block_size:
            raise KVBlockError(
                f"slots {slots.min()} to {slots.max()} do not all lie in the arena's {self.blocks[group]} blocks of "
                f"{self.block_size} tokens: this is a fault of the scheduler, please report it"
            )

    def check_blocks(self, group: int, blocks: np.ndarray) -> None:
        """Raise KVBlockError unless every block (int) is one that is handed out, or the null block."""
        if blocks.size and not 0 <= blocks.min() <= blocks.max() <= self.null_block(group):
            raise KVBlockError(
                f"blocks {blocks.min()} to {blocks.max()} do not all lie in the arena, which has {self.blocks[group]}: "
                "this is a fault of the scheduler, please report it"
            )

    def write(self, layer: int, slots: mx.array | slice, *values: mx.array) -> None:
        """Write `[kv_heads, tokens, dim]` for each array of the slab to `slots` (`[tokens]` int32, or a slice). Lazy;
        must be drained.
        """
        for array, value in zip(self._slabs[layer], values, strict=True):
            array[:, slots] = value

    def can_resize(self, blocks: int | Sequence[int]) -> bool:
        """Whether the system has the memory now that bringing the arena to `blocks` blocks takes on the way."""
        wanted = of_each(self.groups, blocks)
        if wanted == self.blocks:
            return True
        slots = [(min(pair) + 2) * self.block_size for pair in zip(wanted, self.blocks, strict=True)]
        slab = max(g.spec.bytes_per_token * n for g, n in zip(self.groups, slots, strict=True))
        growth = self._growth(wanted)
        return obtainable(slab + growth + min(growth, _SPARE))

    def resize(self, blocks: int | Sequence[int]) -> None:
        """Bring the arena to `blocks` blocks; what lies in blocks that stay is kept. Waits for whatever is in flight.

        Layer by layer, so that at most one slab exists twice. Raises MemoryRefused if the system does not give the
        memory for all layers; then the arena is as it was.
        """
        wanted = of_each(self.groups, blocks)
        mx.synchronize()
        if not self.can_resize(wanted):
            raise self._stays(wanted)
        try:
            self._bring_slabs_to(wanted)
        except (RuntimeError, MemoryError) as error:
            self._bring_slabs_to(self.blocks)
            raise self._stays(wanted) from error
        self.blocks = wanted

    def release(self) -> None:
        """Give all bytes back, with what lies in them, also where a step has failed while it wrote. No block is left
        before `resize` makes some.
        """
        for layer in self.group_of:
            arrays, heads = self.spec(layer).slab_arrays, self.spec(layer).kv_heads
            self._slabs[layer] = tuple(mx.zeros((heads, 0, width), getattr(mx, dtype)) for width, dtype in arrays)
        self.blocks = (0,) * len(self.groups)

    def close(self) -> None:
        """Give all bytes back, for good."""
        self._slabs.clear()

    def _bring_slabs_to(self, blocks: Sequence[int]) -> None:
        """Give every slab the slots of so many blocks, if it has not, keeping what lies in the first of them."""
        for layer, slab in self._slabs.items():
            group = self.group_of[layer]
            slots, keep = (
                (blocks[group] + 2) * self.block_size,
                min(blocks[group], self.blocks[group]) * self.block_size,
            )
            self._slabs[layer] = tuple(a if a.shape[1] == slots else _resized(a, slots, keep) for a in slab)

    def _growth(self, blocks: Sequence[int]) -> int:
        """Bytes that so many blocks take more than the arena has, or 0."""
        more = [max(wanted - have, 0) for wanted, have in zip(blocks, self.blocks, strict=True)]
        return sum(n * self.block_size * g.bytes_per_token for n, g in zip(more, self.groups, strict=True))

    def _stays(self, blocks: Sequence[int]) -> MemoryRefused:
        counts = " and ".join(str(n) for n in dict.fromkeys(self.blocks))
        return _refused(
            self._growth(blocks),
            f"it stays at {counts} blocks of {self.block_size} tokens; free memory and make a new engine",
        )

    def copy_blocks(self, group: int, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy whole blocks within every layer of a group. Must be drained.

        The copies are evaluated before they are written: a pending read of the slab would make the write copy all of
        it.
        """
        for blocks in (sources, targets):
            self.check_blocks(group, blocks)
        source, target = self._block_slots(sources), self._block_slots(targets)
        for layer in self.groups[group].layers:
            values = [a[:, source] for a in self._slabs[layer]]
            mx.eval(values)
            self.write(layer, target, *values)

    def fill(self, group: int, slots: np.ndarray, value: float) -> None:
        """Set every number of `slots` (`[n]` int) to `value`: the debug mode that poisons what must never be read."""
        if not slots.size:
            return
        where = mx.array(slots.astype(np.int32))
        for layer in self.groups[group].layers:
            for array in self._slabs[layer]:
                array[:, where] = mx.array(value, array.dtype)
        mx.eval(self.arrays())

    def _block_slots(self, blocks: np.ndarray) -> mx.array:
        offsets = np.arange(self.block_size, dtype=np.int32)
        return mx.array((blocks.astype(np.int32)[:, None] * self.block_size + offsets).reshape(-1))


def _resized(array: mx.array, slots: int, keep: int) -> mx.array:
    """A copy with so many slots: the first `keep` of the array, then zeros."""
    copy = mx.zeros((array.shape[0], slots, array.shape[2]), array.dtype)
    if keep:
        copy[:, :keep] = array[:, :keep]
    mx.eval(copy)
    return copy


def _refused(size: int, then: str) -> MemoryRefused:
    return MemoryRefused(f"the system refuses {format_bytes(size)} for the KV cache: {then}")
