"""The report's section about speed: a table in the form of llama-bench's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cortexmlx.bench.report.report import GIB
from cortexmlx.bench.report.section import ReportSection, ReportTable
from cortexmlx.bench.suites.rows import TestResult
from cortexmlx.stats import ModelInfo

BELOW = (
    "pp: prompt tokens per second up to the first token; tg: generated tokens per second; mean ± standard deviation of "
    "the runs. batch: sequences at once, whose tokens are counted together. Behind @ d: tokens that were there before, "
    "not timed.",
    "KV: what keys and values of the running sequences took at most; peak: all that MLX held, weights too.",
)


def speed_section(rows: Sequence[TestResult], model: ModelInfo, backend: str) -> ReportSection:
    """Return the section about speed, with the columns of llama-bench, and below it a table of memory."""
    core = (
        model.name.rstrip("/").rpartition("/")[2],
        f"{model.weight_bytes / 2**20:,.1f} MiB",
        _format_count(model.parameters),
        backend,
    )
    batches = any(row.test.batch > 1 for row in rows)
    cells = []
    for row in rows:
        sizes = (str(row.block_size), *((str(row.test.batch),) if batches else ()))
        cells.append((*core, *sizes, row.test.name, f"{row.mean:.2f} ± {row.deviation:.2f}"))
    spare = ("model", "size", "params", "backend")
    headings = (*spare, "block", *(("batch",) if batches else ()), "test", "t/s")
    speed = ReportTable(headings, tuple(cells), 1, spare)
    memory = ReportTable(
        ("test", "block", "batch", "KV MiB", "peak GiB"),
        tuple(
            (
                r.test.name,
                str(r.block_size),
                str(r.test.batch),
                f"{r.kv_bytes / 2**20:,.1f}",
                f"{r.peak_bytes / GIB:.2f}",
            )
            for r in rows
        ),
        1,
        ("peak GiB",),
    )
    return ReportSection(
        "rows",
        "Speed",
        (speed, memory),
        BELOW,
        tuple(map(_json_record, rows)),
    )


def _format_count(parameters: int) -> str:
    """Return a number of parameters in millions or billions."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def _json_record(row: TestResult) -> dict[str, Any]:
    return {
        "test": row.test.name,
        "prompt": row.test.prompt,
        "generate": row.test.generate,
        "batch": row.test.batch,
        "depth": row.test.depth,
        "block_size": row.block_size,
        "mean_tokens_per_second": row.mean,
        "standard_deviation": row.deviation,
        "tokens_per_second": row.rates,
        "tokens": row.tokens,
        "cpu_ms_per_token": row.cpu_ms_per_token,
        "kv_bytes": row.kv_bytes,
        "peak_bytes": row.peak_bytes,
        **{f"{part}_ms": value for part, value in asdict(row.split).items() if part != "steps"},
    }
