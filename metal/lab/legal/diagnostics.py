"""The front end's diagnostics that Metal's compiler shares: at which language level, and in which words."""

import re
from collections.abc import Sequence
from enum import Enum


class Language(Enum):
    """The language level at which MLX compiles a kernel. The version of macOS decides it."""

    METAL_3_1 = "3.1"
    """macOS 14; C++14."""
    METAL_4_0 = "4.0"
    """macOS 26; C++17, with lambdas."""


# OpenCL cannot copy a struct out of `constant` memory, and its temporaries have an address space of their own. Metal
# copies such a struct, and the space of a temporary does not matter to it.
_COPIES = re.compile(r"implicit (?:copy|move) (?:constructor|assignment operator)\) not viable: .*'__constant'", re.S)
# A literal converts to a pointer to non-const char. Every clang accepts this with a warning.
_LITERAL = re.compile(r"no known conversion from 'const __constant char\[\d+\]' to '__constant char \*")
# OpenCL has no built-in operator that adds an object which converts to a number to a pointer (MLX's Int<1>).
_POINTER_AND_NUMBER = re.compile(
    r"^invalid operands to binary expression \('[^']*\*(?:__private)?' and '[^']*\bintegral_constant<"
)
# `this` points to thread memory in Metal, to any memory in OpenCL. (The last but one follows from an error before it.)
_ONLY_THE_SPACE = re.compile(
    r"conflicting types for parameter '\w+' \('(?:__private |__generic )?(.*)' vs\. '(?:__private |__generic )?\1'\)"
)
_FROM_THIS = re.compile(
    r"value of type '(?:const )?__generic .*' changes address space"
    r"|'(?:const )?__private [^']*\*(?:__private)?' with an? [lr]value of type '(?:const )?__generic"
    r"|in address space '__generic' to object in address space '__private'"
    r"|'(?:const )?__private \w+' equal '(?:const )?__generic "
    r"|could not match '(?:const )?__private .*' against '(?:const )?__generic "
    r"|substitution failure \[with .*\]$"
    r"|pass pointer to generic address space as a pointer to address space '__private'",
    re.M,
)
# An object in `constant` memory is constructed like any other in Metal.
_CONSTRUCTS = re.compile(r"cannot be used to construct an object in address space '?__constant")
# half and bfloat convert into each other by an explicit cast only.
_ASKED = re.compile(r"cast from .*(?:\bhalf'.*__bf16'|__bf16'.*half').* is not allowed")

# text.py adds a function that names the instantiation. This error there repeats that the instantiation does not exist.
_NAMED_TWICE = re.compile(r"^address of overloaded function .* cannot be cast to type 'void'")

_REASONS = (
    (re.compile(r"^call to deleted function '(\w+)'"), r"Metal has no overload of '\1' for this type"),
    (re.compile(r"^use of type '(?:long )?double'"), "Metal has no double"),
    (re.compile(r"variable length array|array size is not a constant"), "Metal has no arrays of variable length"),
    (re.compile(r"^virtual functions are not supported"), "Metal has no virtual functions"),
    (
        re.compile(r"non-kernel function variable cannot be declared in|automatic variable qualified with"),
        "a variable in device memory cannot be declared: take a pointer to it",
    ),
)
_CPP17 = re.compile(r" (?:is|are) (?:a C\+\+17|incompatible with C\+\+ standards before C\+\+17)")
# Apple's compiler accepts these in C++14 as extensions. MLX's own headers use them, and it compiles those on macOS 14.
_TAKEN_IN_CPP14 = ("constexpr if", "inline variables", "'static_assert' with no message")

# Operands that are properties: the dialect's swizzles. A text may define an operator for a class of its own, as MLX's
# preamble does. Then, in an instantiated template, the front end ignores the operators of the vectors' class and names
# no candidates. This module decides which operators that class has. The type of an updated swizzle is unknown.
_OPERANDS = re.compile(r"^invalid (?:operands|argument type .*) to (?:bi|u)nary expression")
_UPDATED = "<pseudo-object type>"
_OPERAND = re.compile(r"'([^']*)'(?: \(aka '([^']*)'\))?")
_QUALIFIER = re.compile(r"\b(?:const|__private|__generic|__local|__global|__constant|metal::)(?:\s+|(?<=::))")
_VECTOR = re.compile(r"vec<(\w[\w ]*), \d>")
_FLOATS = ("float", "half", "__bf16")
_OF_INTEGERS = ("%", "&", "|", "^", "<<", ">>", "~")
_INTEGER = re.compile(r"(?:unsigned |signed )?(?:char|short|int|long)|u(?:char|short|int|long)|bool")


def _converts_to_vector(scalar: str, element: str) -> bool:
    """Whether `scalar` converts implicitly to a vector of `element`: see `__implicit` in dialect/legal/vectors.h."""
    if _INTEGER.fullmatch(scalar) or scalar == element:
        return True
    return scalar in _FLOATS and element != "__bf16" and (scalar, element) != ("__bf16", "half")


def _has_operator(message: str, operator: str) -> bool:
    """Whether Metal's vectors have the operator that the message reports as missing."""
    operands = [_QUALIFIER.sub("", known or named) for named, known in _OPERAND.findall(message)]
    updates = operator.endswith("=") and operator not in ("==", "!=", "<=", ">=")
    found = [_VECTOR.fullmatch(operand) for operand in operands]
    unknown = _UPDATED in operands
    vector = found[0] if updates and not unknown else next(filter(None, found), None)
    if vector is None:
        return unknown and _converts_to_vector(operands[-1], "float")
    element = vector[1].replace("bfloat", "__bf16")
    if (operator.removesuffix("=") if updates else operator) in _OF_INTEGERS and element in _FLOATS:
        return False
    return all(operand in (vector[0], _UPDATED) or _converts_to_vector(operand, element) for operand in operands)


def find_objection(
    message: str, notes: Sequence[str], error: bool, option: str | None, language: Language, token: str = ""
) -> str | None:
    """Return what Metal's compiler would object to where the front end gives this `message`, in Metal's words; None if
    only OpenCL or the front end objects. `token` is the word or operator that the front end points at.
    """
    if not error:
        return _objection_for_warning(message, option, language)
    said = "\n".join(notes)
    if _ONLY_THE_SPACE.search(said) or _LITERAL.search(said) or _CONSTRUCTS.search(said):
        return None
    if (
        _NAMED_TWICE.search(message)
        or _ASKED.search(message)
        or _POINTER_AND_NUMBER.search(message)
        or _COPIES.search(said)
        or _FROM_THIS.search(message + "\n" + said)
    ):
        return None
    if _OPERANDS.search(message) and "candidate" not in said and _has_operator(message, token):
        return None
    for pattern, reason in _REASONS:
        if found := pattern.search(message):
            return found.expand(reason)
    why = re.search(r"not viable: (.*)|candidate template ignored: (.*)", said)
    return message + (f": {why.group(1) or why.group(2)}" if why and "no matching" in message else "")


def _objection_for_warning(message: str, option: str | None, language: Language) -> str | None:
    if option == "-Wvla":
        return "Metal has no arrays of variable length"
    if option == "-Wunknown-attributes":
        return message.removesuffix(" ignored") + ": Metal has no such attribute"
    if language is Language.METAL_3_1 and _CPP17.search(message) and not message.startswith(_TAKEN_IN_CPP14):
        return _CPP17.sub("", message) + ": C++17, and Metal 3.1 is C++14"
    return None
