"""A model's thoughts are told from its answer."""

from __future__ import annotations

from cortexmlx.cli.chat.thinking import Part, ThinkSplitter


def test_thoughts_are_told_from_the_answer_however_the_tags_arrive() -> None:
    text = "<think>let me <b>see</b></think>The answer<think>again</think> is <thin air"
    expected = [
        Part("let me <b>see</b>", True),
        Part("The answer", False),
        Part("again", True),
        Part(" is <thin air", False),
    ]
    for size in (1, 3, 7, len(text)):
        splitter = ThinkSplitter()
        parts = [part for at in range(0, len(text), size) for part in splitter.feed(text[at : at + size])]
        joined: list[Part] = []
        for part in [*parts, *splitter.rest()]:
            if joined and joined[-1].thought == part.thought:
                part = Part(joined.pop().text + part.text, part.thought)
            joined.append(part)
        assert joined == expected
