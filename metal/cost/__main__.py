"""The cost of the decode kernels: `python -m cortexmlx.metal.cost [--all | --choice | --goals | --record FILE]`."""

import argparse
from importlib.resources import as_file, files
from pathlib import Path

from cortexmlx.metal.cost import choice, goals
from cortexmlx.metal.cost.compiled import keep
from cortexmlx.metal.cost.sheet import QUANTIZED, SHAPES, WIDE_SHAPES, sheet
from cortexmlx.metal.rules import VARIANTS


def main() -> None:
    """Print the sheet or a table, or record what a compiler made of the kernels."""
    parser = argparse.ArgumentParser(prog="python -m cortexmlx.metal.cost", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every variant that cortexmlx doctor checks")
    parser.add_argument("--record", type=Path, metavar="FILE", help="a result of python -m cortexmlx.metal.agx --json")
    parser.add_argument("--choice", action="store_true", help="which kernel serves which shape, by the cycles of both")
    parser.add_argument("--goals", action="store_true", help="what the kernels are to reach, and what they do")
    options = parser.parse_args()
    if options.record is not None:
        with as_file(files("cortexmlx.metal.cost") / "compiled.json") as target:
            record = keep(options.record, target)
        print(f"{len(record.kernels)} kernels compiled by {record.compiler}")
        return
    lines = choice.table() if options.choice else goals.table() if options.goals else None
    for line in lines or sheet(VARIANTS if options.all else (*SHAPES, *WIDE_SHAPES, *QUANTIZED)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
