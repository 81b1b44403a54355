"""Schemas of the formats, and a judge of formats that needs no other package."""

from __future__ import annotations

import datetime
import ipaddress
import re
from typing import Any

from support.schemas.case import Case


def _of(format: str, valid: tuple[str, ...], invalid: tuple[Any, ...]) -> Case:
    return Case(f"format {format}", {"type": "string", "format": format}, valid, invalid)


FORMATS = (
    _of("date", ("2024-02-29", "1999-12-31", "0001-01-01"), ("2024-13-01", "2024-1-01", "2024-01-32", "24-01-01", "")),
    _of(
        "time", ("10:20:30Z", "23:59:59.123+02:00", "00:00:00-00:30"), ("10:20:30", "24:00:00Z", "10:60:00Z", "10:20Z")
    ),
    _of(
        "date-time",
        ("2024-02-29T10:20:30Z", "1999-12-31T23:59:59.5-08:00", "2026-01-01T00:00:00.000001+00:00"),
        ("2024-02-29", "2024-02-29T10:20:30", "2024-02-29 T10:20:30Z", "2024-00-10T10:20:30Z"),
    ),
    _of("duration", ("P3D", "PT5M30S", "P1Y2M10DT2H", "P4W"), ("P", "PT", "3D", "P1S", "P1.5D")),
    _of(
        "email",
        ("a@b.example", "first.last+tag@sub.domain.org", "x_y-z@a1.io"),
        ("a", "a@", "@b.c", "a b@c.d", "a@b@c.d"),
    ),
    _of("hostname", ("example.org", "a-1.b", "x"), ("", "-a.b", "a_b.c", "a b", "é.org")),
    _of("ipv4", ("127.0.0.1", "255.255.255.255", "8.8.4.4"), ("256.0.0.1", "1.2.3", "1.2.3.4.5", "01.2.3.4")),
    _of(
        "ipv6",
        ("::1", "2001:db8::8a2e:370:7334", "fe80:0:0:0:1:2:3:4", "::"),
        (":::1", "1:2:3", "12345::", "g::1", "1.2.3.4"),
    ),
    _of(
        "uuid",
        (
            "123e4567-e89b-12d3-a456-426614174000",
            "00000000-0000-0000-0000-000000000000",
            "A23E4567-E89B-12D3-A456-42661417400F",
        ),
        (
            "123e4567e89b12d3a456426614174000",
            "123e4567-e89b-12d3-a456-42661417400g",
            "123e4567-e89b-12d3-a456-42661417400",
        ),
    ),
    _of(
        "uri",
        ("https://example.org/a?b=c#d", "mailto:a@b.c", "urn:isbn:0451450523"),
        ("example.org/a", "//a/b", "http://a b", ""),
    ),
)

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:(?:[0-5]\d|60)(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_PART = r"(?:[\w.~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"

GRAMMARS = {
    "time": _TIME,
    "duration": r"P(?!$)(?:\d+W|(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)?"
    r"(?:T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S))?)",
    "email": rf"(?:{_ATOM}(?:\.{_ATOM})*|\"(?:[ !#-\[\]-~]|\\[ -~])*\")@(?:{_LABEL}(?:\.{_LABEL})*|\[[^\[\]\\ ]+\])",
    "hostname": rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?://[^/?#\s\"<>\\^`{{|}}]*)?(?:{_PART}|/)*(?:\?(?:{_PART}|[/?])*)?"
    rf"(?:#(?:{_PART}|[/?])*)?",
}
"""The grammars of RFC 3339, 5321, 1123, 4122 and 3986 as regular expressions of ASCII."""


def fits(format: str, text: str) -> bool:
    """Whether a text has a format."""
    if format == "date-time":
        day, _, time = text[:10], text[10:11], text[11:]
        return text[10:11] in tuple("Tt") and fits("date", day) and fits("time", time)
    try:
        if format == "date":
            return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) and datetime.date.fromisoformat(text))
        if format == "ipv4":
            return bool(ipaddress.IPv4Address(text))
        if format == "ipv6":
            return ipaddress.IPv6Address(text) is not None and "%" not in text
    except ValueError:
        return False
    return re.fullmatch(GRAMMARS[format], text, re.ASCII) is not None
