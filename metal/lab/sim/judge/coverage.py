"""Which lines and branches of the judged kernels ran. The data is in libraries built to count (settings.coverage).

Every basic block of such a library sets a mark when it runs. The compiler's control-flow table lists the blocks that
follow each block. A line ran if a block with code of that line ran. A branch is a block that two or more blocks follow;
these are its outcomes. Critical edges have blocks of their own, so an outcome was taken if and only if its block ran.
Counts of several instantiations of a template are merged by file, line and column. A template without an instantiation
has no code: `kernels_of` counts the kernel functions of a header, so the table shows what is missing.
"""

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cortexmlx.metal.lab.legal.msl import KERNEL_FOLDER
from cortexmlx.metal.lab.sim.built import load
from cortexmlx.metal.lab.sim.dispatch.lines import Row, rows_of
from cortexmlx.metal.lab.sim.judge.mlx.others import KERNEL
from cortexmlx.metal.lab.sim.toolchain import mlx_headers

MARKS = ("mlx:", "custom:")
"""Prefixes of the file names of kernels. Other files belong to the simulator."""


class _Tables(ctypes.Structure):
    """The structure SimCoverage of shim/sim/counters.h."""

    _fields_ = [
        (name, ctypes.c_void_p) for name in ("base", "hit", "hit_end", "blocks", "blocks_end", "edges", "edges_end")
    ]


@dataclass
class FileCoverage:
    """One header or custom kernel: its lines with code and its branch outcomes, each with whether it ran."""

    lines: dict[int, bool] = field(default_factory=dict)
    outcomes: dict[tuple[int, int, int], bool] = field(default_factory=dict)

    @property
    def missed_lines(self) -> list[int]:
        """Lines whose code never ran."""
        return sorted(line for line, ran in self.lines.items() if not ran)

    @property
    def missed_branches(self) -> list[int]:
        """Lines of branches with an outcome that was never taken."""
        return sorted({line for (line, _, _), taken in self.outcomes.items() if not taken})


class Coverage:
    """The coverage of all added libraries, by file."""

    def __init__(self) -> None:
        self.files: dict[str, FileCoverage] = {}

    def add(self, libraries: Iterable[Path]) -> None:
        """Add what ran in these libraries since they were loaded."""
        for library in libraries:
            self._add(library)

    def _add(self, library: Path) -> None:
        ran, successors = _marks(library)
        starts = sorted(ran)
        table = rows_of(library)
        ends = dict(zip(starts, [*starts[1:], 1 << 62], strict=True))
        for start in starts:
            rows = list(_rows_between(table, start, ends[start]))
            for row in rows:
                if row.file.startswith(MARKS):
                    lines = self.files.setdefault(row.file, FileCoverage()).lines
                    lines[row.line] = lines.get(row.line, False) or ran[start]
            after = successors.get(start, [])
            if len(after) > 1 and rows and rows[-1].file.startswith(MARKS):
                outcomes = self.files[rows[-1].file].outcomes
                for number, block in enumerate(after):
                    key = (rows[-1].line, rows[-1].column, number)
                    outcomes[key] = outcomes.get(key, False) or ran[block]

    def table(self, missed: bool = False) -> str:
        """Return one line per file: lines, branch outcomes, kernel functions. With `missed`, list lines and branches
        that never ran.
        """
        out = [f"{'file':<58}{'lines':>14}{'outcomes':>16}{'kernels':>10}"]
        total = FileCoverage()
        for name, one in sorted(self.files.items()):
            out.append(self._row(name, one))
            total.lines |= {hash((name, key)): ran for key, ran in one.lines.items()}
            total.outcomes |= {(hash((name, key)), 0, 0): ran for key, ran in one.outcomes.items()}
            if missed and one.missed_lines:
                out.append(f"    lines that never ran: {_ranges(one.missed_lines)}")
            if missed and one.missed_branches:
                out.append(f"    branches that went one way: {_ranges(one.missed_branches)}")
        return "\n".join([*out, self._row("all", total)])

    @staticmethod
    def _row(name: str, one: FileCoverage) -> str:
        kernels = kernels_of(name)
        with_code = sum(any(line in one.lines for line in range(first, last)) for first, last in kernels.values())
        counts = f"{with_code}/{len(kernels)}" if kernels else ""
        return f"{name:<58}{_share(one.lines.values()):>14}{_share(one.outcomes.values()):>16}{counts:>10}"


def kernels_of(name: str) -> dict[str, tuple[int, int]]:
    """Return the first line of each kernel function of an MLX header ("mlx:scan.h"), and the first line of the next
    kernel.
    """
    if not name.startswith("mlx:"):
        return {}
    text = (mlx_headers() / KERNEL_FOLDER / name.removeprefix("mlx:").replace(":", "/")).read_text()
    found = [(match.group(1), text.count("\n", 0, match.end()) + 1) for match in KERNEL.finditer(text)]
    ends = [*[line for _, line in found[1:]], 1 << 30]
    return {kernel: (line, end) for (kernel, line), end in zip(found, ends, strict=False)}


def _share(happened: Iterable[bool]) -> str:
    each = list(happened)
    return f"{sum(each)}/{len(each)} {100 * sum(each) // len(each)}%" if each else "-"


def _ranges(numbers: list[int]) -> str:
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return " ".join(f"{a}-{b}" if b > a else str(a) for a, b in out)


def _rows_between(table: tuple[Row, ...], start: int, end: int) -> Iterator[Row]:
    """Yield the rows of the code from `start` to `end` or to the end of its function, without rows that have no
    line.
    """
    at = bisect_right(table, start, key=lambda row: row.address) - 1
    if at >= 0 and table[at].address < start and table[at].file and table[at].line:
        yield table[at]
    for row in table[bisect_left(table, start, key=lambda row: row.address) :]:
        if row.address >= end:
            return
        if not row.file:
            if row.address > start:
                return
        elif row.line:
            yield row


def _marks(library: Path) -> tuple[dict[int, bool], dict[int, list[int]]]:
    """Return, by a basic block's address in the file, whether it ran and which blocks follow it."""
    function = load(library).sim_coverage
    function.restype = ctypes.POINTER(_Tables)
    t = function().contents
    count = t.hit_end - t.hit
    hit = (ctypes.c_ubyte * count).from_address(t.hit)
    blocks = (ctypes.c_uint64 * (2 * count)).from_address(t.blocks)
    ran = {blocks[2 * i] - t.base: bool(hit[i]) for i in range(count)}
    words = iter((ctypes.c_uint64 * ((t.edges_end - t.edges) // 8)).from_address(t.edges))
    successors: dict[int, list[int]] = {}
    for block in words:
        # An entry is the block, its successors, 0, the functions that it calls, 0.
        after = list(iter(words.__next__, 0))
        for _ in iter(words.__next__, 0):
            pass
        successors[block - t.base] = [address - t.base for address in after]
    return ran, {block: [a for a in after if a in ran] for block, after in successors.items() if block in ran}
