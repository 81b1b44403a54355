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

    def take(self, code: str) -> int:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return int(value)

    def uleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.take("B")
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def sleb(self) -> int:
        start = self.at
        value = self.uleb()
        bits = 7 * (self.at - start)
        return value - (1 << bits) if value >> (bits - 1) else value

    def string(self) -> str:
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
    return {_DwarfReader(data, strings + h[0]).string(): (h[4], h[5]) for h in headers}


def _read_line_program(data: bytes, start: int) -> Iterator[LineRow]:
    """Yield the rows of one line-number program."""
    r = _DwarfReader(data, start)
    end = r.take("I") + r.at
    version = r.take("H")
    if version not in (2, 3, 4):
        return
    r.take("I")
    minimum = r.take("B")
    if version >= 4:
        r.take("B")
    r.take("B")
    line_base, line_range, first_special = r.take("b"), r.take("B"), r.take("B")
    lengths = [r.take("B") for _ in range(first_special - 1)]
    while r.data[r.at]:
        r.string()
    r.at += 1
    files = [""]
    while r.data[r.at]:
        files.append(r.string())
        for _ in range(3):
            r.uleb()
    r.at += 1
    address, file, line, column = 0, 1, 1, 0
    while r.at < end:
        code = r.take("B")
        if code >= first_special:
            address += (code - first_special) // line_range * minimum
            line += line_base + (code - first_special) % line_range
            yield LineRow(address, files[file], line, column)
        elif code == 0:
            size = r.uleb()
            after = r.at + size
            extended = r.take("B")
            if extended == 1:
                yield LineRow(address, "", 0)
                address, file, line, column = 0, 1, 1, 0
            elif extended == 2:
                address = r.take("Q")
            r.at = after
        elif code == 1:
            yield LineRow(address, files[file], line, column)
        elif code == 2:
            address += r.uleb() * minimum
        elif code == 3:
            line += r.sleb()
        elif code == 4:
            file = r.uleb()
        elif code == 5:
            column = r.uleb()
        elif code == 8:
            address += (255 - first_special) // line_range * minimum
        elif code == 9:
            address += r.take("H")
        else:
            for _ in range(lengths[code - 1]):
                r.uleb()


@cache
def rows_of(library: Path) -> tuple[LineRow, ...]:
    """Return the whole line table, sorted by address. A row without a file ends a range."""
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
    """Return the line of kernel text of the instruction before `address`, a return address; None if unknown."""
    rows = rows_of(library)
    at = bisect_right(rows, address - 1, key=lambda row: row.address) - 1
    # An inlined library function, or no line: take the nearest earlier line of the kernel.
    while at >= 0 and rows[at].file and (rows[at].file != KERNEL_FILE or rows[at].line == 0):
        at -= 1
    return rows[at].line if at >= 0 and rows[at].file else None
