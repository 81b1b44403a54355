"""Schemas that cannot be enforced, each with the keyword or the words that its refusal names."""

from __future__ import annotations

from typing import Any

TEXT = {"type": "string"}

REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("not", {"not": {"type": "null"}}),
    ("not", {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {"const": 1}}}}}),
    ("uniqueItems", {"type": "array", "items": TEXT, "uniqueItems": True}),
    ("contains", {"type": "array", "contains": {"const": 1}}),
    ("minContains", {"type": "array", "minContains": 1}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}),
    ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}),
    ("if", {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}),
    ("phone", {"type": "string", "format": "phone"}),
    ("look-around", {"type": "string", "pattern": "^(?!x)"}),
    ("$dynamicRef", {"$dynamicRef": "#node"}),
    ("lookaround", {"type": "string", "pattern": r"\bcat\b"}),
    ("iri", {"type": "string", "format": "iri"}),
    ("not disjoint", {"type": "object", "patternProperties": {"^a": {}, "b$": TEXT}}),
    ("min/maxProperties", {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}),
    ("integer range", {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}),
    ("Unsatisfiable", {"type": "string", "format": "date", "maxLength": 5}),
)
