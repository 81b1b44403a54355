"""The outcome of a benchmark as Markdown for people, or as JSON, JSON lines or CSV for programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cortexmlx.bench.measure.machine import Machine
from cortexmlx.bench.measure.pairs import Comparison
from cortexmlx.bench.suites.rows import Row
from cortexmlx.stats import ModelInfo

GIB = 1024**3

ROW_HEADINGS = (
    "test",
    "block",
    "batch",
    "tok/s",
    "CPU ms/tok",
    "KV GiB",
    "peak GiB",
    "plan",
    "build",
    "wait",
    "commit",
)
COMPARISON_HEADINGS = ("case", "measure", "cortexmlx", "mlx-lm", "ratio", "min to max", "by CPU time", "target", "met")


@dataclass(frozen=True)
class Report:
    """Everything that one `cortexmlx bench` measured. `notes` are lines that a reader must know; `interrupted` if not
    all that was asked for is there.
    """

    machine: Machine
    model: ModelInfo
    rows: tuple[Row, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()
    interrupted: bool = False

    def header(self) -> list[str]:
        """Machine, model and notes, one line each."""
        model = f"{self.model.name}: {self.model.parameters / 1e6:.0f}M parameters, {self.model.architecture}"
        return [
            *self.machine.lines(),
            f"{model}, {self.model.dtype}, {self.model.weight_bytes / GIB:.2f} GiB",
            *self.model.notes,
            *self.notes,
        ]


def markdown(report: Report) -> str:
    """Tables under the header's lines."""
    parts = ["\n".join(f"- {line}" for line in report.header())]
    if report.rows:
        parts.append(_table(ROW_HEADINGS, [_row_cells(row) for row in report.rows]))
        parts.append("plan, build, wait and commit: milliseconds per step. tok/s: mean ± standard deviation.")
    if report.comparisons:
        parts.append(_table(COMPARISON_HEADINGS, [_comparison_cells(c) for c in report.comparisons]))
        parts.append("\n".join(_raw(c) for c in report.comparisons))
    return "\n\n".join(parts)


def as_json(report: Report) -> str:
    """One object: machine, model, notes, rows, comparisons."""
    shell = {"machine": asdict(report.machine), "model": asdict(report.model), "notes": report.notes}
    figures = {"rows": [_record(r) for r in report.rows], "comparisons": [_record(c) for c in report.comparisons]}
    return json.dumps({**shell, **figures}, indent=2)


def json_lines(report: Report) -> str:
    """One object per row or comparison, each with machine and model."""
    around = {"machine": asdict(report.machine), "model": report.model.name, "notes": report.notes}
    return "\n".join(json.dumps({**record, **around}) for record in _records(report))


def as_csv(report: Report) -> str:
    """One line per row or comparison; lists are joined by spaces."""
    around = {"model": report.model.name, "chip": report.machine.chip, "blas": report.machine.blas}
    records = [{**record, **around} for record in _records(report)]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for record in records for key in record)))
    writer.writeheader()
    for record in records:
        flat = {k: " ".join(f"{x:.6g}" for x in v) if isinstance(v, (list, tuple)) else v for k, v in record.items()}
        writer.writerow(flat)
    return out.getvalue().rstrip("\n")


def _records(report: Report) -> list[dict[str, Any]]:
    return [*map(_record, report.rows), *map(_record, report.comparisons)]


def _record(item: Row | Comparison) -> dict[str, Any]:
    if isinstance(item, Row):
        return {
            "test": item.test.name,
            "prompt": item.test.prompt,
            "generate": item.test.generate,
            "batch": item.test.batch,
            "depth": item.test.depth,
            "block_size": item.block_size,
            "mean_tokens_per_second": item.mean,
            "standard_deviation": item.deviation,
            "tokens_per_second": item.rates,
            "cpu_ms_per_token": item.cpu_ms_per_token,
            "kv_bytes": item.kv_bytes,
            "peak_bytes": item.peak_bytes,
            **{f"{part}_ms": value for part, value in asdict(item.split).items() if part != "steps"},
        }
    derived = {"ratio": item.ratio, "ratios": item.ratios, "cpu_ratio": item.cpu_ratio, "met": item.met}
    return {**asdict(item), "better": item.better.value, **derived}


def _row_cells(row: Row) -> list[str]:
    split = row.split
    return [
        row.test.name,
        str(row.block_size),
        str(row.test.batch),
        f"{row.mean:.2f} ± {row.deviation:.2f}",
        f"{row.cpu_ms_per_token:.2f}",
        f"{row.kv_bytes / GIB:.3f}",
        f"{row.peak_bytes / GIB:.2f}",
        *(f"{ms:.2f}" for ms in (split.plan, split.build, split.wait, split.commit)),
    ]


def _comparison_cells(c: Comparison) -> list[str]:
    return [
        c.case,
        f"{c.measure}, {c.unit}",
        _number(sorted(c.ours)[len(c.ours) // 2]),
        _number(sorted(c.theirs)[len(c.theirs) // 2]),
        f"{c.ratio:.2f}x",
        f"{min(c.ratios):.2f} to {max(c.ratios):.2f}",
        "" if c.cpu_ratio is None else f"{c.cpu_ratio:.2f}x",
        f"{c.better.value} {c.target:g}x",
        "yes" if c.met else "no",
    ]


def _raw(c: Comparison) -> str:
    ours, theirs = (", ".join(_number(x) for x in side) for side in (c.ours, c.theirs))
    same = f"same tokens in {c.same_tokens} of {c.requests} requests"
    return f"- {c.case}, {c.measure} ({c.what}): cortexmlx {ours}; mlx-lm {theirs} {c.unit}; {same}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in (headings, *rows)) for i in range(len(headings))]
    left = 2 if headings is COMPARISON_HEADINGS else 1

    def line(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 1) + ("-" if i < left else ":") for i, w in enumerate(widths))
    return "\n".join([line(headings), f"|{rule}|", *map(line, rows)])
