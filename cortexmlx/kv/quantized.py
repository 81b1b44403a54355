"""Which keys and values can be quantized, and in groups of how many numbers. Without mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cortexmlx.errors import ModelUnsupported
from cortexmlx.kv.spec import KVSpec, LayerGroup

KV_BITS = (8, 4)
"""Bits of a code."""

GROUP_SIZES = (64, 32)
"""How many numbers along a head share a scale and a bias. The first one takes the fewest bytes."""


def quantized(groups: Sequence[LayerGroup], bits: int | None, group_size: int | None = None) -> tuple[LayerGroup, ...]:
    """Return the same layers with keys and values of `bits` bits. None leaves them unchanged, and so do layers without
    keys and values.

    `group_size` None takes the first of `GROUP_SIZES` that divides every key and value. Raises ModelUnsupported if none
    does, if the given one does not, or if no layer keeps keys and values.
    """
    if bits is None:
        return tuple(groups)
    specs = [group.spec for group in groups if group.spec.kv_heads]
    if not specs:
        raise ModelUnsupported(f"kv_bits is {bits}, but no layer keeps keys and values: leave it out")
    size = group_size or next((size for size in GROUP_SIZES if not _undivided(specs, size)), GROUP_SIZES[-1])
    if undivided := _undivided(specs, size):
        other = next((s for s in GROUP_SIZES if not _undivided(specs, s)), None)
        then = "use the model without kv_bits" if other is None else f"choose kv_group_size {other}"
        raise ModelUnsupported(
            f"keys and values of {' and '.join(map(str, undivided))} numbers cannot be quantized in groups of {size}, "
            f"which do not divide them: {then}"
        )
    return tuple(
        replace(group, spec=replace(group.spec, kv_bits=bits, kv_group_size=size)) if group.spec.kv_heads else group
        for group in groups
    )


def unquantized(bits: int, why: str) -> ModelUnsupported:
    """Return the error for a model that does not run on the arena."""
    return ModelUnsupported(f"kv_bits is {bits}, which paged attention alone has: leave it out. {why}")


def kv_form(groups: Sequence[LayerGroup]) -> str:
    """Return in words how keys and values are quantized, such as "8 bits in groups of 64"; an empty text if they are
    not.
    """
    spec = next((group.spec for group in groups if group.spec.kv_bits is not None), None)
    return "" if spec is None else f"{spec.kv_bits} bits in groups of {spec.kv_group_size}"


def _undivided(specs: Sequence[KVSpec], size: int) -> list[int]:
    """Return the dims that groups of `size` do not divide. If a value is a part of its key, it must end where a group
    ends, too.
    """
    return sorted({dim for spec in specs for dim in (spec.key_dim, spec.value_dim) if dim % size})
