"""Metal text as C++ for OpenCL: the few constructs that macros cannot translate. No line moves.

- A Metal attribute becomes an annotation, which the syntax tree shows.
- A threadgroup variable becomes a static. OpenCL allows no other kind in a function that is not an OpenCL kernel.
- A `const thread T&` parameter becomes a value, because OpenCL binds no temporary to such a reference. An annotation
  records the original type.
- A function constant gets a value, because OpenCL requires one.
- `1.5bf` becomes a conversion.
- An explicit instantiation of a kernel is also named in a function, so that the tree leads to it.
- `this` points to thread memory in Metal and to any memory in OpenCL. So `return member;` in a function that returns
  `thread T&` goes through `__thread_memory`, which takes no other named space.
- `reinterpret_cast<thread T*>(...)` becomes a cast that OpenCL allows from any memory except `device`.
"""

import re

from cortexmlx.metal.lab.legal.msl import blank_comments, blank_non_code, find_closing_bracket, split_at_commas

_ATTRIBUTES = re.compile(r"\[\[([^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]\]")
_ANNOTATED = (
    r"(?:kernel|host_name|buffer|threadgroup|function_constant|max_total_threads_per_threadgroup|visible|stitchable"
    r"|thread\w*|threads\w*|simdgroup\w*|simdgroups\w*|quadgroup\w*|quadgroups\w*|dispatch\w*|grid_\w+)"
)
_ATTRIBUTE = re.compile(rf"^\s*({_ANNOTATED})\s*(\(.*\))?\s*$", re.S)
_INSTANTIATION = re.compile(
    r"\btemplate\s+((?:\[\[[^\]]*\]\][\s\\]*)+)(decltype\s*\((?P<name>[\w:]+\s*<[^;()]*>)\)\s*(?P=name)\s*;)"
)
_FUNCTION_CONSTANT = re.compile(r"\[\[\s*function_constant\s*\([^()]*\)\s*\]\](?=\s*;)")
_BFLOAT = re.compile(r"(?<![\w.])((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?:bf|BF)\b")
# `const thread T& name`, where it is a parameter
_CONST_REFERENCE = re.compile(
    r"(?P<before>[(,]\s*)(?:const\s+thread|thread\s+const)\s+(?P<type>(?:typename\s+)?[\w:]+(?:<[^();&*]*>)?(?:::\w+)*)\s*&(?!&)(?=\s*\w*\s*[,)=])"
)
# The qualifier of a member function that is called on thread memory. A function without it is called so, too.
_THREAD_MEMBER = re.compile(r"(\)\s*)((?:const\b\s*)?)thread\b(\s*const\b)?(?=\s*(?:[{;:=]|\\|->|noexcept))")
# OpenCL refuses a thread reference into *this. A constexpr function with a refused body is left out of everything.
_CONSTEXPR_REFERENCE = re.compile(r"\bconstexpr\b(?=\s+(?:const\s+)?thread\b[^;{}()=]*[&*][^;{}=]*\()")
_STATEMENT = re.compile(r"(?<![\w])(alignas\s*\([^()]*\)\s*)?(?:(?:const|volatile)\s+)?threadgroup\b([^;{}]*)")
_WORD = re.compile(r"\s*[A-Za-z_]\w*")
_RETURNS_REFERENCE = re.compile(
    r"\bthread\s+(?!const\s*\()[^;{}()=\[\]]*&\s*(?:[\w:]+|operator\s*[^\s\w(]+|operator\s*\(\s*\))\s*\("
)
_RETURN = re.compile(r"\breturn\b(\s+)([^;{}]+);")
_REINTERPRETED = re.compile(
    r"\breinterpret_cast\s*<((?:[^<>]|<[^<>]*>)*\bthread\b(?:[^<>]|<[^<>]*>)*[*&]\s*)>\s*(?=\()"
)
_BODY = re.compile(r"[^;{}()]*\{")


def _line_breaks(text: str) -> str:
    """Return the line breaks of a text. Backslashes before them stay, because macros need them."""
    return "".join(re.findall(r"\\?\n", text))


def _annotate(match: re.Match[str]) -> str:
    """Turn `[[buffer(0), ...]]` into annotations. Attributes of C++ itself stay."""
    out = []
    for part in split_at_commas(match.group(1)):
        found = _ATTRIBUTE.match(part)
        if found is None:
            return match.group()
        number = re.fullmatch(r"\(\s*(-?\d+)\s*\)", found.group(2) or "")
        value = f"({number.group(1)})" if number else ""
        out.append(f'__attribute__((annotate("metal {found.group(1)}{value}")))')
    return " ".join(out) + _line_breaks(match.group())


def _pass_by_value(match: re.Match[str]) -> str:
    found = match.group()
    return f'{match["before"]}const __attribute__((annotate("metal const thread&"))) {match["type"]} ' + _line_breaks(
        found.removeprefix(match["before"]).replace(match["type"], "")
    )


def _starts_statement(text: str, at: int) -> bool:
    before = text[:at].rstrip()
    if not before or before[-1] in ";{}":
        return True
    if before[-1] == ":":
        return not before.endswith("::")
    last = before.rsplit("\n", 1)[-1].lstrip()
    return last.startswith("#") or before.endswith(("\\", "]]"))


def _is_variable(declared: str) -> bool:
    """Whether a declaration is `T name[N], other = ...`, not a pointer, a reference or a function."""
    depth = 0
    name = ""
    for at, c in enumerate(declared):
        if c in "<[":
            depth += 1
        elif c in ">]":
            depth -= 1
        elif (depth == 0 and c in "*&") or (depth == 0 and c == "("):
            return False
        elif depth == 0 and c == "=":
            break
        elif depth == 0 and (word := _WORD.match(declared, at)) and not declared[at - 1 : at].isidentifier():
            name = word.group()
    return bool(name)


def _make_threadgroup_variables_static(text: str, plain: str) -> str:
    out, at = [], 0
    for match in _STATEMENT.finditer(plain):
        if match.start() >= at and _starts_statement(plain, match.start()) and _is_variable(match.group(2)):
            start = match.start() + len(match.group(1) or "")
            out += [text[at:start], 'static __attribute__((annotate("metal threadgroup variable"))) ']
            at = start
    return "".join(out) + text[at:]


def _turn_instantiations_into_functions(text: str) -> str:
    count = 0

    def make_function(match: re.Match[str]) -> str:
        nonlocal count
        plain = f"template {_line_breaks(match.group(1))}{match.group(2)}"
        if "__VA_ARGS__" in plain:
            return plain
        count += 1
        function = " ".join(match.group("name").split())
        return f"{plain} inline void __legal_root_{count}() {{ (void)&{function}; }}"

    return _INSTANTIATION.sub(make_function, text)


def to_opencl(text: str) -> str:
    """Return Metal text as the front end reads it. Line n of the result is line n of the text."""
    text = blank_comments(text)
    text = _turn_instantiations_into_functions(text)
    text = _FUNCTION_CONSTANT.sub(lambda found: "= {}" + _line_breaks(found.group()), text)
    text = _ATTRIBUTES.sub(_annotate, text)
    text = _CONST_REFERENCE.sub(_pass_by_value, text)
    text = _CONSTEXPR_REFERENCE.sub("", text)
    text = _THREAD_MEMBER.sub(r"\1\2\3", text)
    text = _put_in_thread_memory(text)
    text = _BFLOAT.sub(r"(bfloat(\1f))", text)
    return _make_threadgroup_variables_static(text, blank_non_code(text))


def _put_in_thread_memory(text: str) -> str:
    """Put the results of functions and casts in thread memory, where the text says `thread`. No line moves."""
    text = _REINTERPRETED.sub(r"(\1)", text)
    out, at = [], 0
    for header in _RETURNS_REFERENCE.finditer(text):
        if header.start() < at:
            continue
        parameters_end = find_closing_bracket(text, header.end() - 1)
        body = _BODY.match(text, parameters_end + 1) if parameters_end else None
        end = find_closing_bracket(text, body.end() - 1) if body else None
        if body is None or end is None:
            continue
        out += [text[at : body.end()], _RETURN.sub(r"return\1__thread_memory(\2);", text[body.end() : end])]
        at = end
    return "".join(out) + text[at:]
