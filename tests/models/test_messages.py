"""What a foreign exception says, inside one of our own messages."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from cortexmlx.models.messages import one_line


@given(st.builds(lambda text, times: text * times, st.text(max_size=12), st.integers(0, 60)))
@example("x" * 300)
@example("x" * 301)
def test_it_is_one_line_that_is_neither_empty_nor_endless(text: str) -> None:
    line = one_line(ValueError(text))
    assert 0 < len(line) <= 300 and len(line.splitlines()) == 1
    words = " ".join(text.split())
    if len(words) <= 300:
        assert line == (words or "ValueError")
    else:
        assert words.startswith(line.removesuffix("...")) and line.endswith("...")
