"""Search a folder of notes by meaning: python search.py NOTES "what did I plant in spring?" [MODEL]"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cortexmlx import CortexError, Engine

MODEL = "Qwen/Qwen3-Embedding-0.6B"


def paragraphs(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the paragraphs of all notes, each with its file."""
    for path in sorted(each for each in folder.rglob("*") if each.suffix in (".md", ".txt")):
        for text in path.read_text(encoding="utf-8", errors="replace").split("\n\n"):
            if text.strip():
                yield path, text.strip()


def search(engine: Engine, folder: Path, question: str, most: int = 3) -> list[tuple[float, Path, str]]:
    """Return the paragraphs that are most like an answer, with their scores, the best first."""
    found = list(paragraphs(folder))
    if not found:
        return []
    notes = engine.embed([text for _, text in found], truncate=True).vectors
    info = engine.info.embedding
    asked = engine.embed([question], prompt="query" if info and "query" in info.prompts else None).vectors[0]
    scores = notes @ asked  # of vectors of length 1: the cosine
    return [(float(scores[place]), *found[place]) for place in np.argsort(-scores, kind="stable")[:most]]


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    folder, question, *model = sys.argv[1:]
    try:
        with Engine(*model or [MODEL]) as engine:
            for score, path, text in search(engine, Path(folder), question):
                print(f"{score:.2f}  {path}: {' '.join(text.split())[:80]}")
    except (CortexError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
