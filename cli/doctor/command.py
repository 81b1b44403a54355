"""`cortexmlx doctor`: check that everything is installed that makes models run well."""

from __future__ import annotations

import json
import sys
import time as clock
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cortexmlx.cli import options
from cortexmlx.cli.program import adapt_commands
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import FAILED
from cortexmlx.cli.terminal.text import format_duration

if TYPE_CHECKING:
    from cortexmlx.cli.doctor.checks import OnKernel
    from cortexmlx.cli.doctor.report import DoctorCheck

DEFAULT_FILE = "cortexmlx-report.json"
"""Where `--report` without a name writes."""


def doctor(
    model: options.Model = None,
    time: Annotated[bool, typer.Option("--time", help="Time the ways to compute MODEL.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Check one variant of every kernel and dtype.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="[FILE]",
            help=f"Write what helps to understand this machine to a new file, to be sent: {DEFAULT_FILE} without FILE.",
        ),
    ] = None,
) -> None:
    """Check the installation, a line each: ok, warn or fail, and what to do.

    On an Apple GPU every variant of our kernels is run and compared with the plain computation. A terminal shows how
    many remain, and for how long. Exit code 1 if a line says fail: of a kernel, only where the GPU is not virtual.

    With --time, only the ways to compute a model's attention and quantized matmuls are timed, for classes of rows and
    lengths: what engines do when they open on an Apple GPU, without their bound of 1.5 seconds.

    --report also runs a small model beside mlx-lm for some seconds and, on an Apple GPU, times our kernels beside MLX's
    in the sizes of three known models. The file has no names of the user or the machine, no paths and no texts. With
    --time it has these times, too.
    """
    from cortexmlx.cli.doctor.report import CheckStatus

    if model is not None and not time:
        raise typer.BadParameter("a model is only timed: add --time", param_hint="MODEL")
    if quick and time and report is None:
        raise typer.BadParameter("--time alone checks no kernels: omit it, or add --report", param_hint="--quick")
    if report is not None:
        from cortexmlx.cli.doctor.report import check_writable

        report = report.expanduser()
        check_writable(report)
    colours = {CheckStatus.OK: "32", CheckStatus.WARN: "33", CheckStatus.FAIL: "1;31"}
    is_coloured = console.is_coloured(sys.stdout)

    def show(check: DoctorCheck) -> None:
        verdict = f"{check.verdict.value:<4}"
        if is_coloured:
            console.write_control(sys.stdout, f"\x1b[{colours[check.verdict]}m{verdict}\x1b[0m")
        else:
            console.print_result(verdict, end="")
        console.print_result(f"  {check.name:<14}{check.detail}", flush=True)
        if check.advice:
            console.print_result(f"{'':<20}-> {adapt_commands(check.advice)}", flush=True)

    checks, progress = [], KernelProgress()
    timed_model = options.model_name(model, None) if time else None
    try:
        for check in _selected_checks(timed_model, report is not None, quick, progress.update):
            checks.append(check)
            progress.clear()
            if not as_json:
                show(check)
    finally:
        progress.clear()
    sections: dict[str, Any] = {}
    if report is not None:
        from cortexmlx.cli.doctor.trial import run_trial

        sections, trial_checks = run_trial(lambda what: console.print_note(f"report: {what}"))
        checks += trial_checks
        for check in () if as_json else trial_checks:
            show(check)
    if as_json:
        console.print_result(json.dumps([asdict(check) for check in checks]))
    if report is not None:
        write_report(report, checks, sections)
    if any(check.verdict is CheckStatus.FAIL for check in checks):
        raise typer.Exit(FAILED)


class KernelProgress:
    """A line on stderr that says how many kernels remain to be checked, and for about how long. Only a terminal gets
    it; whatever is printed replaces it.
    """

    _start_time = 0.0
    _shown = False

    def update(self, done: int, count: int) -> None:
        """Show that `done` of `count` kernels are checked."""
        self.clear()
        self._start_time = self._start_time if done else clock.monotonic()
        if done < count and console.is_terminal(sys.stderr):
            seconds = (clock.monotonic() - self._start_time) / max(done, 1) * (count - done)
            left = f", about {format_duration(seconds)} left" if done else ""
            console.print_message(f"checking kernels: {count - done} of {count} remain{left}", end="")
            self._shown = True

    def clear(self) -> None:
        """Remove the line."""
        if self._shown:
            console.write_control(sys.stderr, "\r\x1b[K")
            sys.stderr.flush()
            self._shown = False


def _selected_checks(
    timed_model: str | None, everything: bool, quick: bool, on_kernel: OnKernel
) -> Iterator[DoctorCheck]:
    """Yield all checks, or a model's timed choices; if `everything`, both, and a timing error as a failed check."""
    from cortexmlx.cli.doctor.checks import run_checks
    from cortexmlx.cli.doctor.choices import NAME, time_choices
    from cortexmlx.cli.doctor.report import CheckStatus, DoctorCheck

    if timed_model is None or everything:
        yield from run_checks(quick=quick, on_kernel=on_kernel)
    if timed_model is None:
        return
    try:
        yield from time_choices(timed_model)
    except Exception as error:
        if not everything:
            raise
        detail = f"{type(error).__name__}: {error}".replace(timed_model, "MODEL")
        yield DoctorCheck(NAME, CheckStatus.FAIL, detail, "the report is written without its times")


def write_report(path: Path, checks: list[DoctorCheck], sections: dict[str, Any]) -> None:
    """Write the report to a file, and print where it is."""
    from cortexmlx.cli.doctor.report import make_report, write_file

    size = write_file(path, make_report(checks, sections))
    console.print_note(
        f"wrote {path} ({size:,} bytes), without names and paths: please read it, and send it as an issue"
    )
