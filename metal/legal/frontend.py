"""libclang as a GPU front end: parses Metal text, gives its diagnostics in Metal's words and its syntax tree."""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cortexmlx.errors import ToolchainMissing

from . import swizzles
from .diagnostics import verdict
from .language import Language
from .text import to_opencl

DIALECT = Path(__file__).parent / "dialect"
MAIN = "kernel.cl"
PREAMBLE = '#include "mlx/backend/metal/kernels/utils.h"\n'
_PRELUDE = "legal/prelude.h"
_STANDARD_HEADERS = (
    "array atomic common compute config geometric integer limits logging math matrix numeric pack quadgroup relational "
    "simdgroup simdgroup_matrix stdlib tensor type_traits types uniform assert extended_vector cooperative_tensor"
).split()
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.M)
_EXTENSIONS = "-cl-ext=+all,-cl_khr_fp64,-__opencl_c_fp64"
_WORDS = (("__local", "device"), ("__global", "threadgroup"), ("__constant", "constant"), ("__private", "thread"))
_SPACE = re.compile(r"\b__generic\s?|(?<=[*&])__(?:private|generic)\b")
_VALUE_SPACE = re.compile(r"'(?:__private|__generic) ([^'*&]*)'")


@dataclass(frozen=True, order=True)
class Complaint:
    """One thing that a Metal compiler would refuse, and the line of the text it is on."""

    line: int
    message: str


@dataclass(frozen=True)
class Parsed:
    """A parsed text: what the front end said about it, and the tree for what it does not judge by itself."""

    unit: Any
    text: str
    language: Language
    complaints: tuple[Complaint, ...]


@cache
def _cindex() -> Any:
    """The bindings.

    Raises:
        ToolchainMissing: the wheel is not installed.
    """
    if importlib.util.find_spec("clang") is None or importlib.util.find_spec("clang.cindex") is None:
        raise ToolchainMissing(
            "no libclang to judge Metal text with: install its wheel, `pip install libclang==18.1.1`"
        )
    import clang.cindex

    return clang.cindex


def available() -> bool:
    """Whether the front end's wheel is installed."""
    return importlib.util.find_spec("clang") is not None and importlib.util.find_spec("clang.cindex") is not None


def template_of(cursor: Any) -> Any | None:
    """The template, or the member of one, that a function was instantiated from."""
    return _cindex().conf.lib.clang_getSpecializedCursorTemplate(cursor)


@cache
def _index() -> Any:
    return _cindex().Index.create()


def _arguments(language: Language, includes: Sequence[Path]) -> list[str]:
    return [
        *("-x", "cl", "-cl-std=clc++2021", "-target", "x86_64-unknown-linux", "-cl-no-stdinc", "-nostdinc"),
        *("-fdeclspec", "-cl-single-precision-constant", "-Xclang", _EXTENSIONS, "-ferror-limit=0"),
        *("-Wno-everything", "-Wpre-c++17-compat", "-Wunknown-attributes", "-Wvla"),
        *(["-DLEGAL_METAL4"] if language is Language.METAL_4_0 else []),
        *(part for path in (DIALECT, *includes) for part in ("-isystem", str(path))),
        *("-include", str(DIALECT / _PRELUDE)),
    ]


def _virtual(preamble: str) -> list[tuple[str, str]]:
    """Files that need not lie on disk: the swizzles, the names under which the library can be included, the preamble."""
    library = '#pragma once\n#include "legal/library.h"\n'
    return [
        (str(DIALECT / "legal" / "swizzles.h"), swizzles.header()),
        *((str(DIALECT / f"metal_{name}"), library) for name in _STANDARD_HEADERS),
        (str(DIALECT / "MetalPerformancePrimitives" / "MetalPerformancePrimitives.h"), library),
        (str(DIALECT / _PRELUDE), library + preamble),
    ]


def parse(text: str, language: Language, includes: Sequence[Path], preamble: str = PREAMBLE) -> Parsed:
    """Parse Metal text after `preamble`, with `includes` for the headers that the two name."""
    files = [(MAIN, to_opencl(text)), *_virtual(preamble), *_included(preamble + text, tuple(includes))]
    unit = _index().parse(MAIN, _arguments(language, includes), unsaved_files=files)
    return Parsed(unit, text, language, tuple(_judged(unit, language)))


@cache
def _header(path: Path) -> tuple[str, str]:
    """A header's text as the front end reads it, and as it was."""
    text = path.read_text()
    return to_opencl(text), text


def _included(text: str, includes: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """The headers that the text includes, directly or not, each as the front end reads it."""
    seen: set[Path] = set()
    waiting = [text]
    while waiting:
        for name in _INCLUDE.findall(waiting.pop()):
            for path in (folder / name for folder in includes):
                if path not in seen and path.is_file():
                    seen.add(path)
                    read, own = _header(path)
                    waiting.append(own)
                    yield str(path), read


def in_metal(message: str) -> str:
    """A message of the front end with Metal's names for the address spaces."""
    message = _VALUE_SPACE.sub(r"'\1'", message)
    message = _SPACE.sub("", message)
    for opencl, metal in _WORDS:
        message = message.replace(opencl, metal)
    return message


def _place(diagnostic: Any) -> int | None:
    """The line of the text that a diagnostic is about: its own, or the one that asked for the instantiation."""
    for one in (diagnostic, *diagnostic.children):
        if one.location.file is not None and one.location.file.name == MAIN:
            return int(one.location.line)
    return None


def _judged(unit: Any, language: Language) -> Iterator[Complaint]:
    for diagnostic in unit.diagnostics:
        line = _place(diagnostic)
        notes = [note.spelling for note in diagnostic.children]
        said = verdict(diagnostic.spelling, notes, diagnostic.severity >= 3, diagnostic.option, language)
        if said is None:
            continue
        if line is None:
            if diagnostic.severity >= 3:
                where = diagnostic.location
                yield Complaint(1, f"in {where.file}:{where.line}: {in_metal(said)}")
            continue
        yield Complaint(line, in_metal(said))
