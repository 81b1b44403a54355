"""Faults of the quantized matmul: numbers of other places, sums that are not whole, rows of others, and its seam."""

from __future__ import annotations

from tests.faults.planted import Fault

TEXT, ENTRY = "metal/shaders/quantized_matmul.metal", "metal/matmul/kernel.py"
SHAPE, SERVED = "metal/matmul/shape.py", "cortexmlx/matmul/served.py"
SHARED = "cortexmlx/matmul/served.py"

_BARRIER = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"

TESTS = ("metal/matmul", "matmul", "engine/test_matmul_engine.py")
"""The tests that judge these faults."""

FAULTS = (
    Fault("a row of x stands for its neighbour's inputs", TEXT, "place.row % 2 * RUN", "place.row % 2"),
    Fault("quarters of a group are halves", TEXT, "place.row / 2 * (GROUP / 4)", "place.row / 2 * (GROUP / 2)"),
    Fault(
        "rows beyond the last are read",
        TEXT,
        "min(t * 8 + place.column + e, rows.count - 1)",
        "t * 8 + place.column + e",
    ),
    Fault("rows beyond the last are written", TEXT, "t * 8 + row < rows.count && ", ""),
    Fault(
        "outputs beyond the last are read",
        TEXT,
        "min(first + o * 8 + place.row, outputs - 1)",
        "(first + o * 8 + place.row)",
    ),
    Fault("outputs beyond the last are written", TEXT, " && first + o < outputs", ""),
    Fault("the bias is that of a single lane", TEXT, "sum_over_rows(sum)", "sum"),
    Fault("a group's bias is left out", TEXT, "fma(group.bias, x_sum[t][e], out[o][t][e])", "out[o][t][e]"),
    Fault(
        "a group replaces the groups before it",
        TEXT,
        "sum[t].thread_elements()[e], before)",
        "sum[t].thread_elements()[e], 0.0f)",
    ),
    Fault(
        "offsets of rows have 16 bits", TEXT, "uint(row) * groups * GROUP", "uint(ushort(uint(row) * groups * GROUP))"
    ),
    Fault(
        "rows of bfloat16 go through halves",
        TEXT,
        "thread_elements()[e] = loaded[k]",
        "thread_elements()[e] = T(half(loaded[k]))",
    ),
    Fault("halves are multiplied by bfloats", TEXT, "typename Factor<T, half>::type", "T"),
    Fault(
        "no barrier after the last tile",
        TEXT,
        "    threadgroup_barrier(mem_flags::mem_threadgroup);\n  }\n}",
        "    if (t + 1 < TILES) threadgroup_barrier(mem_flags::mem_threadgroup);\n  }\n}",
    ),
    Fault("slices take the same groups", TEXT, "for (uint g = slice; g", "for (uint g = 0; g"),
    Fault("the first slice alone is summed", TEXT, "s < SLICES; s++", "s < 1; s++"),
    Fault(
        "no barrier before the slices are summed",
        TEXT,
        _BARRIER + "    for (int n = int(slice",
        "    for (int n = int(slice",
    ),
    Fault("no barrier before the next tile", TEXT, _BARRIER + "  }\n}", "  }\n}"),
    Fault("the sign of mxfp4 is dropped", TEXT, "as_type<half2>(magnitudes | signs)", "as_type<half2>(magnitudes)"),
    Fault("mxfp4 has another fraction", TEXT, "4 * k - 9", "4 * k - 8"),
    Fault("a scale of mxfp4 is twice its power", TEXT, "exponent << 23), 0.0f", "(exponent + 1) << 23), 0.0f"),
    Fault("an expert's pairs include those that fill up the list", TEXT, "pair < pairs && ", ""),
    Fault(
        "pairs are found from the first one on again",
        TEXT,
        "simd_prefix_exclusive_sum(is_one) - skip",
        "simd_prefix_exclusive_sum(is_one)",
    ),
    Fault("each 32 pairs are counted anew", TEXT, "count += simd_sum(is_one)", "count = simd_sum(is_one)"),
    Fault("a pair's row is its own number", TEXT, "rows.pairs[row] / rows.repeat", "rows.pairs[row]"),
    Fault(
        "all experts are the first",
        ENTRY,
        '"MOST / 8", "RowsOfExpert", "int(expert)"',
        '"MOST / 8", "RowsOfExpert", "0"',
    ),
    Fault("every pair computes its expert's rows", ENTRY, "if (found[0] != pair) {{", "if (pair < 0) {{"),
    Fault(
        "only so many pairs of an expert are computed", ENTRY, "done < count; done += MOST", "done < 1; done += MOST"
    ),
    Fault("the second part begins with the first row", ENTRY, "grid.y) * 8 * TILES", "grid.y) * 0 * TILES"),
    Fault(
        "slices depend on nothing",
        SHAPE,
        "min(SLICES, 1 << (self.inputs // self.group).bit_length() - 1)",
        "SLICES + 1",
    ),
    Fault("matmuls are served outside of a step", SERVED, "not self._in_step or ", ""),
    Fault(
        "a step never ends",
        SERVED,
        "        finally:\n            self._in_step = False",
        "        finally:\n            pass",
    ),
    Fault("the bias of a linear module is lost", SERVED, 'matmul + self["bias"] if "bias" in self else ', ""),
    Fault("the biases of experts are lost", SERVED, 'mx.expand_dims(self["bias"][indices], -2)', "0.0"),
    Fault("modules stay as they were made", SERVED, "            module.__class__ = kind\n", ""),
    Fault("what disagrees is asked of all the same", SERVED, "return self._variant_approved[variant]", "return True"),
    Fault(
        "a subclass is taken for a module of MLX",
        SERVED,
        "_SERVED.get(type(module))",
        "_SERVED.get(type(module).__mro__[1], _SERVED.get(type(module)))",
    ),
    Fault("a matmul of another array is taken", SHARED, "self._input is not x or", "self._input is None or"),
    Fault(
        "a part begins with its neighbour's",
        SHARED,
        "self._output[..., begin:end]",
        "self._output[..., : end - begin]",
    ),
    Fault("weights in other groups are joined", SHARED, "module.bits, module.group_size, ", "module.bits, "),
    Fault("a joint matmul is kept for ever", SHARED, "self._waiting.discard(id(module))", "pass"),
    Fault("rows of a batch share, too", SERVED, "return rows == 1 and self._in_step", "return self._in_step"),
    Fault(
        "attention is timed before matmuls",
        "cortexmlx/execution/autotuning.py",
        "*multiplications.values(), *pieces.values(), *attention.values()",
        "*attention.values(), *pieces.values(), *multiplications.values()",
    ),
)
