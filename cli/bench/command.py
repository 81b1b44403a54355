"""`cortexmlx bench`: how fast this machine runs a model, compared with mlx-lm."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cortexmlx.cli import options
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import INTERRUPTED
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.core.config import EngineConfig
from cortexmlx.kv.spec import BLOCK_SIZES, DEFAULT_BLOCK_SIZE
from cortexmlx.models.resolve import STARTER, starter_path

if TYPE_CHECKING:
    from cortexmlx.bench.report import Report


def parse_numbers(option: str, texts: Sequence[str], minimum: int) -> list[int]:
    """Parse the distinct numbers of an option, given at once like `1,4,8` or one by one. Raises typer.BadParameter."""
    text = ",".join(texts)
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers like 1,4,8", param_hint=option) from None
    if min(numbers) < minimum:
        raise typer.BadParameter(f"{min(numbers)} is below {minimum}", param_hint=option)
    if len(set(numbers)) < len(numbers):
        raise typer.BadParameter(f"{text} names a number twice", param_hint=option)
    return numbers


def parse_block_sizes(texts: Sequence[str]) -> list[int]:
    """Parse lists of KV block sizes. Raises typer.BadParameter for a size that the engine does not support."""
    sizes = parse_numbers("--block-size", texts, 1)
    unsupported = [size for size in sizes if size not in BLOCK_SIZES]
    if unsupported:
        raise typer.BadParameter(
            f"{unsupported[0]} is none of {', '.join(map(str, BLOCK_SIZES))}", param_hint="--block-size"
        )
    return sizes


# Show on stderr what is being measured: a live line for a person, a line now and then for a log.


LOG_SECONDS = 10.0


@contextmanager
def progress_display() -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being measured: yield a function that takes the name of what runs now."""
    if not console.is_terminal(sys.stderr):
        next_time = time.monotonic() + LOG_SECONDS

        def log(message: str) -> None:
            nonlocal next_time
            if time.monotonic() >= next_time:
                console.print_note(message)
                next_time = time.monotonic() + LOG_SECONDS

        yield log
        return
    from rich.text import Text

    with console.stderr().status("starting") as status:

        def update(message: str) -> None:
            status.update(Text(to_single_line(message)))

        yield update


# The sections of `cortexmlx bench`, and the options that each takes. Other options are refused, not ignored.


class Suite(str, Enum):
    """Which set of measurements `bench` takes."""

    basic = "basic"
    serving = "serving"
    images = "images"


class BenchSection(Enum):
    """A group of bench measurements that are taken together."""

    ROWS = "basic"
    RATIOS = "basic or serving"
    IMAGES = "images"
    SPECULATION = "speculate"


SECTIONS_BY_OPTION: dict[str, set[BenchSection]] = {
    "hosts": {BenchSection.ROWS},
    "prompt": {BenchSection.ROWS, BenchSection.RATIOS},
    "generate": {BenchSection.ROWS, BenchSection.RATIOS},
    "batch": {BenchSection.ROWS, BenchSection.RATIOS, BenchSection.SPECULATION},
    "depth": {BenchSection.ROWS, BenchSection.RATIOS},
    "case": {BenchSection.RATIOS},
}
"""The sections to which an option applies. An option that is not listed applies to all."""


def choose_section(suite: Suite, against: bool, speculate: bool = False) -> BenchSection:
    """Return the section for these options. Raises typer.BadParameter if no section fits the options."""
    if speculate:
        if against or suite is not Suite.basic:
            conflicting_option = "--against" if against else f"--suite {suite.value}"
            raise typer.BadParameter(f"is measured alone: leave {conflicting_option} out", param_hint="--speculate")
        return BenchSection.SPECULATION
    if suite is Suite.images:
        if against:
            raise typer.BadParameter("--suite images has no peer to run: leave it out", param_hint="--against")
        return BenchSection.IMAGES
    if suite is Suite.serving and not against:
        raise typer.BadParameter("these cases are comparisons: add --against mlx-lm", param_hint="--suite serving")
    return BenchSection.RATIOS if against else BenchSection.ROWS


def check_options(names: Iterable[str], section: BenchSection, suite: Suite, against: bool) -> None:
    """Raise typer.BadParameter for an option that the chosen section does not use."""
    names = list(names)
    if against and "hosts" in names:
        raise typer.BadParameter("no peer shares weights that are in other processes", param_hint="--hosts")
    for name in names:
        if section in SECTIONS_BY_OPTION.get(name, set(BenchSection)):
            if name in ("prompt", "generate", "batch", "depth") and suite is Suite.serving:
                raise typer.BadParameter(
                    "the cases of --suite serving have sizes of their own", param_hint=_option_name(name)
                )
            continue
        suite_option = f"--suite {suite.value}" + (" with --against" if against else "")
        selected_option = "--speculate" if section is BenchSection.SPECULATION else suite_option
        raise typer.BadParameter(f"says nothing to {selected_option}: leave it out", param_hint=_option_name(name))


def _option_name(name: str) -> str:
    """Return a parameter's option as typed, such as `--block-size`."""
    return f"--{name.replace('_', '-')}"


class OutputFormat(str, Enum):
    """The format in which `bench` prints its results."""

    md = "md"
    json = "json"


class Peer(str, Enum):
    """The other engine to compare with."""

    mlx_lm = "mlx-lm"


PROMPT, GENERATE, BATCH, DEPTH, BLOCK_SIZE = ["512"], ["128"], ["1"], ["0"], [str(DEFAULT_BLOCK_SIZE)]


def bench(
    ctx: typer.Context,
    model: options.Model = None,
    model_option: options.ModelOption = None,
    adapter: options.Adapter = None,
    draft: options.Draft = None,
    hosts: options.Hosts = None,
    prompt: Annotated[
        list[str], typer.Option("--prompt", "-p", metavar="N,..", help="Prompt tokens; 0: none.")
    ] = PROMPT,
    generate: Annotated[
        list[str], typer.Option("--generate", "-n", metavar="N,..", help="Tokens to generate; 0: none.")
    ] = GENERATE,
    batch: Annotated[list[str], typer.Option("--batch", "-b", metavar="N,..", help="Sequences at once.")] = BATCH,
    depth: Annotated[
        list[str], typer.Option("--depth", "-d", metavar="N,..", help="Tokens before, not timed.")
    ] = DEPTH,
    block_size: Annotated[
        list[str], typer.Option("--block-size", metavar="N,..", help="Tokens per KV block.")
    ] = BLOCK_SIZE,
    repetitions: Annotated[
        int, typer.Option("--repetitions", "-r", metavar="N", min=1, help="Runs, or pairs of runs.")
    ] = 5,
    output: Annotated[OutputFormat, typer.Option("--output", "-o", help="Format.")] = OutputFormat.md,
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
    kv_memory: options.KVMemory = None,
    kv_bits: options.KVBits = None,
    kv_group_size: options.KVGroupSize = None,
    attention: options.Attention = EngineConfig.attention,
    seed: Annotated[int, typer.Option(min=0, help="Other random prompts.")] = 0,
) -> None:
    """Measure prefill (pp) and decode (tg) in tokens per second; lists give every combination.

    With --against the ratio cortexmlx / mlx-lm of the median pair of runs: of the usual cases, in sizes of --prompt and
    --generate, or with --batch or --depth of the same rows as without. Prompts are random and never repeat, and
    nothing is cached. Suites: basic (tokens per second), serving (what a paged engine is for, beside mlx-lm), images
    (of a model that sees).
    """
    section, given_names = choose_section(suite, against is not None, speculate), options.given_parameters(ctx)
    check_options(given_names, section, suite, against is not None)
    sizes, prompts = parse_block_sizes(block_size), parse_numbers("--prompt", prompt, 0)
    generates, batches = parse_numbers("--generate", generate, 0), parse_numbers("--batch", batch, 1)
    depths = parse_numbers("--depth", depth, 0)
    if section is not BenchSection.ROWS and len(sizes) > 1:
        raise typer.BadParameter(f"takes one number here, and got {len(sizes)}", param_hint="--block-size")
    memory = options.parse_memory_size(kv_memory)

    from cortexmlx.cpu import blas

    blas.preload()  # before the session imports mlx
    from cortexmlx.bench import session
    from cortexmlx.bench.measure.engines import BenchPlan
    from cortexmlx.bench.replay import report as replay
    from cortexmlx.bench.suites.against import ComparisonSizes
    from cortexmlx.bench.suites.images import measure_images
    from cortexmlx.bench.suites.rows import make_tests

    with _bench_model(model, model_option) as (path, notes), progress_display() as on_run:
        if kv_bits is not None and against is not None:
            notes += (f"{kv_bits}-bit keys and values here; mlx-lm's batches keep them in the model's dtype",)
        plan = BenchPlan(
            path, notes, memory, attention, repetitions, seed, on_run, adapter, kv_bits, kv_group_size, draft, hosts
        )
        tests = make_tests(prompts, generates, batches, depths)
        same_rows = bool({"batch", "depth"} & set(given_names))
        shape = ComparisonSizes(tuple(prompts), generates=tuple(generates), rows=tuple(tests) if same_rows else ())
        try:
            if section is BenchSection.ROWS:
                report = session.measure_rows(plan, tests, sizes)
            elif section is BenchSection.RATIOS:
                report = session.compare_with_mlx_lm(plan, suite.value, case or (), shape, sizes[0])
            elif section is BenchSection.IMAGES:
                report = measure_images(plan, sizes[0])
            else:
                report = replay.measure_speculation(plan, batches, sizes[0])
        except KeyboardInterrupt:
            console.print_note("interrupted before anything was measured")
            raise
    _output_report(report, output)


def _output_report(report: Report, output: OutputFormat) -> None:
    """Print the report. Raises typer.Exit if it was interrupted."""
    from cortexmlx.bench.report import WIDTH, as_json, as_markdown

    if output is OutputFormat.md:
        on_terminal = console.is_terminal(sys.stdout)
        width = min(WIDTH, max(20, shutil.get_terminal_size().columns)) if on_terminal else WIDTH
        console.print_result(as_markdown(report, width))
    else:
        console.print_result(as_json(report))
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)


@contextmanager
def _bench_model(argument: str | None, option: str | None) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield a model's name and notes: the given model, else the starter model, else one with random weights."""
    name = options.model_name(argument, option)
    if argument or option:
        yield name, ()
    elif starter_path() is not None:
        yield STARTER, (f"no model was named: {STARTER}",)
    else:
        from cortexmlx.bench.measure.random_model import write_random_model

        with tempfile.TemporaryDirectory(prefix="cortexmlx-bench-") as folder:
            note = "no model was named and the starter model is not installed: a small model with random weights"
            yield str(write_random_model(Path(folder))), (note,)
