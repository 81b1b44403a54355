"""The judge of documents: the package jsonschema, with patterns of Unicode and with every format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import regex
from jsonschema.validators import extend, validator_for

from support.schemas.formats import fits

FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

_checker = jsonschema.FormatChecker(formats=())
for _format in FORMATS:
    _checker.checks(_format)(lambda value, format=_format: not isinstance(value, str) or fits(format, value))


def _pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """Python's own expressions know no classes of Unicode."""
    if isinstance(value, str) and not regex.search(pattern, value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def judge_of(schema: dict[str, Any]) -> Any:
    """The validator of a schema. Without `$schema`, it is that of draft 2020-12."""
    kind = validator_for(schema, jsonschema.Draft202012Validator)
    kind.check_schema(schema, format_checker=jsonschema.FormatChecker(formats=()))
    return extend(kind, {"pattern": _pattern})(schema, format_checker=_checker)
