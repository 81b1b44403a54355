"""Chat templates: rendered by transformers' own renderer, and one line for whatever goes wrong in them."""

from __future__ import annotations

import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.models.tokenizers.base import SpecialTokens
from cortexmlx.models.tokenizers.templates import render
from support.byte_tokenizers import SMOLLM, build


def test_a_template_that_refuses_is_an_invalid_request() -> None:
    special = SpecialTokens()
    tokenizer = build(SMOLLM, special, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


MESSAGES = [{"role": "user", "content": "hi"}]


def test_tools_and_variables_reach_the_template() -> None:
    template = "{{ tools[0]['name'] }}, {{ mood }}, {{ messages[0]['content'] }}"
    assert render(template, MESSAGES, [{"name": "look_up"}], {"mood": "calm"}) == "look_up, calm, hi"
    assert render("{{ tools is none }}", MESSAGES, None, {}) == "True"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}",
        "{{ messages[7]['content'] }}",
        "{{ nothing.at.all }}",
        "{{ '{0}'.format() }}",
        "{{ '{a}'.format() }}",
        "{{ 'a' | dictsort }}",
        "{{ 1 + 'a' }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
    ids=[
        "syntax",
        "index",
        "undefined",
        "no argument",
        "no name",
        "attribute",
        "types",
        "a way out of the sandbox",
        "a change of what it was given",
    ],
)
def test_a_template_that_breaks_is_an_invalid_request_of_one_line(template: str) -> None:
    with pytest.raises(InvalidRequest, match="the model's chat template cannot render") as caught:
        render(template, MESSAGES, None, {})
    assert "\n" not in str(caught.value)
