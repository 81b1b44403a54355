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
from cortexmlx.cli.program import fit_commands
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import FAILED

if TYPE_CHECKING:
    from cortexmlx.cli.doctor.check import Check

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
    from cortexmlx.cli.doctor.check import Verdict

    if model is not None and not time:
        raise typer.BadParameter("a model is only timed: add --time", param_hint="MODEL")
    if report is not None:
        from cortexmlx.cli.doctor.report import check_writable

        report = report.expanduser()
        check_writable(report)
    colours = {Verdict.OK: "32", Verdict.WARN: "33", Verdict.FAIL: "1;31"}
    coloured = console.is_coloured(sys.stdout)

    def show(check: Check) -> None:
        verdict = f"{check.verdict.value:<4}"
        if coloured:
            console.control(sys.stdout, f"\x1b[{colours[check.verdict]}m{verdict}\x1b[0m")
        else:
            console.say(verdict, end="")
        console.say(f"  {check.name:<14}{check.detail}", flush=True)
        if check.advice:
            console.say(f"{'':<20}-> {fit_commands(check.advice)}", flush=True)

    done = []
    for check in _checks(options.model_name(model, None) if time else None, report is not None):
        done.append(check)
        if not as_json:
            show(check)
    sections: dict[str, Any] = {}
    if report is not None:
        from cortexmlx.cli.doctor.trial import trial

        sections, more = trial(lambda what: console.note(f"report: {what}"))
        done += more
        for check in () if as_json else more:
            show(check)
    if as_json:
        console.say(json.dumps([asdict(check) for check in done]))
    if report is not None:
        write_report(report, done, sections)
    if any(check.verdict is Verdict.FAIL for check in done):
        raise typer.Exit(FAILED)


def _checks(timed: str | None, everything: bool) -> Iterator[Check]:
    """Yield all checks, or the times of a model's attention; with `everything` both, and what the times raise."""
    from cortexmlx.cli.doctor.check import Check, Verdict
    from cortexmlx.cli.doctor.checks import all_checks
    from cortexmlx.cli.doctor.choices import NAME, timed_choices

    if timed is None or everything:
        yield from all_checks()
    if timed is None:
        return
    try:
        yield from timed_choices(timed)
    except Exception as error:
        if not everything:
            raise
        detail = f"{type(error).__name__}: {error}".replace(timed, "MODEL")
        yield Check(NAME, Verdict.FAIL, detail, "the report is written without its times")


def write_report(path: Path, checks: list[Check], sections: dict[str, Any]) -> None:
    """Write a report, and say where it is."""
    from cortexmlx.cli.doctor.report import report, write

    size = write(path, report(checks, sections))
    console.note(f"wrote {path} ({size:,} bytes), without names and paths: please read it, and send it as an issue")
