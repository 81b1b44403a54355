"""A whole chat looks as it did when somebody last looked at it."""

from __future__ import annotations

import pytest

from tests.screens.chat import SIZES, file_for, seen


@pytest.mark.parametrize("size", SIZES)
def test_a_chat_in_a_window_of_this_size(size: tuple[int, int]) -> None:
    assert seen(*size) == file_for(*size).read_text(), "if it should look so: python -m tests.screens"
