"""`cortexmlx batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import os
import stat
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from cortexmlx.cli import engine as engines
from cortexmlx.cli import options
from cortexmlx.cli.batch.files import BatchFiles
from cortexmlx.cli.batch.input import BatchReader, RequestIds, read_ids
from cortexmlx.cli.batch.resume import RunIdentity, skip_done
from cortexmlx.cli.batch.run import BatchRun
from cortexmlx.cli.files.outputs import STDOUT, choose_mode, output_path
from cortexmlx.cli.files.source import STDIN, InputFormat, is_jsonl, open_lines
from cortexmlx.cli.limits import FORM_CUT
from cortexmlx.cli.prompts import check_variables, parse_template_vars, prepare_prompt
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import FAILED
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.cli.terminal.text import format_duration
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.protocols.batch import RecordBuilder
from cortexmlx.server.model_pool import client_model_name
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


LIVE_SECONDS = 0.25
LOG_SECONDS = 10.0


class BatchStatusLine:
    """The status line of a batch run on stderr, shown from a thread while its context is open: live on a terminal, or a
    line every ten seconds in a log. It says how many requests are done, failed, running and waiting.

    - `done_before`: requests of the `total` that an earlier run finished. They count as done, but not for the time
      left.
    - `live`: False if the results may come to the same terminal, as from `| head`. No live line is then drawn there.
    """

    def __init__(self, engine: Engine, run: BatchRun, *, total: int | None, live: bool, done_before: int = 0) -> None:
        self._engine = engine
        self._run = run
        self._done_before = done_before
        self._total = total
        self._status: Any = None
        if console.is_terminal(sys.stderr) and live:
            from rich.status import Status

            self._status = Status("starting", console=console.stderr())
        self._interval = LIVE_SECONDS if self._status else LOG_SECONDS
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="cortexmlx-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop_event.set()
        self._thread.join()
        if self._status:
            with console.PRINTING:
                self._status.stop()

    def _refresh(self) -> None:
        """Show the status again and again until the context ends."""
        from rich.text import Text

        while not self._stop_event.wait(self._interval):
            try:
                line = self._status_text()
            except CortexError:  # the engine has ended; the run reports it
                return
            if self._status:
                self._status.update(Text(line))
            else:
                console.print_note(line)

    def _status_text(self) -> str:
        """Return the status line: requests done, failed, running and waiting, and the speed."""
        stats, run = self._engine.stats(), self._run
        elapsed_seconds = run.seconds
        done_count = self._done_before + run.done_count
        running_count, waiting_count = stats.rows_running, stats.rows_waiting
        if self._total is not None:  # the engine knows a few requests at a time; the rest waits, too
            running_count = min(running_count, self._total - done_count)
            waiting_count = self._total - done_count - running_count
        parts = [
            f"{done_count}/{self._total} done" if self._total is not None else f"{done_count} done",
            *([f"{run.failed_count} failed"] if run.failed_count else []),
            f"{running_count} running",
            f"{waiting_count} waiting",
            f"{stats.generated_tokens / elapsed_seconds:.0f} tok/s",
            f"KV {format_bytes(stats.kv_bytes_in_use)} of {format_bytes(stats.kv_bytes_limit)}",
        ]
        answered_count = run.done_count - run.failed_count  # most errors come at once and say nothing about the others
        if self._total is not None and answered_count > 0:
            remaining_count = max(self._total - done_count, 0)
            expected_seconds = run.last_answer_seconds * (1 + remaining_count / answered_count)
            seconds_left = expected_seconds - elapsed_seconds  # counts down until the next one is done
            parts.append(f"{format_duration(max(seconds_left, 0.0))} left")
        return " · ".join(parts)


@options.add_sampling_options(excluded=("presence_penalty", "frequency_penalty"))
@options.add_engine_options(has_store=True)
def batch(
    positional: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] IN", help="The model, as for generate, and the file: JSONL, plain lines, or -."
        ),
    ],
    model_option: options.ModelOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT", help="Default, and -: stdout.", show_default=False)
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option("--errors", metavar="FILE", help="Where error records go; default: OUT.", show_default=False),
    ] = None,
    ordered: Annotated[
        bool, typer.Option("--ordered/--unordered", help="In the end in the order of IN, or as they finish.")
    ] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Go on: leave out what OUT holds already.")] = False,
    retry_errors: Annotated[
        bool,
        typer.Option("--retry-errors", help="With --resume: ask again what failed or ended before its form was whole."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Begin again, and lose what OUT holds.")] = False,
    input_format: Annotated[InputFormat, typer.Option("--format", help="How to read IN.")] = InputFormat.auto,
    system: options.System = None,
    fetch_images: options.FetchImages = None,
    images_from: Annotated[
        Path | None,
        typer.Option(
            "--images-from", metavar="DIR", help="Read the images that lines name in DIR.", show_default=False
        ),
    ] = None,
    template_var: options.TemplateVar = None,
    think: options.Think = None,
    *,
    params: SamplingParams,
    raw: Annotated[
        bool, typer.Option("--raw/--chat", help="Prompts as they are, or through the chat template.")
    ] = False,
    config: EngineConfig,
) -> None:
    """Answer every request of a file: one JSON record each, in input order.

    IN is OpenAI batch JSONL (custom_id, url, body), simple JSONL (prompt or messages, optional id and sampling
    parameters) or plain lines. A line that is no request becomes an error record with its line number. Every record is
    on disk as soon as it is there. Exit code: 0 all good, 1 if a record is an error, 130 on Ctrl-C, what has finished
    kept.
    """
    if len(positional) > 2:
        raise typer.BadParameter(f"{len(positional)} arguments, but MODEL and IN are two: {' '.join(positional)}")
    *model_arguments, source = positional
    model = options.model_name(model_arguments[0] if model_arguments else None, model_option)
    if model_arguments and not model.endswith(".gguf") and Path(model).is_file():
        raise typer.BadParameter(f"{model} is no model: type `cortexmlx batch MODEL {model} -o OUT`")
    has_model, is_readable = model_arguments or model_option, Path(source).exists() and not Path(source).is_dir()
    if not has_model and source != STDIN and not is_jsonl(source, input_format) and not is_readable:
        raise typer.BadParameter(f"{source} is no file. If it is the model: `cortexmlx batch {source} FILE`")
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, which --raw leaves out")
    variables = parse_template_vars(template_var, think, raw=raw)
    out_path = output_path(output)
    read_elsewhere = options.make_linked_image_reader(fetch_images, images_from)
    errors = None if errors is None or output_path(errors) == out_path == STDOUT else output_path(errors)
    mode = choose_mode(out_path, resume=resume, retry_errors=retry_errors, force=force)
    kv = (config.kv_bits, config.kv_group_size, config.keep)
    other_settings = (errors, variables or None, config.adapters)
    identity = RunIdentity(model, source, system, raw, params, config.adapter, *kv, *other_settings)
    with open_lines(source, input_format) as lines, BatchFiles(out_path, errors, mode, source) as files:
        known_ids = read_ids(source, input_format)
        ids = known_ids or RequestIds()
        reader = BatchReader(
            lines,
            params,
            jsonl=is_jsonl(source, input_format),
            raw=raw,
            template_vars=variables,
            ids=ids,
            model=client_model_name(model),
            adapters=tuple(config.adapters or ()),
        )
        files.check(identity, ids.digests)
        if known_ids is not None and known_ids.lines.keys() <= files.done_keys:
            files.open(identity, ids.digests)  # without a model
            if ordered:
                files.sort_records(ids.lines)
            if not ids.lines:
                console.print_note(f"{source} has no requests")
            print_done_before(files)
            raise typer.Exit(FAILED if files.failed_keys else 0)
        note = "interrupted while the model was loading: no request was begun. The same command begins again"
        with engines.open_engine(replace(config, model=model, resume_lost=True), note) as engine:
            engines.print_notes(engine)
            if read_elsewhere is not None and (reason := engines.why_no_images(engine)):
                raise InvalidRequest(f"images were to be read (--images-from, --fetch-images), but {reason}")
            check_variables(engine, variables)
            if params.form is not None:  # refused now, and not by every line
                engine.submit("?", replace(params, max_tokens=1)).cancel()
            reader.restrict_variables(engine.info.known_vars)
            reader.enable_images(engine.check_image if engine.sees_images else None, read_elsewhere)
            contents = {name: info.digest for name, info in engine.adapters.items()} or None
            loaded = replace(identity, weights=engine.info.identity, adapter_weights=contents)
            writer = files.open(loaded, ids.digests)
            run = BatchRun(
                engine,
                skip_done(reader, files.done_keys),
                writer,
                partial(prepare_prompt, engine, system),
                RecordBuilder(engine.info.name, files.created, engine.token_bytes),
                rows=config.max_rows,
                in_order=ordered and not files.is_regular_file,
            )
            total = None if known_ids is None else len(known_ids.lines)
            live = out_path != STDOUT or stat.S_ISREG(os.fstat(1).st_mode)
            try:
                with BatchStatusLine(engine, run, done_before=len(files.done_keys), total=total, live=live):
                    run.run()
            finally:
                try:
                    if ordered and not run.has_write_error:
                        files.sort_records(ids.lines)
                finally:
                    print_summary(engine, run, reader, files, total)
    if run.failed_count or files.failed_keys:
        raise typer.Exit(FAILED)


def print_done_before(files: BatchFiles) -> None:
    """Print how many records existed before this run."""
    if files.done_keys:
        failed_count = len(files.failed_keys)
        failed_note = f", {failed_count} of them errors: --retry-errors asks them again" if failed_count else ""
        console.print_note(f"{len(files.done_keys)} were there already{failed_note}")


def print_summary(engine: Engine, run: BatchRun, reader: BatchReader, files: BatchFiles, total: int | None) -> None:
    """Print the run's summary on stderr: requests done now, done before, and left."""
    other_models = sorted(reader.models - {engine.info.name})
    if other_models:
        console.print_note(f"requests name {', '.join(map(repr, other_models))}: {engine.info.name} was asked")
    print_done_before(files)
    seconds = run.seconds
    rate = f", {run.tokens / seconds:.1f} tok/s" if run.tokens else ""
    cached = f", {run.cached_tokens} prompt tokens from the cache" if run.cached_tokens else ""
    console.print_note(
        f"{run.done_count - run.failed_count} answered, {run.failed_count} failed, {run.tokens} tokens in "
        f"{seconds:.1f} s{rate}{cached}"
    )
    for line, message in run.first_failures:
        console.print_note(f"line {line}: {to_single_line(message)}")
    if run.failed_count > len(run.first_failures):
        more = run.failed_count - len(run.first_failures)
        console.print_note(f"and {more} more: each record in {files.error_name} has its error")
    if run.cut_count:
        subject = "1 answer ends" if run.cut_count == 1 else f"{run.cut_count} answers end"
        again = (
            "--resume --retry-errors asks again, with a larger -n or max_tokens of the line"
            if files.is_regular_file
            else "-n allows more tokens"
        )
        console.print_note(f"{subject} {FORM_CUT}: `notes` in OUT says which, and {again}")
    remaining_count = 0 if total is None else total - len(files.done_keys) - run.done_count
    if remaining_count > 0 and files.is_regular_file:
        console.print_note(f"{remaining_count} left: the same command with --resume goes on")
