"""The cost of the decode kernels: `python -m cortexmlx.metal.lab.cost [--all | --choice | --record FILE]`."""

import argparse
from importlib.resources import as_file, files
from pathlib import Path

from cortexmlx.metal.lab.cost import choice
from cortexmlx.metal.lab.cost.compiled import write_record
from cortexmlx.metal.lab.cost.sheet import SHAPES, sheet
from cortexmlx.metal.rules import VARIANTS


def main() -> None:
    """Print the sheet or the choice of kernels, or record what a compiler made of the kernels."""
    parser = argparse.ArgumentParser(prog="python -m cortexmlx.metal.lab.cost", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every variant that cortexmlx doctor checks")
    parser.add_argument("--choice", action="store_true", help="which kernel serves which shape, and by what figures")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="a result of python -m cortexmlx.metal.lab.agx --json"
    )
    options = parser.parse_args()
    if options.record is not None:
        with as_file(files("cortexmlx.metal.lab.cost") / "compiled.json") as target:
            record = write_record(options.record, target)
        print(f"{len(record.kernels)} kernels compiled by {record.compiler}")
        return
    for line in choice.table() if options.choice else sheet(VARIANTS if options.all else SHAPES):
        print(line, flush=True)


if __name__ == "__main__":
    main()
