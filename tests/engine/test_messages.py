"""Chat messages as a prompt: which variables a request's body asks for."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.messages import ChatPrompt, body_vars, checked_vars


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, {}),
        ({"reasoning_effort": None, "chat_template_kwargs": None}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high", "a": None}},
            {"reasoning_effort": "high"},
        ),
    ],
)
def test_a_body_asks_for_variables_as_vllms_or_openais(body: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert body_vars(body) == wanted


def test_variables_are_a_map_from_names() -> None:
    given = {"a": 1}
    copied = checked_vars(given)
    assert copied == given and copied is not given
    for wrong in ({1: 2}, [("a", 1)], "a", None):
        with pytest.raises(InvalidRequest, match="template_vars is"):
            checked_vars(wrong)
    assert ChatPrompt([{"role": "user", "content": "a"}]).template_vars == {}
