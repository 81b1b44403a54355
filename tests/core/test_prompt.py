"""What the engine makes of a plain prompt before the model sees it."""

from __future__ import annotations

import pytest

from cortexmlx.core.prompt import count_thinking_tag_tokens, render, tokenize
from cortexmlx.errors import InvalidRequest
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.structured.output import Thoughts


class BosTokenizer:
    """Puts its bos in front unless told not to, as Llama's tokenizers do."""

    bos_token = "<s>"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [1] if text.startswith("<s>") else []
        return ([1] if add_special_tokens else []) + ids + [10] * len(text.removeprefix("<s>"))


def test_a_prompt_that_begins_with_the_bos_text_gets_one_bos_only() -> None:
    assert tokenize(SharedTokenizer(BosTokenizer()), "<s>ab") == [1, 10, 10]
    assert tokenize(SharedTokenizer(BosTokenizer()), "ab") == [1, 10, 10]


def test_broken_text_becomes_question_marks_and_not_an_error() -> None:
    assert tokenize(SharedTokenizer(BosTokenizer()), "a\udcff") == [1, 10, 10]


def test_what_is_no_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        tokenize(SharedTokenizer(BosTokenizer()), [{"role": "user"}, 3])
    with pytest.raises(InvalidRequest, match="did you mean 'system'"):
        tokenize(SharedTokenizer(BosTokenizer()), [{"role": "sytem", "content": "hi"}])


def test_token_ids_need_no_tokenizer() -> None:
    assert tokenize(SharedTokenizer(object()), [3, 1, 2]) == [3, 1, 2]


def test_what_is_null_in_a_message_is_not_there() -> None:
    """But a text that many templates read, Qwen's and Devstral's among them, beside calls that have none."""
    seen = []

    class Reader:
        images = None

        def render(self, messages: object, variables: object, tools: object) -> str:
            seen.append(messages)
            return ""

    calls = [{"function": {"name": "f"}}]
    render(Reader(), [{"role": "assistant", "content": None, "tool_calls": calls, "name": None}])  # type: ignore[arg-type]
    assert seen == [[{"role": "assistant", "content": "", "tool_calls": calls}]]


@pytest.mark.parametrize(
    ("rendered", "count"),
    [
        ("hello<think>", 7),
        ("hello<think>\n", 8),
        ("hello<think>\n\n</think>\n\n", 19),
        ("hello", 0),
        ("<think>hello", 0),
        ("hello</think>", 0),
        ("<think>a</think>hello<think>", 7),
    ],
)
def test_the_tail_of_a_prompt_is_its_tags_of_thoughts(rendered: str, count: int) -> None:
    class Reader:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [ord(each) for each in text]

    reader, thoughts = Reader(), Thoughts("<think>", "</think>")
    ids = reader.encode(rendered)
    assert count_thinking_tag_tokens(reader, rendered, ids, thoughts) == count  # type: ignore[arg-type]
    assert count_thinking_tag_tokens(reader, rendered, ids, None) == 0  # type: ignore[arg-type]
    assert count_thinking_tag_tokens(reader, ids, ids, thoughts) == 0  # type: ignore[arg-type]
    assert count_thinking_tag_tokens(reader, rendered, [*ids[:-1], 0], thoughts) == 0, "a token across the place"  # type: ignore[arg-type]
