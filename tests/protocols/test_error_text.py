"""What a client is told of an error is ours: no panic, no path, and little of what was sent."""

from __future__ import annotations

import re

import pytest

from cortexmlx import errors
from cortexmlx.errors import CortexError, InvalidRequest, ModelCorrupt
from cortexmlx.protocols.anthropic import errors as anthropic
from cortexmlx.protocols.batch import InvalidLine, LineStyle, error_record
from cortexmlx.protocols.error_text import error_text
from cortexmlx.protocols.openai import errors as openai

PANICS = [
    "panic: index out of bounds: the len is 3\n<backtrace>\n   0: rust_begin_unwind\n at /rustc/9fc/x.rs",
    "thread '<unnamed>' panicked at parser/src/earley/parser.rs:1234:56:\ncalled `Option::unwrap()` on a `None` value",
    "PanicException: no entry found for key; set RUST_BACKTRACE=1",
    'Traceback (most recent call last):\n  File "/Users/ann/app/x.py", line 7, in f\nValueError: x',
    "stack backtrace:\n 0: core::panicking::panic_fmt()",
]
LIBRARYS = re.compile(r"panic|backtrace|rust|\.rs|unwrap|\.py|Users|Traceback|::|<unnamed>", re.IGNORECASE)


def test_nothing_of_a_library_is_told_whatever_the_error_is() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CortexError)]
    for kind in kinds:
        for panic in PANICS:
            for before in ("", "this schema cannot be enforced: ", "no such luck "):
                told = error_text(kind(before + panic))
                assert told and not LIBRARYS.search(told), (kind, before, panic, told)
                assert before != "this schema cannot be enforced: " or told.startswith(before.rstrip(": "))
    shown = error_text(ModelCorrupt("/Users/ann/models/x/config.json cannot be read, nor ~/x/y.gguf"))
    assert shown == "config.json cannot be read, nor y.gguf"


def test_what_is_ours_stays_as_it_is() -> None:
    for text in (
        "/v1/panic is not served: there are /v1/chat/completions, /v1/messages",
        "unknown field of a body: 'backtrace' (did you mean 'background'?)",
        "url is 'https://a.example/v1/x', but must be one of /v1/embeddings",
        "the model's answer is 'it's' here, and a model's `content` isn't",
    ):
        assert error_text(InvalidRequest(text)) == text


LONG = "¤" * 5_000_000
QUOTES = {
    "repr": f"stop is {LONG!r}, but must be a list",
    "cut repr": f"stop is {LONG!r:.80}, but must be a list",
    "bare": f"the pattern {LONG} is none",
    "names": ", ".join(f"'{'¤' * 30}{n}'" for n in range(1000)),
    "unclosed": "it is '" + LONG + " '" * 1000,
    "backslashes": "it is '" + "\\" * 9999 + "' \\'" * 9999 + LONG,
    "value": f"it is {[LONG] * 2!r}",
}


@pytest.mark.parametrize("what", QUOTES)
def test_at_most_200_characters_of_what_was_sent_are_told(what: str) -> None:
    error = InvalidRequest(QUOTES[what], field=f"messages[0].{LONG}")
    record = error_record(InvalidLine(1, 1, LineStyle.CHAT, str(error)), str(error))
    for body in (openai.error_body(error), anthropic.error_body(error), record):
        assert 0 < str(body).count("¤") <= 200
