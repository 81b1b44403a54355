"""`python -m cortexmlx.metal.lab.legal FILE...`: list what a Metal compiler would refuse, at each language level.

Each file is checked as the text of a kernel that MLX compiles: MLX's own preamble comes before it.
"""

import sys
from pathlib import Path

from cortexmlx.metal.lab.legal.diagnostics import Language
from cortexmlx.metal.lab.legal.rules import complaints


def main(paths: list[str]) -> int:
    """Print `FILE:LINE: MESSAGE (Metal LEVELS)` for every complaint.

    Return 0 for no complaint, 1 for at least one, 2 for wrong use.
    """
    if not paths:
        print("usage: python -m cortexmlx.metal.lab.legal FILE...", file=sys.stderr)
        return 2
    found = False
    for path in paths:
        text = Path(path).read_text()
        levels: dict[tuple[int, str], list[str]] = {}
        for language in Language:
            for complaint in complaints(text, language):
                levels.setdefault((complaint.line, complaint.message), []).append(language.value)
        for (line, message), values in sorted(levels.items()):
            print(f"{path}:{line}: {message} (Metal {', '.join(values)})")
        found = found or bool(levels)
    return int(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
