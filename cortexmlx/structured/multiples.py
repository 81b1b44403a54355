"""The bound on `multipleOf`: its cost grows with the number, not with the length of a schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import lcm
from typing import Any

from cortexmlx.errors import InvalidRequest

MOST_REMAINDERS = 100_000
"""The least common multiple of all `multipleOf` of a schema, times how often the schema says `multipleOf` or `$ref`, at
most. A grammar has a state for each remainder: 100,000 take about a second to compile, a million 7 to 40 s. Numbers
that hold for the same value are combined into their common multiple.
"""


def check_multiples(schema: object) -> None:
    """Raise InvalidRequest if the `multipleOf` of a schema would take too long to compile."""
    said = list(_multiples_and_references(schema))
    factors = [_digits(number) for number in said if number is not None]
    if not factors:
        return
    common = 1
    for factor in factors:
        common = lcm(common, factor)
        if common * len(said) > MOST_REMAINDERS:
            raise InvalidRequest(
                "`multipleOf` takes too long to enforce: the least common multiple of its numbers is "
                f"{min(common, 10**12):,} or more, in {len(said):,} places, and the product must be at most "
                f"{MOST_REMAINDERS:,}. Leave it out or take smaller numbers",
                field="structured",
            )


def _multiples_and_references(schema: object) -> Iterator[int | float | None]:
    """Yield the number of each `multipleOf`, and None for each `$ref`, wherever in the schema they are."""
    waiting: list[Any] = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            number = each.get("multipleOf")
            if isinstance(number, int | float) and not isinstance(number, bool):
                yield number
            if "$ref" in each:
                yield None
            waiting.extend(each.values())
        elif isinstance(each, list | tuple):
            waiting.extend(each)


def _digits(number: int | float) -> int:
    """Return a number without its decimal point and its zeros at the end, which cost nothing; 1 for what is none."""
    found = Decimal(repr(number))
    if not found.is_finite() or not found:
        return 1
    return abs(int("".join(map(str, found.as_tuple().digits)).rstrip("0")))
