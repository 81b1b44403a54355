"""Texts to replay: prompts, and the answers that a good model could give, of kinds that repeat more or less.

They are made from this package's own source, always in the same way. Each row has texts of its own.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import islice
from pathlib import Path

import cortexmlx

Encode = Callable[[str], Sequence[int]]

_ROW, _FREE, _PROSE = 101, 50, 70
"""Sentences from those of one row to those of the next, and from a row's page to what no prompt has."""

_NAME = re.compile(r"\b[a-z_]{4,}\b")


class AnswerKind(str, Enum):
    """The kind of an answer's text, which decides how much of it repeats earlier text."""

    EDIT = "edit"
    """A file of the prompt with three changed lines."""
    QUOTES = "quotes"
    """Sentences, of which two of three are in the prompt."""
    JSON = "JSON"
    """Records with the same keys."""
    SCHEMA = "schema"
    """Such records without blanks, where a schema leaves no choice of the keys."""
    PROSE = "prose"
    """Sentences that are in no prompt."""


@dataclass(frozen=True)
class ReplayText:
    """A prompt and its known answer, in tokens."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def repetition(self, order: int) -> float:
        """Return the share of the answer's n-grams of `order` tokens that occurred earlier in prompt or answer."""
        text = (*self.prompt, *self.answer)
        seen_ngrams: set[tuple[int, ...]] = set()
        repeated_count = 0
        for end in range(order, len(text) + 1):
            ngram = text[end - order : end]
            repeated_count += end > len(self.prompt) and ngram in seen_ngrams
            seen_ngrams.add(ngram)
        return repeated_count / max(1, len(self.answer))


def make_text(kind: AnswerKind, row: int, tokens: int, encode: Encode) -> ReplayText:
    """Make a prompt, and its answer of at most `tokens` tokens, for one row of the batch."""
    prompt, answer = _MAKERS[kind](row, tokens, encode)
    prefix_ids = tuple(encode(""))  # what the tokenizer puts before each text
    answer_ids = tuple(encode(answer))
    answer_ids = (
        answer_ids[len(prefix_ids) :] if prefix_ids and answer_ids[: len(prefix_ids)] == prefix_ids else answer_ids
    )
    return ReplayText(tuple(encode(prompt)), answer_ids[:tokens])


def _make_edit(row: int, tokens: int, encode: Encode) -> tuple[str, str]:
    """Return a prompt with a source file, and an answer: the file with three changed lines."""
    files = _source_files()
    lines = list(_take_tokens(files[row * len(files) // 17 % len(files)].splitlines(), tokens, encode))
    changed_lines = list(lines)
    named_lines = [
        (line_index, *line_names) for line_index, line in enumerate(lines) if (line_names := _NAME.findall(line))
    ]
    for number in range(3):
        place, *names = named_lines[(2 * number + 1) * len(named_lines) // 6]
        changed_lines[place] = f"renamed_{row}_{number}".join(lines[place].rsplit(names[-1], 1))
    file = "\n".join(lines)
    return f"A file:\n\n{file}\n\nThe file with three lines changed:\n\n", "\n".join(changed_lines)


def _make_quotes(row: int, tokens: int, encode: Encode) -> tuple[str, str]:
    """Return a prompt, and an answer that quotes two of three sentences from it."""
    page = list(_take_tokens(_endless_sentences(row), 2 * tokens, encode))
    sentence_indices = random.Random(row).sample(range(len(page)), len(page))
    quotes = (f"{page[sentence_index - 1]} {page[sentence_index]}" for sentence_index in sentence_indices)
    answer_lines = (
        f'The page says: "{quote}" {free}' for quote, free in zip(quotes, _endless_sentences(row, _FREE), strict=False)
    )
    return f"A page:\n\n{' '.join(page)}\n\nWhat does it say, and what follows?\n\n", "\n".join(answer_lines)


def _make_json(row: int, tokens: int, encode: Encode) -> tuple[str, str]:
    """Return a prompt, and an answer of JSON records with the same keys."""
    records = _make_customers(row, 2 + tokens // 40)
    fields = ", ".join(f"{name} ({type(value).__name__})" for name, value in records[0].items())
    return f"Shop number {row}. Its customers as JSON, with the fields {fields}:\n\n", json.dumps(records)


def _make_schema_json(row: int, tokens: int, encode: Encode) -> tuple[str, str]:
    """Return a prompt, and an answer of JSON records that follow a schema, without blanks."""
    prompt, _ = _make_json(row, 0, encode)
    return prompt, json.dumps(_make_customers(row, 2 + tokens // 30), separators=(",", ":"))


def _make_customers(row: int, count: int) -> list[dict[str, object]]:
    """Return `count` random customer records that follow the schema `RECORD`."""
    chance = random.Random(row)
    words = [word for sentence in islice(_endless_sentences(row), 30) for word in re.findall(r"[a-z]{5,}", sentence)]

    def make_customer() -> dict[str, object]:
        return {
            "identifier": chance.randrange(1, 10_000),
            "customer_name": " ".join(chance.choice(words).title() for _ in range(2)),
            "subscription_status": chance.choice(["active", "invited", "suspended", "deleted"]),
            "newsletter_subscribed": chance.random() < 0.5,
            "shipping_address": {
                "street_name": f"{chance.choice(words).title()} Street",
                "postal_code": f"{chance.randrange(100_000):05}",
                "country_code": chance.choice(["DE", "FR", "GB", "US"]),
            },
            "lifetime_value_euros": chance.randrange(100_000),
        }

    return [make_customer() for _ in range(count)]


def _make_prose(row: int, tokens: int, encode: Encode) -> tuple[str, str]:
    """Return a prompt, and an answer of sentences that are in no prompt."""
    sentences = _take_tokens(_endless_sentences(row, _PROSE), tokens + 20, encode)
    return f"Write chapter {row + 1} of the manual, without a heading.\n\n", " ".join(sentences)


_MAKERS: dict[AnswerKind, Callable[[int, int, Encode], tuple[str, str]]] = {
    AnswerKind.EDIT: _make_edit,
    AnswerKind.QUOTES: _make_quotes,
    AnswerKind.JSON: _make_json,
    AnswerKind.SCHEMA: _make_schema_json,
    AnswerKind.PROSE: _make_prose,
}


def _take_tokens(segments: Iterable[str], tokens: int, encode: Encode) -> Iterator[str]:
    """Yield segments of a text until they have about `tokens` tokens together."""
    for segment in segments:
        yield segment
        tokens -= max(1, len(encode(segment)))
        if tokens <= 0:
            return


def _endless_sentences(row: int, offset: int = 0) -> Iterator[str]:
    """Yield sentences without end, beginning at another place for each row."""
    sentences = _source_sentences()
    index = row * _ROW + offset
    while True:
        yield sentences[index % len(sentences)]
        index += 1


@cache
def _source_files() -> tuple[str, ...]:
    """Return the texts of this package's modules that are long enough for an edit."""
    folder = Path(cortexmlx.__file__).parent
    texts = (path.read_text(encoding="utf-8") for path in sorted(folder.glob("*/*.py")))
    return tuple(text for text in texts if len(text) > 4_000)


@cache
def _source_sentences() -> tuple[str, ...]:
    """Return the sentences of the modules' docstrings, each once."""
    sentences: dict[str, None] = {}
    for text in _source_files():
        for node in ast.walk(ast.parse(text)):
            docstring = (
                node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
            )
            for sentence in re.split(r"(?<=\.)\s+", " ".join(docstring.split())) if isinstance(docstring, str) else ():
                if 6 <= len(sentence.split()) <= 40:
                    sentences[sentence] = None
    return tuple(sentences)
