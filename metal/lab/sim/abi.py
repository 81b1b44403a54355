"""The structures that the host shares with the runtime (runtime/state.h), with the same order and sizes."""

import ctypes
from ctypes import c_char, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import ClassVar

MAX_FINDINGS = 64
MAX_ARRAYS = 256
SIMD_OPS = (
    "reduce",
    "prefix",
    "shuffle_indexed",
    "shuffle_uniform",
    "shuffle_xor",
    "shuffle_shift",
    "broadcast",
    "broadcast_first",
    "vote",
    "active",
    "matrix_multiply",
    "matrix_load",
    "matrix_store",
)
NOTE_DIVERGENT = 18
"""The one kind of finding that is not a fault: a divergent operation whose result cannot depend on the divergence."""

_Fields = list[tuple[str, type]]
_uint3 = c_uint32 * 3


class BufferCounters(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        (name, c_uint64)
        for name in (
            "reads",
            "writes",
            "bytes_read",
            "bytes_written",
            "distinct_read",
            "distinct_written",
            "group_distinct_read",
            "group_distinct_written",
            "simd_accesses",
            "simd_segments",
            "simd_ideal_segments",
            "unwritten_elements",
            "first_unwritten",
        )
    ]


class Buffer(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("base", c_void_p),
        ("bytes", c_uint64),
        ("item_bytes", c_uint32),
        ("writable", c_uint32),
        ("tracked", c_uint32),
        ("reserved", c_uint32),
        ("start", c_uint64),
        ("counters", BufferCounters),
    ]


class Finding(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("kind", c_uint32),
        ("is_write", c_uint32),
        ("buffer", c_int32),
        ("array", c_int32),
        ("offset", c_int64),
        ("size", c_uint32),
        ("count", c_uint32),
        ("group", _uint3),
        ("thread", _uint3),
        ("other_group", _uint3),
        ("other_thread", _uint3),
        ("pc", c_uint64),
        ("other_state", c_uint32),
        ("line", c_uint32),
        ("text", c_char * 96),
    ]


class ArrayInfo(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [("bytes", c_uint64), ("name", c_char * 56)]


class Launch(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("grid", _uint3),
        ("threadgroup", _uint3),
        ("seed", c_uint64),
        ("patience", c_double),
        ("checked", c_uint32),
        ("coalescing", c_uint32),
        ("buffer_count", c_uint32),
        ("stack_bytes", c_uint32),
        ("fast_errors", c_uint32),
        ("stacks", c_void_p),
        ("arena", c_void_p),
        ("buffers", c_void_p),
        ("finding_count", c_uint32),
        ("aborted", c_uint32),
        ("threadgroup_bytes", c_uint64),
        ("array_count", c_uint32),
        ("reserved", c_uint32),
        ("threadgroups", c_uint64),
        ("threads", c_uint64),
        ("barriers", c_uint64),
        ("divergent_ops", c_uint64),
        ("benign_races", c_uint64),
        ("findings", Finding * MAX_FINDINGS),
        ("arrays", ArrayInfo * MAX_ARRAYS),
    ]
