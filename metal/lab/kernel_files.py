"""The kernels as files for Apple's compiler: `python -m cortexmlx.metal.lab.kernel_files FOLDER`.

At run time MLX compiles its own headers, the kernel's text and a generated signature as one text. This module writes
that text to a file for each kernel of each variant, which needs no GPU. `xcrun metal -c` compiles the files anywhere.
`.ci/compile-metal` compiles them all.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from cortexmlx.cli.doctor.checks import check_kernels
from cortexmlx.metal.checked import CHECKED, CheckedKernel
from cortexmlx.metal.lab.legal.msl import INCLUDE, UTILS
from cortexmlx.metal.lab.sim import metal_kernel
from cortexmlx.metal.lab.sim.source import KernelText
from cortexmlx.metal.lab.sim.toolchain import mlx_headers

_LONGEST_NAME = 200
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*$", re.M)


@cache
def kernel_texts(variant: CheckedKernel) -> tuple[KernelText, ...]:
    """Return a variant's kernels as MLX generates them for the launches of its check, which has the engine's inputs."""
    made: dict[str, KernelText] = {}

    def record_texts(**options: Any) -> Any:
        """A replacement of `mx.fast.metal_kernel` that keeps the text of a call and computes nothing."""
        kernel = metal_kernel(**options)

        def call(*, inputs: Any, template: Any, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            text = kernel.text(inputs, output_dtypes, template)
            made[text.name] = text
            return [mx.ones(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

        return call

    list(check_kernels(record_texts, [variant]))
    return tuple(made.values())


def preamble() -> str:
    """Return the text that MLX puts before every kernel: its `utils.h` and all headers that this includes. Each header
    is there once, after the headers that it includes itself.
    """
    done: list[str] = []
    parts: list[str] = []

    def add_header(name: str) -> None:
        if name in done:
            return
        done.append(name)
        text = (mlx_headers() / name).read_text()
        for included in INCLUDE.findall(text):
            add_header(included)
        alone = _ONCE.sub("", INCLUDE.sub("", text))  # empty lines replace them, so line numbers stay
        parts.append(f'#line 1 "{name}"\n{alone.rstrip()}\n')

    add_header(UTILS)
    return "".join(parts)


def file_name(kernel: KernelText) -> str:
    """Return the file name of a kernel: its name in Metal, which has all its template arguments and input types. A long
    name is cut, and a digest of the whole name replaces its end.
    """
    name = kernel.name.removeprefix("custom_kernel_")
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}_{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return name + ".metal"


def metal_file(kernel: KernelText) -> str:
    """Return the whole text that MLX compiles for a kernel. A diagnostic names the line of a header or of this file."""
    before = preamble()
    return f'{before}#line {before.count(chr(10)) + 2} "{file_name(kernel)}"\n{kernel.text}'


def main(arguments: Sequence[str]) -> int:
    """Write every kernel of `CHECKED` once into the given folder. Return the exit status."""
    if len(arguments) != 1:
        print("usage: python -m cortexmlx.metal.lab.kernel_files FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    kernels = {file_name(kernel): kernel for variant in CHECKED for kernel in kernel_texts(variant)}
    for name, kernel in kernels.items():
        (folder / name).write_text(metal_file(kernel))
    print(f"{len(kernels)} kernels of {len(CHECKED)} variants in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
