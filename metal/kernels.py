"""The decode and reduce kernels as `mx.fast.metal_kernel` objects, and the calls that run them.

The mathematics is in `shaders/`. This module has the reduce kernel's entry: the lines between MLX's generated signature
and the kernel's function. The entries of the decode kernels are with their geometries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx

from cortexmlx.errors import MemoryRefused
from cortexmlx.metal.results import make_whole_entry
from cortexmlx.metal.rules import GEOMETRIES, REDUCE_SIMDGROUPS, REDUCE_THREADS, Variant
from cortexmlx.metal.sources import BIASES, SCALES, SLABS
from cortexmlx.metal.work import STRUCTS

_OWN_HEADER = re.compile(r'^#include "(\w+\.h)"$', re.M)
QUANTIZED_HEADERS = ("quantized.h", "quantized_matrix.h")
"""The headers that only the kernels for quantized keys and values need."""

KernelFactory = Callable[..., Any]
"""`mx.fast.metal_kernel`, or a function with the same arguments whose kernels are called in the same way."""


REDUCE_ENTRY = f"""{STRUCTS}
  threadgroup float outputs[SIMDGROUPS * VALUE_DIM];
  threadgroup float sum_exp_scores[SIMDGROUPS];
  const int query_heads = partials_shape[1];  // times query tokens
  const int head = int(threadgroup_position_in_grid.y), row = int(threadgroup_position_in_grid.z);
  const device RowItems& work = ((const device RowItems*)decode_plan)[row];
  const int64_t item_head = int64_t(work.first_item) * query_heads + head;
  paged_reduce<T, VALUE_DIM, SIMDGROUPS, SINKS>(
      (const device Partial<VALUE_DIM>*)partials + item_head, work.items, query_heads,
      SINKS ? float(head_sinks[head / TOKENS]) : 0.0f, attended + (int64_t(row) * query_heads + head) * VALUE_DIM,
      outputs, sum_exp_scores, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""


def kernel_text(name: str, *, quantized: bool = True) -> str:
    """Return the text of a file in `shaders/`, with our own headers in the place of their includes. Without
    `quantized`, the headers about quantized keys and values are left out.
    """

    def read_with_headers(name: str) -> str:
        if not quantized and name in QUANTIZED_HEADERS:
            return ""
        text = (files("cortexmlx.metal") / "shaders" / name).read_text()
        return _OWN_HEADER.sub(lambda header: read_with_headers(header[1]), text)

    return read_with_headers(name)


def make_kernel(
    factory: KernelFactory,
    name: str,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    entry: str,
    text: str,
    copies: bool = False,
) -> Callable[..., Sequence[mx.array]]:
    """Make a Metal kernel by `factory` from the `text` of a shader and the `entry` lines that call its function. MLX
    gets both without comments and indentation. With `copies`, MLX copies inputs that are not row-contiguous.
    """
    kernel: Callable[..., Sequence[mx.array]] = factory(
        name=name,
        input_names=list(inputs),
        output_names=list(outputs),
        source=minify(entry),
        header=minify(text),
        ensure_row_contiguous=copies,  # see `DecodeInputs`
    )
    return kernel


@dataclass(frozen=True)
class DecodeInputs:
    """The arrays that one layer's decode attention reads.

    All arrays must be row-contiguous, because the kernels compute addresses from an array's shape. By default MLX
    silently copies an array that is not contiguous: gigabytes for a slab, in every layer of every step. So the kernels
    turn that copy off, and the caller makes sure.

    With quantization, slabs and tails hold the codes of `mx.quantize`: 32-bit words `[..., dim * bits / 32]`. The tail
    holds the codes, not the numbers they stand for. Quantizing those numbers again may give other bits, and a token
    must stay the same when it moves to the arena.
    """

    queries: mx.array
    """`[rows, query_heads, query_tokens, key_dim]`."""
    keys: mx.array
    """The arena's slab of keys, `[kv_heads, slots, key_dim]`."""
    values: mx.array | None
    """The arena's slab of values, `[kv_heads, slots, value_dim]`; None if values lie in their keys."""
    tail_keys: mx.array
    """`[rows, kv_heads, columns, key_dim]`."""
    tail_values: mx.array | None
    """`[rows, kv_heads, columns, value_dim]`; None if values lie in their keys."""
    tables: mx.array
    """Block tables `[rows, blocks]` int32."""
    plan: mx.array
    """`WorkList.plan`."""
    factors: mx.array
    """(scale, softcap), float32."""
    sinks: mx.array
    """`[query_heads]` float32; ignored if the variant has no sinks."""
    slopes: mx.array
    """`[query_heads]` float32; ignored if the variant has no ALiBi."""
    scales: tuple[mx.array, ...] = ()
    """The scales of (keys, values, tail_keys, tail_values), each `[..., dim / group]` in the KV dtype."""
    biases: tuple[mx.array, ...] = ()
    """The biases of the same arrays, in the same shapes."""


LARGEST = 1 << 30
"""The most 32-bit words of a layer's quantized keys, or of its values (4 GiB).

The kernels index codes by 32 bits, which the hardware adds to an address for free. The index counts bytes where a lane
loads two codes of 4 bits. Plain keys and values are indexed by 64 bits."""

_INPUTS = ["queries", *SLABS, "block_tables", "decode_plan", "score_factors", "head_slopes"]
_QUANTIZED_INPUTS = [*_INPUTS, *SCALES, *BIASES]
_SINKS = "head_sinks"


class DecodeKernels:
    """The decode attention kernels and the reduce kernel, made once by `factory`."""

    def __init__(self, factory: KernelFactory) -> None:
        self._decode = {
            (kernel, quantized, is_whole): make_kernel(
                factory,
                f"cortex_{geometry.name}" + "_whole" * is_whole + "_quantized" * quantized,
                inputs=[*(_QUANTIZED_INPUTS if quantized else _INPUTS), *[_SINKS] * is_whole],
                outputs=["attended" if is_whole else "partials"],
                entry=make_whole_entry(entry) if is_whole else entry,
                text=kernel_text(geometry.file, quantized=quantized),
            )
            for kernel, geometry in GEOMETRIES.items()
            for quantized, entry in ((False, geometry.entry), (True, geometry.quantized_entry))
            for is_whole in (False, True)
            if entry is not None
        }
        self._reduce = make_kernel(
            factory,
            "cortex_paged_reduce",
            inputs=["partials", "decode_plan", _SINKS],
            outputs=["attended"],
            entry=REDUCE_ENTRY,
            text=kernel_text("paged_reduce.metal"),
        )

    def __call__(self, variant: Variant, items: int, inputs: DecodeInputs) -> mx.array:
        """Return the attention, `[rows, query_heads, query_tokens, value_dim]` in the dtype of the queries."""
        return self.reduce(variant, self.decode(variant, items, inputs), inputs)

    def decode(
        self, variant: Variant, items: int, inputs: DecodeInputs, *, init_value: float | None = None
    ) -> mx.array:
        """Return the partial attention results of all work items, `[items, query_heads * query_tokens,
        partial_floats]` float32.

        `init_value` fills the output before the launch, which costs a launch of its own.

        Raises:
            MemoryRefused: The quantized keys or values of the layer have more than `LARGEST` words.
        """
        queries = inputs.queries.shape[1] * variant.query_tokens
        partials: mx.array
        (partials,) = self._decode[variant.kernel, variant.kv_bits is not None, False](
            inputs=_ordered_inputs(variant, inputs),
            template=_kernel_template_arguments(variant)[0],
            **_launch_dims(variant, items, inputs),
            output_shapes=[(items, queries, variant.partial_floats)],
            output_dtypes=[mx.float32],
            init_value=init_value,
        )
        return partials

    def decode_and_reduce(
        self, variant: Variant, items: int, inputs: DecodeInputs, *, init_value: float | None = None
    ) -> mx.array:
        """Return the attention by one kernel launch instead of two, with the same bits. There must be one work item
        for each row. `init_value` and errors are those of `decode`.
        """
        rows, query_heads, query_tokens, _ = inputs.queries.shape
        assert items == rows
        output: mx.array
        (output,) = self._decode[variant.kernel, variant.kv_bits is not None, True](
            inputs=[*_ordered_inputs(variant, inputs), inputs.sinks],
            template=_kernel_template_arguments(variant)[2],
            **_launch_dims(variant, items, inputs),
            output_shapes=[(rows, query_heads, query_tokens, variant.value_dim)],
            output_dtypes=[inputs.queries.dtype],
            init_value=init_value,
        )
        return output

    def reduce(
        self, variant: Variant, partials: mx.array, inputs: DecodeInputs, *, init_value: float | None = None
    ) -> mx.array:
        """Combine the partial results of `decode` into the attention. `init_value` works as in `decode`."""
        rows, query_heads, query_tokens, _ = inputs.queries.shape
        output: mx.array
        (output,) = self._reduce(
            inputs=[partials, inputs.plan, inputs.sinks],
            template=_kernel_template_arguments(variant)[1],
            grid=(REDUCE_THREADS, query_heads * query_tokens, rows),
            threadgroup=(REDUCE_THREADS, 1, 1),
            output_shapes=[(rows, query_heads, query_tokens, variant.value_dim)],
            output_dtypes=[inputs.queries.dtype],
            init_value=init_value,
        )
        return output


def _ordered_inputs(variant: Variant, inputs: DecodeInputs) -> list[mx.array]:
    """Return a decode kernel's inputs in order. Raises MemoryRefused if a quantized slab is too large to index."""
    if variant.kv_bits and max(slab.size for slab in (inputs.keys, inputs.values) if slab is not None) > LARGEST:
        raise MemoryRefused(
            f"quantized keys of {inputs.keys.shape} words in a layer, or their values, are more than the {LARGEST} "
            "words that the kernels count: choose a smaller KV memory (--kv-memory)"
        )
    return [
        inputs.queries,
        inputs.keys,
        inputs.keys if inputs.values is None else inputs.values,  # not read, but the kernel needs a buffer
        inputs.tail_keys,
        inputs.tail_keys if inputs.tail_values is None else inputs.tail_values,
        inputs.tables,
        inputs.plan,
        inputs.factors,
        inputs.slopes,
        *inputs.scales,
        *inputs.biases,
    ]


def _launch_dims(variant: Variant, items: int, inputs: DecodeInputs) -> dict[str, tuple[int, int, int]]:
    """Return the grid and the threadgroup size of a decode kernel."""
    geometry, kv_heads = variant.geometry, inputs.keys.shape[0]
    grid = (geometry.threads, kv_heads * geometry.threadgroups, items)
    return {"grid": grid, "threadgroup": (geometry.threads, 1, 1)}


@cache
def _kernel_template_arguments(
    variant: Variant,
) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return the template arguments of three kernels: decode, reduce, and both in one (`decode_and_reduce`)."""
    dtype, kv_dtype = getattr(mx, variant.dtype), getattr(mx, variant.kv_dtype)
    decode = [
        ("T", dtype),
        ("KV", kv_dtype),
        ("KEY_DIM", variant.key_dim),
        ("VALUE_DIM", variant.value_dim),
        ("BLOCK_SIZE", variant.block_size),
        ("GROUP", variant.group),
        *([("BITS", variant.kv_bits), ("QUANT_GROUP", variant.quant_group)] if variant.kv_bits else []),
        *variant.geometry.template,
    ]
    reduce = [
        ("T", dtype),
        ("VALUE_DIM", variant.value_dim),
        ("SIMDGROUPS", REDUCE_SIMDGROUPS),
        ("TOKENS", variant.query_tokens),
        ("SINKS", variant.sinks),
    ]
    return decode, reduce, [*decode, ("SINKS", variant.sinks)]


# The kernels' text is made short before it is sent: MLX copies it whole at every call, and hashes it at every launch.
# So the files in `shaders/` are written for people.


_KEPT = (
    r'(?<![\w.])(?:u8|[uUL])?R"(?P<raw>[^()\\\s]*)\(.*?\)(?P=raw)"'  # a raw literal
    r'|"(?:\\.|[^"\\\n])*"|'
    r"'(?:\\.|[^'\\\n])*'"
    r"|(?<![\w.])\.?\d(?:[eEpP][+-]|'?[\w.])*"  # the ' in a number opens no literal
)
_COMMENTS = re.compile(rf"(?P<kept>{_KEPT})|//(?:\\\n|[^\n])*|/\*.*?\*/", re.S)
_SPACES = re.compile(
    rf"(?P<kept>{_KEPT})"
    r"|(?P<before>[ \t]*)\\[ \t]*\n(?P<after>[ \t]*)"  # a line that goes on in the next one
    r"|(?P<line>[ \t]*\n[ \t]*)"
    r"|[ \t]+",
    re.S,
)


@cache
def minify(text: str) -> str:
    """Return Metal text without comments, indentation and trailing spaces. Line n of the result is line n of the text,
    so a compiler's line numbers are those of the readable text.

    The result has the same tokens. Literals stay as they are, and so do the lines of macros.
    """
    return _SPACES.sub(_strip_indentation, _COMMENTS.sub(_strip_comment, text)).strip(" \t")


def _strip_comment(match: re.Match[str]) -> str:
    """Return the replacement of a comment: a space and its line breaks. A literal is returned as it is."""
    if match["kept"] is not None:
        return match.group()
    # A directive goes on behind a comment of several lines, so its line breaks become continued lines.
    breaks, comment = match.group().count("\n"), match.group()
    return " " + breaks * ("\n" if comment.startswith("//") else "\\\n")


def _strip_indentation(match: re.Match[str]) -> str:
    """Return the replacement of white space: one space or line break. A literal is returned as it is."""
    if match["kept"] is not None:
        return match.group()
    if match["line"] is not None:
        return "\n"
    if match["before"] is not None:
        return " \\\n" if match["before"] or match["after"] else "\\\n"
    return " "
