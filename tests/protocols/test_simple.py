"""Our own JSON for a request: which prompts go through the chat template."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.protocols.simple import read
from cortexmlx.types.sampling_params import SamplingParams

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("body", "raw", "templated"),
    [
        ({"prompt": "hi"}, False, True),
        ({"prompt": "hi"}, True, False),
        ({"messages": [USER]}, True, True),
        ({"prompt": [1]}, False, False),
    ],
)
def test_what_goes_through_the_template_has_its_variables(body: dict[str, Any], raw: bool, templated: bool) -> None:
    request = read(body, RequestDefaults(SamplingParams(), {"a": 1}, raw))
    assert request.template_vars == ({"a": 1} if templated else {}) and request.raw is raw
    (prompt,) = request.prompts
    assert prompt == body.get("prompt", [USER])


def test_a_request_has_one_prompt() -> None:
    for body in ({"prompt": "a", "messages": [USER]}, {"prompt": ["a", "b"]}, {}):
        with pytest.raises(InvalidRequest, match="`prompt`") as refused:
            read(body, RequestDefaults(SamplingParams()))
        assert refused.value.field == "prompt"
