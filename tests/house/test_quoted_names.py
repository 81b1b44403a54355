"""Names in `quotes` lead somewhere: what a docstring, a comment or a page about the code names is there."""

from __future__ import annotations

import ast
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
    "ScaledDotProductAttention",  # MLX's
}
"""Classes of other packages that are named and not imported."""


def tokens_of(text: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(text).readline))


def words_of(text: str) -> Iterator[str]:
    """What is written in quotes, without blocks of code."""
    yield from re.findall(r"`([^`\n]+)`", re.sub("```.*?```", "", text, flags=re.DOTALL))


def prose_of(text: str) -> Iterator[str]:
    """The docstrings and comments of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    yield from (token.string for token in tokens_of(text) if token.type == tokenize.COMMENT)


def test_names_in_quotes_are_those_of_something_that_is_there() -> None:
    texts = {path: path.read_text() for path in MODULES}
    names = {
        path: {token.string for token in tokens_of(text) if token.type == tokenize.NAME} for path, text in texts.items()
    }
    every = set().union(*names.values())
    members = defaultdict(set)
    for path, text in texts.items():
        for name in re.findall(r"^ *class (\w+)", text, re.MULTILINE):
            members[name] |= names[path]
    files = [str(path.relative_to(ROOT)) for path in (*MODULES, *(ROOT / "tests").rglob("*.py"))]

    def is_there(word: str, here: set[str]) -> bool:
        if re.fullmatch(r"[\w./]+\.py", word):
            return any(f"/{file}".endswith(f"/{word.lstrip('./')}") for file in files)
        if (name := re.match(r"[A-Za-z_][\w.]*(?=$|[^\w<])", word)) is None:
            return True
        first, *rest = name.group().split(".")
        if re.fullmatch(r"_[a-z]\w+", first) and not rest:
            return first in here
        if not re.fullmatch(r"_?[A-Z][a-z]+[A-Z]\w*", first):
            return True
        return first in every | FOREIGN and all(each in (members.get(first) or every) for each in rest)

    stale = [
        f"{path.relative_to(ROOT)}: `{word}`"
        for paths, where in ((MODULES, names.__getitem__), (PAGES, lambda _: every))
        for path in paths
        for prose in (prose_of(texts[path]) if path in texts else [path.read_text()])
        for word in words_of(prose)
        if not is_there(word, where(path))
    ]
    assert not stale, "\n".join(stale)
