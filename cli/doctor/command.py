"""`cortexmlx doctor`: check that everything is installed that makes models run well."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from cortexmlx.cli import options
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import FAILED


def doctor(
    model: options.Model = None,
    time: Annotated[bool, typer.Option("--time", help="Time the ways of attention in MODEL.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
) -> None:
    """Check the installation, a line each: ok, warn or fail, and what to do.

    On an Apple GPU every kind of attention kernel is run and compared with the plain computation. Exit code 1 if a
    line says fail.

    With --time, only the ways to compute attention in a model are timed, for classes of rows and lengths: what engines
    do when they open on an Apple GPU, without their bound of 1.5 seconds.
    """
    from cortexmlx.cli.doctor.check import Check, Verdict
    from cortexmlx.cli.doctor.checks import all_checks
    from cortexmlx.cli.doctor.choices import timed_choices

    if model is not None and not time:
        raise typer.BadParameter("a model is only timed: add --time", param_hint="MODEL")

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
            console.say(f"{'':<20}-> {check.advice}", flush=True)

    done = []
    for check in timed_choices(options.model_name(model, None)) if time else all_checks():
        done.append(check)
        if not as_json:
            show(check)
    if as_json:
        console.say(json.dumps([asdict(check) for check in done]))
    if any(check.verdict is Verdict.FAIL for check in done):
        raise typer.Exit(FAILED)
