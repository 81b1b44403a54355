"""Chat messages as a prompt: with variables for the template, and with their text in parts."""

from __future__ import annotations

import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.types.messages import ChatPrompt, checked_vars, plain_message


def test_variables_are_a_map_from_names() -> None:
    given = {"a": 1}
    copied = checked_vars(given)
    assert copied == given and copied is not given
    for wrong in ({1: 2}, [("a", 1)], "a", None):
        with pytest.raises(InvalidRequest, match="template_vars is"):
            checked_vars(wrong)
    assert ChatPrompt([{"role": "user", "content": "a"}]).template_vars == {}


def test_a_messages_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a "}, "b", {"type": "input_text", "text": " c"}]
    assert plain_message({"role": "user", "content": parts, "name": "x"}) == {
        "role": "user",
        "content": "a b c",
        "name": "x",
    }
    for content in ("a", None, {"anything": "else"}):
        assert plain_message({"content": content}) == {"content": content}


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "'image_url'"),
        ({"type": "image"}, "'image'"),
        (b"bytes", "'bytes'"),
    ],
)
def test_a_part_that_is_no_text_is_refused_by_its_type(part: object, kind: str) -> None:
    with pytest.raises(InvalidRequest, match=f"part of type {kind}, but only text is read: images"):
        plain_message({"role": "user", "content": [{"type": "text", "text": "look"}, part]})


def test_a_part_of_text_without_its_text_is_not_taken_for_an_image() -> None:
    with pytest.raises(InvalidRequest, match="part of type 'text' whose `text` is no text"):
        plain_message({"role": "user", "content": [{"type": "text", "text": None}]})
