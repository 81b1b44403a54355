"""The bytes of the KV cache: one preallocated slab per layer, written in place and read through views.

A layer's slab is a tuple of arrays (keys, values), each head-major `[kv_heads, slots, dim]`. The slot of a token is
`block * block_size + offset`. If values are part of their keys, the slab is (keys,). Quantized keys, or values, are
three arrays (`Quantization`). Consecutive blocks are one strided view `[kv_heads, tokens, dim]` of the slab, which
matrix products read without a copy.

MLX writes into an array in place only while nothing else holds its buffer: no view, no alias, no operation in flight.
So every write must happen *drained* (all dispatched work is finished), and no view may outlive the step that made it.

Two more blocks follow those that are handed out. The *null block* stays zero: padding entries of block tables point to
it. The last block is scratch: its last slot takes writes that belong to no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from cortexmlx.errors import KVBlockError, MemoryRefused
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.kv.spec import GroupCounts, KVSpec, LayerGroup, blocks_per_group
from cortexmlx.system.machine import can_allocate, is_memory_refusal

Slab = tuple[mx.array, ...]

QUANTIZED_PARTS = 3
"""Arrays of quantized keys, or values: codes, scales, biases."""


@dataclass(frozen=True)
class Quantization:
    """How keys and values are quantized, in MLX's affine format `number = scale * code + bias`. A code has `bits`
    bits, 8 or 4, and `group` numbers along a head share a scale and a bias.

    A quantized slab has six arrays: codes `[kv_heads, slots, dim * bits / 32]` uint32, scales and biases `[kv_heads,
    slots, dim / group]` of the keys, and the same of the values. It has three if values are part of their keys. A tail
    has as many arrays `[rows, kv_heads, W, ...]`. The tail keeps codes, too: dequantized numbers that are quantized
    again can have other bits. So a token is the same before and after it moves to the arena.
    """

    bits: int
    group: int

    def quantize(self, *numbers: mx.array) -> tuple[mx.array, ...]:
        """Quantize arrays `[..., dim]`: return codes, scales and biases of each, one array after the other."""
        return tuple(part for array in numbers for part in mx.quantize(array, group_size=self.group, bits=self.bits))

    def dequantize(self, parts: Sequence[mx.array]) -> tuple[mx.array, ...]:
        """Return the dequantized numbers `[..., dim]` of arrays that `quantize` returned, in the scales' dtype."""
        each = zip(parts[::QUANTIZED_PARTS], parts[1::QUANTIZED_PARTS], parts[2::QUANTIZED_PARTS], strict=True)
        return tuple(mx.dequantize(c, s, b, group_size=self.group, bits=self.bits) for c, s, b in each)


_STEP_RESERVE_BYTES = 256 << 20
"""The arena takes bytes only if as many again, up to this number, are left for the steps: logits, activations,
copies.
"""


class KVArena:
    """The memory of the KV cache: all layers' slabs, with `blocks` blocks of `block_size` tokens. `blocks` is one
    number for all layer groups, or one for each. With None, the arena takes no memory, as after `release`.

    Raises MemoryRefused if the system does not give the memory.
    """

    def __init__(self, groups: Sequence[LayerGroup], blocks: int | Sequence[int] | None, block_size: int) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.group_of: dict[int, int] = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        self._empty: dict[int, Slab] = {
            layer: tuple(
                mx.zeros((group.spec.kv_heads, 0, width), getattr(mx, dtype)) for width, dtype in group.spec.slab_arrays
            )
            for group in groups
            for layer in group.layers
        }
        """Slabs without slots, made in advance: to give memory back must not take any."""
        self._slabs: dict[int, Slab] = {}
        self.blocks: GroupCounts
        self.release()
        if blocks is None:
            return
        self.blocks = blocks_per_group(groups, blocks)
        size = sum(group.bytes_per_token * self.slots_per_slab(g) for g, group in enumerate(self.groups))
        if not can_allocate(size + min(size, _STEP_RESERVE_BYTES)):
            raise _memory_refused_error(size, "free memory, or choose a smaller model or KV memory (--kv-memory)")
        for layer, g in self.group_of.items():
            spec, slots = self.groups[g].spec, self.slots_per_slab(g)
            self._slabs[layer] = tuple(
                mx.zeros((spec.kv_heads, slots, width), getattr(mx, dtype)) for width, dtype in spec.slab_arrays
            )
        mx.eval(self.arrays())

    def null_block(self, group: int) -> int:
        """Return the block of zeros that pads block tables."""
        return self.blocks[group]

    def slots_per_slab(self, group: int) -> int:
        """Return the number of slots (tokens) in a slab of a group, the null and the scratch block included."""
        return (self.blocks[group] + 2) * self.block_size

    @property
    def nbytes(self) -> int:
        """The bytes of all slabs."""
        return sum(a.nbytes for a in self.arrays())

    def arrays(self) -> list[mx.array]:
        """Return every array of every slab, for evaluation."""
        return [a for slab in self._slabs.values() for a in slab]

    def spec(self, layer: int) -> KVSpec:
        """Return the KVSpec of a layer."""
        return self.groups[self.group_of[layer]].spec

    def quantization(self, layer: int) -> Quantization | None:
        """Return how a layer's keys and values are quantized; None if they are not."""
        spec = self.spec(layer)
        if spec.kv_bits is None or spec.kv_group_size is None:
            return None
        return Quantization(spec.kv_bits, spec.kv_group_size)

    def value_in_key(self, layer: int) -> int | None:
        """Return how many of a key's first numbers are the value; None if values are stored separately."""
        spec = self.spec(layer)
        return spec.value_dim if spec.value_in_key else None

    def slab(self, layer: int) -> Slab:
        """Return the layer's (keys, values) or (keys,), each `[kv_heads, slots, dim]`, or the arrays of `Quantization`.
        Drop what is returned before the next write.
        """
        return self._slabs[layer]

    def view(self, layer: int, run: KVHandle, tokens: int) -> Slab:
        """Return the first `tokens` tokens of a run as (keys, values), each `[kv_heads, tokens, dim]`, without a copy.

        A view that still exists at the next write makes MLX copy the whole slab.
        """
        if not 0 <= tokens <= run.count * self.block_size:
            raise ValueError(f"a run of {run.count} blocks of {self.block_size} has no {tokens} tokens")
        start = run.start * self.block_size
        return tuple([a[:, start : start + tokens] for a in self._slabs[layer]])

    def slab_as_blocks(self, layer: int) -> Slab:
        """Return a slab as `gather_mm` matrices, head by head: `[kv_heads * all blocks, block_size, dim]`."""
        return tuple(a.reshape(-1, self.block_size, a.shape[-1]) for a in self._slabs[layer])

    def check_slots(self, group: int, slots: np.ndarray) -> None:
        """Raise KVBlockError unless every slot (`[n]` int) belongs to an allocatable block, or is -1, the last slot.

        MLX checks no index: it reads and writes whatever is there.
        """
        if slots.size and not -1 <= slots.min() <= slots.max() < self.blocks[group] * self.block_size:
            raise KVBlockError(
                f"slots {slots.min()} to {slots.max()} do not all lie in the arena's {self.blocks[group]} blocks of "
                f"{self.block_size} tokens: this is a fault of the scheduler, please report it"
            )

    def check_blocks(self, group: int, blocks: np.ndarray) -> None:
        """Raise KVBlockError unless every block number is that of an allocatable block or of the null block."""
        if blocks.size and not 0 <= blocks.min() <= blocks.max() <= self.null_block(group):
            raise KVBlockError(
                f"blocks {blocks.min()} to {blocks.max()} do not all lie in the arena, which has {self.blocks[group]}: "
                "this is a fault of the scheduler, please report it"
            )

    def write(self, layer: int, slots: mx.array | slice, *values: mx.array) -> None:
        """Write new values to `slots` (`[tokens]` int32, or a slice), one `[kv_heads, tokens, dim]` for each array of
        the slab. The write is lazy, and nothing else may be in flight.
        """
        for array, value in zip(self._slabs[layer], values, strict=True):
            array[:, slots] = value

    def write_scratch_slots(self) -> None:
        """Write zeros, lazily, to each slab's last slot, which belongs to no token. Nothing else may be in flight."""
        for slab in self._slabs.values():
            for array in slab:
                array[:, -1:] = 0

    def can_resize(self, blocks: int | Sequence[int]) -> bool:
        """Return whether the system has memory now to resize to `blocks` blocks, including the temporary copy."""
        target_blocks = blocks_per_group(self.groups, blocks)
        if target_blocks == self.blocks:
            return True
        slots = [(min(pair) + 2) * self.block_size for pair in zip(target_blocks, self.blocks, strict=True)]
        slab = max(g.spec.bytes_per_token * n for g, n in zip(self.groups, slots, strict=True))
        growth = self._growth_bytes(target_blocks)
        return can_allocate(slab + growth + min(growth, _STEP_RESERVE_BYTES))

    def resize(self, blocks: int | Sequence[int]) -> None:
        """Resize the arena to `blocks` blocks, and keep the content of the blocks that stay. Waits for all work in
        flight.

        Layers are resized one after the other, so at most one slab exists twice. Raises MemoryRefused if the system
        does not give the memory for all layers; then the arena has not changed. Whatever else it raises, the arena has
        given all bytes back, as after `release`: there are never layers of different sizes. That is also its last
        resort if the memory for the old sizes is refused.
        """
        target_blocks = blocks_per_group(self.groups, blocks)
        mx.synchronize()
        if not self.can_resize(target_blocks):
            raise self._resize_error(target_blocks)
        try:
            self._resize_slabs(target_blocks)
        except BaseException as error:
            if not (is_memory_refusal(error) and self._restore_slab_sizes()):
                self.release()
                raise
            raise self._resize_error(target_blocks) from error
        self.blocks = target_blocks

    def release(self) -> None:
        """Free the slabs, even after a failed write: all cached keys and values are lost. There are no blocks until
        `resize`.
        """
        self._slabs.update(self._empty)
        self.blocks = (0,) * len(self.groups)

    def close(self) -> None:
        """Free all memory for good. The arena cannot be used again."""
        self._slabs.clear()

    def _resize_slabs(self, blocks: Sequence[int]) -> None:
        """Give every slab the size of `blocks` blocks, and keep the content of its first blocks. A failed attempt may
        have left slabs of different sizes.

        MLX's cache is cleared first each time. It has the slab of the layer before, and buffers of other sizes. MLX
        copies an array at a write if its buffer is more than 16,384 bytes larger (`is_donatable`), and the cache gives
        out buffers that are up to two pages larger: 32,768 bytes on a Mac.
        """
        for layer, slab in self._slabs.items():
            mx.clear_cache()
            slots, extra_slots = (blocks[self.group_of[layer]] + 2) * self.block_size, 2 * self.block_size
            self._slabs[layer] = tuple(
                a if a.shape[1] == slots else _resize_array(a, slots, max(0, min(slots, a.shape[1]) - extra_slots))
                for a in slab
            )
        for layer, slab in self._slabs.items():
            if any(a.shape[1] != (blocks[self.group_of[layer]] + 2) * self.block_size for a in slab):
                raise KVBlockError(f"the slabs of layer {layer} have other sizes than its group: please report it")

    def _restore_slab_sizes(self) -> bool:
        """Resize all slabs back to the current number of blocks. Return whether the system gave the memory for that."""
        try:
            self._resize_slabs(self.blocks)
        except Exception:
            return False
        return True

    def _growth_bytes(self, blocks: Sequence[int]) -> int:
        """Return how many bytes more than now `blocks` blocks take, at least 0."""
        added_blocks = [
            max(target_count - current_count, 0)
            for target_count, current_count in zip(blocks, self.blocks, strict=True)
        ]
        return sum(n * self.block_size * g.bytes_per_token for n, g in zip(added_blocks, self.groups, strict=True))

    def _resize_error(self, blocks: Sequence[int]) -> MemoryRefused:
        """Return the error for a resize that the system refuses."""
        counts = " and ".join(str(n) for n in dict.fromkeys(self.blocks))
        return _memory_refused_error(
            self._growth_bytes(blocks),
            f"it stays at {counts} blocks of {self.block_size} tokens for now; free memory and ask again",
        )

    def copy_blocks(self, group: int, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy whole blocks within every layer of a group. Nothing else may be in flight.

        The copies are evaluated before they are written, and awaited: a read of the slab that is pending, or whose
        command buffer is not given back yet (`mx.eval` does not wait for that), would make the write copy all of it.
        """
        for blocks in (sources, targets):
            self.check_blocks(group, blocks)
        source, target = self._block_slots(sources), self._block_slots(targets)
        layers = self.groups[group].layers
        values = [[a[:, source] for a in self._slabs[layer]] for layer in layers]
        mx.eval(values)
        mx.synchronize()
        for layer, each in zip(layers, values, strict=True):
            self.write(layer, target, *each)

    def fill(self, group: int, slots: np.ndarray, value: float) -> None:
        """Set every number of `slots` (`[n]` int) to `value`, so that the debug mode notices reads of unused memory."""
        if not slots.size:
            return
        slot_index = mx.array(slots.astype(np.int32))
        for layer in self.groups[group].layers:
            for array in self._slabs[layer]:
                array[:, slot_index] = mx.array(value, array.dtype)
        mx.eval(self.arrays())

    def _block_slots(self, blocks: np.ndarray) -> mx.array:
        """Return the slots of all tokens of blocks."""
        offsets = np.arange(self.block_size, dtype=np.int32)
        return mx.array((blocks.astype(np.int32)[:, None] * self.block_size + offsets).reshape(-1))


def _resize_array(array: mx.array, slots: int, keep: int) -> mx.array:
    """Return a copy with `slots` slots: the first `keep` of the array, then zeros."""
    copy = mx.zeros((array.shape[0], slots, array.shape[2]), array.dtype)
    if keep:
        copy[:, :keep] = array[:, :keep]
    mx.eval(copy)
    return copy


def _memory_refused_error(size: int, advice: str) -> MemoryRefused:
    """Return the error for a refused allocation of `size` bytes."""
    return MemoryRefused(f"the system refuses {format_bytes(size)} for the KV cache: {advice}")
