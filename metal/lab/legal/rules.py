"""What a Metal compiler would refuse in a text: the complaints of the front end, and the rules that it does not check.

The rules read the syntax tree, as the text is written and as its templates are instantiated: features that Metal leaves
out, address spaces, the places of variables, and implicit conversions. MLX writes the signatures of kernels.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from cortexmlx.metal.lab.legal.diagnostics import Language
from cortexmlx.metal.lab.legal.frontend import (
    Complaint,
    Parsed,
    TreeNode,
    in_text,
    kind_of,
    metal_attributes,
    parse,
    unwrap,
    walk,
)
from cortexmlx.metal.lab.legal.msl import PREAMBLE, blank_non_code
from cortexmlx.metal.lab.sim.toolchain import mlx_headers


@cache
def _default_includes() -> tuple[Path, ...]:
    return (mlx_headers(),)


def complaints(
    text: str,
    language: Language = Language.METAL_3_1,
    preamble: str = PREAMBLE,
    includes: Sequence[Path] | None = None,
) -> list[Complaint]:
    """Return what is wrong with a text that MLX would compile after `preamble`, in the order of lines. The list of a
    legal text is empty.

    Templates are checked as they are written and as the text instantiates them.

    Raises:
        ToolchainMissing: the libclang wheel or MLX's headers are missing.
    """
    parsed = parse(text, language, _default_includes() if includes is None else includes, preamble)
    nodes = walk(parsed)
    found = {
        *parsed.complaints,
        *_check_features(parsed, nodes),
        *_check_address_spaces(nodes),
        *_check_storage(nodes),
        *_check_conversions(nodes),
    }
    return sorted(found)


# Features of C++ that Metal leaves out (MSL 1.5.4), in the syntax tree and in the words of the text.

_WORDS = (
    (
        re.compile(
            r"\b(?:unsigned\s+|signed\s+)?long\s+long\b|\b(?:0[xX][0-9a-fA-F]+|\d+)(?:[uU]?(?:ll|LL)|(?:ll|LL)[uU])\b"
        ),
        "Metal has no long long: its long has 64 bits",
    ),
    (re.compile(r"\b(?:asm|__asm__|__asm)\b"), "Metal has no asm"),
    (re.compile(r"\bregister\b"), "Metal has no `register`"),
    (re.compile(r"\bstd\s*::"), "Metal has no std: its library is in the namespace metal"),
    (re.compile(r"\b(?:thread_local|_Thread_local)\b"), "Metal has no thread_local"),
    (re.compile(r"\bvirtual\b"), "Metal has no virtual functions"),
    (re.compile(r"\b(?:try|catch|throw)\b"), "Metal has no exceptions"),
    (re.compile(r"\b(?:dynamic_cast|typeid)\b"), "Metal has no run-time type information"),
    (re.compile(r"\bnew\b(?=\s*[\w(:])|(?<!=)(?<!= )\bdelete\b(?=\s*(?:\[|\w))"), "Metal has no new and delete"),
    (re.compile(r"\bprintf\s*\("), "Metal has no printf: os_log of Metal 3.2 is what there is"),
    (re.compile(r"\bdouble\b"), "Metal has no double"),
    (
        re.compile(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?[lL]\b"),
        "Metal has no long double: a literal ends in f, h or bf",
    ),
)
# Words that say what a function is for. A word that one of these characters follows is used as a name.
_STAGE = re.compile(r"\b(kernel|vertex|fragment)\b(?=\s*(?:[=;,)+\-*/%.<>&|^?\[:]|\]))(?!\s*\]\])")
_VARIABLE_STAGE = re.compile(r"\[\[[^\]]*\]\]")
_FEATURE_NODES = {
    "GOTO_STMT": "Metal has no goto",
    "INDIRECT_GOTO_STMT": "Metal has no goto",
    "ASM_STMT": "Metal has no asm",
    "MS_ASM_STMT": "Metal has no asm",
}
_DEFINES = {"FUNCTION_DECL", "CXX_METHOD", "FUNCTION_TEMPLATE"}


def _check_words(text: str) -> Iterator[Complaint]:
    plain = blank_non_code(text)
    for pattern, message in _WORDS:
        for found in pattern.finditer(plain):
            yield Complaint(plain.count("\n", 0, found.start()) + 1, message)
    named = _VARIABLE_STAGE.sub(lambda found: " " * len(found.group()), plain)
    for found in _STAGE.finditer(named):
        line = named.count("\n", 0, found.start()) + 1
        yield Complaint(line, f"'{found.group(1)}' is a word of the language and names nothing else")


def _check_feature(node: TreeNode, language: Language) -> Iterator[Complaint]:
    if node.kind in _FEATURE_NODES:
        yield Complaint(node.line, _FEATURE_NODES[node.kind])
    elif node.kind == "LAMBDA_EXPR" and language is Language.METAL_3_1:
        yield Complaint(node.line, "Metal 3.1 has no lambdas")
    elif node.kind in _DEFINES:
        if node.cursor.type.kind.name == "FUNCTIONPROTO" and node.cursor.type.is_function_variadic():
            yield Complaint(
                node.line, f"'{node.cursor.spelling}' takes a variable number of arguments: Metal has no `...`"
            )
        if node.cursor.spelling == "main":
            yield Complaint(node.line, "no function of Metal's may be called main")


def _check_features(parsed: Parsed, nodes: Sequence[TreeNode]) -> Iterator[Complaint]:
    """Yield complaints about features that Metal does not have."""
    yield from (complaint for complaint in _check_words(parsed.text) if complaint.line not in parsed.dead)
    for node in nodes:
        if not node.instantiated:
            yield from _check_feature(node, parsed.language)


# Address spaces (MSL 4): pointers and references that name none, and calls that do not fit the space of an object.

_DECLARATIONS = {"VAR_DECL", "PARM_DECL", "FIELD_DECL", "TYPEDEF_DECL", "TYPE_ALIAS_DECL"}
_RETURNING = {"FUNCTION_DECL", "CXX_METHOD", "CONVERSION_FUNCTION"}
_CASTS = {
    "CSTYLE_CAST_EXPR",
    "CXX_STATIC_CAST_EXPR",
    "CXX_REINTERPRET_CAST_EXPR",
    "CXX_CONST_CAST_EXPR",
    "CXX_FUNCTIONAL_CAST_EXPR",
}
_NAMED = re.compile(r"\b__(?:private|global|local|constant)\b")
_OTHER_SPACE = {"__local": "device", "__global": "threadgroup", "__constant": "constant"}
_SPACES = "device, constant, threadgroup or thread"


def _address_space_of(spelling: str) -> str | None:
    """Return Metal's name of the address space of an object of this type, or None for thread memory."""
    outer = spelling.split("<", 1)[0]
    return next((metal for opencl, metal in _OTHER_SPACE.items() if re.search(rf"\b{opencl}\b", outer)), None)


def _names_address_space(type_: Any) -> bool:
    """Whether the outermost qualifiers of a type name an address space."""
    spelled = str(type_.get_canonical().spelling)
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", spelled)) != spelled:
        spelled = shorter
    last = max(spelled.rfind("*"), spelled.rfind("&"))
    return bool(_NAMED.search(spelled[last + 1 :] if last >= 0 else spelled))


def _lacks_address_space(type_: Any, depth: int = 0) -> bool:
    """Whether the type has a pointer or reference to memory in no named address space."""
    kind = type_.kind.name
    if kind in ("CONSTANTARRAY", "INCOMPLETEARRAY", "VARIABLEARRAY", "DEPENDENTSIZEDARRAY"):
        return _lacks_address_space(type_.element_type, depth)
    if kind in ("POINTER", "LVALUEREFERENCE", "RVALUEREFERENCE"):
        pointee = type_.get_pointee()
        if (
            pointee.kind.name in ("FUNCTIONPROTO", "FUNCTIONNOPROTO")
            or pointee.get_canonical().kind.name == "FUNCTIONPROTO"
        ):
            return False
        if "auto" in pointee.spelling.split() or pointee.kind.name == "AUTO":
            return False
        if kind == "LVALUEREFERENCE" and pointee.kind.name == "POINTER" and not _lacks_address_space(pointee, depth):
            return False  # `const device T*& x`: MLX's quantized kernels use it, so Metal accepts it
        forwards = kind == "RVALUEREFERENCE" and pointee.get_canonical().kind.name in ("UNEXPOSED", "DEPENDENT")
        return (not forwards and not _names_address_space(pointee)) or _lacks_address_space(pointee, depth)
    if depth < 3:
        for i in range(type_.get_num_template_arguments()):
            argument = type_.get_template_argument_type(i)
            if argument.kind.name != "INVALID" and _lacks_address_space(argument, depth + 1):
                return True
    return False


def _is_written_as_array(cursor: Any) -> bool:
    return kind_of(cursor) == "PARM_DECL" and any(token.spelling == "[" for token in cursor.get_tokens())


def _has_deduced_type(cursor: Any) -> bool:
    return any(token.spelling in ("auto", "decltype") for token in cursor.get_tokens())


def _check_address_space_is_named(node: TreeNode) -> Iterator[Complaint]:
    cursor = node.cursor
    if node.kind in _DECLARATIONS:
        type_ = cursor.underlying_typedef_type if node.kind in ("TYPEDEF_DECL", "TYPE_ALIAS_DECL") else cursor.type
        if type_.kind.name in ("AUTO", "INVALID") or cursor.spelling.startswith("__"):
            return
        if _lacks_address_space(type_) and not _is_written_as_array(cursor) and not _has_deduced_type(cursor):
            what = {"PARM_DECL": "parameter ", "FIELD_DECL": "member "}.get(node.kind, "")
            yield Complaint(
                node.line,
                f"{what}'{cursor.spelling}' is a pointer or reference that names no address space: add {_SPACES}",
            )
    elif node.kind in _RETURNING:
        if _lacks_address_space(cursor.result_type) and "auto" not in str(cursor.result_type.spelling):
            yield Complaint(
                node.line,
                f"'{cursor.spelling}' returns a pointer or reference that names no address space: add {_SPACES}",
            )
    elif node.kind in _CASTS and _lacks_address_space(cursor.type) and not _has_deduced_type(cursor):
        yield Complaint(node.line, f"a cast to a pointer or reference that names no address space: add {_SPACES}")


def _check_method_call(node: TreeNode) -> Iterator[Complaint]:
    """Refuse a call of a member function that is not marked for the space of its object."""
    callee = next(iter(node.cursor.get_children()), None)
    if callee is None or kind_of(callee) != "MEMBER_REF_EXPR":
        return
    method = node.cursor.referenced
    if method is None or kind_of(method) != "CXX_METHOD" or not in_text(method) or method.is_static_method():
        return
    base = next(iter(callee.get_children()), None)
    if base is None or "__generic" not in method.type.spelling.rsplit(")", 1)[-1]:
        return
    held = unwrap(base).type.get_canonical()
    held = held.get_pointee() if held.kind.name == "POINTER" else held
    space = _address_space_of(_outermost_type(held.spelling))
    if space:
        yield Complaint(
            node.line, f"'{method.spelling}' is called on an object in {space} memory: mark the function `{space}`"
        )


def _outermost_type(spelling: str) -> str:
    last = max(spelling.rfind("*"), spelling.rfind("&"))
    return spelling[last + 1 :] if last >= 0 else spelling


def _is_copy_or_move(constructor: Any) -> bool:
    return constructor is not None and (constructor.is_copy_constructor() or constructor.is_move_constructor())


def _check_arguments(node: TreeNode) -> Iterator[Complaint]:
    """Refuse an argument from another space for a `const thread T&` (text.py makes this parameter a value)."""
    function = node.cursor.referenced
    if function is None or not in_text(function):
        return
    parameters = [c for c in function.get_children() if kind_of(c) == "PARM_DECL"]
    for parameter, argument in zip(parameters, node.cursor.get_arguments(), strict=False):
        if argument is None or "const thread&" not in metal_attributes(parameter):
            continue
        given = unwrap(argument)
        if kind_of(given) == "CALL_EXPR" and _is_copy_or_move(given.referenced):
            given = unwrap(next(given.get_arguments()))
        space = _address_space_of(_outermost_type(given.type.get_canonical().spelling))
        if space and given.type.get_canonical().kind.name != "POINTER":
            yield Complaint(
                node.line,
                f"parameter '{parameter.spelling}' of '{function.spelling}' is a `const thread` reference, "
                f"and the argument lies in {space} memory",
            )


def _check_address_spaces(nodes: Sequence[TreeNode]) -> Iterator[Complaint]:
    """Yield the complaints about address spaces that the front end does not make itself."""
    for node in nodes:
        if not node.instantiated:
            yield from _check_address_space_is_named(node)
        if node.kind == "CALL_EXPR":
            yield from _check_method_call(node)
            yield from _check_arguments(node)


# The places of variables (MSL 4): constants at program scope, threadgroup variables in kernels, no other statics.
# A threadgroup variable has no initial value.

_PROGRAM_SCOPE = {"TRANSLATION_UNIT", "NAMESPACE"}
_CLASSES = {"STRUCT_DECL", "CLASS_DECL", "CLASS_TEMPLATE", "UNION_DECL", "CLASS_TEMPLATE_PARTIAL_SPECIALIZATION"}


def _is_in_constant_memory(node: TreeNode) -> bool:
    return "__constant" in node.cursor.type.spelling.split("<")[0] or "__constant" in node.type.split("<")[0]


def _check_variable(node: TreeNode) -> Iterator[Complaint]:
    name = node.cursor.spelling
    parent = node.parent.kind if node.parent else "TRANSLATION_UNIT"
    if parent in _PROGRAM_SCOPE or parent == "UNEXPOSED_DECL":
        if not _is_in_constant_memory(node):
            yield Complaint(node.line, f"'{name}' is a variable at program scope: it must be `constant`")
        return
    if parent in _CLASSES:
        if not _is_in_constant_memory(node):
            yield Complaint(node.line, f"'{name}' is a static member: it must be `constant`")
        return
    if node.cursor.storage_class.name != "STATIC" or _is_in_constant_memory(node):
        return
    if "threadgroup variable" not in metal_attributes(node.cursor):
        yield Complaint(node.line, f"'{name}' is a static variable in a function: Metal has none, but for `constant`")
        return
    words = [token.spelling for token in node.cursor.get_tokens()]
    if {"=", "{"} & set(words[words.index(name) :] if name in words else ()):
        yield Complaint(node.line, f"the threadgroup variable '{name}' cannot have an initial value: store it")
    function = node.function()
    if function is None or "kernel" not in metal_attributes(function.cursor):
        yield Complaint(
            node.line,
            f"the threadgroup variable '{name}' can only be declared in the kernel: pass a pointer to it",
        )


def _check_variable_template(node: TreeNode) -> Iterator[Complaint]:
    """Refuse a variable template that is not `constant`. The syntax tree shows only its words."""
    words = [token.spelling for token in node.cursor.get_tokens()]
    before = words[: words.index(node.cursor.spelling)] if node.cursor.spelling in words else []
    if (
        before[:1] == ["template"]
        and "constant" not in before
        and not any(word.isupper() and len(word) > 1 for word in before)
    ):
        yield Complaint(node.line, f"'{node.cursor.spelling}' is a variable at program scope: it must be `constant`")


def _check_storage(nodes: Sequence[TreeNode]) -> Iterator[Complaint]:
    """Yield complaints about variables in wrong places or with initial values. A launch counts threadgroup memory."""
    for node in nodes:
        if node.kind == "VAR_DECL" and not node.instantiated:
            yield from _check_variable(node)
        elif node.kind == "UNEXPOSED_DECL" and not node.instantiated:
            yield from _check_variable_template(node)


# Implicit conversions: a bfloat becomes a float, no float becomes a bfloat (MSL 2.1, as MLX's bf16_math.h quotes it).
# And addresses of vector elements.

_FLOAT = "a float does not become a bfloat by itself: write bfloat(...) around it"
_EXPLICIT = {"CSTYLE_CAST_EXPR", "CXX_STATIC_CAST_EXPR", "CXX_FUNCTIONAL_CAST_EXPR"}
_QUALIFYING_WORDS = ("__private ", "__global ", "__local ", "__constant ", "__generic ", "const ", "volatile ")
_ELEMENTS = {"x", "y", "z", "w"}


def _scalar_name(type_: Any) -> str:
    spelling = str(type_.get_canonical().spelling)
    while any(spelling.startswith(word) for word in _QUALIFYING_WORDS):
        for word in _QUALIFYING_WORDS:
            spelling = spelling.removeprefix(word)
    return spelling


def _check_bfloat_conversion(node: TreeNode) -> Iterator[Complaint]:
    if node.parent and node.parent.kind in _EXPLICIT:
        return
    inside = list(node.cursor.get_children())
    if len(inside) == 1 and _scalar_name(node.cursor.type) == "__bf16" and _scalar_name(inside[0].type) == "float":
        yield Complaint(node.line, _FLOAT)


def _check_initializer_list(node: TreeNode) -> Iterator[Complaint]:
    """Check initializers in braces. The tree shows them as they are written, without their conversions."""
    type_ = node.cursor.type.get_canonical()
    values = list(node.cursor.get_children())
    if type_.kind.name == "CONSTANTARRAY":
        wanted = [type_.element_type] * len(values)
    elif type_.kind.name == "RECORD":
        wanted = [field.type for field in type_.get_fields()]
    else:
        wanted = [type_] * len(values)
    for value, element in zip(values, wanted, strict=False):
        if _scalar_name(element) == "__bf16" and _scalar_name(value.type) == "float":
            yield Complaint(int(value.location.line), _FLOAT)


def _check_compound_assignment(node: TreeNode) -> Iterator[Complaint]:
    left, right = [*node.cursor.get_children(), None, None][:2]
    if (
        left is not None
        and right is not None
        and _scalar_name(left.type) == "__bf16"
        and _scalar_name(right.type) in ("float", "half")
    ):
        yield Complaint(
            node.line,
            f"the result is a {_scalar_name(right.type)}, which becomes no bfloat by itself: write out the assignment",
        )


def _is_element(cursor: Any) -> bool:
    """Whether an expression is an element of a vector by name: x, y, z or w."""
    found = unwrap(cursor)
    if kind_of(found) != "MEMBER_REF_EXPR" or found.spelling not in _ELEMENTS or found.referenced is None:
        return False
    owner = found.referenced.semantic_parent
    return owner is not None and owner.spelling in ("vec", "__packed") and not in_text(owner)


def _check_element_address(node: TreeNode) -> Iterator[Complaint]:
    """Refuse a pointer or a reference to an element of a vector."""
    inside = list(node.cursor.get_children())
    if node.kind == "UNARY_OPERATOR":
        first = next((token.spelling for token in node.cursor.get_tokens()), "")
        if first == "&" and inside and _is_element(inside[0]):
            yield Complaint(node.line, "the elements of a vector have no address")
    elif node.kind == "VAR_DECL" and node.cursor.type.kind.name == "LVALUEREFERENCE":
        if inside and _is_element(inside[-1]) and not node.cursor.type.get_pointee().is_const_qualified():
            yield Complaint(node.line, "a reference cannot be bound to an element of a vector")
    elif node.kind == "CALL_EXPR" and node.cursor.referenced is not None:
        parameters = [c for c in node.cursor.referenced.get_children() if kind_of(c) == "PARM_DECL"]
        for parameter, argument in zip(parameters, node.cursor.get_arguments(), strict=False):
            reference = (
                parameter.type.kind.name == "LVALUEREFERENCE" and not parameter.type.get_pointee().is_const_qualified()
            )
            if reference and argument is not None and _is_element(argument):
                yield Complaint(node.line, "a reference cannot be bound to an element of a vector")


def _check_conversions(nodes: Sequence[TreeNode]) -> Iterator[Complaint]:
    """Yield complaints about implicit conversions to bfloat, and pointers and references to elements of vectors."""
    for node in nodes:
        if node.kind == "UNEXPOSED_EXPR":
            yield from _check_bfloat_conversion(node)
        elif node.kind == "COMPOUND_ASSIGNMENT_OPERATOR":
            yield from _check_compound_assignment(node)
        elif node.kind in ("UNARY_OPERATOR", "VAR_DECL", "CALL_EXPR"):
            yield from _check_element_address(node)
        elif node.kind == "INIT_LIST_EXPR":
            yield from _check_initializer_list(node)
