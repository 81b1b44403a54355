"""Markdown answers with what a reader must find of them, said by the one who wrote them and not by any renderer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

DECORATION = str.maketrans(dict.fromkeys("•▌│─┼", " "))
SPOKEN = (
    "the sky is blue because light scatters; and water, too: (mostly) clear! Why? It's 2 * 3 = 6, AT&T, x<y, a_b_c "
    "snake_case 50% C++ [note] #tag ~5 km, 1.5 e.g. so-called end. Über naïve café 🎉 →"
)
WORDS = SPOKEN.split()
CHINESE = "天空是蓝色的，因为光会散射。水也是清澈的吗？"


@dataclass
class Answer:
    """`text` is Markdown; `seen` are the words of each block in order, in any if `loose`; `code` the lines of code."""

    text: str = ""
    seen: list[list[str]] = field(default_factory=list)
    loose: set[int] = field(default_factory=set)
    code: list[list[str]] = field(default_factory=list)

    def add(self, text: str, words: Sequence[str], *, table: bool = False) -> None:
        """One more block."""
        if table:
            self.loose.add(len(self.seen))
        self.text += text
        self.seen.append(list(words))

    def check(self, lines: Sequence[str]) -> None:
        """Raise AssertionError if `lines` show anything else, or anything twice, or code that is not as it was."""
        found = " ".join(line.translate(DECORATION) for line in lines).split()
        if any(letter in CHINESE for words in self.seen for word in words for letter in word):
            found = [*"".join(found)]
            seen = [[*"".join(words)] for words in self.seen]
        else:
            seen = self.seen
        at = 0
        for number, words in enumerate(seen):
            part, at = found[at : at + len(words)], at + len(words)
            if number in self.loose:
                part, words = sorted(part), sorted(words)
            assert part == words, f"block {number}: {_difference(part, words)}"
        assert found[at:] == [], "more than the answer"
        for block in self.code:
            assert any([*lines[n : n + len(block)]] == block for n in range(len(lines))), f"{block} in {lines}"


def _difference(shown: list[str], wanted: list[str]) -> str:
    at = next((n for n, (a, b) in enumerate(zip(shown, wanted, strict=False)) if a != b), min(len(shown), len(wanted)))
    return f"word {at}, {shown[at : at + 8]} instead of {wanted[at : at + 8]}, after {wanted[max(at - 8, 0) : at]}"


def answer(seed: int, blocks: int = 12) -> Answer:
    """So many blocks of all kinds."""
    chance, made = random.Random(seed), Answer()
    kinds: list[Callable[[random.Random, Answer], None]] = [_paragraph, _paragraph, _heading, _list, _nested, _code]
    kinds += [_quote, _table, _poem, _rule] + ([_chinese] if seed % 3 == 0 else [])
    for number in range(blocks):
        if number:
            made.text += "\n\n"
        chance.choice(kinds)(chance, made)
    return made


def _sentence(chance: random.Random, most: int = 60) -> tuple[str, list[str]]:
    """Words with markup around some of them, and what is seen of them."""
    text, seen = [chance.choice(("So", "Now", "Éric"))], []
    seen += text
    for _ in range(chance.randint(1, most)):
        word = chance.choice(WORDS)
        plain = word.isalpha()
        match chance.randrange(12) if plain else 0:
            case 1:
                text.append(f"**{word}**")
            case 2:
                text.append(f"*{word} {word}*")
                seen.append(word)
            case 3:
                text.append(f"`{word}({word}, *a)`")
                seen.append(f"{word}({word},")
                word = "*a)"
            case 4:
                text.append(f"[{word}](https://a.b/{word})")
                seen.append(word)
                word = f"(https://a.b/{word})"
            case 5:
                text.append(f"~~{word}~~")
            case _:
                text.append(word)
        seen.append(word)
    return " ".join(text), seen


def _paragraph(chance: random.Random, made: Answer) -> None:
    made.add(*_sentence(chance))


def _poem(chance: random.Random, made: Answer) -> None:
    verses = [_sentence(chance, 5) for _ in range(4)]
    made.add("\n".join(text for text, _ in verses), [word for _, seen in verses for word in seen])


def _heading(chance: random.Random, made: Answer) -> None:
    text, seen = _sentence(chance, 5)
    made.add(f"{'#' * chance.randint(1, 4)} {text}", seen)


def _list(chance: random.Random, made: Answer) -> None:
    ordered, items, words = chance.random() < 0.5, [], []
    for number in range(1, chance.randint(3, 12)):
        text, seen = _sentence(chance, 25)
        items.append(f"{number}. {text}" if ordered else f"- {text}")
        words += [f"{number}."] * ordered + seen
    made.add("Here they are:\n\n" + "\n".join(items) + "\n\nThat was all.", [*_HERE, *words, *_ALL])


def _nested(chance: random.Random, made: Answer) -> None:
    (a, a_seen), (b, b_seen), (c, c_seen) = (_sentence(chance, 20) for _ in range(3))
    code = _lines(chance, 3)
    inside = "".join(f"   {line}\n" if line else "\n" for line in code)
    text = f"1. {a}\n   - {b}\n   - {c}\n\n   ```python\n{inside}   ```\n2. {b}\n\nThat was all."
    made.add(text, ["1.", *a_seen, *b_seen, *c_seen, *" ".join(code).split(), "2.", *b_seen, *_ALL])
    made.code.append(code)


def _code(chance: random.Random, made: Answer) -> None:
    code = _lines(chance, chance.randint(1, 30))
    fence = chance.choice(("```python", "```", "~~~c", "````"))
    made.add("\n".join([fence, *code, fence[:4].rstrip("pc")]), " ".join(code).split())
    made.code.append(code)


def _lines(chance: random.Random, count: int) -> list[str]:
    choices = (
        "def f(x: int) -> str:",
        "    return '''a **b** ''' + f\"{x!r:>{8}}\"  # a comment",
        "",
        "/* a comment in C */ int x = 3; // **not** _this_ `one` <b> &amp; \\n",
        "        if " + " and ".join(f"condition_{n}(x)" for n in range(12)) + ":",
        "| not | a | table |",
        "- not an item",
    )
    lines = [chance.choice(choices) for _ in range(count)]
    return ["x = 1", *lines, "print(x)"]


def _quote(chance: random.Random, made: Answer) -> None:
    text, seen = _sentence(chance)
    made.add(f"> {text}\n> - {text}", [*seen, *seen])


def _table(chance: random.Random, made: Answer) -> None:
    rows = [["name", "n", "meaning"]]
    rows += [[chance.choice(("blue", "`red`")), str(n), "so it is " * chance.randint(1, 3)] for n in range(40)]
    rows = rows[: chance.choice((3, 5, 30))]
    text = "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["---", "--:", ":---"], *rows[1:]])
    made.add(text, " ".join(" ".join(row) for row in rows).replace("`", "").split(), table=True)


def _rule(chance: random.Random, made: Answer) -> None:
    made.add("---", [])


def _chinese(chance: random.Random, made: Answer) -> None:
    text = (CHINESE + "English ") * chance.randint(1, 5) + "end."
    made.add(text, text.split())


_HERE, _ALL = ("Here", "they", "are:"), ("That", "was", "all.")
