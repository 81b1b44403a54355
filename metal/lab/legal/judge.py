"""The list of what a Metal compiler would refuse in a text, line by line."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from cortexmlx.metal.lab.legal.diagnostics import Language
from cortexmlx.metal.lab.legal.frontend import Complaint, parse
from cortexmlx.metal.lab.legal.msl import PREAMBLE
from cortexmlx.metal.lab.legal.rules import conversions, entry_points, features, spaces, storage
from cortexmlx.metal.lab.legal.tree import walk
from cortexmlx.metal.lab.sim.toolchain import mlx_headers


@cache
def _includes() -> tuple[Path, ...]:
    return (mlx_headers(),)


def complaints(
    text: str,
    language: Language = Language.METAL_3_1,
    preamble: str = PREAMBLE,
    includes: Sequence[Path] | None = None,
) -> list[Complaint]:
    """Return what is wrong with a text that MLX would compile after `preamble`, in the order of lines. The list of a
    legal text is empty.

    Templates are checked as they are written and as the text instantiates them.

    Raises:
        ToolchainMissing: the libclang wheel or MLX's headers are missing.
    """
    parsed = parse(text, language, _includes() if includes is None else includes, preamble)
    nodes = walk(parsed)
    found = {
        *parsed.complaints,
        *features.complaints(parsed, nodes),
        *spaces.complaints(nodes),
        *storage.complaints(nodes),
        *conversions.complaints(nodes),
        *entry_points.complaints(nodes),
    }
    return sorted(found)
