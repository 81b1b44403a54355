"""The list of what a Metal compiler would refuse in a text, line by line."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from cortexmlx.metal.lab.legal.msl import PREAMBLE
from cortexmlx.metal.lab.sim.toolchain import mlx_headers

from .diagnostics import Language
from .frontend import Complaint, parse
from .rules import conversions, entry_points, features, spaces, storage
from .tree import walk


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
