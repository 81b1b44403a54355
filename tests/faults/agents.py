"""Faults of `launch`: what an agent is told wrongly, and what outlives it."""

from __future__ import annotations

from tests.faults.planted import Fault

LAUNCH = "cli/launch.py"

TESTS = ("cli/test_launch.py",)
"""The tests that judge these faults."""

FAULTS = (
    Fault("the agent ends with 0 whatever it said", LAUNCH, "return code if code >= 0 else 128 - code", "return 0"),
    Fault(
        "an interrupt ends the server", LAUNCH, "(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)", "(signal.SIGTERM,)"
    ),
    Fault("the log is on the agent's screen", LAUNCH, "os.dup2(file.fileno(), 2)", "pass"),
    Fault("a key of the user's stays", LAUNCH, 'removed=("ANTHROPIC_API_KEY",)', "removed=()"),
    Fault("settings at home hide the address", LAUNCH, ", settings=settings", ""),
    Fault("the context is not told", LAUNCH, '"CLAUDE_CODE_MAX_CONTEXT_TOKENS": _user', '"CLAUDE_X": _user'),
    Fault("any model of a server will do", LAUNCH, "if name in names", "if True"),
)
