"""The Python that the documentation shows runs: each page from top to bottom as one program, in a folder with the
files that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import cortexmlx
from support.embedding.models import write_embedding, write_reranker
from support.models.adapters import write_adapter
from support.models.calling import write_calling
from support.models.thinking import SWITCHED, write_thinking
from support.pages import blocks

PROGRAMS = sorted(
    {block.page for block in blocks("python")}
    - {"docs/server.md", "docs/clients.md", "docs/embeddings.md", "docs/images.md"}
)
"""Without the pages whose programs need a server: `test_server_page.py`, `test_embeddings_page.py`,
`test_images_page.py` and `tests/server/clients/test_packages.py` run them.
"""
SAID = {
    "README.md": [],
    "docs/adapters.md": ["4 ", "['sql', 'chat', 'poem']"],
    "docs/batch.md": ["a Hello!\n", "q8 failed: `messages` is missing\n"],
    "docs/coming-from.md": [],
    "docs/memory.md": ["StoreStats("],
    "docs/python.md": ["enable_thinking", " tokens\n", "in the cache", "1 ", "2 ", "\nFREE ", "\nSTORED 0 of "],
    "docs/quickstart.md": [],
    "docs/speculation.md": ["\n"],
    "docs/structured.md": ["-"],
    "docs/tools.md": [],
}
"""What a page's program prints, besides what a model says."""


def run(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page, one after the other, each with what the ones before it have named."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    for file in ("book.txt", "notes.txt"):
        Path(file).write_text("The sky is blue. Grass is green, and water is wet. " * 12)
    Path("questions.csv").write_text("id,question\nq1,Why?\n")
    shown = (line for block in blocks("jsonl") for line in block.text.splitlines())
    Path("answers.jsonl").write_text("\n".join(line for line in shown if line.startswith('{"id": "batch_req_')))
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in blocks("python"):
            if block.page == page:
                exec(compile(block.text, block.name, "exec", dont_inherit=True), names)
    finally:
        if "engine" in names:
            names["engine"].close()


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose template has a switch for thoughts."""
    return write_thinking(tmp_path_factory.mktemp("model"), SWITCHED, max_position_embeddings=1600)


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that calls tools."""
    return write_calling(tmp_path_factory.mktemp("model") / "calling", "hermes", max_position_embeddings=700)


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models that embed and judge, by the names that the pages give."""
    folder = tmp_path_factory.mktemp("pooling")
    return {
        "Qwen/Qwen3-Embedding-0.6B": write_embedding(folder / "embedding"),
        "Qwen/Qwen3-Reranker-0.6B": write_reranker(folder / "Qwen3-Reranker", max_position_embeddings=1024),
    }


def opened(models: Mapping[str, Path], others: Any = None) -> Any:
    """In the place of `Engine`: these names are tiny models. `others` opens all others; None: there are none."""
    real = cortexmlx.Engine

    def engine(name: str, **options: Any) -> Any:
        if others is not None and name not in models:
            return others(name, **options)
        return real(models[name], **{"kv_memory": "4MB", **options})

    return engine


TOOLS = "docs/tools.md"
"""Its model cannot be had here, and the starter model calls no tools."""

ADAPTERS = "docs/adapters.md"
"""Its adapters are made here, for the tiny model."""


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_program_of_a_page_runs(
    page: str,
    thinking: Path,
    calling: Path,
    pooling: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "mlx-community/Qwen3-4B-4bit" if page == TOOLS else "smollm2"
    monkeypatch.setattr(cortexmlx, "Engine", opened({name: calling if page == TOOLS else thinking, **pooling}))
    for number, adapter in enumerate(("sql", "chat", "poem") if page == ADAPTERS else ()):
        write_adapter(tmp_path / "adapters" / adapter, thinking, seed=number)
    run(page, tmp_path, monkeypatch)
    said = capsys.readouterr().out
    assert [words for words in SAID[page] if words not in said] == []


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PROGRAMS if page not in (TOOLS, ADAPTERS)])
def test_it_runs_with_the_starter_model(
    page: str,
    pooling: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cortexmlx, "Engine", opened(pooling, cortexmlx.Engine))
    run(page, tmp_path, monkeypatch)
    said = capsys.readouterr().out
    assert "Paris" in said or page != "docs/python.md"
    assert "cancelled" in said or page != "docs/python.md"
