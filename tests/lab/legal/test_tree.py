"""The walk finds what is written, and every instantiation once."""

from cortexmlx.metal.lab.legal.diagnostics import Language
from cortexmlx.metal.lab.legal.frontend import parse, walk
from cortexmlx.metal.lab.sim.toolchain import mlx_headers
from support.kernels.legal_tools import kernel

TEMPLATES = """
template <typename T> inline T inner(T v) { return v + v; }
template <typename T> inline T outer(T v) { return inner(v) + inner(v); }
template <typename T> inline T unused(T v) { return v; }
template <typename T> struct Box { T v; T get() const { return v; } };
"""


def test_instantiations_are_followed_from_where_they_are_used_each_once() -> None:
    text = kernel("x[0] = outer(1.0f) + outer(2.0f) + outer(3); Box<half> box = {1}; x[1] = box.get();", TEMPLATES)
    nodes = walk(parse(text, Language.METAL_3_1, (mlx_headers(),)))
    functions = [n.cursor.spelling for n in nodes if n.instantiated and n.parent is None]
    assert sorted(functions) == ["get", "inner", "inner", "outer", "outer"]
    assert {n.type for n in nodes if n.instantiated and n.kind == "PARM_DECL"} == {"__private float", "__private int"}


def test_a_node_knows_its_function() -> None:
    nodes = walk(
        parse(kernel("float inside = 1;", "constant float OUTSIDE = 1;"), Language.METAL_3_1, (mlx_headers(),))
    )
    functions = {n.cursor.spelling: n.function() for n in nodes if n.kind == "VAR_DECL"}
    assert functions["OUTSIDE"] is None
    assert functions["inside"] is not None and functions["inside"].cursor.spelling == "k"
