"""libclang as a GPU front end: it parses Metal text, and gives diagnostics in Metal's words and the syntax tree."""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from cortexmlx.errors import ToolchainMissing
from cortexmlx.metal.lab.legal.diagnostics import Language, find_objection
from cortexmlx.metal.lab.legal.msl import PREAMBLE
from cortexmlx.metal.lab.legal.text import to_opencl

DIALECT = Path(__file__).parent / "dialect"
MAIN = "kernel.cl"
_PRELUDE = "legal/prelude.h"
_STANDARD_HEADERS = (
    *("array", "assert", "atomic", "common", "compute", "config", "cooperative_tensor", "extended_vector"),
    *("geometric", "integer", "limits", "logging", "math", "matrix", "numeric", "quadgroup", "relational"),
    *("simdgroup", "simdgroup_matrix", "stdlib", "tensor", "type_traits", "types", "uniform"),
)
_DETAILED = 0x01  # the preprocessing record
_PRECOMPILED = 0x02 | 0x10  # incomplete, for serialization
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.M)
_EXTENSIONS = "-cl-ext=+all,-cl_khr_fp64,-__opencl_c_fp64"
_WORDS = (
    ("legal_name_", ""),
    ("__local", "device"),
    ("__global", "threadgroup"),
    ("__constant", "constant"),
    ("__private", "thread"),
)
_SPACE = re.compile(r"\b__generic\s?|(?<=[*&])__(?:private|generic)\b")
_NAMED_SPACE = re.compile(r"address space '(device|threadgroup|constant|thread)'")
_VALUE_SPACE = re.compile(r"'(?:__private|__generic) ([^'*&]*)'")


@dataclass(frozen=True, order=True)
class Complaint:
    """One thing that a Metal compiler would refuse, and its line in the text."""

    line: int
    message: str


@dataclass(frozen=True)
class Parsed:
    """A parsed Metal text."""

    unit: Any
    """libclang's translation unit: the tree, for rules that the front end does not check itself."""
    text: str
    language: Language
    complaints: tuple[Complaint, ...]
    """The front end's own complaints, those about the preamble first."""
    dead: frozenset[int]
    """The lines that the preprocessor skipped."""


@cache
def _clang_bindings() -> Any:
    """Return libclang's Python bindings.

    Raises:
        ToolchainMissing: the wheel is not installed.
    """
    if not available():
        raise ToolchainMissing(
            "no libclang to judge Metal text with: install its wheel, `pip install libclang==18.1.1`"
        )
    from clang import cindex  # `import clang.cindex` on two threads at once may find `clang` without it

    return cindex


def available() -> bool:
    """Whether the front end's wheel is installed."""
    return importlib.util.find_spec("clang") is not None and importlib.util.find_spec("clang.cindex") is not None


def template_of(cursor: Any) -> Any | None:
    """Return the template, or the member of a template, that a function is an instance of; None for other functions."""
    return _clang_bindings().conf.lib.clang_getSpecializedCursorTemplate(cursor)


class _SourceRanges(ctypes.Structure):
    """libclang's CXSourceRangeList. Its ranges are opaque here."""

    _fields_ = (("count", ctypes.c_uint), ("ranges", ctypes.c_void_p))


def skipped_lines(unit: Any) -> set[int]:
    """Return the lines of the text that the preprocessor skipped."""
    cindex = _clang_bindings()
    skipped = cindex.conf.lib.clang_getSkippedRanges
    skipped.argtypes, skipped.restype = [cindex.c_object_p, ctypes.c_void_p], ctypes.POINTER(_SourceRanges)
    dispose = cindex.conf.lib.clang_disposeSourceRangeList
    dispose.argtypes, dispose.restype = [ctypes.POINTER(_SourceRanges)], None
    found = skipped(unit, unit.get_file(MAIN).obj)
    ranges = ctypes.cast(found.contents.ranges, ctypes.POINTER(cindex.SourceRange))
    lines = [range(ranges[i].start.line, ranges[i].end.line + 1) for i in range(found.contents.count)]
    dispose(found)
    return {line for some in lines for line in some}


@cache
def _clang_index() -> Any:
    atexit.register(_clang_index.cache_clear)  # so that it is freed before its library is gone
    return _clang_bindings().Index.create()


def _compiler_arguments(language: Language, includes: Sequence[Path], header: bool = False) -> list[str]:
    return [
        *(
            "-x",
            "cl-header" if header else "cl",
            "-cl-std=clc++2021",
            "-target",
            "x86_64-unknown-linux",
            "-cl-no-stdinc",
            "-nostdinc",
        ),
        *("-fdeclspec", "-cl-single-precision-constant", "-Xclang", _EXTENSIONS, "-ferror-limit=0"),
        *("-Wno-everything", "-Wpre-c++17-compat", "-Wunknown-attributes", "-Wvla"),
        *(["-DLEGAL_METAL4"] if language is Language.METAL_4_0 else []),
        *(part for path in (DIALECT, *includes) for part in ("-isystem", str(path))),
    ]


def _virtual_files(preamble: str) -> list[tuple[str, str]]:
    """Return the files that the front end gets from memory: swizzles, the library under each name, the preamble."""
    library = '#pragma once\n#include "legal/library.h"\n'
    return [
        (str(DIALECT / "legal" / "swizzles.h"), swizzle_header()),
        *((str(DIALECT / f"metal_{name}"), library) for name in _STANDARD_HEADERS),
        (str(DIALECT / "MetalPerformancePrimitives" / "MetalPerformancePrimitives.h"), library),
        (str(DIALECT / _PRELUDE), library + preamble),
    ]


@cache
def _precompile(preamble: str, language: Language, includes: tuple[Path, ...]) -> tuple[Path, tuple[Complaint, ...]]:
    """Precompile library and preamble, once per process for all texts. Return the header and complaints about it."""
    folder = tempfile.mkdtemp(prefix="metal-legal-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header = Path(folder, "prelude.h")
    header.write_text(f'#include "{DIALECT / _PRELUDE}"\n')
    files = [*_virtual_files(preamble), *_included_headers(preamble, includes)]
    unit = _clang_index().parse(
        str(header), _compiler_arguments(language, includes, header=True), unsaved_files=files, options=_PRECOMPILED
    )
    compiled = Path(folder, "prelude.pch")
    unit.save(str(compiled))
    return compiled, tuple(_complaints_of(unit, language))


def parse(text: str, language: Language, includes: Sequence[Path], preamble: str = PREAMBLE) -> Parsed:
    """Parse Metal text after `preamble`. `includes` are the folders of the headers that they include."""
    folders = tuple(includes)
    library, complaints = _precompile(preamble, language, folders)
    files = [(MAIN, to_opencl(text)), *_virtual_files(preamble), *_included_headers(preamble + text, folders)]
    arguments = [*_compiler_arguments(language, folders), "-include-pch", str(library), "-Xclang", "-fno-validate-pch"]
    unit = _clang_index().parse(MAIN, arguments, unsaved_files=files, options=_DETAILED)
    return Parsed(unit, text, language, (*complaints, *_complaints_of(unit, language)), frozenset(skipped_lines(unit)))


@cache
def _read_header(path: Path) -> tuple[str, str]:
    """Return a header's text twice: as the front end reads it, and as it is on disk."""
    text = path.read_text()
    return to_opencl(text), text


def _included_headers(text: str, includes: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """Yield the path of each header that the text includes, even indirectly, and its text as the front end reads it."""
    seen: set[Path] = set()
    waiting = [text]
    while waiting:
        for name in _INCLUDE.findall(waiting.pop()):
            for path in (folder / name for folder in includes):
                if path not in seen and path.is_file():
                    seen.add(path)
                    read, own = _read_header(path)
                    waiting.append(own)
                    yield str(path), read


def to_metal_words(message: str) -> str:
    """Return a message of the front end with Metal's names for the address spaces."""
    message = _VALUE_SPACE.sub(r"'\1'", message)
    message = _SPACE.sub("", message)
    for opencl, metal in _WORDS:
        message = message.replace(opencl, metal)
    return _NAMED_SPACE.sub(r"\1", message)


def _line_in_text(diagnostic: Any) -> int | None:
    """Return the line of the text that a diagnostic, or a note on it, points at; None if they point elsewhere."""
    for one in (diagnostic, *diagnostic.children):
        included = one.spelling.startswith("in file included from")
        if not included and one.location.file is not None and one.location.file.name == MAIN:
            return int(one.location.line)
    return None


def _token_at(unit: Any, location: Any) -> str:
    """Return the word or operator at a location."""
    extent = _clang_bindings().SourceRange.from_locations(location, location)
    return next((str(token.spelling) for token in unit.get_tokens(extent=extent)), "")


def _complaints_of(unit: Any, language: Language) -> Iterator[Complaint]:
    for diagnostic in unit.diagnostics:
        line = _line_in_text(diagnostic)
        notes = [note.spelling for note in diagnostic.children]
        token = _token_at(unit, diagnostic.location)
        said = find_objection(diagnostic.spelling, notes, diagnostic.severity >= 3, diagnostic.option, language, token)
        if said is None:
            continue
        if line is None:
            if diagnostic.severity >= 3:
                where = diagnostic.location
                yield Complaint(1, f"in {where.file}:{where.line}: {to_metal_words(said)}")
            continue
        yield Complaint(line, to_metal_words(said))


# The syntax tree as a list of nodes: the text as it is written, and every instantiation of its templates. libclang
# shows a template as it is written. The walk finds an instantiation at a call, or at an explicit instantiation that
# text.py has named, and visits each once.

_FUNCTIONS = {"FUNCTION_DECL", "CXX_METHOD", "CONSTRUCTOR", "DESTRUCTOR", "CONVERSION_FUNCTION"}
FUNCTIONS = frozenset(_FUNCTIONS | {"FUNCTION_TEMPLATE"})
_USES = {"CALL_EXPR", "DECL_REF_EXPR", "MEMBER_REF_EXPR", "OVERLOADED_DECL_REF"}


@dataclass(frozen=True, eq=False)
class TreeNode:
    """A node of the syntax tree."""

    cursor: Any
    kind: str
    parent: TreeNode | None
    instantiated: bool
    """Whether this is part of an instantiation: a copy of what is written elsewhere."""

    @property
    def line(self) -> int:
        """The line in the text."""
        return int(self.cursor.location.line)

    @property
    def type(self) -> str:
        """The canonical type: all names resolved, address spaces by the front end's names."""
        return str(self.cursor.type.get_canonical().spelling)

    def ancestors(self) -> Iterator[TreeNode]:
        """Yield the nodes around this one, from the inside out."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def function(self) -> TreeNode | None:
        """Return the function around this node, or None."""
        return next((node for node in self.ancestors() if node.kind in FUNCTIONS), None)


def in_text(cursor: Any) -> bool:
    """Whether the cursor is in the text itself, not in a header."""
    file = cursor.location.file
    return file is not None and file.name == MAIN


def kind_of(cursor: Any) -> str:
    """Return the name of the cursor's kind; "UNKNOWN" if the bindings do not know it. No rule needs such a kind."""
    try:
        return str(cursor.kind.name)
    except ValueError:
        return "UNKNOWN"


def metal_attributes(cursor: Any) -> list[str]:
    """Return the Metal attributes of a declaration."""
    return [
        child.spelling.removeprefix("metal ")
        for child in cursor.get_children()
        if kind_of(child) == "ANNOTATE_ATTR" and child.spelling.startswith("metal ")
    ]


def unwrap(cursor: Any) -> Any:
    """Return an expression without the implicit conversions and parentheses around it."""
    while kind_of(cursor) in ("UNEXPOSED_EXPR", "PAREN_EXPR"):
        inside = list(cursor.get_children())
        if len(inside) != 1:
            break
        cursor = inside[0]
    return cursor


class _TreeWalk:
    """Walks a syntax tree: collects its `nodes`, and in `waiting` the instantiations that are still to be walked."""

    def __init__(self) -> None:
        self.nodes: list[TreeNode] = []
        self.waiting: list[Any] = []
        self.seen: set[int] = set()

    def visit(self, cursor: Any, parent: TreeNode | None, instantiated: bool) -> None:
        node = TreeNode(cursor, kind_of(cursor), parent, instantiated)
        self.nodes.append(node)
        if node.kind in _USES:
            self._queue_instantiation(cursor)
        for child in cursor.get_children():
            self.visit(child, node, instantiated)

    def _queue_instantiation(self, cursor: Any) -> None:
        used = cursor.referenced
        if used is None or kind_of(used) not in _FUNCTIONS or not in_text(used):
            return
        if used.hash in self.seen or template_of(used) is None:
            return
        self.seen.add(used.hash)
        self.waiting.append(used)


def walk(parsed: Parsed) -> list[TreeNode]:
    """Return every node of the text in order, then the nodes of the instantiations."""
    found = _TreeWalk()
    for cursor in parsed.unit.cursor.get_children():
        if in_text(cursor):
            found.visit(cursor, None, False)
    while found.waiting:
        found.visit(found.waiting.pop(), None, True)
    return found.nodes


# The swizzles of Metal's vectors (MSL 2.2) as member declarations: `v.xy`, `v.bgr`, `v.wwww`. A swizzle is a property
# of the vector's class. One that repeats an element can only be read.

_ELEMENT_NAMES = ("xyzw", "rgba")


def _declare_swizzles(names: str, width: int) -> Iterator[str]:
    for length in range(1, 5):
        if length == 1 and names[0] == "x":
            continue  # x, y, z and w are the elements themselves
        read: list[str] = []
        written: list[str] = []
        for letters in product(names[:width], repeat=length):
            (written if len(set(letters)) == length else read).append("".join(letters))
        element = "T" if length == 1 else f"vec<T, {length}>"
        for found, access in ((read, f"get = __get{length}"), (written, f"get = __get{length}, put = __put{length}")):
            if found:
                yield f"__declspec(property({access})) {element} {', '.join(found)};"


def swizzle_header() -> str:
    """Return one macro of declarations for each width: LEGAL_SWIZZLES_2, _3 and _4."""
    lines = ["#pragma once"]
    for width in (2, 3, 4):
        members = " ".join(declaration for names in _ELEMENT_NAMES for declaration in _declare_swizzles(names, width))
        lines.append(f"#define LEGAL_SWIZZLES_{width} {members}")
    return "\n".join(lines) + "\n"
