"""The files that Apple's compiler is given: what MLX compiles at run time, whole, one file for each kernel."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.attention.selfcheck import check_decode
from cortexmlx.metal.checked import CHECKED
from cortexmlx.metal.kernels import DecodeKernels
from cortexmlx.metal.lab.kernel_files import file_name, kernel_texts, main, metal_file, preamble
from cortexmlx.metal.lab.sim.toolchain import find_compiler, mlx_headers
from cortexmlx.metal.rules import Variant

SINKS = Variant("bfloat16", "bfloat16", 64, 64, 32, 3, sinks=True)
WIDE = Variant("float32", "float16", 192, 128, 8, 1, softcap=True)


@pytest.mark.parametrize("variant", [SINKS, WIDE], ids=lambda v: v.label)
def test_they_are_the_texts_that_mlx_prints(
    variant: Variant, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX prints what it would compile for the launches of the self-check, on any machine."""

    def exporting(**options: Any) -> Any:
        """MLX's kernel, which prints its text while its call is exported and computes nothing."""
        kernel: Any = mx.fast.metal_kernel(**options)

        def call(*, inputs: list[mx.array], **how: Any) -> list[mx.array]:
            def launch(*arrays: mx.array) -> Any:
                return kernel(inputs=list(arrays), verbose=True, **how)

            mx.export_function(str(tmp_path / "call"), launch, *inputs)
            return [mx.ones(s, d) for s, d in zip(how["output_shapes"], how["output_dtypes"], strict=True)]

        return call

    capfd.readouterr()
    check_decode(DecodeKernels(exporting), variant)
    printed = re.findall(r"```\n(.*?)\n```\n", capfd.readouterr().out, re.S)
    assert sorted(set(printed)) == sorted(k.text for k in kernel_texts(variant))


def test_every_variant_has_its_three_kernels_and_each_is_written_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "texts"
    assert main([str(folder)]) == 0
    names = {path.name for path in folder.iterdir()}
    texts = {kernel.name: file_name(kernel) for variant in CHECKED for kernel in kernel_texts(variant)}
    assert names == {*texts.values()} and len(names) == len(texts) > len(CHECKED), "no two are one"
    assert max(map(len, names)) <= 255 < max(map(len, texts)), "what a file system takes, and what there is"
    assert capsys.readouterr().out == f"{len(names)} kernels of {len(CHECKED)} variants in {folder}\n"
    assert main([]) == 2 and "FOLDER" in capsys.readouterr().err


def test_a_file_needs_nothing_beside_it_and_a_diagnostic_names_its_line() -> None:
    """`#line` gives the headers their names, and the kernel its place in the file itself."""
    for kernel in kernel_texts(SINKS):
        text = metal_file(kernel)
        assert re.findall(r'^\s*#\s*include\s+"', text, re.M) == [] and "#pragma once" not in text
        assert text.endswith(kernel.text)
        [(number, name)] = re.findall(r'#line (\d+) "(\w+\.metal)"\n', text)
        before = text[: text.index(f'"{name}"\n')] + f'"{name}"\n'
        assert int(number) == before.count("\n") + 1 and text[len(before) :] == kernel.text


@pytest.mark.parametrize("version", [310, 400])
def test_the_preamble_is_what_the_preprocessor_makes_of_mlx_headers(version: int, tmp_path: Path) -> None:
    """Judged by clang: the headers included, and the preamble as one text, are the same tokens."""
    sources = {"included": '#include "mlx/backend/metal/kernels/utils.h"\n', "whole": preamble()}
    for apples in ("metal_math", "metal_stdlib", "metal_logging"):
        (tmp_path / apples).write_text("")
    folders = [f"-I{mlx_headers()}", f"-I{tmp_path}"]
    tokens = {}
    for name, text in sources.items():
        source = tmp_path / f"{name}.cpp"
        source.write_text(text)
        command = [*find_compiler().compile, "-E", "-P", "-w", "-nostdinc", f"-D__METAL_VERSION__={version}", *folders]
        done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        tokens[name] = done.stdout.split()
    assert len(tokens["whole"]) > 1000 and tokens["whole"] == tokens["included"]
