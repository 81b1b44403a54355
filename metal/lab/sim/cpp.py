"""The C++ translation unit of a kernel: MLX's preamble, the rewritten Metal text, and an entry point that calls it.

Macros of the shim headers say most of Metal in C++. Rewritten are the few constructs that they cannot express. Line
numbers do not change.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cortexmlx.metal.lab.legal.msl import PREAMBLE, blank_comments, iterate_top_level, split_at_commas
from cortexmlx.metal.lab.sim.paths import mark_paths
from cortexmlx.metal.lab.sim.source import KernelText, Role

_ATTRIBUTE_VALUES = {
    "dispatch_quadgroups_per_threadgroup": "t->dispatch_simdgroups * 8",
    "dispatch_simdgroups_per_threadgroup": "t->dispatch_simdgroups",
    "dispatch_threads_per_threadgroup": "SIM_3(t->dispatch_threads_per_threadgroup)",
    "grid_origin": "uint3{0, 0, 0}",
    "grid_size": "SIM_3(t->threads_per_grid)",
    "quadgroup_index_in_threadgroup": "t->index_in_threadgroup / 4",
    "quadgroups_per_threadgroup": "t->simdgroups * 8",
    "simdgroup_index_in_threadgroup": "t->simdgroup",
    "simdgroups_per_threadgroup": "t->simdgroups",
    "thread_execution_width": "32u",
    "thread_index_in_quadgroup": "t->index_in_threadgroup % 4",
    "thread_index_in_simdgroup": "t->lane",
    "thread_index_in_threadgroup": "t->index_in_threadgroup",
    "thread_position_in_grid": "SIM_3(t->position_in_grid)",
    "thread_position_in_threadgroup": "SIM_3(t->position_in_threadgroup)",
    "threadgroup_position_in_grid": "SIM_3(t->group_position_in_grid)",
    "threadgroups_per_grid": "SIM_3(t->threadgroups_per_grid)",
    "threads_per_grid": "SIM_3(t->threads_per_grid)",
    "threads_per_simdgroup": "32u",
    "threads_per_threadgroup": "SIM_3(t->threads_per_threadgroup)",
}


def attribute_value(attribute: str) -> str:
    """Return a C++ expression for one of Metal's thread attributes. It reads `t`, the running thread."""
    return _ATTRIBUTE_VALUES[attribute]


def entry_point(instance: str, arguments: Sequence[str]) -> str:
    """Return the C++ function that the runtime calls on every thread's stack.

    `arguments` may use `b` (buffers) and `t` (thread).
    """
    function = re.split(r"[<\s]", instance)[0]
    return (
        '\n#line 1 "entry"\n'
        f'extern "C" const char sim_kernel_function[] = "{function}";\n'
        "#define SIM_3(a) uint3{a[0], a[1], a[2]}\n"
        'extern "C" void sim_kernel_entry(void* const* buffers) {\n'
        "  void* const SIM_HIDDEN* b = (void* const SIM_HIDDEN*)buffers;\n"
        "  const SIM_HIDDEN SimThread* t = (const SIM_HIDDEN SimThread*)sim_thread();\n"
        f"  {instance}(\n      " + ",\n      ".join(arguments) + ");\n}\n"
    )


def translation_unit(kernel: KernelText) -> str:
    """Return the C++ text of an `mx.fast.metal_kernel`. Line 1 of its file "kernel" is line 1 of the kernel's text."""
    arguments = []
    for p in kernel.buffers:
        const = "" if p.role is Role.OUTPUT else "const "
        pointer = f"({const}{p.element}*)b[{p.index}]"
        arguments.append(f"*{pointer}" if p.reference else pointer)
    arguments += [attribute_value(a) for a in kernel.attributes]
    return PREAMBLE + '#line 1 "kernel"\n' + to_cpp(kernel.text) + entry_point(kernel.instance, arguments)


# Metal text as C++.

_STRING_OR_NUMBER = re.compile(r'"(?:\\.|[^"\\\n])*"|(?<![\w.])\.?\d(?:[eEpP][+-]|\'?[\w.])*')
_FLOATING = re.compile(
    r"(?P<digits>(?:(?:\d[\d']*)?\.\d[\d']*|\d[\d']*\.)(?:[eE][+-]?\d+)?|\d[\d']*[eE][+-]?\d+"
    r"|0[xX][\da-fA-F]*\.?[\da-fA-F]*[pP][+-]?\d+)(?P<suffix>[hH]|bf|BF|)"
)
_THREADGROUP = re.compile(r"(?P<align>\balignas\s*\((?:[^()]|\([^()]*\))*\)\s*)?\bthreadgroup\b")
_DECLARATOR = re.compile(r"\s*(?P<type>.*?)(?P<name>\b\w+)\s*(?P<dims>(?:\[.*\])?)\s*$", re.S)
# A parameter that points to a thread's own memory, and what assigns to a pointer.
_OWN_POINTER = re.compile(
    r"(?P<type>[(,]\s*(?:const\s+)?thread\b(?:[^(),;{}<>*&]|<[^<>(){};]*(?:<[^<>(){};]*>[^<>(){};]*)*>)*\*)"
    r"\s*(?P<name>[A-Za-z_]\w*)(?=\s*[,)])"
)
_ASSIGNED = r"(?:\+\+|--)\s*{0}\b|\b{0}\s*(?:\+\+|--|[-+]?=(?!=))"
_HOST_NAME = re.compile(r"template\s*\[\[host_name\([^\]]*\)\]\]\s*\[\[kernel\]\]\s*(decltype\()")


def _convert_literal(match: re.Match[str]) -> str:
    """Return a floating literal in C++, which lacks Metal's: no suffix is a float, `h` a half, `bf` a bfloat."""
    number = _FLOATING.fullmatch(match.group())
    if number is None:
        return match.group()
    digits, suffix = number.group("digits"), number.group("suffix").lower()
    return {"": f"{digits}f", "h": f"{digits}f16", "bf": f"bfloat((__bf16){digits})"}[suffix]


def _statement_end(text: str, start: int) -> int | None:
    """Return the index of the semicolon that ends the declaration at `start`; None for a function or a parameter."""
    before = ""
    for at, c in iterate_top_level(text, start):
        if c == ";":
            return at
        if c == "{" and before == ")":
            return None
        before = before if c.isspace() else c
    return None


@dataclass(frozen=True)
class _Declarator:
    """One variable of a declaration: `type name dims value`. Only the first variable of a declaration has a type."""

    type: str
    name: str
    dims: str
    value: str


def _parse_declarator(text: str) -> _Declarator | None:
    end = next((at for at, c in iterate_top_level(text) if c in "={"), len(text))
    if any(c in "*&()" for at, c in iterate_top_level(text) if at < end):
        return None
    found = _DECLARATOR.fullmatch(text[:end])
    return found and _Declarator(found["type"].strip(), found["name"], found["dims"], text[end:].strip())


def _convert_variables(statement: str, align: str) -> str | None:
    """Convert variables such as `T x[N], y = 1` to references into threadgroup memory; return None for pointers.

    `align` is the alignment that the text asks for, if any: `alignas(16)`.
    """
    declarators = [_parse_declarator(part) for part in split_at_commas(statement)]
    if not declarators or declarators[0] is None or not declarators[0].type:
        return None
    out = []
    for d in declarators:
        if d is None:
            return None
        out.append(f"SIM_THREADGROUP({d.name}, ({declarators[0].type}), {d.dims}{align and ', ' + align})")
        if d.value:
            out.append(f"SIM_INITIAL({d.name}, {d.value})")
    return " ".join(out)


def _starts_statement(text: str, at: int) -> bool:
    before = text[:at].rstrip(" \t\n\\")  # of a macro's lines, too
    return not before or before[-1] in ";{}:" or before.rsplit("\n", 1)[-1].lstrip().startswith("#")


def _convert_threadgroup_memory(text: str) -> str:
    out, at = [], 0
    for found in _THREADGROUP.finditer(text):
        if found.start() < at or not _starts_statement(text, found.start()):
            continue
        end = _statement_end(text, found.end())
        align = (found["align"] or "").strip()
        new = _convert_variables(text[found.end() : end], align) if end is not None else None
        if new is not None and end is not None:
            lines = text.count("\n", found.start(), end) - new.count("\n")
            out += [text[at : found.start()], new, "\n" * lines]
            at = end + 1
    return "".join(out) + text[at:]


def _add_pointer_sizes(text: str) -> str:
    """Let a function that gets a pointer to a thread's own array know the array's size.

    The compiler finds it at the call: of the member or row that is passed, not of the variable around it. It then
    checks the function's indices before it optimises. A pointer that the text moves stays as it is.
    """

    def add_size(found: re.Match[str]) -> str:
        if re.search(_ASSIGNED.format(found["name"]), text):
            return found.group()
        return f"{found['type']} const {found['name']} SIM_SIZED"

    return _OWN_POINTER.sub(add_size, text)


def to_cpp(text: str) -> str:
    """Return Metal kernel text as C++ for the shim headers."""
    text = blank_comments(text)
    text = re.sub(r"\[\[\s*threadgroup\b", "[[sim_threadgroup", text)
    text = _convert_threadgroup_memory(text)
    text = _add_pointer_sizes(text)
    text = _STRING_OR_NUMBER.sub(_convert_literal, text)
    text = _HOST_NAME.sub(r"template \1", text)
    return mark_paths(text)
