"""The search finds the paragraph whose vector is nearest, as its own program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cortexmlx import Engine
from support.embedding.models import write_embedding
from support.examples import EXAMPLES, example
from support.patience import PATIENCE

NOTES = {
    "garden.md": "Peas on Monday.\n\nBeans on Friday.",
    "a/b.txt": "The key is under the mat.\n\n\n",
    "c.py": "no note",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedding(tmp_path_factory.mktemp("models") / "embedder")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    for name, text in NOTES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path


def test_the_nearest_paragraphs_come_first(model: Path, folder: Path) -> None:
    search = example("search/search.py")
    texts = ["The key is under the mat.", "Peas on Monday.", "Beans on Friday."]
    with Engine(str(model), kv_memory="8MB") as engine:
        found = search.search(engine, folder, "where is the key?", most=2)
        query, *notes = (
            engine.embed([text], prompt=name).vectors[0].astype(np.float64)
            for text, name in [("where is the key?", "query"), *((text, None) for text in texts)]
        )
    judge = sorted(((float(note @ query), text) for note, text in zip(notes, texts, strict=True)), reverse=True)[:2]
    assert [text for _, _, text in found] == [text for _, text in judge]
    assert np.allclose([score for score, _, _ in found], [score for score, _ in judge], atol=1e-5)
    assert {path.name for _, path, _ in found} <= {"garden.md", "b.txt"}


def test_it_runs_as_the_page_says(model: Path, folder: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "search" / "search.py"), str(folder), "the key", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 3, done.stderr
