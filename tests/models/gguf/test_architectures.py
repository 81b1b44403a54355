"""A GGUF file of every architecture gives the logits of mlx-lm's own class on the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cortexmlx.models import load_model
from cortexmlx.models.gguf.config import ARCHITECTURES, MIXTRAL
from cortexmlx.models.gguf.tensors import READ_TYPES
from cortexmlx.models.tokenizers.bytelevel import PRE_TOKENIZERS
from support.gguf.export import export, logits_of, tiny

pytestmark = pytest.mark.usefixtures("a_linux_cpu")


def mixed(name: str) -> str:
    """The types of a file as people have it: Q4_K with finer ones where that matters, and all others somewhere."""
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    kinds = {
        "token_embd": ("Q6_K", "Q6_K"),
        "output": ("Q6_K", "Q6_K"),
        "attn_q": ("Q4_K", "Q5_0"),
        "attn_k": ("Q5_K", "Q4_0"),
        "attn_v": ("Q6_K", "Q8_0"),
        "attn_qkv": ("Q4_K", "Q5_1"),
        "attn_output": ("Q3_K", "Q4_1"),
        "ffn_down": ("Q6_K", "Q5_K"),
        "ffn_up": ("Q2_K", "Q4_K"),
        "ffn_down_exps": ("MXFP4", "Q6_K"),
        "ffn_up_exps": ("MXFP4", "Q5_K"),
    }
    return kinds.get(name.split(".")[-2], ("Q4_K", "Q8_0"))[layer % 2]


@pytest.mark.parametrize("name", tiny())
def test_floats_give_the_same_bits(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tiny.gguf"
    reference = export(path, tiny()[name])
    assert np.array_equal(logits_of(load_model(path, dequantize=False).model), logits_of(reference))


@pytest.mark.parametrize(("name", "dequantize"), [(name, bool(n % 2)) for n, name in enumerate(tiny())])
def test_quantized_files_compute_what_their_bytes_say(tmp_path: Path, name: str, dequantize: bool) -> None:
    path = tmp_path / "tiny.gguf"
    wanted = logits_of(export(path, tiny(256)[name], mixed))
    loaded = load_model(path, dequantize=dequantize)
    assert np.abs(logits_of(loaded.model) - wanted).max() < 2e-5 * np.abs(wanted).max()


def test_every_architecture_is_judged() -> None:
    assert {model.architecture for model in tiny().values()} == set(ARCHITECTURES)


def test_the_page_names_everything_that_is_read() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gguf.md").read_text()
    wanted = [*READ_TYPES, *(f"`{name}`" for name in (*ARCHITECTURES, *PRE_TOKENIZERS))]
    wanted += [f"`{found.model_type}`" for found in (*ARCHITECTURES.values(), MIXTRAL)]
    assert [name for name in wanted if name not in page] == []
