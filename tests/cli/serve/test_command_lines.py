"""The line of a request: for people, and as JSON."""

from __future__ import annotations

import json

import pytest

from cortexmlx.cli.serve.command import LogFormat, format_event, format_request, parse_duration
from cortexmlx.errors import InvalidRequest
from cortexmlx.server.settings import LoggedRequest, RequestTokens


def test_a_line_for_people() -> None:
    line = format_request(
        LoggedRequest("POST", "/v1/x\x1b[2J\n", 200, 1.234, RequestTokens(1200, 1000, 7), "a\nb"), LogFormat.text, 0.0
    )
    assert line[8:] == " POST /v1/x␛[2J␊ 200 1.23 s · a␊b · 1,200 (1,000 cached) + 7 tokens"
    assert format_request(LoggedRequest("GET", "/", 404, 0.0, None), LogFormat.text, 0.0)[8:] == " GET / 404 0.00 s"


def test_a_line_as_json() -> None:
    line = format_request(LoggedRequest("POST", "/a\nb", 200, 0.12345, RequestTokens(3, 2, 1)), LogFormat.json, 12.3456)
    expected = {"time": 12.346, "method": "POST", "path": "/a\nb", "status": 200, "seconds": 0.1235, "model": None}
    assert json.loads(line) == {**expected, "prompt": 3, "cached": 2, "answer": 1} and "\n" not in line


def test_the_line_of_an_event() -> None:
    assert format_event("loaded a\x1b[2J", LogFormat.text, 0.0)[8:] == " loaded a␛[2J"
    assert json.loads(format_event("loaded a\n", LogFormat.json, 1.5)) == {"time": 1.5, "event": "loaded a\n"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("10m", 600), ("1h", 3600), ("1.5H", 5400), ("2d", 172800), (" 45 ", 45), ("never", None)],
)
def test_a_duration(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-1m", "m", "10 minutes", "nan", "inf", "1e3", "1h30m", "9" * 400])
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is no duration: write 30s, 10m, 1h, or never"):
        parse_duration(text)
