"""The report's sections about KV memory: its writes and its reads."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from cortexmlx.bench.measure.pairs import BetterDirection
from cortexmlx.bench.measure.yardstick import MEMORY
from cortexmlx.bench.report.section import ChartBar, FigureSeries, ReportSection, ReportTable
from cortexmlx.bench.report.text import format_number
from cortexmlx.bench.suites.kernels import KernelSpeed
from cortexmlx.bench.suites.pool import NAIVE, POOL, PoolSizes, WriterResult
from cortexmlx.stats import TimedChoice

TARGET = 3.0
"""How many times as fast as a buffer for each block a pool should be."""


def pool_section(results: Sequence[WriterResult], sizes: PoolSizes) -> ReportSection:
    """Return the section about writing keys and values: the tokens per second of each way."""
    naive_rate = next(median(w.rates) for w in results if w.name == NAIVE)
    pool_rate = next(median(w.rates) for w in results if w.name == POOL)
    rows = tuple(
        (
            w.name,
            format_number(median(w.rates)),
            f"{format_number(min(w.rates))} to {format_number(max(w.rates))}",
            f"{median(w.rates) / naive_rate:.2f}x",
            f"{w.bytes_added / 2**20:.1f}",
        )
        for w in results
    )
    table = ReportTable(
        ("keys and values in", "tokens/s", "of all runs", "of naive", "MiB added"),
        rows,
        1,
        ("of all runs", "MiB added"),
    )
    notes = (
        f"{sizes.rows} sequences of {sizes.tokens} tokens, {sizes.layers} layers, {sizes.heads} KV heads of "
        f"{sizes.dim}, float16, blocks of {sizes.block}; a token of every sequence at a time, waited for. All was "
        "read back and is what was written.",
        f"{POOL} beside {NAIVE}: {pool_rate / naive_rate:.1f}x, target {TARGET:g}x: "
        f"{'met' if pool_rate >= TARGET * naive_rate else 'missed'}",
        "MiB added: what MLX holds more after the last token than before the first. mlx-lm's cache is for rows of one "
        "length that share nothing.",
    )
    records = tuple(
        {
            "way": w.name,
            "tokens_per_second": w.rates,
            "of_naive": median(w.rates) / naive_rate,
            "bytes_added": w.bytes_added,
        }
        for w in results
    )
    bars = tuple(
        ChartBar("pool", w.name, "tokens per second", median(w.rates), min(w.rates), max(w.rates)) for w in results
    )
    series = tuple(
        FigureSeries(f"pool, {w.name}", "t/s", BetterDirection.HIGHER, w.rates, MEMORY)
        for w in results
        if w.name == POOL
    )
    return ReportSection("pool", "Pool of blocks", (table,), notes, records, bars, series)


def _min_max(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _peak_share(speed: KernelSpeed) -> str:
    """Return the share of the memory's peak bandwidth that a kernel reached."""
    return f"{median(speed.rates) / speed.peak:.0%}"


def _peak_range(speeds: Sequence[KernelSpeed]) -> str:
    """Return the lowest and the highest peak bandwidth as text."""
    return " to ".join(dict.fromkeys(f"{end:.1f}" for end in _min_max([speed.peak for speed in speeds])))


def kernel_section(speeds: Sequence[KernelSpeed], peak: str, gpu: bool) -> ReportSection:
    """Return the section about decode attention: the bandwidth of each kernel."""
    rows = tuple(
        (
            s.shape.name,
            s.kernel,
            f"{median(s.rates):.1f}",
            "{:.1f} to {:.1f}".format(*_min_max(s.rates)),
            _peak_share(s),
        )
        for s in speeds
    )
    table = ReportTable(("decode attention", "kernel", "GB/s", "of all runs", "of peak"), rows, 2, ("of all runs",))
    implementation = (
        "the Metal kernels" if gpu else "the reference path, since MLX runs on a CPU here: no kernel of ours"
    )
    note = (
        f"GB/s of keys and values, median run; peak: {_peak_range(speeds)} GB/s, {peak}. cortexmlx: {implementation}, "
        "on blocks in random order; MLX: its scaled_dot_product_attention on contiguous arrays."
    )
    records = tuple(
        {"shape": s.shape.name, "kernel": s.kernel, "gigabytes_per_second": s.rates, "peak": s.peak} for s in speeds
    )
    bars = tuple(
        ChartBar("decode attention", f"{s.kernel}, {s.shape.name}", "GB/s", median(s.rates), *_min_max(s.rates))
        for s in speeds
    )
    return ReportSection("kernel", "Decode attention", (table,), (note,), records, bars)


# The ways of decode attention in a report.


def choices_section(choices: Sequence[TimedChoice]) -> ReportSection:
    """Return the section about autotuning: each candidate's time, fastest first, and the one an engine would use."""
    rows = tuple(
        (choice.batch, name, f"{seconds * 1e6:,.0f}", "serves" if name == choice.chosen else "")
        for choice in choices
        for name, seconds in sorted(choice.seconds.items(), key=lambda each: each[1])
    )
    refusals = sorted(
        {f"{name} cannot serve: {reason}" for choice in choices for name, reason in choice.refused.items()}
    )
    notes = (
        "Microseconds of one layer's attention, median. The fastest way serves, unless the rules' choice is nearly as "
        "fast. Classes with one way are left out.",
        *refusals,
    )
    records = tuple(
        {
            "job": choice.job,
            "batch": choice.batch,
            "chosen": choice.chosen,
            "seconds": dict(choice.seconds),
            "refused": dict(choice.refused),
        }
        for choice in choices
    )
    table = ReportTable(("decode attention", "way", "us", ""), rows, 2)
    return ReportSection("choices", "Ways of decode attention", (table,), notes, records)
