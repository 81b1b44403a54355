"""What MLX gets of a kernel's text: the same tokens on the same lines, without what is for people."""

from __future__ import annotations

import re
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.metal.kernels import QUANTIZED_HEADERS, DecodeKernels, kernel_text, minify
from cortexmlx.metal.lab.sim.toolchain import find_compiler
from cortexmlx.metal.matmul.kernel import MatmulKernel
from cortexmlx.metal.prefill import PrefillKernel
from cortexmlx.metal.rules import GEOMETRIES
from cortexmlx.metal.tail_write import TailWriteKernel

SHADERS = sorted(path.name for path in (files("cortexmlx.metal") / "shaders").iterdir())


def sent_texts() -> dict[str, str]:
    """The header and the source of every kernel that the engine makes, by its name."""
    made: dict[str, str] = {}

    def factory(*, name: str, header: str, source: str, **_: Any) -> Any:
        made[name] = header + "\0" + source
        return mx.zeros

    DecodeKernels(factory)
    PrefillKernel(factory)
    TailWriteKernel(factory)
    MatmulKernel(factory)
    return made


def tokens(text: str, folder: Path) -> list[str]:
    """The tokens of a text after the C++ preprocessor."""
    (folder / "metal_simdgroup_matrix").touch()
    command = [*find_compiler().compile, "-E", "-P", "-x", "c++", "-nostdinc", "-I", str(folder), "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.stdout.split()


def test_the_engine_sends_these_texts_and_no_comment_of_them() -> None:
    texts = sent_texts()
    of_partitions = len(GEOMETRIES) + sum(g.quantized_entry is not None for g in GEOMETRIES.values())
    assert len(texts) == 2 * of_partitions + 3 + 4, "with partial and whole results; reduce, prefill, tail; matmuls"
    for name, text in texts.items():
        assert text.isascii(), name
        assert not re.search(r"//|/\*|[ \t]\n|\n[ \t]|  ", text), name
        assert not re.search(r"INFINITY|infinity\(|FLT_MAX", text), f"{name}: fast math may assume that none is there"


def test_a_plain_kernel_carries_no_quantized_code() -> None:
    texts = {name: text for name, text in sent_texts().items() if "matmul" not in name}
    named = re.findall(r"^struct (\w+)|\binline [\w<> ]+?(\w+)\(", "".join(map(kernel_text, QUANTIZED_HEADERS)), re.M)
    only = {a or b for a, b in named} - {"from_slot", "head_of", "sum_queries", "add_scores", "clear", "rescale"}
    only -= {"add_biases", "add_values", "load_token", "Biases"}  # those have a plain twin
    assert {"QuantizedSource", "two_codes", "group_of", "load_words"} <= only
    for name, text in texts.items():
        found = {word for word in only if re.search(rf"\b{word}\b", text)}
        assert found == (only & set(re.findall(r"\w+", text))) and bool(found) == name.endswith("_quantized"), name
    assert sum(name.endswith("_quantized") for name in texts) == 2 * 2


@pytest.mark.parametrize("name", SHADERS)
def test_a_file_keeps_its_tokens_and_their_lines(name: str, tmp_path: Path) -> None:
    text = kernel_text(name)
    assert tokens(minify(text), tmp_path) == tokens(text, tmp_path)
    assert minify(text).count("\n") == text.count("\n") and len(minify(text)) < 0.9 * len(text)
    for readable, short in zip(text.split("\n"), minify(text).split("\n"), strict=True):
        assert " ".join(readable.partition("//")[0].split()) == short


PIECES = (
    *("a", "b1", "0x1e", "1'000'000", "2.5f", "+", "-", "/", "*", "(", ")", "{", "}", ";", "\n", "\n", " ", "  ", "\t"),
    *("// said\n", "// goes on \\\n and ends\n", "/* said */", "/* over\n two */", "//* one\n", "/*/ odd */"),
    *('"a  // b"', '"a \\"  /* "', '"over \\\n   two"', "'\"'", "'  '", ' R"(a  // " b)"', ' R"x(  )" )x"'),
    *("\n#define M(x)  x /* two\n lines */ + 1 // end\n", "\n#define N  7 \\\n   + 1\n", "M( a )", "N", "\n\n   \n"),
)


def test_any_text_keeps_its_tokens_and_the_number_of_its_lines(tmp_path: Path) -> None:
    """Judged by a compiler's own preprocessor, with literals, macros and comments in any order."""
    for seed in range(8):
        random = np.random.default_rng(seed)
        texts = ["".join(random.choice(PIECES, random.integers(13))) for _ in range(100)]
        assert all(minify(text).count("\n") == text.count("\n") for text in texts)
        whole = "\n;\n".join(texts)
        assert tokens(minify(whole), tmp_path) == tokens(whole, tmp_path), seed
