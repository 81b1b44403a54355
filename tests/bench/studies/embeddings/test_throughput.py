"""What the study of embeddings compares: the same texts, the same tokens and the same vectors on every side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cortexmlx.bench.studies.embeddings import throughput
from cortexmlx.bench.studies.embeddings.model_folder import write_model
from support.embedding.models import write_embedding


def test_texts_are_ragged_and_always_the_same() -> None:
    texts = throughput.ragged_texts(200, 16)
    lengths = [len(text.split()) for text in texts]
    assert texts == throughput.ragged_texts(200, 16) and 10 < np.median(lengths) < 24
    assert max(lengths) > 4 * np.median(lengths)


@pytest.mark.parametrize("prompt", [None, "query"])
def test_all_sides_compute_the_same_vectors(tmp_path: Path, prompt: str | None) -> None:
    folder = write_embedding(
        tmp_path, prompts={"query": throughput.INSTRUCTION}, flat=False, max_position_embeddings=4096
    )
    result = throughput.measure(folder, throughput.ragged_texts(20, 6), 2, 8, prompt)
    assert list(result.seconds) == ["cortexmlx", "padded, 8 a batch", "padded, 8 a batch, by length"]
    assert all(len(seconds) == 2 and all(each.wall > 0 for each in seconds) for seconds in result.seconds.values())
    assert max(result.distances.values()) < 1e-4
    assert (result.cached > 0) == (prompt is not None)
    lines = throughput.table(result, 20).splitlines()
    assert len(lines) == 5 and lines[2].startswith("cortexmlx") and lines[2].count("1.00x") == 2


@pytest.mark.model
def test_the_starter_model_becomes_an_embedding_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {"query": throughput.INSTRUCTION})
    result = throughput.measure(folder, ["the cat", "a longer text about blocks"], 1, 2, "query")
    assert max(result.distances.values()) < 1e-4
