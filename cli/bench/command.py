"""`cortexmlx bench`: how fast this machine runs a model, compared with mlx-lm and with earlier runs."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cortexmlx.cli import options
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import INTERRUPTED, SLOWER
from cortexmlx.cli.terminal.harmless import in_a_line
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.spec import BLOCK_SIZES, DEFAULT_BLOCK_SIZE
from cortexmlx.models.resolve import STARTER, starter_path
from cortexmlx.system.files import in_place_of

if TYPE_CHECKING:
    from cortexmlx.bench.changes.saved import Saved
    from cortexmlx.bench.measure.engines import Plan
    from cortexmlx.bench.report.report import Report


def numbers(option: str, text: str, least: int) -> list[int]:
    """Return the numbers of a list like `1,4,8`, each once. Raises typer.BadParameter."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers like 1,4,8", param_hint=option) from None
    if min(found) < least:
        raise typer.BadParameter(f"{min(found)} is below {least}", param_hint=option)
    if len(set(found)) < len(found):
        raise typer.BadParameter(f"{text} names a number twice", param_hint=option)
    return found


def block_sizes(text: str) -> list[int]:
    """Return sizes of blocks. Raises typer.BadParameter for one that no engine takes."""
    found = numbers("--block-size", text, 1)
    wrong = [size for size in found if size not in BLOCK_SIZES]
    if wrong:
        raise typer.BadParameter(f"{wrong[0]} is none of {', '.join(map(str, BLOCK_SIZES))}", param_hint="--block-size")
    return found


def only(option: str, found: list[int], why: str) -> int:
    """Return the one number of a list. Raises typer.BadParameter if there are several."""
    if len(found) > 1:
        raise typer.BadParameter(f"takes one number {why}, and here are {len(found)}", param_hint=option)
    return found[0]


def promise(text: str) -> tuple[float, float]:
    """Return the seconds to the first token and per token, from a text like `ttft:2000,tpot:200` (milliseconds). A
    missing one is not limited. Raises typer.BadParameter.
    """
    limits = {"ttft": float("inf"), "tpot": float("inf")}
    for part in text.split(","):
        name, _, value = part.partition(":")
        try:
            seconds = float(value) / 1_000
        except ValueError:
            seconds = 0.0
        if name not in limits or not seconds > 0:
            wrong = f"{part!r} is not like ttft:2000 or tpot:200, in milliseconds"
            raise typer.BadParameter(wrong, param_hint="--goodput")
        limits[name] = seconds
    return limits["ttft"], limits["tpot"]


# Show on stderr what is being measured: a live line for a person, a line now and then for a log.


LOG_SECONDS = 10.0


@contextmanager
def shown() -> Iterator[Callable[[str], None]]:
    """Yield a function that is called with the name of what is running."""
    if not console.is_terminal(sys.stderr):
        yield _Log()
        return
    from rich.text import Text

    with console.stderr().status("starting") as status:

        def update(what: str) -> None:
            status.update(Text(in_a_line(what)))

        yield update


class _Log:
    """A log that prints a line only if the last one is `LOG_SECONDS` ago."""

    def __init__(self) -> None:
        self._next = time.monotonic() + LOG_SECONDS

    def __call__(self, what: str) -> None:
        if time.monotonic() >= self._next:
            console.note(what)
            self._next = time.monotonic() + LOG_SECONDS


# The sections of `cortexmlx bench`, and the options that each takes. Other options are refused, not ignored.


class Suite(str, Enum):
    """What to measure."""

    basic = "basic"
    serving = "serving"
    trace = "trace"
    pool = "pool"
    allocator = "allocator"
    kernel = "kernel"
    all = "all"


class Section(Enum):
    """A group of measurements that are taken together."""

    ROWS = "basic"
    RATIOS = "basic or serving"
    TRACE = "trace"
    POOL = "pool"
    ALLOCATOR = "allocator"
    KERNEL = "kernel"
    SPECULATION = "speculate"


_ENGINES = {Section.ROWS, Section.RATIOS, Section.TRACE, Section.SPECULATION}

TAKEN: dict[str, Collection[Section]] = {
    "model": _ENGINES,
    "model_option": _ENGINES,
    "adapter": _ENGINES,
    "draft": _ENGINES,
    "hosts": {Section.ROWS, Section.TRACE},
    "prompt": {Section.ROWS, Section.RATIOS},
    "generate": {Section.ROWS, Section.RATIOS},
    "batch": {Section.ROWS, Section.RATIOS, Section.SPECULATION},
    "depth": {Section.ROWS, Section.RATIOS},
    "block_size": set(Section),
    "repetitions": set(Section),
    "case": {Section.RATIOS},
    "requests": {Section.TRACE},
    "request_rate": {Section.TRACE},
    "goodput": {Section.TRACE},
    "kv_memory": _ENGINES,
    "kv_bits": _ENGINES,
    "kv_group_size": _ENGINES,
    "attention": {*_ENGINES, Section.KERNEL},
    "seed": {*_ENGINES, Section.ALLOCATOR},
}
"""The sections to which an option applies. An option that is not listed applies to all."""


def sections(suite: Suite, against: bool, speculate: bool = False) -> list[Section]:
    """Return the sections of a suite, or of `speculate`. Raises typer.BadParameter if the suite is empty with, or
    without, a peer.
    """
    if speculate:
        if against or suite is not Suite.basic:
            other = "--against" if against else f"--suite {suite.value}"
            raise typer.BadParameter(f"is measured alone: leave {other} out", param_hint="--speculate")
        return [Section.SPECULATION]
    speed = Section.RATIOS if against else Section.ROWS
    if suite is Suite.all:
        return [speed, Section.TRACE, Section.POOL, Section.ALLOCATOR, Section.KERNEL]
    if suite is Suite.serving and not against:
        raise typer.BadParameter("these cases are comparisons: add --against mlx-lm", param_hint="--suite serving")
    found = {Suite.basic: speed, Suite.serving: speed}.get(suite)
    chosen = Section[suite.value.upper()] if found is None else found
    if against and chosen not in (Section.RATIOS, Section.TRACE):
        raise typer.BadParameter(f"--suite {suite.value} has no peer to run: leave it out", param_hint="--against")
    return [chosen]


def check_options(names: Iterable[str], chosen: Collection[Section], suite: Suite, against: bool) -> None:
    """Raise typer.BadParameter for an option that applies to none of the sections."""
    names = list(names)
    if against and "hosts" in names:
        raise typer.BadParameter("no peer shares weights that are in other processes", param_hint="--hosts")
    for name in names:
        if name not in TAKEN or set(TAKEN[name]) & set(chosen):
            if name in ("prompt", "generate", "batch", "depth") and suite is Suite.serving:
                raise typer.BadParameter("the cases of --suite serving have sizes of their own", param_hint=_hint(name))
            continue
        suited = f"--suite {suite.value}" + (" with --against" if against else "")
        asked = "--speculate" if Section.SPECULATION in chosen else suited
        raise typer.BadParameter(f"says nothing to {asked}: leave it out", param_hint=_hint(name))


def _hint(name: str) -> str:
    return "MODEL" if name == "model" else "--model" if name == "model_option" else f"--{name.replace('_', '-')}"


REPETITIONS = 5
COMPARED = 20
"""Repetitions if rows are saved or compared. They are measured in half as many rounds."""

FEWEST_ROUNDS = 5
"""Rounds, at least, if there are enough repetitions. With fewer rounds, nobody knows how much rounds differ."""


class Output(str, Enum):
    """The format in which the outcome is printed."""

    md = "md"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"


class Peer(str, Enum):
    """The program to compare with."""

    mlx_lm = "mlx-lm"


def bench(
    ctx: typer.Context,
    model: options.Model = None,
    model_option: options.ModelOption = None,
    adapter: options.Adapter = None,
    draft: options.Draft = None,
    hosts: options.Hosts = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", metavar="N,..", help="Prompt tokens; 0: none.")] = "512",
    generate: Annotated[
        str, typer.Option("--generate", "-n", metavar="N,..", help="Tokens to generate; 0: none.")
    ] = "128",
    batch: Annotated[str, typer.Option("--batch", "-b", metavar="N,..", help="Sequences at once.")] = "1",
    depth: Annotated[str, typer.Option("--depth", "-d", metavar="N,..", help="Tokens before, not timed.")] = "0",
    block_size: Annotated[str, typer.Option("--block-size", metavar="N,..", help="Tokens per KV block.")] = str(
        DEFAULT_BLOCK_SIZE
    ),
    repetitions: Annotated[
        int | None,
        typer.Option(
            "--repetitions",
            "-r",
            metavar="N",
            min=1,
            help=f"Runs, or pairs of runs: {REPETITIONS}, or {COMPARED} of what --save or --compare keep.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Format.")] = Output.md,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep this run.", show_default=False)] = None,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Say what changed since; exit code 3: slower.", show_default=False),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw it.", show_default=False)] = None,
    against: Annotated[
        Peer | None, typer.Option(help="Compare on the same weights, in turns.", show_default=False)
    ] = None,
    speculate: Annotated[bool, typer.Option("--speculate", help="What drafts save, on texts that are known.")] = False,
    suite: Annotated[Suite, typer.Option(help="What to measure.")] = Suite.basic,
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="With --against: cases with TEXT in their name; may be repeated.", show_default=False
        ),
    ] = None,
    requests: Annotated[int, typer.Option(metavar="N", min=2, help="Of a trace.")] = 32,
    request_rate: Annotated[float, typer.Option(metavar="X", help="Requests a second, on average.")] = 1.0,
    goodput: Annotated[
        str, typer.Option(metavar="LIMITS", help="Milliseconds that a good request of a trace keeps.")
    ] = "ttft:2000,tpot:200",
    kv_memory: options.KVMemory = None,
    kv_bits: options.KVBits = None,
    kv_group_size: options.KVGroupSize = None,
    attention: options.Attention = EngineConfig.attention,
    seed: Annotated[int, typer.Option(min=0, help="Other random prompts.")] = 0,
) -> None:
    """Measure prefill (pp) and decode (tg) in tokens per second; lists give every combination.

    With --against the ratio cortexmlx / mlx-lm of the median pair of runs: of the usual cases, in sizes of --prompt and
    --generate, or with --batch or --depth of the same rows as without. Prompts are random and never repeat, and
    nothing is cached, but for the shared system prompts of a trace. Suites: basic (tokens per second), serving (what a
    paged engine is for, beside mlx-lm), trace (requests at random times), pool, allocator and kernel (KV memory).
    """
    chosen, given = sections(suite, against is not None, speculate), options.given(ctx)
    check_options(given, chosen, suite, against is not None)
    if not 0 < request_rate < float("inf"):
        raise typer.BadParameter("must be above 0, and finite", param_hint="--request-rate")
    sizes, prompts = block_sizes(block_size), numbers("--prompt", prompt, 0)
    generates, batches = numbers("--generate", generate, 0), numbers("--batch", batch, 1)
    depths = numbers("--depth", depth, 0)
    if chosen != [Section.ROWS]:
        only("--block-size", sizes, "here")
    ttft, tpot = promise(goodput)
    memory = options.memory_size(kv_memory)

    from cortexmlx.cpu import blas

    blas.preload()  # before the session imports mlx
    from cortexmlx.bench import parts, session
    from cortexmlx.bench.measure.engines import Plan
    from cortexmlx.bench.replay import report as replay
    from cortexmlx.bench.suites.against import Shape
    from cortexmlx.bench.suites.arrivals import Promise, Traffic
    from cortexmlx.bench.suites.rows import tests

    saved = _prepared(save, compare, plot)
    needs_model = bool({Section.ROWS, Section.RATIOS, Section.TRACE, Section.SPECULATION} & set(chosen))
    with _model(model, model_option, needs_model) as (path, notes), shown() as on_run:
        if kv_bits is not None and against is not None:
            notes += (f"{kv_bits}-bit keys and values here; mlx-lm's batches keep them in the model's dtype",)
        count = repetitions or REPETITIONS
        plan = Plan(path, notes, memory, attention, count, seed, on_run, adapter, kv_bits, kv_group_size, draft, hosts)
        rows = _in_rounds(plan, repetitions) if save is not None or compare is not None else plan
        wanted = tests(prompts, generates, batches, depths)
        same_rows = bool({"batch", "depth"} & set(given))
        shape = Shape(tuple(prompts), generates=tuple(generates), rows=tuple(wanted) if same_rows else ())
        suites = [s.value for s in (Suite.basic, Suite.serving) if suite in (s, Suite.all)]
        traffic, peer = Traffic(requests, request_rate), against is not None
        steps: dict[Section, Callable[[], Report]] = {
            Section.ROWS: lambda: session.measure_rows(rows, wanted, sizes),
            Section.RATIOS: lambda: session.compare_with_mlx_lm(plan, suites, case or (), shape, sizes[0]),
            Section.TRACE: lambda: session.measure_trace(plan, traffic, Promise(ttft, tpot), peer, sizes[0]),
            Section.POOL: lambda: parts.measure_pool(sizes[0], count, on_run),
            Section.ALLOCATOR: lambda: parts.measure_allocator(sizes[0], count, seed, on_run),
            Section.KERNEL: lambda: parts.measure_kernel(sizes[0], attention, count, on_run),
            Section.SPECULATION: lambda: replay.measure_speculation(plan, batches, sizes[0]),
        }
        report = _all([steps[section] for section in chosen])
    _finish(report, output, save, compare, plot, saved)


def _in_rounds(plan: Plan, repetitions: int | None) -> Plan:
    """Measure with a new engine for every other repetition: a comparison must know how much engines differ."""
    count = repetitions or COMPARED
    return replace(plan, repetitions=count, rounds=min(count, max(FEWEST_ROUNDS, count // 2)))


def _all(steps: Sequence[Callable[[], Report]]) -> Report:
    """Yield one section after the other. An interrupt ends the run with the sections so far; before the first, it is
    raised.
    """
    from cortexmlx.bench.session import INTERRUPTED as INTERRUPTED_NOTE
    from cortexmlx.bench.session import combined

    reports: list[Report] = []
    try:
        for step in steps:
            reports.append(step())
            if reports[-1].interrupted:
                break
    except KeyboardInterrupt:
        if not reports:
            console.note("interrupted before anything was measured")
            raise
        notes = (*reports[-1].notes, INTERRUPTED_NOTE)
        reports[-1] = replace(reports[-1], interrupted=True, notes=notes)
    return combined(reports)


def _prepared(save: Path | None, compare: Path | None, plot: Path | None) -> Saved | None:
    """Return the run to compare with. Errors that would come after minutes are raised here."""
    from cortexmlx.bench.changes import compared, saved
    from cortexmlx.bench.measure.machine import Machine

    if save is not None:
        saved.check_new(save)
    if plot is not None:
        _check_plot(plot)
        if save is not None and save.absolute() == plot.absolute():
            raise typer.BadParameter(f"{plot} is where --save keeps the run", param_hint="--plot")
    if compare is None:
        return None
    before = saved.read(compare)
    compared.check_machine(before, Machine.here(), compare)
    return before


def _check_plot(plot: Path) -> None:
    """Raise typer.BadParameter unless a picture can be written to that file. An older picture may be replaced."""
    from cortexmlx.bench.changes import saved

    if plot.suffix != ".svg":
        raise typer.BadParameter(f"{plot} does not end with .svg", param_hint="--plot")
    if not plot.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {plot.parent}", param_hint="--plot")
    if plot.exists() and not (plot.is_file() and plot.read_bytes().startswith(b"<svg")):
        raise typer.BadParameter(f"{plot} exists and is no picture of this kind", param_hint="--plot")
    saved.check_writable(plot)


def _finish(
    report: Report, output: Output, save: Path | None, compare: Path | None, plot: Path | None, before: Saved | None
) -> None:
    """Compare, save, draw and print; return the exit code. Measurements are saved even if nobody reads the output, and
    printed if they cannot be saved.
    """
    from cortexmlx.bench.changes import compared, saved
    from cortexmlx.bench.report import chart, formats, svg, text

    now, kept, worse = saved.of_report(report), report, False
    other: InvalidRequest | None = None
    if before is not None and compare is not None:
        try:
            compared.check_model(before, now, compare)
            found = compared.outcomes(before, now)
            worse = compared.slower(found)
            report = replace(report, parts=(*report.parts, compared.part(before, now, found, compare)))
        except InvalidRequest as error:
            other = error  # measurements are shown and kept anyway
    failed: list[OSError] = []
    try:
        if save is not None and not report.interrupted:
            saved.save(kept, save)
        if plot is not None:
            with in_place_of(plot) as file:
                file.write(svg.picture(report).encode())
    except OSError as error:
        failed.append(error)
    if output is Output.md:
        seen = console.is_terminal(sys.stdout)
        width = min(text.WIDTH, max(20, shutil.get_terminal_size().columns)) if seen else text.WIDTH
        console.say(text.markdown(report, width))
        if seen and (drawn := chart.chart([bar for part in report.parts for bar in part.bars], width)):
            console.say(f"\n{drawn}")
    else:
        console.say(
            {Output.json: formats.as_json, Output.jsonl: formats.json_lines}.get(output, formats.as_csv)(report)
        )
    if failed:
        raise failed[0]
    if report.interrupted:
        if save is not None:
            console.note(f"interrupted: {save} was not written")
        raise typer.Exit(INTERRUPTED)
    if other is not None:
        raise other
    if worse:
        raise typer.Exit(SLOWER)


@contextmanager
def _model(argument: str | None, option: str | None, needed: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return the given model, or else the starter model, or random weights if that is not installed."""
    name = options.model_name(argument, option)
    if argument or option or not needed:
        yield name, ()
    elif starter_path() is not None:
        yield STARTER, (f"no model was named: {STARTER}",)
    else:
        from cortexmlx.bench.measure.random_model import write_random_model

        with tempfile.TemporaryDirectory(prefix="cortexmlx-bench-") as folder:
            note = "no model was named and the starter model is not installed: a small model with random weights"
            yield str(write_random_model(Path(folder))), (note,)
