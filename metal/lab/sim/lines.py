"""Find the line of kernel text of an address in a built library, in the DWARF line table that the compiler writes.

Format: DWARF 4, section 6.2, in a 64-bit little-endian ELF file. Other files (macOS) give no line.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

KERNEL_FILE = "kernel"


@dataclass(frozen=True)
class LineRow:
    """The source of a range of instructions. The range starts at `address` and ends at the next row."""

    address: int
    file: str
    line: int
    column: int = 0


class _DwarfReader:
    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    def read_number(self, code: str) -> int:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return int(value)

    def read_uleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.read_number("B")
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def read_sleb(self) -> int:
        start = self.at
        value = self.read_uleb()
        bits = 7 * (self.at - start)
        return value - (1 << bits) if value >> (bits - 1) else value

    def read_string(self) -> str:
        end = self.data.index(0, self.at)
        text = self.data[self.at : end].decode(errors="replace")
        self.at = end + 1
        return text


def _find_sections(data: bytes) -> dict[str, tuple[int, int]]:
    """Return (offset in the file, size) of each section by name; nothing for a file of another format."""
    if data[:4] != b"\x7fELF" or data[4:6] != b"\x02\x01":
        return {}
    table, entry, count, names = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * entry) for i in range(count)]
    strings = headers[names][4]
    return {_DwarfReader(data, strings + h[0]).read_string(): (h[4], h[5]) for h in headers}


def _read_line_program(data: bytes, start: int) -> Iterator[LineRow]:
    """Yield the rows of one line-number program."""
    r = _DwarfReader(data, start)
    end = r.read_number("I") + r.at
    version = r.read_number("H")
    if version not in (2, 3, 4):
        return
    r.read_number("I")
    minimum = r.read_number("B")
    if version >= 4:
        r.read_number("B")
    r.read_number("B")
    line_base, line_range, first_special = r.read_number("b"), r.read_number("B"), r.read_number("B")
    lengths = [r.read_number("B") for _ in range(first_special - 1)]
    while r.data[r.at]:
        r.read_string()
    r.at += 1
    files = [""]
    while r.data[r.at]:
        files.append(r.read_string())
        for _ in range(3):
            r.read_uleb()
    r.at += 1
    address, file, line, column = 0, 1, 1, 0
    while r.at < end:
        code = r.read_number("B")
        if code >= first_special:
            address += (code - first_special) // line_range * minimum
            line += line_base + (code - first_special) % line_range
            yield LineRow(address, files[file], line, column)
        elif code == 0:
            size = r.read_uleb()
            after = r.at + size
            extended = r.read_number("B")
            if extended == 1:
                yield LineRow(address, "", 0)
                address, file, line, column = 0, 1, 1, 0
            elif extended == 2:
                address = r.read_number("Q")
            r.at = after
        elif code == 1:
            yield LineRow(address, files[file], line, column)
        elif code == 2:
            address += r.read_uleb() * minimum
        elif code == 3:
            line += r.read_sleb()
        elif code == 4:
            file = r.read_uleb()
        elif code == 5:
            column = r.read_uleb()
        elif code == 8:
            address += (255 - first_special) // line_range * minimum
        elif code == 9:
            address += r.read_number("H")
        else:
            for _ in range(lengths[code - 1]):
                r.read_uleb()


@cache
def rows_of(library: Path) -> tuple[LineRow, ...]:
    """Return the whole line table, sorted by address. A row without a file ends a range of addresses."""
    data = library.read_bytes()
    place = _find_sections(data).get(".debug_line")
    if place is None:
        return ()
    rows: list[LineRow] = []
    at = place[0]
    while at < place[0] + place[1]:
        rows += _read_line_program(data, at)
        at += 4 + struct.unpack_from("<I", data, at)[0]
    return tuple(sorted(rows, key=lambda row: row.address))


def line_of(library: Path, address: int) -> int | None:
    """Return the kernel text's line of the call that returns to `address`; None if it is unknown."""
    rows = rows_of(library)
    at = bisect_right(rows, address - 1, key=lambda row: row.address) - 1
    # An inlined library function, or no line: take the nearest earlier line of the kernel.
    while at >= 0 and rows[at].file and (rows[at].file != KERNEL_FILE or rows[at].line == 0):
        at -= 1
    return rows[at].line if at >= 0 and rows[at].file else None
