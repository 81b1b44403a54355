"""References within a schema: as RFC 6901 has them."""

from __future__ import annotations

import pytest

from cortexmlx.structured.schemas import target_of

SCHEMA = {"$defs": {"a/b": {"type": "null"}, "c~d e": 7}, "anyOf": [{"x": 1}, True]}


@pytest.mark.parametrize(
    ("reference", "target"),
    [
        ("#", SCHEMA),
        ("#/$defs/a~1b", {"type": "null"}),
        ("#/$defs/c~0d%20e", 7),
        ("#/anyOf/0/x", 1),
        ("#/anyOf/1", True),
        *((wrong, None) for wrong in ("#/anyOf/2", "#/anyOf/x", "#/$defs/none", "#/anyOf/1/x", "#name", "", 3, None)),
        *((elsewhere, None) for elsewhere in ("https://example.com/$defs", "other.json#/$defs/a~1b")),
    ],
)
def test_what_a_reference_leads_to(reference: object, target: object) -> None:
    assert target_of(reference, SCHEMA) == target
