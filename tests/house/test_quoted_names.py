"""Names in `quotes` lead somewhere: what a docstring, a comment or a page about the code names is there."""

from __future__ import annotations

import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    path
    for folder in ("cortexmlx", "cli", "bench", "metal")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not any(part.is_symlink() for part in path.parents)
]
PAGES = [
    *(ROOT / "docs").glob("design-*.md"),
    *(ROOT / name for name in ("docs/architecture.md", "metal/README.md", "CONTRIBUTING.md")),
]

FOREIGN = {
    "DynamicNTKScalingRoPE",  # mlx-lm's
    "Indexer",
    "LlamaModel",
    "SwitchGLU",
    "TransformerBlock",
    "MtpLayer",  # mlx-vlm's
    "Gemma4AssistantForCausalLM",  # transformers'
    "_Float16",  # of C
    "Factor",  # of our shaders
}
"""Types of other packages and languages that are named and not imported."""


BLANK = (tokenize.NL, tokenize.COMMENT, tokenize.ENCODING)


def tokens_of(text: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(text).readline))


def prose_of(tokens: list[tokenize.TokenInfo]) -> Iterator[str]:
    """The docstrings and comments of a module: texts that begin a line of code."""
    begins = True
    for token in tokens:
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and begins):
            yield token.string
        begins = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT) or (begins and token.type in BLANK)


def test_names_in_quotes_are_those_of_something_that_is_there() -> None:
    texts = {path: path.read_text() for path in MODULES}
    tokens = {path: tokens_of(text) for path, text in texts.items()}
    names = {path: {token.string for token in of if token.type == tokenize.NAME} for path, of in tokens.items()}
    every = set().union(*names.values())
    members = defaultdict(set)
    for path, text in texts.items():
        for name in re.findall(r"^ *class (\w+)", text, re.MULTILINE):
            members[name] |= names[path]
    files = [str(path.relative_to(ROOT)) for path in (*MODULES, *(ROOT / "tests").rglob("*.py"))]

    def is_there(word: str, here: set[str]) -> bool:
        if re.fullmatch(r"[\w./]+\.py", word):
            return any(f"/{file}".endswith(f"/{word.lstrip('./')}") for file in files)
        if (name := re.match(r"[A-Za-z_][\w.]*(?=$|[(=\[])", word)) is None:
            return True
        first, *rest = name.group().split(".")
        if re.fullmatch(r"_[a-z]\w+", first) and not rest:
            return first in here
        if not re.fullmatch(r"_?[A-Z][a-z]\w+", first):
            return True
        return (first in every or first in FOREIGN) and all(each in (members.get(first) or every) for each in rest)

    stale = [
        f"{path.relative_to(ROOT)}: `{word}`"
        for paths, where in ((MODULES, names.__getitem__), (PAGES, lambda _: every))
        for path in paths
        for prose in (prose_of(tokens[path]) if path in tokens else [path.read_text()])
        for word in re.findall(r"`([^`\n]+)`", re.sub("```.*?```", "", prose, flags=re.DOTALL))  # no blocks of code
        if not is_there(word, where(path))
    ]
    assert not stale, "\n".join(stale)
