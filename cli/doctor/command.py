"""`cortexmlx doctor`: check that everything is installed that makes models run well."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cortexmlx.cli import options
from cortexmlx.cli.program import adapt_commands
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import FAILED

if TYPE_CHECKING:
    from cortexmlx.cli.doctor.check import DoctorCheck

DEFAULT_FILE = "cortexmlx-report.json"
"""Where `--report` without a name writes."""


def doctor(
    model: options.Model = None,
    time: Annotated[bool, typer.Option("--time", help="Time the ways to compute MODEL.")] = False,
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

    On an Apple GPU every kind of attention kernel is run and compared with the plain computation. Exit code 1 if a
    line says fail.

    With --time, only the ways to compute a model's attention and quantized products are timed, for classes of rows and
    lengths: what engines do when they open on an Apple GPU, without their bound of 1.5 seconds.

    --report also runs a small model beside mlx-lm for some seconds. The file has no names of the user or the machine,
    no paths and no texts. With --time it has these times, too.
    """
    from cortexmlx.cli.doctor.check import CheckStatus

    if model is not None and not time:
        raise typer.BadParameter("a model is only timed: add --time", param_hint="MODEL")
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

    checks = []
    for check in _selected_checks(options.model_name(model, None) if time else None, report is not None):
        checks.append(check)
        if not as_json:
            show(check)
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


def _selected_checks(timed_model: str | None, everything: bool) -> Iterator[DoctorCheck]:
    """Yield all checks, or only a model's attention times; with `everything` both, a timing error as a failed check."""
    from cortexmlx.cli.doctor.check import CheckStatus, DoctorCheck
    from cortexmlx.cli.doctor.checks import run_checks
    from cortexmlx.cli.doctor.choices import NAME, time_choices

    if timed_model is None or everything:
        yield from run_checks()
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
