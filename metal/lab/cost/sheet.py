"""The cost sheet as text: for each decode kernel its instructions, registers, resident threads and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from cortexmlx.metal.lab.cost.choice import candidates, compiled, per_token
from cortexmlx.metal.lab.cost.compiled import RECORD_AGAIN, CompiledKernel, packaged_record
from cortexmlx.metal.lab.cost.mlx_attention import HELD, MlxShape, has_two_pass_gqa, one_pass, two_pass, two_pass_gqa
from cortexmlx.metal.lab.cost.traffic import measure
from cortexmlx.metal.rules import Variant

SHAPES = (
    *(Variant(t, t, dim, dim, 32, g) for t in ("float16", "bfloat16") for dim in (64, 128) for g in (1, 2, 4, 8, 16)),
    *(Variant(t, t, 256, 256, 32, group) for t in ("float16", "bfloat16") for group in (4, 8)),
    *(Variant(t, t, 512, 512, 32, 8) for t in ("float16", "bfloat16")),
    *(Variant(t, t, 576, 512, 32, group, latent=True) for t in ("float16", "bfloat16") for group in (16, 128)),
    *(
        Variant("float16", "float16", dim, dim, 32, group, kv_bits=bits, quant_group=64)
        for bits in (8, 4)
        for dim in (64, 128)
        for group in (1, 2, 4, 8)
    ),
)
"""The head_dims and query heads per KV head that most models have, wide and latent heads, and quantized ones."""

TOKENS = 512
"""Tokens of the row whose bytes are counted."""
_BLOCKS = 4
"""Blocks of tokens in MLX's kernels of two passes."""

_COLUMNS: dict[str, tuple[str, ...]] = {
    "fma": ("fma",),
    "float": ("float",),
    "int": ("integer",),
    "convert": ("convert",),
    "shuffle": ("shuffle", "reduce"),
    "matrix": ("matrix",),
    "load": ("device load", "threadgroup"),
    "other": ("device store", "move", "control", "wait", "spill"),
}
_HEADING = (
    f"{'':<26}{'bytes / minimum':<16}{'16-bit':>6}{'':7}{'threadgroup':>16}{'resident groups':>16}{'resident':>9}"
    "   instructions per token and query head\n"
    f"{'':<26}{'loaded':>8}{'partial':>8}{'regs':>6}{'spills':>7}{'threads':>9}{'bytes':>7}"
    f"{'by regs':>8}{'bytes':>6}{'threads':>9}{'all':>8}" + "".join(f"{name:>8}" for name in _COLUMNS)
)

EPILOGUE = """\
Counted, not timed. Instructions and registers are what Mesa's compiler makes of the kernels for an M1; of a branch both
sides count. Bytes are what the simulator sees a lone row load, over the bytes of its keys and values. What is loaded
more than once may come from a cache. Resident threads are whole threadgroups, as many as the registers and the
threadgroup memory of a core hold. From none of this follows a time."""


GROUP_MEMORY = 60 * 1024
"""Threadgroup memory of a core, in bytes (philipturner/metal-benchmarks: about 60 KB on an M1)."""


def resident_groups(register_threads: int, threads: int, memory: int) -> tuple[int, int]:
    """Return the threadgroups that a core holds: by registers that suffice for `register_threads` threads, and by
    threadgroup memory. `threads` and `memory` (bytes) are those of a threadgroup.
    """
    return register_threads // threads, GROUP_MEMORY // memory if memory else 1024 // threads


def rows(variants: Iterable[Variant]) -> Iterator[str]:
    """Yield a line for each kernel of each shape: ours, the chosen one first, and then MLX's for plain keys."""
    yield from _HEADING.splitlines()
    for variant in variants:
        yield variant.label
        yield from map(_ours, candidates(variant))
        yield from _mlx(variant)


def _ours(variant: Variant) -> str:
    geometry, traffic = variant.geometry, measure(variant, TOKENS)
    found = compiled(variant)
    loaded = f"{traffic.loaded:>8.2f}{traffic.partials:>8.3f}"
    per_head = {kind: n / variant.group for kind, n in per_token(variant).items()} if found else {}
    return _line(geometry.name, loaded, found, geometry.threads, geometry.threadgroup_bytes, per_head)


def _mlx(variant: Variant) -> Iterator[str]:
    dim, dtype, group = variant.key_dim, variant.kv_dtype, variant.group
    others = variant.kv_bits or variant.softcap or variant.alibi or dim != variant.value_dim
    if others or dim not in (64, 96, 128, 192, 256):
        return
    shape = MlxShape(dtype, dim, group, TOKENS)
    launched = {
        "sdpa_vector": one_pass(shape),
        "sdpa_vector_2pass_1": two_pass(shape, _BLOCKS),
    }
    if group == 8 and dim in HELD and has_two_pass_gqa():
        launched["sdpa_vector_2pass_1_gqa"] = two_pass_gqa(shape, _BLOCKS, HELD[dim])
    for kernel, report in launched.items():
        found = packaged_record().find(kernel, f"{dtype}, head_dim {dim}")
        read = sum(b.bytes_read for b in list(report.buffers.values())[1:3])
        counts = found.per_token_head if found else {}
        threads, memory = math.prod(report.threadgroup), report.threadgroup_memory
        yield _line(kernel, f"{read / shape.live_bytes:>8.2f}{'':8}", found, threads, memory, counts)


def _line(
    name: str, loaded: str, found: CompiledKernel | None, threads: int, memory: int, per_head: Mapping[str, float]
) -> str:
    line = f"  {name:<24}{loaded}"
    if found is None:
        return f"{line}  not compiled"
    by_registers, by_memory = resident_groups(found.resident_threads, threads, memory)
    cells = "".join(f"{sum(per_head.get(kind, 0.0) for kind in kinds):>8.2f}" for kinds in _COLUMNS.values())
    return (
        f"{line}{found.half_registers:>6}{found.spills:>7}{threads:>9}{memory:>7}"
        f"{by_registers:>7}{by_memory:>7}{min(by_registers, by_memory) * threads:>9}"
        f"{sum(per_head.values()):>8.1f}{cells}"
    )


def compiler() -> Iterator[str]:
    """Yield the record's compiler, and the texts that have changed since. The sheet shows those as not compiled."""
    record = packaged_record()
    yield f"instructions and registers: {record.compiler}"
    for text in record.stale():
        yield f"{text} has changed since: it is shown as not compiled. {RECORD_AGAIN}"


def sheet(variants: Iterable[Variant] = SHAPES) -> Iterator[str]:
    """Yield the whole sheet, line by line."""
    yield from rows(variants)
    yield from compiler()
    yield EPILOGUE
