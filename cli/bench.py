"""`cortexmlx bench`: how fast this machine runs a model, and how that compares with mlx-lm."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from cortexmlx.cli import options
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import INTERRUPTED
from cortexmlx.kv.spec import DEFAULT_BLOCK_SIZE
from cortexmlx.models.resolve import STARTER, starter_path
from cortexmlx.serving.config import EngineConfig


class Output(str, Enum):
    """How to print the outcome."""

    md = "md"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"


class Peer(str, Enum):
    """Whom to compare with."""

    mlx_lm = "mlx-lm"


class Suite(str, Enum):
    """Which comparisons to run."""

    basic = "basic"
    serving = "serving"
    all = "all"


def bench(
    model: options.Model = None,
    model_option: options.ModelOption = None,
    adapter: options.Adapter = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", metavar="N,..", help="Prompt tokens; 0: none.")] = "512",
    generate: Annotated[str, typer.Option("--generate", "-n", metavar="N,..", help="Tokens; 0: none.")] = "128",
    batch: Annotated[str, typer.Option("--batch", "-b", metavar="N,..", help="Rows at once.")] = "1",
    depth: Annotated[str, typer.Option("--depth", "-d", metavar="N,..", help="Tokens before, not timed.")] = "0",
    block_size: Annotated[str, typer.Option("--block-size", metavar="N,..", help="Tokens per KV block.")] = str(
        DEFAULT_BLOCK_SIZE
    ),
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", min=1, help="Runs, or pairs of runs.")] = 5,
    output: Annotated[Output, typer.Option("--output", "-o", help="Format.")] = Output.md,
    against: Annotated[
        Peer | None, typer.Option(help="Compare on the same weights, in turns.", show_default=False)
    ] = None,
    suite: Annotated[Suite, typer.Option(help="What to compare.")] = Suite.basic,
    case: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only cases with TEXT in their name.", show_default=False)
    ] = None,
    kv_memory: options.KVMemory = None,
    kv_bits: options.KVBits = None,
    kv_group_size: options.KVGroupSize = None,
    attention: options.Attention = EngineConfig.attention,
    seed: Annotated[int, typer.Option(min=0, help="Other random prompts.")] = 0,
) -> None:
    """Measure prefill (pp) and decode (tg) in tokens per second; lists give every combination.

    With --against the ratio cortexmlx / mlx-lm of the median pair of runs. Prompts are random and never repeat.
    """
    from cortexmlx.cpu import blas

    blas.preload()  # before mlx is imported, which the session does
    from cortexmlx.bench.session import Plan, compare_with_mlx_lm, measure_rows

    memory = options.memory_size(kv_memory)
    sizes = _numbers("--block-size", block_size, 1)
    prompts, generates = _numbers("--prompt", prompt, 0), _numbers("--generate", generate, 0)
    batches, depths = _numbers("--batch", batch, 1), _numbers("--depth", depth, 0)
    with _model(model, model_option) as (path, notes), _progress() as on_run:
        if kv_bits is not None and against is not None:
            notes += (f"{kv_bits}-bit keys and values here; mlx-lm's batches keep them in the model's dtype",)
        plan = Plan(path, notes, memory, attention, repetitions, seed, on_run, adapter, kv_bits, kv_group_size)
        if against is None:
            report = measure_rows(plan, prompts, generates, batches, depths, sizes)
        else:
            wanted = [Suite.basic, Suite.serving] if suite is Suite.all else [suite]
            report = compare_with_mlx_lm(plan, [s.value for s in wanted], case, prompts[0], generates[0], sizes[0])
    from cortexmlx.bench import report as reports

    formats = {Output.md: reports.markdown, Output.json: reports.as_json, Output.jsonl: reports.json_lines}
    print(formats.get(output, reports.as_csv)(report))
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)


@contextmanager
def _model(argument: str | None, option: str | None) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The model that was asked for; with none the starter model, or random weights where that is not installed."""
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


@contextmanager
def _progress() -> Iterator[Callable[[str], None] | None]:
    """What is running, in one line on stderr, where a person looks."""
    if not console.is_terminal(sys.stderr):
        yield None
        return
    with console.stderr().status("loading") as status:
        yield status.update


def _numbers(option: str, text: str, least: int) -> list[int]:
    """The numbers of a list like `1,4,8`. Raises typer.BadParameter."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers like 1,4,8", param_hint=option) from None
    if min(numbers) < least:
        raise typer.BadParameter(f"{min(numbers)} is below {least}", param_hint=option)
    return numbers
